"""Move bytes between ranks: one message per peer, over gloo or between threads of one process.

A channel posts an exchange without blocking and returns an `Exchange` to wait for. The n-th message
from a to b meets the n-th receive that b posted for a. A relayed message is posted long before it
can leave, so its place in that order is reserved at once, on both sides: timing cannot change which
message meets which receive. Each wait has a time-out; its error names rank, operation and peer.
Layer: comm.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from .arrivals import Arrivals, Exchange

Payload = tuple[int, Tensor]  # peer, uint8 bytes
_AT_LEAST = timedelta(milliseconds=10)
EXCHANGE_SECONDS = 120.0  # under the default group's time-out, above a server's


class ExchangeError(RuntimeError):
    """An exchange did not finish: the message names rank, operation and peer."""


class Channel(Protocol):
    """Moves bytes between the ranks of one group.

    Attributes:
        rank (`int`): This rank, within the group.
        sent (`Counter[int]`): Bytes sent to each peer so far.
        more (`Sequence[Channel]`): Others between the same ranks; a program numbers this one 0 and
            them from 1.
    """

    rank: int
    sent: Counter[int]

    @property
    def more(self) -> "Sequence[Channel]": ...

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        """Start receiving into `recvs` and sending `sends`; errors name the operation `what`."""
        ...

    def agree(self, number: int, *, what: str) -> None:
        """Compare a number across the group. Raises `ValueError` if ranks differ."""
        ...


class ReservedSends(Exchange, Protocol):
    """Messages whose place in the order is taken before they can leave."""

    def send(self, messages: Sequence[Tensor]) -> None:
        """Send them, once. Only after that can they be waited for."""
        ...


@runtime_checkable
class RelayChannel(Channel, Protocol):
    """A channel on which messages can leave as others arrive.

    Attributes:
        arrivals (`Arrivals`): What to do as its exchanges arrive.
    """

    arrivals: Arrivals

    def reserve(self, sizes: Sequence[tuple[int, int]], *, what: str) -> ReservedSends:
        """Take the place of one message for each `(peer, bytes)`; they count as sent."""
        ...


def select_channel(channel: Channel, number: int) -> Channel:
    """Return the channel that a program calls `number`."""
    have = 1 + len(channel.more)
    assert number < have, f"the program uses channel {number}, and there are {have}"
    return channel.more[number - 1] if number else channel


def sent_to_each(channel: Channel) -> Counter[int]:
    """Return the bytes sent to each peer, over a channel and its further ones."""
    return sum((each.sent for each in (channel, *channel.more)), Counter())


def sent_over_all(channel: Channel) -> int:
    """Return the bytes sent to all peers, over a channel and its further ones."""
    return sent_to_each(channel).total()


def cause(error: RuntimeError) -> str:
    """Shorten gloo's error to a line, without its source file and general advice."""
    # gloo puts its source file before, and two sentences of advice behind the cause.
    line = (str(error).splitlines() or ["time-out"])[0]
    return re.sub(r"^\[[^] ]+:\d+\] ", "", line).split(" This is typically")[0]


def _failed(rank: int, what: str, peer: int, why: object) -> ExchangeError:
    lost = f"rank {peer} may itself be blocked on a stalled or dead rank"
    return ExchangeError(f"rank {rank}: {what} with rank {peer} did not finish: {why} ({lost})")


def _validate_agreement(high: int, low: int, number: int, rank: int, what: str) -> None:
    if high != low:
        raise ValueError(
            f"rank {rank}: the ranks of a group disagree on {what}: {number} here, between {low} "
            f"and {high} elsewhere; give every rank the same data set, seed, flags and versions"
        )


class _GlooExchange:
    def __init__(self, channel: "GlooChannel", works: list[tuple[int, dist.Work]], what: str):
        self.channel, self.works, self.what = channel, works, what

    def done(self) -> bool:
        return all(work.is_completed() for _, work in self.works)

    def wait(self, *, since: float | None = None) -> None:
        began = time.monotonic() if since is None else since
        for peer, work in self.works:
            left = self.channel.timeout - timedelta(seconds=time.monotonic() - began)
            try:
                # However late, a message that is there is taken; gloo reads 0 as no time-out.
                work.wait(max(left, _AT_LEAST))
            except RuntimeError as error:
                raise _failed(self.channel.rank, self.what, peer, cause(error)) from error


