"""Accept attention servers that connect to a group's first trainer, and keep them until invited.

A server holds one TCP connection to the group's first trainer for its whole life. It carries the
handshake, the invitation to join, reports, and the end: a server exits when it closes. The listener
is bound to one interface. Layer: servers.
"""

import logging
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from .handshake import HandshakeError, ServerInfo, authenticate, send

logger = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 10.0  # for the whole handshake, however slowly its bytes arrive
_MAX_HANDSHAKES = 16  # at once: strangers must not use up the trainer's file descriptors


@dataclass(frozen=True, slots=True)
class WaitingServer:
    """A server that has authenticated and waits to be invited.

    Args:
        connection (`socket.socket`): Its control connection. Closing it ends the server.
        info (`ServerInfo`): How it introduced itself.
    """

    connection: socket.socket
    info: ServerInfo

    def is_alive(self) -> bool:
        """Check that it still holds the connection."""
        try:
            readable = select.select([self.connection], [], [], 0)[0]
            # A closed connection is readable too, but gives no byte.
            return not readable or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def disconnect(self) -> None:
        """Close the connection, which ends the server."""
        # A forked data loader worker may hold a copy, and close() alone would leave that one open.
        _shut_down(self.connection)
        self.connection.close()


def _shut_down(connection: socket.socket) -> None:
    """Shut a connection down for both sides and for every process that holds a copy of it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Listener:
    """Accept and authenticate servers on one interface, in a thread of its own.

    Args:
        host (`str`): Address of the interface.
        token (`bytes`): Token that servers must know.

    Attributes:
        waiting (`deque[WaitingServer]`): Servers that wait to be invited, oldest first.
    """

    def __init__(self, host: str, *, token: bytes) -> None:
        self._socket, self._token = socket.create_server((host, 0)), token
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self.waiting: deque[WaitingServer] = deque()
        self._open, self._handshakes = True, threading.BoundedSemaphore(_MAX_HANDSHAKES)
        threading.Thread(target=self._accept, name="longctx servers", daemon=True).start()

    def _accept(self) -> None:
        while self._open:
            try:
                connection, (address, *_) = self._socket.accept()
            except OSError as error:  # closed, or the process may open no more files for now
                if self._open:
                    logger.warning("could not accept a server's connection: %s", error)
                    time.sleep(0.1)
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            # One thread per handshake: a silent stranger must not keep servers out.
            target, args = self._authenticate, (connection, address)
            threading.Thread(target=target, args=args, daemon=True).start()

    def _authenticate(self, connection: socket.socket, address: str) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        # The time-out above is per read: one byte now and then would hold the slot for ever.
        deadline = threading.Timer(HANDSHAKE_SECONDS, _shut_down, (connection,))
        deadline.daemon = True
        deadline.start()
        try:
            info = authenticate(connection, token=self._token)
        except (HandshakeError, OSError) as error:
            logger.warning("rejected a server from %s: %s", address, error)
            connection.close()
        else:
            _keep_alive(connection)
            self.waiting.append(WaitingServer(connection, info))
            if not self._open:  # the listener closed during this handshake
                self._dismiss_all()
        finally:
            deadline.cancel()
            self._handshakes.release()

    def take(self, spawned: int | None = None) -> WaitingServer | None:
        """Remove and return the next waiting server; drop those that have disconnected.

        Args:
            spawned (`int`, *optional*): Take only the server with this number.
        """
        for waiting in list(self.waiting):
            if not waiting.is_alive():
                self.waiting.remove(waiting)
                waiting.disconnect()
            elif spawned is None or waiting.info.spawned == spawned:
                self.waiting.remove(waiting)
                return waiting
        return None

    def close(self) -> None:
        """Stop accepting servers and dismiss those that wait."""
        self._open = False
        _shut_down(self._socket)  # wakes the thread in accept(), which close() would not
        self._socket.close()
        self._dismiss_all()

    def _dismiss_all(self) -> None:
        # Two threads may empty the queue at once, so a length check before popleft() could lie.
        with suppress(IndexError):
            while waiting := self.waiting.popleft():
                with suppress(OSError):
                    send(waiting.connection, {"what": "end"})
                waiting.disconnect()


def connect(host: str, port: int) -> socket.socket:
    """Connect a server to the trainers. Raises `OSError` if nothing listens there."""
    connection = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    _keep_alive(connection)
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Have the system notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # macOS names the first one otherwise
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def own_address(toward: str) -> str:
    """Return this machine's address on the interface that leads to `toward`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))  # chooses a route; a datagram socket sends nothing here
        return str(probe.getsockname()[0])
