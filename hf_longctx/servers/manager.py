"""A token and an address -> attention-server processes of this trainer, which end with it.

Layer: servers.
A group's trainers and a number of servers -> processes that attend for them, while they last. Every trainer of the group does the same at the same points: start, admit, drop and
close. The first one listens and calls; each holds its own end of every bridge.

A batch and a limit in bytes -> speeds at which no attention server holds more of any layer. The plan gives a server work by its speed, so a server short of memory is planned
as a slower one. Every rank finds the same speeds.
"""

import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ..comm.bridge import BridgedChannel
from ..comm.channels import Channel, GlooChannel
from ..data.batch import LongCtxBatch
from ..planning.layouts.cost import LayerKind
from ..planning.program.counts import Widths, peak_bytes
from ..runtime.executor import Runtime
from ..runtime.requests import RequestSender
from .handshake import Refused, receive, send
from .rendezvous import (
    STEP_SECONDS,
    Address,
    Bridge,
    Listener,
    Meeting,
    Waiting,
    open_store,
    own_address,
    share,
)

# By its path: a server must not import Transformers, see there. `-P` keeps its folder off sys.path.
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("attention_server.py")), "serve")
_END_SECONDS = 5.0  # that a server may take to end by itself


@dataclass(frozen=True, slots=True)
class Spawned:
    """A server that this trainer started.

    Args:
        process (`subprocess.Popen`): Its process.
        log (`Path`): What it says.
    """

    process: "subprocess.Popen[bytes]"
    log: Path

    def last_words(self) -> str:
        """The last line of its log, for the trainer's own."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end_in_words(self) -> str:
        """How it ended, or that it did not."""
        code = self.process.poll()
        how = "it still runs" if code is None else f"exit code {code}"
        return f"{how}; its log {self.log.resolve()} ends: {self.last_words()}"

    def end(self, *, seconds: float = _END_SECONDS) -> None:
        """Wait so long for its end, then kill it: a stopped process can be killed too."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def in_words(report: Mapping[str, float]) -> str:
    """What a server says at its end, for people; see `runtime.server.Served`."""
    return (
        f"{report['requests']:,} requests, {report['attending']:.1f} s of attention, "
        f"{report['waited']:.1f} s of waits, {report['sent']:,} bytes sent, at most "
        f"{report['peak_bytes']:,} held"
    )


def write_token(path: Path, token: bytes) -> None:
    """A file that only its owner can read, also while it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # another run's, perhaps with other rights
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(token)


def spawn(
    number: int, *, join: str, token_file: Path, log: Path, flags: Sequence[str] = ()
) -> Spawned:
    """Start one server in a session of its own, so that a Ctrl-C reaches the trainer alone.

    Args:
        number (`int`): By which the trainers know it again.
        join (`str`): `HOST:PORT` of the group's first trainer.
        token_file (`Path`): See `write_token`.
        log (`Path`): Where its output goes.
        flags (`Sequence[str]`): More flags of `hf-longctx serve`.
    """
    command = [*_COMMAND, "--join", join]
    command += ["--token-file", str(token_file), "--spawned", str(number)]
    command += ["--parent", str(os.getpid()), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return Spawned(process, log)


logger = logging.getLogger(__name__)
START_SECONDS = 120.0  # that spawned servers may take to start


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the roster, as this trainer sees it.

    Args:
        name (`str`): For people.
        speed (`float`): Beside a rank's 1.
        bridge (`Bridge`): To it.
        spawned (`int`): Its number among those that were started; -1 for one that joined.
        waiting (`Waiting`, *optional*): The first trainer's connection to it.
        sender (`RequestSender`, *optional*): The first trainer's.
    """

    name: str
    speed: float
    bridge: Bridge
    spawned: int
    waiting: Waiting | None
    sender: RequestSender | None


