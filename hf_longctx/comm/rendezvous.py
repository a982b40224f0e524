"""Connections of servers to a group's first trainer -> those that proved themselves, and wait.

Floor: comm. The listener is bound to one interface. `meeting` builds bridges to those that wait.
"""

import logging
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from .handshake import Refused, Visitor, greet, send

logger = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 10.0  # that a visitor may take to say who it is
_HANDSHAKES = 16  # at once: strangers must not use up the trainer's files


@dataclass(frozen=True, slots=True)
class Waiting:
    """A server that proved itself and waits to be called.

    Args:
        connection (`socket.socket`): Says what to do; its end ends the server.
        visitor (`Visitor`): Who it is.
    """

    connection: socket.socket
    visitor: Visitor

    def alive(self) -> bool:
        """Whether it still holds the connection."""
        try:
            heard = select.select([self.connection], [], [], 0)[0]
            return not heard or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    @staticmethod
    def shut(connection: socket.socket) -> None:
        """Have both sides see the end of a connection, whoever holds a copy of it."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def send_away(self) -> None:
        """End the connection, also where a forked data loader worker holds a copy of it."""
        self.shut(self.connection)
        self.connection.close()


class Listener:
    """Takes servers in, on one interface, in a thread of its own.

    Args:
        host (`str`): Address of the interface.
        token (`bytes`): What they must know.
    """

    def __init__(self, host: str, *, token: bytes) -> None:
        self._socket, self._token = socket.create_server((host, 0)), token
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self.waiting: deque[Waiting] = deque()
        self._open, self._handshakes = True, threading.BoundedSemaphore(_HANDSHAKES)
        threading.Thread(target=self._listen, name="longctx servers", daemon=True).start()

    def _listen(self) -> None:
        while self._open:
            try:
                connection, (address, *_) = self._socket.accept()
            except OSError as error:  # closed, or the process may open no more files now
                if self._open:
                    logger.warning("a server could not be taken in: %s", error)
                    time.sleep(0.1)
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            # each in a thread: one that stays silent must not keep others out
            threading.Thread(target=self._take, args=(connection, address), daemon=True).start()

    def _take(self, connection: socket.socket, address: str) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        # It is shut at the end of that time, whatever came until then.
        late = threading.Timer(HANDSHAKE_SECONDS, Waiting.shut, (connection,))
        late.daemon = True
        late.start()
        try:
            visitor = greet(connection, token=self._token)
        except (Refused, OSError) as error:
            logger.warning("a server from %s was turned down: %s", address, error)
            connection.close()
        else:
            _keep_alive(connection)
            self.waiting.append(Waiting(connection, visitor))
            if not self._open:  # it came while the listener closed
                self._send_all_away()
        finally:
            late.cancel()
            self._handshakes.release()

    def take(self, spawned: int | None = None) -> Waiting | None:
        """The next server that waits (number `spawned`, if given); those that left are dropped."""
        for waiting in list(self.waiting):
            if not waiting.alive():
                self.waiting.remove(waiting)
                waiting.send_away()
            elif spawned is None or waiting.visitor.spawned == spawned:
                self.waiting.remove(waiting)
                return waiting
        return None

    def close(self) -> None:
        """Take nobody in any more; those that wait are sent away."""
        self._open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self._send_all_away()

    def _send_all_away(self) -> None:
        with suppress(IndexError):  # none is left
            while waiting := self.waiting.popleft():
                with suppress(OSError):
                    send(waiting.connection, {"what": "end"})
                waiting.send_away()


def connect(host: str, port: int) -> socket.socket:
    """A server's connection to the trainers. Raises `OSError` where nobody listens."""
    connection = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    _keep_alive(connection)
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Have the system notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def own_address(toward: str) -> str:
    """This machine's address on the interface that leads to `toward`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
