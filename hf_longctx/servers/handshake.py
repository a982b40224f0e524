"""A token and a connection -> a server that the trainers trust, or a reason that both sides say.

Layer: servers. Each side proves that it knows the token, which never travels, by an HMAC over numbers
that both drew; then versions are compared. Messages are JSON behind their length: nothing that a
stranger sends is run.
"""

import hashlib
import hmac
import json
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any

from ..planning.program.program import FORMAT
from ..version import VERSION

MAGIC = "hf_longctx attention server"
SPEEDS = (1e-3, 1e3)  # that a server may have beside a trainer
_LONGEST = 1 << 16  # bytes of a message


class Refused(ValueError):
    """A handshake that failed: the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A server as it introduces itself.

    Args:
        name (`str`): Host and process, for people.
        device (`str`): Where it attends.
        speed (`float`): How fast it attends, beside a rank's 1.
        spawned (`int`): Its number among those that the trainers started; -1 for one that joined.
    """

    name: str
    device: str
    speed: float = 1.0
    spawned: int = -1


def versions() -> dict[str, object]:
    """What must be the same on both sides."""
    return {"hf_longctx": VERSION, "plan format": FORMAT}


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Raises `OSError` where the connection is lost."""
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        OSError: where the connection is closed, lost, or silent beyond its time-out.
        Refused: where something else than one of our messages came.
    """
    size = int.from_bytes(_exactly(connection, 4), "little")
    if size > _LONGEST:
        raise Refused("what answered does not speak as an hf_longctx trainer or server does")
    try:
        message = json.loads(_exactly(connection, size))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise Refused("what answered does not speak as an hf_longctx trainer or server does")
    return message


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _proof(token: bytes, role: str, numbers: tuple[str, str], visitor: dict[str, Any]) -> str:
    text = json.dumps([role, *numbers, visitor], sort_keys=True).encode()
    return hmac.new(token, text, hashlib.sha256).hexdigest()


def _knows(message: dict[str, Any], proof: str) -> bool:
    return hmac.compare_digest(str(message.get("proof")).encode(), proof.encode())


def _sound(visitor: dict[str, Any]) -> bool:
    """Whether a visitor's fields are what planners can work with."""
    kinds = {"name": str, "device": str, "speed": float, "spawned": int}
    fits = {name: type(value) for name, value in visitor.items()} == kinds
    return fits and SPEEDS[0] <= visitor["speed"] <= SPEEDS[1]


def greet(connection: socket.socket, *, token: bytes) -> Visitor:
    """The trainers' side: find out who comes.

    Raises:
        Refused: for another token or version, or for something that is no server; it was told.
        OSError: where it went away or fell silent.
    """
    mine = secrets.token_hex(32)
    send(connection, {"magic": MAGIC, "number": mine})
    hello = receive(connection)
    reason, visitor = None, hello.get("visitor")
    numbers = mine, str(hello.get("number"))
    if hello.get("magic") != MAGIC or not isinstance(visitor, dict):
        reason = "it is no hf_longctx server"
    elif not _knows(hello, _proof(token, "server", numbers, visitor)):
        reason = "its token is not that of this run; copy the file that the trainer names"
    elif hello.get("versions") != versions():
        reason = (
            f"it has {hello.get('versions')}, the trainers have {versions()}; install the same "
            "version on both"
        )
    found = visitor if isinstance(visitor, dict) else {}
    if reason is None and not _sound(found):
        reason = f"it introduces itself as {found}, with a speed outside {SPEEDS}"
    if reason is not None:
        send(connection, {"refused": reason})
        raise Refused(reason)
    send(connection, {"proof": _proof(token, "trainer", numbers, found)})
    return Visitor(**found)


def introduce(connection: socket.socket, *, token: bytes, visitor: Visitor) -> None:
    """The server's side.

    Raises:
        Refused: where the trainers turn this server down, or do not know the token themselves.
        OSError: where they went away or fell silent.
    """
    greeting, about = receive(connection), asdict(visitor)
    if greeting.get("magic") != MAGIC:
        raise Refused("what listens there is no hf_longctx trainer; check HOST:PORT")
    numbers = str(greeting.get("number")), secrets.token_hex(32)
    hello = {"magic": MAGIC, "number": numbers[1], "versions": versions(), "visitor": about}
    send(connection, {**hello, "proof": _proof(token, "server", numbers, about)})
    answer = receive(connection)
    if "refused" in answer:
        raise Refused(f"the trainers turn this server down: {answer['refused']}")
    if not _knows(answer, _proof(token, "trainer", numbers, about)):
        raise Refused("what listens there does not know the token; check HOST:PORT")
