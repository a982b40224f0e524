"""Start, admit, drop and end the attention servers of one group of trainers.

Every trainer of a group calls the same methods at the same points of the training. The first one
listens for servers, invites them and sends them requests; each trainer holds its own end of every
bridge. A trainer's servers end with it. Layer: servers.
"""

import logging
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch.distributed as dist

from ..comm.bridge import BridgedChannel
from ..comm.channels import GlooChannel
from ..runtime.executor import Runtime
from ..runtime.requests import RequestSender
from .handshake import HandshakeError, ServerInfo, receive, send
from .listener import Listener, WaitingServer, own_address
from .rendezvous import (
    STEP_SECONDS,
    Bridge,
    Rendezvous,
    RendezvousAddress,
    broadcast_address,
    open_store,
)
from .server_loop import describe_report
from .spawn import ServerProcess, spawn, write_token

logger = logging.getLogger(__name__)
START_SECONDS = 120.0  # for spawned servers to start; importing torch from a cold disk takes long
MAX_SERVERS = 62  # of a group: trainers tell each other the lost ones as bits of one int64


@dataclass(frozen=True, slots=True)
class JoinedServer:
    """A server of the roster, as this trainer sees it.

    Args:
        info (`ServerInfo`): How it introduced itself.
        bridge (`Bridge`): Channel to it.
        waiting (`WaitingServer`, *optional*): Its control connection, on the first rank.
        sender (`RequestSender`, *optional*): Sends it requests, on the first rank.
    """

    info: ServerInfo
    bridge: Bridge
    waiting: WaitingServer | None
    sender: RequestSender | None

    def disconnect(self) -> None:
        """Close this trainer's connections to it, which ends the server."""
        self.bridge.close()
        if self.waiting is not None:
            self.waiting.disconnect()


