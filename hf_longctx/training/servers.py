"""A group's trainers and a number of servers -> processes that attend for them, while they last.

Floor: training. Every trainer of the group does the same at the same points: start, admit, drop and
close. The first one listens and calls; each holds its own end of every bridge.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..comm.bridge import BridgedChannel
from ..comm.channels import Channel
from ..comm.handshake import receive, send
from ..comm.rendezvous import Bridge, Listener, Meeting, Waiting, open_store, own_address
from ..runtime.binding import Runtime
from ..runtime.requests import Caller
from .groups import Group, servers_of_a_group
from .spawn import Spawned, spawn, write_token

logger = logging.getLogger(__name__)
START_SECONDS = 120.0  # that spawned servers may take to start
STEP_SECONDS = 1800.0  # that the first trainer may come later to a step boundary than another
_ADDRESS = 256  # bytes


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the roster, as this trainer sees it.

    Args:
        name (`str`): For people.
        speed (`float`): Beside a rank's 1.
        bridge (`Bridge`): To it.
        spawned (`int`): Its number among those that were started; -1 for one that joined.
        waiting (`Waiting`, *optional*): The first trainer's connection to it.
        caller (`Caller`, *optional*): The first trainer's.
    """

    name: str
    speed: float
    bridge: Bridge
    spawned: int
    waiting: Waiting | None
    caller: Caller | None


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
        reports (`list[dict]`): What servers said at their end that they had done; on the first
            rank.
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
        self.reports: list[dict[str, float]] = []
        self._peers: Channel | None = runtime.channel
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
        token = self._open()
        write_token(self._token_file, token)
        for number in range(count):
            if number * self.ranks // count == self.rank:
                self._spawned[number] = spawn(
                    number,
                    join=self._join,
                    token_file=self._token_file,
                    log=self.folder / f"{self.name}.server{number}.log",
                )
        for number in range(count):
            self._admit(self._await(number) if self._listener else None)
            if len(self._roster) != number + 1:
                raise RuntimeError(self._why_not(number))
        if self._listener:
            logger.info(
                "%s: %d trainers attend with %d servers; another joins at the next step with\n"
                "    hf-longctx serve --join %s --token-file %s",
                self.name, self.ranks, count, self._join, self._token_file.absolute(),
            )  # fmt: skip

    def _open(self) -> bytes:
        """Listen, and have all ranks know where; the token."""
        host = own_address(self.toward)
        token = secrets.token_hex(32).encode()
        if self.rank == 0:
            self._listener = Listener(host, token=token)
            store = open_store(host, seconds=STEP_SECONDS)
            address = [host, self._listener.port, store.port, token.decode()]
            text = json.dumps(address).encode().ljust(_ADDRESS)
            parcels = [
                (peer, torch.frombuffer(bytearray(text), dtype=torch.uint8))
                for peer in range(1, self.ranks)
            ]
            if self._peers is not None:
                self._peers.post(parcels, [], what="the servers' address").wait()
        else:
            assert self._peers is not None
            data = torch.empty(_ADDRESS, dtype=torch.uint8)
            self._peers.post([], [(0, data)], what="the servers' address").wait()
            address = json.loads(data.numpy().tobytes())
            store = open_store(address[0], address[2], seconds=STEP_SECONDS)
            token = address[3].encode()
        self._join = f"{address[0]}:{address[1]}"
        self._meeting = Meeting(store, host, self.rank, self.ranks, self.timeout)
        return token

    def _await(self, number: int) -> Waiting | None:
        """A spawned server, once it has come; `None` where it ended or takes too long."""
        assert self._listener is not None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            waiting = self._listener.take(number)
            if waiting is not None:
                return waiting
            if number in self._spawned and self._spawned[number].process.poll() is not None:
                return None
            time.sleep(0.02)
        return None

    def _why_not(self, number: int) -> str:
        if number not in self._spawned:
            return f"attention server {number} did not start; its log is with the trainer it is of"
        own = self._spawned[number]
        return f"attention server {number} did not start: {own.last_words()} ({own.log})"

    def joining(self) -> int:
        """Servers that wait to be admitted; known to the first rank alone."""
        return len(self._listener.waiting) if self._listener else 0

    def admit(self) -> None:
        """Take one waiting server into the roster, at the end; it may have left meanwhile."""
        self._admit(self._listener.take() if self._listener else None)

    def _admit(self, waiting: Waiting | None) -> None:
        assert self._meeting is not None, "servers join a run that was started with servers"
        name, self._called = f"bridge{self._called}", self._called + 1
        if self.rank == 0:
            self._meeting.call(name, waiting)
        found = self._meeting.build(name)
        if found is None:
            if waiting is not None:
                waiting.connection.close()
            return
        bridge, visitor = found
        caller = Caller(bridge, ranks=self.ranks) if self.rank == 0 else None
        server = Server(visitor.name, visitor.speed, bridge, visitor.spawned, waiting, caller)
        self._roster.append(server)
        self._connect()

    def _connect(self) -> None:
        """A channel to the present roster, which counts on from the last one."""
        before, bridges = self.runtime.channel, [server.bridge for server in self._roster]
        channel = BridgedChannel(self._peers, bridges, ranks=self.ranks, rank=self.rank)
        if before is not None:
            channel.sent.update(before.sent)
        self.runtime.channel = channel
        self.runtime.callers = tuple(s.caller for s in self._roster if s.caller is not None)

    def drop(self, numbers: Iterable[int]) -> None:
        """Give servers up: what they still do is of no use, and they are to end."""
        given_up = frozenset(numbers)
        gone = [server for at, server in enumerate(self._roster) if at in given_up]
        self._roster = [s for at, s in enumerate(self._roster) if at not in given_up]
        self._connect()
        for server in gone:
            server.bridge.close()
            if server.waiting is not None:
                server.waiting.connection.close()
            own = self._spawned.pop(server.spawned, None)
            if own is not None:
                own.end(seconds=0.0)
                logger.warning(
                    "server %d (%s) is lost, exit code %s; its log %s ends: %s",
                    server.spawned, server.name, own.process.returncode, own.log, own.last_words(),
                )  # fmt: skip

    def close(self) -> None:
        """End all servers."""
        for server in self._roster:
            if server.waiting is not None:
                self._end(server.waiting)
        gone, self._roster = self._roster, []
        if self._meeting is not None:
            self._connect()
        for server in gone:
            server.bridge.close()
        if self._listener is not None:
            self._listener.close()
        for own in self._spawned.values():
            own.end()
        self._spawned, self._listener, self._meeting = {}, None, None
        self._token_file.unlink(missing_ok=True)

    def _end(self, waiting: Waiting) -> None:
        """Tell a server that the training ended, and hear what it did."""
        try:
            send(waiting.connection, {"what": "end"})
            self.reports.append(receive(waiting.connection))
        except (OSError, ValueError) as error:
            logger.warning("%s did not answer at its end: %s", waiting.visitor.name, error)
        waiting.connection.close()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def servers_for(runtime: Runtime, group: Group, arguments: Any, *, name: str) -> Servers:
    """The servers that the training arguments ask for, not started yet.

    Raises:
        ValueError: see `groups.servers_of_a_group`.
    """
    return Servers(
        runtime,
        ranks=group.size,
        rank=group.rank,
        count=servers_of_a_group(arguments, group, name=name),
        folder=Path(arguments.output_dir) / "longctx_servers",
        name=f"group{group.index}",
        timeout=arguments.longctx_server_timeout,
        toward=os.environ.get("MASTER_ADDR", "127.0.0.1"),
    )
