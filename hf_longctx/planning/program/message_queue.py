"""Exchanges of ranks in lock step: which message meets which receive, and when relays pass it on.

Layer: planning. As on gloo, one waiting thread per channel takes the exchanges that are relayed on in
the order in which they were posted: what stands behind one that never comes stays behind it.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .operations import Block, Message, Post

Key = tuple[int, int, int, int]  # channel, from, to, how many went that way before
Delivery = tuple[tuple[str, int, int], np.ndarray]  # (kind, head, heads) and values of one block


class PlanError(AssertionError):
    """A program is wrong: the message names the rank, the operation and what differs."""


@dataclass
class MessageQueue:
    """Messages under way: the n-th from a to b on a channel meets b's n-th receive from a there."""

    sent: dict[Key, list[Delivery]] = field(default_factory=dict)
    expected: set[Key] = field(default_factory=set)
    counts: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    events: int = 0  # posts, departures and arrivals so far: none in a round means no progress

    def next(self, way: str, channel: int, source: int, target: int) -> Key:
        """The key of the next message that way, as seen by one end."""
        number = self.counts.get((way, channel, source, target), 0)
        self.counts[way, channel, source, target] = number + 1
        self.events += 1
        return channel, source, target, number


@dataclass(eq=False)
class _Posted:
    """An exchange between its post and its wait."""

    post: Post
    sends: list[tuple[Key, Sequence[Block]]]
    recvs: list[tuple[Key, Message]]
    upon: "_Posted | None" = None  # what a relay waits for
    relays: list["_Posted"] = field(default_factory=list)
    arrived: bool = False  # and unpacked; before its wait only where it is relayed on


class Postings:
    """One rank's exchanges under way in one direction.

    Args:
        rank (`int`): This rank.
        mail (`MessageQueue`): Shared by all ranks.
        relayed (`frozenset[int]`): Tags of the exchanges that relays pass on.
        pack (`Callable`): Blocks -> parcels with their present values.
        unpack (`Callable`): Fills a message's blocks from its parcels.
    """

    def __init__(
        self,
        rank: int,
        mail: MessageQueue,
        relayed: frozenset[int],
        *,
        pack: Callable[[Sequence[Block]], list[Delivery]],
        unpack: Callable[[list[Delivery], Message, int], None],
    ) -> None:
        self.rank, self.mail, self.relayed = rank, mail, relayed
        self.pack, self.unpack = pack, unpack
        self.pending: dict[int, _Posted] = {}
        self.waiting_for = ""
        self._queues: dict[int, deque[_Posted]] = {}  # by channel: what its thread waits for
        self._filled: dict[int, list[tuple[int, int, Block]]] = {}  # by array: tag, peer, block

    def post(self, op: Post) -> None:
        """Start an exchange. Raises `PlanError` on a relay of what is not under way or received."""
        if op.tag in self.pending:
            raise PlanError(f"rank {self.rank}: posts {op.tag}, which is not waited for yet")
        mail, on = self.mail, op.channel
        sends = [(mail.next("sent", on, self.rank, m[0]), m[1]) for m in op.sends]
        recvs = [(mail.next("received", on, m[0], self.rank), m) for m in op.recvs]
        mail.expected.update(key for key, _ in recvs)
        posted = _Posted(op, sends, recvs)
        if op.after >= 0:
            posted.upon = self._relays_on(op)
        self.pending[op.tag] = posted
        if op.tag in self.relayed:
            self._queues.setdefault(on, deque()).append(posted)
            for peer, block in ((peer, b) for peer, blocks in op.recvs for b in blocks):
                self._filled.setdefault(block.array, []).append((op.tag, peer, block))
        if posted.upon is None or posted.upon.arrived:
            self._send(posted)
        else:
            posted.upon.relays.append(posted)

    def _relays_on(self, op: Post) -> _Posted:
        upon = self.pending.get(op.after)
        if upon is None:
            raise PlanError(f"rank {self.rank}: {op.tag} relays {op.after}, not under way then")
        received = [block for _, (_, blocks) in upon.recvs for block in blocks]
        for block in (block for _, blocks in op.sends for block in blocks):
            if not any(_holds(whole, block) for whole in received):
                raise PlanError(
                    f"rank {self.rank}: {op.tag} relays {block}, which {op.after} does not receive"
                )
        return upon

    def _send(self, posted: _Posted) -> None:
        for key, blocks in posted.sends:
            self.mail.sent[key] = self.pack(blocks)
            self.mail.events += 1

    def _take(self, posted: _Posted) -> None:
        posted.arrived = True
        for key, message in posted.recvs:
            self.unpack(self.mail.sent.pop(key), message, posted.post.tag)
            self.mail.events += 1

    def move(self) -> None:
        """What the waiting threads do: unpack exchanges that have come whole, and pass them on."""
        for queue in self._queues.values():
            while queue and all(key in self.mail.sent for key, _ in queue[0].recvs):
                posted = queue.popleft()
                self._take(posted)
                for relay in posted.relays:
                    self._send(relay)

    def wait(self, tag: int) -> Generator[None]:
        """Yield until the exchange has arrived and left; then its blocks are filled."""
        if tag not in self.pending:
            raise PlanError(f"rank {self.rank}: waits for {tag}, never posted")
        posted = self.pending[tag]
        while (peer := self._missing(posted)) is not None:
            self.waiting_for = f"rank {self.rank} waits for {peer} (tag {tag})"
            yield
        self.waiting_for = ""
        if tag not in self.relayed:
            for block in (block for _, (_, blocks) in posted.recvs for block in blocks):
                self.refuse(block)
            self._take(posted)
        else:
            for array in {b.array for _, (_, blocks) in posted.recvs for b in blocks}:
                self._filled[array] = [x for x in self._filled[array] if x[0] != tag]
        del self.pending[tag]

    def _missing(self, posted: _Posted) -> int | None:
        """The rank that must do something before the exchange is done."""
        for key, (peer, _) in posted.recvs:
            if not posted.arrived and key not in self.mail.sent:
                return peer
        if posted.post.tag in self.relayed and not posted.arrived:
            return self.rank  # its thread is held up by an exchange that was posted before
        if posted.upon is not None and not posted.upon.arrived:
            return next((peer for _, (peer, _) in posted.upon.recvs), self.rank)
        for key, _ in posted.sends:  # a send leaves once its receive is posted
            if key not in self.mail.expected:
                return key[2]
        return None

    def refuse(self, block: Block) -> None:
        """Raise `PlanError` where the waiting threads may fill or pass on rows of `block` now."""
        for tag, peer, other in self._filled.get(block.array, ()):
            if _meet(block, other):
                raise PlanError(
                    f"rank {self.rank}: touches {block}, which tag {tag} from {peer} fills and "
                    "relays; wait for it first"
                )


def _heads(block: Block) -> tuple[int, int]:
    return (block.head, block.head + block.heads) if block.heads else (0, 2**31)


def _holds(whole: Block, part: Block) -> bool:
    """Whether all of `part` lies in `whole`."""
    low, high = _heads(part)
    first, last = _heads(whole)
    rows = whole.start <= part.start and part.stop <= whole.stop
    return whole.array == part.array and rows and first <= low and high <= last


def _meet(one: Block, other: Block) -> bool:
    """Whether two blocks share an element."""
    (low, high), (first, last) = _heads(one), _heads(other)
    rows = max(one.start, other.start) < min(one.stop, other.stop)
    return one.array == other.array and rows and max(low, first) < min(high, last)