class Servers:
    """The attention servers of one group.

    Args:
        runtime (`Runtime`): Its channel reaches the group's ranks, and then the servers too.
        ranks (`int`): Ranks of the group.
        rank (`int`): This one.
        count (`int`): Servers to start, spread over the ranks.
        folder (`Path`): Where token and logs go.
        name (`str`): Of the group, in file names.
        timeout (`float`): Seconds that a server may take for an exchange.
        toward (`str`): A host that the group's first rank reaches over the interface to listen on.

    Attributes:
        runtime (`Runtime`): As given.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        ranks: int,
        rank: int,
        count: int,
        folder: Path,
        name: str = "group0",
        timeout: float = 30.0,
        toward: str = "127.0.0.1",
    ) -> None:
        self.runtime, self.ranks, self.rank, self.count = runtime, ranks, rank, count
        self.folder, self.name, self.timeout, self.toward = folder, name, timeout, toward
        assert runtime.channel is None or isinstance(runtime.channel, GlooChannel)
        self._peers: GlooChannel | None = runtime.channel
        self._roster: list[Server] = []
        self._spawned: dict[int, Spawned] = {}
        self._listener: Listener | None = None
        self._meeting: Meeting | None = None
        self._called = 0

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of each server, beside a rank's 1."""
        return tuple(server.speed for server in self._roster)

    @property
    def channel(self) -> Channel | None:
        """To the ranks and the servers of the present roster."""
        return self.runtime.channel

    @property
    def lost(self) -> frozenset[int]:
        """Numbers in the present roster that this process found lost."""
        channel = self.runtime.channel
        return frozenset(channel.lost) if isinstance(channel, BridgedChannel) else frozenset()

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes that this trainer started and did not give up."""
        return tuple(own.process.pid for own in self._spawned.values())

    @property
    def _token_file(self) -> Path:
        return self.folder / f"{self.name}.rank{self.rank}.token"

    def start(self) -> None:
        """Start the servers and wait for them.

        Raises:
            RuntimeError: where one does not come.
        """
        count = self.count
        if not count:
            return
        address = self._open()
        write_token(self._token_file, address.token.encode())
        for number in range(count):
            if number * self.ranks // count == self.rank:
                self._spawned[number] = spawn(
                    number,
                    join=address.join,
                    token_file=self._token_file,
                    log=self.folder / f"{self.name}.server{number}.log",
                )
        for number in range(count):
            self._admit(self._await(number))
            if len(self._roster) != number + 1:
                if self._peers is not None:  # who raises first closes the store for all
                    dist.barrier(group=self._peers.group)
                raise RuntimeError(self._why_not(number))
        if self._listener:
            logger.info(
                "%s: trainers %d, servers %d (%s); another joins at the next step with\n"
                "    hf-longctx serve --join %s --token-file %s",
                self.name, self.ranks, count, ", ".join(server.name for server in self._roster),
                address.join, self._token_file.resolve(),
            )  # fmt: skip

    def _open(self) -> Address:
        """Listen on the first rank, and have all ranks know where."""
        host, address = own_address(self.toward), None
        store: dist.TCPStore | None = None
        if self.rank == 0:
            token = secrets.token_hex(32)
            self._listener = Listener(host, token=token.encode())
            store = open_store(host, seconds=STEP_SECONDS)
            address = Address(host, self._listener.port, store.port, token)
        address = share(address, self._peers)
        if store is None:
            store = open_store(address.host, address.store_port, seconds=STEP_SECONDS)
        self._meeting = Meeting(store, host, self.rank, self.ranks, self.timeout)
        return address

    def _await(self, number: int) -> Waiting | None:
        """A spawned server, once it has come; `None` where it ended or takes too long, and on all
        ranks but the first, to which its own trainer says that it ended."""
        assert self._meeting is not None
        store, own, end = self._meeting.store, self._spawned.get(number), f"server{number}/ended"
        called, limit = f"bridge{self._called}/go", time.monotonic() + START_SECONDS
        while time.monotonic() < limit:
            if own is not None and own.process.poll() is not None:
                store.set(end, "1")
            if self._listener is None:
                if own is None or store.check([called]):
                    return None
            elif (waiting := self._listener.take(number)) or store.check([end]):
                return waiting
            time.sleep(0.02)
        return None

    def _why_not(self, number: int) -> str:
        if number not in self._spawned:
            return f"attention server {number} did not start; its log is with the trainer it is of"
        return f"attention server {number} did not start: {self._spawned[number].end_in_words()}"

    def joining(self) -> int:
        """Servers that wait to be admitted; known to the first rank alone."""
        return len(self._listener.waiting) if self._listener else 0

    def admit(self) -> None:
        """Take one waiting server into the roster, at the end; it may have left meanwhile."""
        waiting, before = self._listener.take() if self._listener else None, len(self._roster)
        self._admit(waiting)
        if waiting is not None:
            came = "joined" if len(self._roster) > before else "did not come when it was called"
            logger.info("%s: %s %s", self.name, waiting.visitor.name, came)

    def _admit(self, waiting: Waiting | None) -> None:
        assert self._meeting is not None, "servers join a run that was started with servers"
        name, self._called = f"bridge{self._called}", self._called + 1
        if self.rank == 0:
            self._meeting.call(name, waiting)
        found = self._meeting.build(name)
        if found is None:
            if waiting is not None:
                waiting.send_away()
            return
        bridge, visitor = found
        sender = RequestSender(bridge, ranks=self.ranks) if self.rank == 0 else None
        server = Server(visitor.name, visitor.speed, bridge, visitor.spawned, waiting, sender)
        self._roster.append(server)
        self._connect()

    def _connect(self) -> None:
        """A channel to the present roster, which counts on from the last one."""
        before, bridges = self.runtime.channel, [server.bridge for server in self._roster]
        channel = BridgedChannel(self._peers, bridges, ranks=self.ranks, rank=self.rank)
        if before is not None:
            channel.sent.update(before.sent)
        self.runtime.channel = channel
        self.runtime.senders = tuple(s.sender for s in self._roster if s.sender is not None)

    def drop(self, numbers: Iterable[int]) -> None:
        """Give servers up: what they still do is of no use, and they are to end."""
        given_up = frozenset(numbers)
        gone = [(at, server) for at, server in enumerate(self._roster) if at in given_up]
        self._roster = [s for at, s in enumerate(self._roster) if at not in given_up]
        channel = self.runtime.channel
        found = channel.lost if isinstance(channel, BridgedChannel) else {}
        self._connect()
        for at, server in gone:
            server.bridge.close()
            if server.waiting is not None:
                server.waiting.send_away()
            own = self._spawned.pop(server.spawned, None)
            why = str(found.get(at, "another trainer found it so"))
            if own is not None:
                own.end(seconds=0.0)
                why = own.end_in_words()
            if own is not None or self.rank == 0:
                logger.warning("%s: %s is lost: %s", self.name, server.name, why)

    def report(self) -> list[dict[str, float]]:
        """What each server says it did so far; known to the first rank alone."""
        return [said for said in self._tell("report") if said]

    def _tell(self, what: str) -> list[dict[str, float]]:
        """Tell all servers something, and hear what each answers; nothing from one that is lost."""
        heard: list[dict[str, float]] = []
        for connection in [s.waiting.connection for s in self._roster if s.waiting is not None]:
            heard.append({})
            with suppress(OSError, Refused):
                send(connection, {"what": what})
                heard[-1] = receive(connection)
        return heard

    def close(self) -> None:
        """End all servers."""
        for number, said in enumerate(self._tell("end")):
            name, did = self._roster[number].name, in_words(said) if said else "it does not answer"
            logger.info("%s: %s ends: %s", self.name, name, did)
        gone, self._roster = self._roster, []
        if self._meeting is not None:
            self._connect()
        for server in gone:
            server.bridge.close()
            if server.waiting is not None:
                server.waiting.send_away()
        if self._listener is not None:
            self._listener.close()
        for own in self._spawned.values():
            own.end()
        self._spawned, self._listener, self._meeting = {}, None, None
        self._token_file.unlink(missing_ok=True)

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_SMALLER = 0.9  # of the speed that would just fit, if bytes followed work


def limit_memory(
    batch: LongCtxBatch,
    *,
    algorithm: str,
    layers: Sequence[tuple[LayerKind, Widths]],
    limit: int,
) -> None:
    """Lower `batch.speeds` until every server keeps within `limit`.

    Args:
        batch (`LongCtxBatch`): With the speeds of its servers.
        algorithm (`str`): Attention name.
        layers (`Sequence[tuple[LayerKind, Widths]]`): Kind and row sizes of each layer.
        limit (`int`): Bytes of queries, keys, values and results of one layer.
    """
    while True:
        peaks = [
            _peak(batch, number, algorithm=algorithm, layers=layers)
            for number in range(len(batch.speeds))
        ]
        if not peaks or max(peaks) <= limit:
            return
        batch.speeds = tuple(
            speed if peak <= limit else speed * _SMALLER * min(limit / peak, 1.0)
            for speed, peak in zip(batch.speeds, peaks, strict=True)
        )


def _peak(
    batch: LongCtxBatch, number: int, *, algorithm: str, layers: Sequence[tuple[LayerKind, Widths]]
) -> int:
    """Bytes that a server holds of the largest layer, in the worse direction."""
    process = batch.layout.ranks + number
    programs = {
        (part.plan(algorithm, kind).program(process), widths)
        for part in batch.parts
        for kind, widths in layers
    }
    return max(
        peak_bytes(program, widths, backward=backward)
        for program, widths in programs
        for backward in (False, True)
    )