@dataclass(eq=False)
class ServerPool:
    """The attention servers of one group. Leaving it as a context ends them.

    Args:
        runtime (`Runtime`): Its channel reaches the group's ranks; with servers, those too.
        ranks (`int`): Ranks of the group.
        rank (`int`): Rank of this process.
        count (`int`): Servers to start, spread over the ranks.
        folder (`Path`): Folder for the token and the logs.
        name (`str`, *optional*, defaults to "group0"): Name of the group in file names and logs.
        timeout (`float`, *optional*, defaults to 30.0): Seconds that a server may take for an
            exchange.
        toward (`str`, *optional*, defaults to "127.0.0.1"): Host that the first rank reaches over
            the interface to listen on.
    """

    runtime: Runtime
    _: KW_ONLY
    ranks: int
    rank: int
    count: int  # stays as given after servers were lost: the run may lose and admit more
    folder: Path
    name: str = "group0"
    timeout: float = 30.0
    toward: str = "127.0.0.1"

    def __post_init__(self) -> None:
        peers = self.runtime.channel
        assert peers is None or isinstance(peers, GlooChannel)
        self._peers: GlooChannel | None = peers  # kept: _connect replaces the runtime's channel
        # The order is the servers' numbering in plans, so it is the same on every rank.
        self._roster: list[JoinedServer] = []
        self._processes: dict[int, ServerProcess] = {}  # by number, of this trainer alone
        self._listener: Listener | None = None  # on the first rank
        self._rendezvous: Rendezvous | None = None
        self._invitations = 0

    @property
    def speeds(self) -> tuple[float, ...]:
        """Attention speed of each server of the roster; a trainer has 1."""
        return tuple(server.info.speed for server in self._roster)

    @property
    def lost(self) -> frozenset[int]:
        """Numbers in the roster of the servers that this trainer found lost."""
        channel = self.runtime.channel
        return frozenset(channel.lost) if isinstance(channel, BridgedChannel) else frozenset()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of the processes that this trainer started and has not dropped."""
        return tuple(own.process.pid for own in self._processes.values())

    @property
    def _token_file(self) -> Path:
        return self.folder / f"{self.name}.rank{self.rank}.token"

    def start(self) -> None:
        """Start the servers and wait for them.

        Raises:
            RuntimeError: if a server does not start.
        """
        count = self.count
        if not count:
            return
        address = self._open()
        write_token(self._token_file, address.token.encode())
        for number in range(count):
            # Even over the ranks, and so over the nodes, which hold equal numbers of ranks.
            if number * self.ranks // count == self.rank:
                self._processes[number] = spawn(
                    number,
                    join=address.join,
                    token_file=self._token_file,
                    log=self.folder / f"{self.name}.server{number}.log",
                )
        for number in range(count):
            self._invite(self._await(number))
            if len(self._roster) != number + 1:
                # Raising ends the process, and the first rank's would take the store along.
                if self._peers is not None:
                    dist.barrier(group=self._peers.group)
                raise RuntimeError(self._describe_failed_start(number))
        if self._listener:
            logger.info(
                "%s: trainers %d, servers %d (%s); add one from the next step on with\n"
                "    hf-longctx serve --join %s --token-file %s",
                self.name, self.ranks, count, ", ".join(s.info.name for s in self._roster),
                address.join, self._token_file.resolve(),
            )  # fmt: skip

    def _open(self) -> RendezvousAddress:
        """Listen on the first rank, and connect all ranks to its store."""
        host, address = own_address(self.toward), None
        store: dist.TCPStore | None = None
        if self.rank == 0:
            token = secrets.token_hex(32)
            self._listener = Listener(host, token=token.encode())
            store = open_store(host, seconds=STEP_SECONDS)
            address = RendezvousAddress(host, self._listener.port, store.port, token)
        address = broadcast_address(address, self._peers)
        if store is None:
            store = open_store(address.host, address.store_port, seconds=STEP_SECONDS)
        self._rendezvous = Rendezvous(store, host, self.rank, self.ranks, self.timeout)
        return address

    def _await(self, number: int) -> WaitingServer | None:
        """Wait until a spawned server has come, or cannot come any more.

        Returns:
            The server, on the first rank; `None` there if it ended or took too long, and on all
            other ranks.
        """
        assert self._rendezvous is not None
        store, own = self._rendezvous.store, self._processes.get(number)
        invited, ended = f"bridge{self._invitations}/go", f"server{number}/ended"
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit:
            # Only the trainer that started it sees its end, and only the first rank waits for it.
            if own is not None and own.process.poll() is not None:
                store.set(ended, "1")
            if self._listener is None:
                if own is None or store.check([invited]):
                    return None
            elif (waiting := self._listener.take(number)) or store.check([ended]):
                return waiting
            time.sleep(0.02)
        return None

    def _describe_failed_start(self, number: int) -> str:
        why = "; the trainer that started it has its log"
        if number in self._processes:
            why = f": {self._processes[number].describe_exit()}"
        return f"attention server {number} did not start{why}"

    def joining(self) -> int:
        """Return how many servers wait to be admitted; 0 on all ranks but the first."""
        return len(self._listener.waiting) if self._listener else 0

    def admit(self) -> None:
        """Add one waiting server at the end of the roster, unless it has left in the meantime."""
        waiting, before = self._listener.take() if self._listener else None, len(self._roster)
        self._invite(waiting)
        if waiting is not None:
            result = "joined" if len(self._roster) > before else "did not come when it was invited"
            logger.info("%s: %s %s", self.name, waiting.info.name, result)

    def _invite(self, waiting: WaitingServer | None) -> None:
        """Invite a server, given on the first rank, and add it to the roster if it comes."""
        assert self._rendezvous is not None, "servers join a run that was started with servers"
        # A name is used once: the store still holds the keys of earlier attempts.
        name, self._invitations = f"bridge{self._invitations}", self._invitations + 1
        if self.rank == 0:
            self._rendezvous.invite(name, waiting)
        built = self._rendezvous.build(name)
        if built is not None:
            bridge, info = built
            sender = RequestSender(bridge, ranks=self.ranks) if self.rank == 0 else None
            self._roster.append(JoinedServer(info, bridge, waiting, sender))
            self._connect()
        elif waiting is not None:
            waiting.disconnect()

    def _connect(self) -> None:
        """Give the runtime a channel to the present roster."""
        before, bridges = self.runtime.channel, [server.bridge for server in self._roster]
        channel = BridgedChannel(self._peers, bridges, ranks=self.ranks, rank=self.rank)
        if before is not None:  # bytes are counted over the run, whatever the roster was
            channel.sent.update(before.sent)
        self.runtime.channel = channel
        self.runtime.senders = tuple(s.sender for s in self._roster if s.sender is not None)

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove servers from the roster and end them, whatever they still do.

        Args:
            numbers (`Iterable[int]`): Their numbers in the roster, the same on every rank.
        """
        dropped = {number: self._roster[number] for number in numbers}
        channel = self.runtime.channel
        errors = channel.lost if isinstance(channel, BridgedChannel) else {}
        self._roster = [s for number, s in enumerate(self._roster) if number not in dropped]
        self._connect()
        for number, server in dropped.items():
            server.disconnect()
            own = self._processes.pop(server.info.spawned, None)
            why = str(errors.get(number, "another trainer lost its connection"))
            if own is not None:
                own.stop(seconds=0.0)  # it may hang, and its result is of no use any more
                why = own.describe_exit()
            if own is not None or self.rank == 0:
                logger.warning("%s: %s is lost: %s", self.name, server.info.name, why)

    def report(self) -> list[dict[str, float]]:
        """Return the figures of each server that answers; an empty list on all ranks but the
        first."""
        return [figures for figures in self._tell("report") if figures]

    def _tell(self, what: str) -> list[dict[str, float]]:
        """Send each server a message; return the answers, empty for a server that is lost."""
        answers: list[dict[str, float]] = []
        for connection in [s.waiting.connection for s in self._roster if s.waiting is not None]:
            answers.append({})
            with suppress(OSError, HandshakeError):
                send(connection, {"what": what})
                answers[-1] = receive(connection)
        return answers

    def close(self) -> None:
        """End all servers. May be called twice, and after a failed start."""
        for server, figures in zip(self._roster, self._tell("end"), strict=False):
            did = describe_report(figures) if figures else "no answer"
            logger.info("%s: %s ends: %s", self.name, server.info.name, did)
        joined, self._roster = self._roster, []
        # The runtime outlives the pool: evaluation after training runs over the peers alone.
        if self._rendezvous is not None:
            self._connect()
        for server in joined:
            server.disconnect()
        if self._listener is not None:
            self._listener.close()
        for own in self._processes.values():
            own.stop()
        self._processes, self._listener, self._rendezvous = {}, None, None
        self._token_file.unlink(missing_ok=True)

    def __enter__(self) -> "ServerPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
