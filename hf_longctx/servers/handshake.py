"""Authenticate an attention server to the trainers, and the trainers to the server.

Each side proves that it knows the token of the run with an HMAC over numbers that both sides drew,
so the token never travels. Then versions are compared. A message is JSON behind its length: nothing
that a stranger sends is unpickled or run. Layer: servers.
"""

import hashlib
import hmac
import json
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ..planning.program.program import FORMAT
from ..version import VERSION

MAGIC = "hf_longctx attention server"
SPEEDS = (1e-3, 1e3)  # planners divide work by speed, so 0, infinity and NaN are rejected
_MAX_MESSAGE_BYTES = 1 << 16  # a stranger must not make this process allocate gigabytes


class HandshakeError(ValueError):
    """A failed handshake. The message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """How a server introduces itself.

    Args:
        name (`str`): Host and process, for the logs.
        device (`str`): Device it computes attention on.
        speed (`float`, *optional*, defaults to 1.0): Its attention speed; a trainer has 1.
        spawned (`int`, *optional*, defaults to -1): Its number among the servers that the trainers
            started; -1 for a server that joined later.
    """

    name: str
    device: str
    speed: float = 1.0
    spawned: int = -1


def versions() -> dict[str, object]:
    """Return the versions that must be equal on both sides."""
    return {"hf_longctx": VERSION, "plan format": FORMAT}


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises `OSError` if the connection is lost."""
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive the next message.

    Raises:
        OSError: if the connection is closed, lost, or silent beyond its time-out.
        HandshakeError: if the bytes are not one of our messages.
    """
    size, message = int.from_bytes(_receive_exactly(connection, 4), "little"), None
    if size <= _MAX_MESSAGE_BYTES:
        # RecursionError: thousands of nested brackets fit into the allowed size
        with suppress(ValueError, RecursionError):
            message = json.loads(_receive_exactly(connection, size))
    if not isinstance(message, dict):
        raise HandshakeError("the other side does not speak as an hf_longctx trainer or server")
    return message


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _proof(token: bytes, role: str, numbers: tuple[str, str], server: dict[str, Any]) -> str:
    # The role is signed too: otherwise a stranger could send our own proof back to us.
    text = json.dumps([role, *numbers, server], sort_keys=True).encode()
    return hmac.new(token, text, hashlib.sha256).hexdigest()


def _has_proof(message: dict[str, Any], proof: str) -> bool:
    # compare_digest takes equal time for every wrong proof, so timing does not reveal a prefix
    return hmac.compare_digest(str(message.get("proof")).encode(), proof.encode())


def _is_usable(server: dict[str, Any]) -> bool:
    """Check that a server gave the fields of `ServerInfo`, with a speed that planners accept."""
    types = {"name": str, "device": str, "speed": float, "spawned": int}
    complete = {name: type(value) for name, value in server.items()} == types
    return complete and SPEEDS[0] <= server["speed"] <= SPEEDS[1]  # NaN fails as well


def authenticate(connection: socket.socket, *, token: bytes) -> ServerInfo:
    """Authenticate a server, on the trainers' side.

    Raises:
        HandshakeError: if its token or version differs, or if it is no server. It is told why.
        OSError: if it disconnects or falls silent.
    """
    number = secrets.token_hex(32)
    send(connection, {"magic": MAGIC, "number": number})
    hello, reason = receive(connection), None
    server: Any = hello.get("visitor")
    numbers = number, str(hello.get("number"))
    # The proof comes before the versions: a stranger learns nothing about this installation.
    if hello.get("magic") != MAGIC or not isinstance(server, dict):
        reason = "it is no hf_longctx server"
    elif not _has_proof(hello, _proof(token, "server", numbers, server)):
        reason = "its token is not that of this run; copy the token file named in the trainers' log"
    elif hello.get("versions") != versions():
        reason = (
            f"it has {hello.get('versions')}, the trainers have {versions()}; install the same "
            "version on both"
        )
    elif not _is_usable(server):
        reason = (
            f"it describes itself as {server}, with missing fields or with a speed outside "
            f"{SPEEDS}; start it by `hf-longctx serve`"
        )
    if reason is not None:
        send(connection, {"refused": reason})
        raise HandshakeError(reason)
    send(connection, {"proof": _proof(token, "trainer", numbers, server)})
    return ServerInfo(**server)


def introduce(connection: socket.socket, *, token: bytes, server: ServerInfo) -> None:
    """Introduce a server to the trainers and authenticate them, on the server's side.

    Raises:
        HandshakeError: if the trainers reject this server, or do not know the token themselves.
        OSError: if they disconnect or fall silent.
    """
    greeting, fields = receive(connection), asdict(server)
    if greeting.get("magic") != MAGIC:
        raise HandshakeError("the listener there is no hf_longctx trainer; check HOST:PORT")
    numbers = str(greeting.get("number")), secrets.token_hex(32)
    hello = {"magic": MAGIC, "number": numbers[1], "versions": versions(), "visitor": fields}
    send(connection, {**hello, "proof": _proof(token, "server", numbers, fields)})
    answer = receive(connection)
    if "refused" in answer:
        raise HandshakeError(f"the trainers rejected this server: {answer['refused']}")
    if not _has_proof(answer, _proof(token, "trainer", numbers, fields)):
        raise HandshakeError("the listener there does not know the token; check HOST:PORT")
