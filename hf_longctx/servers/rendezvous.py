"""Connections of servers to a group's first trainer -> those that proved themselves, and wait.

Layer: servers. The listener is bound to one interface. `meeting` builds bridges to those that wait.

A server that waits -> a bridge between all trainers of a group and it. A bridge is a gloo group of its own, outside the default one, over a store that listens
on one interface. Nobody builds it before the server has said `ready`: a constructor that waits for
a server that never comes would hold every trainer up.
"""

import json
import logging
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.channels import GlooChannel, cause
from .handshake import Refused, Visitor, greet, receive, send

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


BUILD_SECONDS = 10.0  # that a server may take to come when called, and all to build a bridge
STEP_SECONDS = 1800.0  # that one trainer may come later to a step boundary than another
NEVER = 30 * 86400.0  # seconds: a server waits for its trainers as long as they live
_ADDRESS = 512  # bytes


@dataclass(frozen=True, slots=True)
class Address:
    """Where a group's first trainer takes servers in.

    Args:
        host (`str`): Of its interface.
        port (`int`): Of its listener.
        store_port (`int`): Of its store.
        token (`str`): What servers must know.
    """

    host: str
    port: int
    store_port: int
    token: str

    @property
    def join(self) -> str:
        """As `hf-longctx serve --join` takes it."""
        return f"{self.host}:{self.port}"


def share(address: Address | None, peers: GlooChannel | None) -> Address:
    """The first rank's address, on every rank of the group.

    Args:
        address (`Address`, *optional*): On the first rank.
        peers (`GlooChannel`, *optional*): To the other ranks; `None` where a rank is alone.
    """
    text = json.dumps(astuple(address)) if address else ""
    data = torch.frombuffer(bytearray(text.ljust(_ADDRESS).encode()), dtype=torch.uint8)
    if peers is not None:
        dist.broadcast(data, group=peers.group, group_src=0)
    return Address(*json.loads(data.numpy().tobytes()))


def open_store(host: str, port: int | None = None, *, seconds: float) -> dist.TCPStore:
    """The store over which a group's bridges are built.

    Args:
        host (`str`): Where it listens.
        port (`int`, *optional*): Of a store that runs; by default one is started on that host.
        seconds (`float`): Longest wait for a key.
    """
    timeout = timedelta(seconds=seconds)
    if port is not None:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    listening = socket.create_server((host, 0))  # by itself the store would listen on all
    return dist.TCPStore(
        host, int(listening.getsockname()[1]), is_master=True, wait_for_workers=False,
        timeout=timeout, master_listen_fd=listening.detach(),
    )  # fmt: skip


class Bridge(GlooChannel):
    """The ranks of a group and one server, which comes after them.

    Args:
        store (`dist.Store`): All of them, and no others, build on it.
        rank (`int`): This process.
        ranks (`int`): Ranks of the group.
        host (`str`, *optional*): Address of the interface to use.
        interface (`str`, *optional*): Its name instead.
        build_seconds (`float`): Longest wait for the others to come.
        timeout (`float`): Seconds that one exchange may take.

    Raises:
        RuntimeError: where one of them did not come.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        ranks: int,
        host: str = "",
        interface: str = "",
        build_seconds: float,
        timeout: float,
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=build_seconds), 1
        at = {"interface": interface} if interface else {"hostname": host}
        options._devices = [dist.ProcessGroupGloo.create_device(**at)]
        group = dist.ProcessGroupGloo(store, rank, ranks + 1, options)
        super().__init__(group, timeout=timeout)  # type: ignore[arg-type]

    def close(self) -> None:
        """Give up the connections; whoever waits on them sees them closed."""
        del self.group


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group's trainers build bridges, and as whom.

    Args:
        store (`dist.TCPStore`): Theirs.
        host (`str`): This process's address.
        rank (`int`): This rank.
        ranks (`int`): Ranks of the group.
        timeout (`float`): Seconds that an exchange with a server may take.
    """

    store: dist.TCPStore
    host: str
    rank: int
    ranks: int
    timeout: float

    def call(self, name: str, waiting: Waiting | None) -> None:
        """The first rank asks a server to come, and tells the others whether it does."""
        came = ""
        if waiting is not None:
            with suppress(OSError, RuntimeError):
                called = {"bridge": name, "store": self.store.port, "ranks": self.ranks}
                send(waiting.connection, called)
                limit = timedelta(seconds=BUILD_SECONDS)
                self.store.wait([f"{name}/ready"], limit)
                came = json.dumps(asdict(waiting.visitor))
        self.store.set(f"{name}/go", came)

    def build(self, name: str) -> tuple[Bridge, Visitor] | None:
        """The bridge, once the first rank has called; `None` where not every rank has it."""
        who = self.store.get(f"{name}/go")
        if not who:
            return None
        bridge: Bridge | None = None
        try:
            bridge = Bridge(
                dist.PrefixStore(name, self.store), rank=self.rank, ranks=self.ranks,
                host=self.host, build_seconds=BUILD_SECONDS, timeout=self.timeout,
            )  # fmt: skip
        except RuntimeError as error:
            logger.warning("a bridge could not be built: %s", cause(error))
        self.store.set(f"{name}/built/{self.rank}", "0" if bridge is None else "1")
        built = [self.store.get(f"{name}/built/{rank}") for rank in range(self.ranks)]
        if bridge is None or b"0" in built:
            if bridge is not None:
                bridge.close()
            return None
        return bridge, Visitor(**json.loads(who))


def answer_call(
    connection: socket.socket, *, host: str, interface: str = ""
) -> tuple[Bridge, int] | None:
    """The server's side: wait to be called, come, and build the bridge.

    Returns:
        The bridge and the ranks of the group; `None` where the trainers ended without calling.

    Raises:
        OSError: where the connection is lost.
        RuntimeError: where the bridge could not be built.
    """
    connection.settimeout(None)
    called = receive(connection)
    if "bridge" not in called:
        return None
    name, ranks = called["bridge"], called["ranks"]
    store = open_store(host, called["store"], seconds=BUILD_SECONDS)
    store.set(f"{name}/ready", "1")
    if not store.get(f"{name}/go"):
        raise RuntimeError("the trainers waited too long for this server; start it again")
    bridge = Bridge(
        dist.PrefixStore(name, store), rank=ranks, ranks=ranks,
        host=own_address(host), interface=interface,
        build_seconds=BUILD_SECONDS, timeout=NEVER,
    )  # fmt: skip
    return bridge, ranks