class _GlooReserved(_GlooExchange):
    def __init__(self, channel: "GlooChannel", slots: Sequence[tuple[int, int]], what: str) -> None:
        super().__init__(channel, [], what)
        self.slots = slots  # peer, tag

    def send(self, messages: Sequence[Tensor]) -> None:
        for (peer, tag), data in zip(self.slots, messages, strict=True):
            try:
                self.works.append((peer, self.channel.send(data, peer, tag)))
            except RuntimeError as error:
                raise _failed(self.channel.rank, self.what, peer, cause(error)) from error


class GlooChannel:
    """Exchange over a gloo process group.

    Args:
        group (`dist.ProcessGroup`): A gloo group of the ranks that share a batch.
        timeout (`float`, *optional*, defaults to 120.0): Seconds that one exchange may take.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: float = EXCHANGE_SECONDS) -> None:
        self.group, self.rank = group, group.rank()  # also of a group outside the default one
        self.timeout = timedelta(seconds=timeout)
        self.more: tuple[GlooChannel, ...] = ()
        self.sent: Counter[int] = Counter()
        self.arrivals = Arrivals(f"longctx arrivals of rank {self.rank}")
        self._numbers: Counter[tuple[str, int]] = Counter()

    def _tag(self, way: str, peer: int) -> int:
        """Return the number of the next message to or from a peer."""
        # gloo matches a send with the receive of the same tag, whatever was posted between them.
        self._numbers[way, peer] += 1
        return self._numbers[way, peer] % 2**30

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        """Start an exchange; see `Channel.post`."""
        works: list[tuple[int, dist.Work]] = []
        # Receives first: a gloo send waits until the peer has posted its receive.
        try:
            for peer, data in recvs:
                tag = self._tag("from", peer)
                works.append((peer, self.group.recv([data], peer, tag)))
            for peer, data in sends:
                tag = self._tag("to", peer)
                # Counted first: whoever has received the message may read the count at once.
                self.sent[peer] += data.numel()
                works.append((peer, self.send(data, peer, tag)))
        except RuntimeError as error:
            raise _failed(self.rank, what, peer, cause(error)) from error
        return _GlooExchange(self, works, what)

    def send(self, data: Tensor, peer: int, tag: int) -> dist.Work:
        """Send one message under its tag."""
        return self.group.send([data], peer, tag)

    def reserve(self, sizes: Sequence[tuple[int, int]], *, what: str) -> _GlooReserved:
        """Take a tag for each message; see `RelayChannel.reserve`."""
        self.sent.update(dict(sizes))
        return _GlooReserved(self, [(peer, self._tag("to", peer)) for peer, _ in sizes], what)

    def close(self) -> None:
        """Destroy the groups."""
        # Their threads must end before the interpreter does.
        for channel in self.more:
            channel.close()
        if dist.is_initialized():  # else the groups were destroyed already, all at once
            dist.destroy_process_group(self.group)
        del self.group

    def agree(self, number: int, *, what: str) -> None:
        """Compare by one small all-reduce; `number` must lie in [0, 2**63)."""
        both = torch.tensor([number, -number], dtype=torch.int64)  # the maximum and the minimum
        try:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: comparing {what} did not finish: {cause(error)}"
            ) from error
        _validate_agreement(int(both[0]), -int(both[1]), number, self.rank, what)


def over_groups(groups: Sequence[dist.ProcessGroup], *, timeout: float) -> GlooChannel:
    """Return the channel over the first group, with one more over each of the others.

    All ranks must give the groups in the same order.
    """
    # Each channel is used once here: gloo connects at the first use, and within a step that would
    # count as the time of an exchange.
    first, *more = (GlooChannel(group, timeout=timeout) for group in groups)
    first.more = tuple(more)
    for number, channel in enumerate(more, start=1):
        channel.agree(number, what="a channel's number")
    return first


_Key = tuple[int, int, int, int]  # number of the channel, from, to, how many went that way


# Sends here never wait for a receive, so tests that depend on it need gloo.
class Hub:
    """The messages of ranks that run as threads of one process.

    Args:
        ranks (`int`): Ranks of the group.
        timeout (`float`, *optional*, defaults to 120.0): Seconds that one exchange may take.
        more (`int`, *optional*, defaults to 5): Further channels of each rank.
    """

    def __init__(self, ranks: int, *, timeout: float = EXCHANGE_SECONDS, more: int = 5) -> None:
        self.ranks, self.timeout, self.more = ranks, timeout, more
        self.messages: dict[_Key, Tensor] = {}
        self.changed = threading.Condition()
        self.barrier = threading.Barrier(ranks, timeout=timeout)
        self.numbers = [0] * ranks

    def channels(self) -> list["ThreadChannel"]:
        """Return one channel per rank, each with its further ones."""
        return [ThreadChannel(self, rank) for rank in range(self.ranks)]


class _ThreadExchange:
    def __init__(self, channel: "ThreadChannel", due: list[tuple[_Key, Tensor]], what: str) -> None:
        self.channel, self.due, self.what = channel, due, what

    def done(self) -> bool:
        with self.channel.hub.changed:
            return all(key in self.channel.hub.messages for key, _ in self.due)

    def wait(self, *, since: float | None = None) -> None:
        hub = self.channel.hub
        end = (time.monotonic() if since is None else since) + hub.timeout
        for key, buffer in self.due:
            with hub.changed:
                arrived = hub.changed.wait_for(
                    partial(hub.messages.__contains__, key), end - time.monotonic()
                )
                if not arrived:
                    why = f"no message within {hub.timeout} s"
                    raise _failed(self.channel.rank, self.what, key[1], why)
                message = hub.messages.pop(key)
            if message.numel() != buffer.numel():
                why = f"{message.numel()} bytes came, {buffer.numel()} were expected"
                raise _failed(self.channel.rank, self.what, key[1], why)
            # Into the caller's buffer, as gloo receives.
            buffer.copy_(message)
        self.due = []


class _ThreadReserved(_ThreadExchange):
    def __init__(self, channel: "ThreadChannel", slots: Sequence[_Key], what: str) -> None:
        super().__init__(channel, [], what)
        self.slots = slots

    def send(self, messages: Sequence[Tensor]) -> None:
        for key, data in zip(self.slots, messages, strict=True):
            self.channel.send(data, key)


class ThreadChannel:
    """Exchange between threads of one process, or between programs run in lock step.

    Args:
        hub (`Hub`): Of all ranks.
        rank (`int`): This one.
        number (`int`, *optional*, defaults to 0): Of the channel; only the first has `more`.
    """

    def __init__(self, hub: Hub, rank: int, number: int = 0) -> None:
        self.hub, self.rank, self.number = hub, rank, number
        self.sent: Counter[int] = Counter()
        self.arrivals = Arrivals(f"longctx arrivals of rank {rank}")
        self._numbers: Counter[tuple[int, int]] = Counter()

    @cached_property
    def more(self) -> "tuple[ThreadChannel, ...]":
        """The further channels."""
        count = self.hub.more if self.number == 0 else 0
        return tuple(ThreadChannel(self.hub, self.rank, 1 + other) for other in range(count))

    def _key(self, source: int, target: int) -> _Key:
        self._numbers[source, target] += 1
        return self.number, source, target, self._numbers[source, target]

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        """Leave the messages in the hub; see `Channel.post`."""
        # Copies: unlike a process, a thread could change a message before its peer has read it.
        due = [(self._key(peer, self.rank), buffer) for peer, buffer in recvs]
        for peer, data in sends:
            self.sent[peer] += data.numel()
            self.send(data.clone(), self._key(self.rank, peer))
        return _ThreadExchange(self, due, what)

    def send(self, data: Tensor, key: _Key) -> None:
        """Leave one message in the hub under its key."""
        with self.hub.changed:
            self.hub.messages[key] = data
            self.hub.changed.notify_all()

    def reserve(self, sizes: Sequence[tuple[int, int]], *, what: str) -> _ThreadReserved:
        """Take a key for each message; see `RelayChannel.reserve`."""
        self.sent.update(dict(sizes))
        return _ThreadReserved(self, [self._key(self.rank, peer) for peer, _ in sizes], what)

    def agree(self, number: int, *, what: str) -> None:
        """Compare through the hub, once every rank has left its number."""
        self.hub.numbers[self.rank] = number
        self._meet(what)
        high, low = max(self.hub.numbers), min(self.hub.numbers)
        self._meet(what)  # the next comparison must not overwrite numbers that are being read
        _validate_agreement(high, low, number, self.rank, what)

    def _meet(self, what: str) -> None:
        try:
            self.hub.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ExchangeError(
                f"rank {self.rank}: comparing {what} did not finish: not all {self.hub.ranks} "
                f"ranks came within {self.hub.timeout} s"
            ) from error
