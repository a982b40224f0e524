"""Match the messages of ranks that run in lock step, and pass relays on when they arrive.

The checker runs programs over this in place of a network. As on gloo, one waiting thread per
channel takes the exchanges that are relayed in the order in which they were posted: what is posted
after one that never arrives is never passed on. Layer: planning.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .operations import Block, Message, Post

Key = tuple[int, int, int, int]  # channel, from, to, how many went that way before
BlockValues = tuple[tuple[str, int, int], np.ndarray]  # (kind, head, heads), values of a block


class PlanError(AssertionError):
    """Raised for a wrong program; names the rank, the operation and what differs."""


@dataclass
class MessageQueue:
    """The messages under way.

    The n-th message from a to b on a channel meets b's n-th receive from a on that channel.
    """

    sent: dict[Key, list[BlockValues]] = field(default_factory=dict)
    expected: set[Key] = field(default_factory=set)
    counts: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    events: int = 0  # posts, departures and arrivals so far: none in a round means no progress

    def next(self, way: str, channel: int, source: int, target: int) -> Key:
        """Return the key of the next message that way, as one end counts them."""
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
    upon: "_Posted | None" = None  # what a relay passes on
    relays: list["_Posted"] = field(default_factory=list)
    arrived: bool = False  # and unpacked; before its wait only where it is relayed on


class Postings:
    """One rank's exchanges under way in one direction.

    Args:
        rank (`int`): This rank.
        queue (`MessageQueue`): Shared by all ranks.
        relayed (`frozenset[int]`): Tags of the exchanges that relays pass on.
        pack (`Callable`): Returns the present values of blocks.
        unpack (`Callable`): Fills a message's blocks with values; the last argument is the tag.
    """

    def __init__(
        self,
        rank: int,
        queue: MessageQueue,
        relayed: frozenset[int],
        *,
        pack: Callable[[Sequence[Block]], list[BlockValues]],
        unpack: Callable[[list[BlockValues], Message, int], None],
    ) -> None:
        self.rank, self.queue, self.relayed = rank, queue, relayed
        self.pack, self.unpack = pack, unpack
        self.pending: dict[int, _Posted] = {}
        self.waiting_for = ""
        self._threads: dict[int, deque[_Posted]] = {}  # by channel: what its thread waits for
        self._filled: dict[int, list[tuple[int, int, Block]]] = {}  # by array: tag, peer, block

    def post(self, op: Post) -> None:
        """Start an exchange.

        Raises:
            PlanError: on a tag in use, or a relay of what is not under way or not received.
        """
        if op.tag in self.pending:
            raise PlanError(f"rank {self.rank}: posts {op.tag}, which is not waited for yet")
        queue, on = self.queue, op.channel
        sends = [(queue.next("sent", on, self.rank, m[0]), m[1]) for m in op.sends]
        recvs = [(queue.next("received", on, m[0], self.rank), m) for m in op.recvs]
        queue.expected.update(key for key, _ in recvs)
        posted = _Posted(op, sends, recvs)
        if op.after >= 0:
            posted.upon = self._relays_on(op)
        self.pending[op.tag] = posted
        if op.tag in self.relayed:
            self._threads.setdefault(on, deque()).append(posted)
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
            if not any(_holds(other, block) for other in received):
                raise PlanError(
                    f"rank {self.rank}: {op.tag} relays {block}, which {op.after} does not receive"
                )
        return upon

    def _send(self, posted: _Posted) -> None:
        for key, blocks in posted.sends:
            self.queue.sent[key] = self.pack(blocks)
            self.queue.events += 1

    def _take(self, posted: _Posted) -> None:
        posted.arrived = True
        for key, message in posted.recvs:
            self.unpack(self.queue.sent.pop(key), message, posted.post.tag)
            self.queue.events += 1

    def move(self) -> None:
        """Do what the waiting threads do: unpack exchanges that have arrived, and pass them on."""
        for thread in self._threads.values():
            while thread and all(key in self.queue.sent for key, _ in thread[0].recvs):
                posted = thread.popleft()
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
            # A receive that is not relayed fills its blocks here; one that is has filled them.
            for block in (block for _, (_, blocks) in posted.recvs for block in blocks):
                self.validate_access(block)
            self._take(posted)
        else:
            for array in {b.array for _, (_, blocks) in posted.recvs for b in blocks}:
                self._filled[array] = [x for x in self._filled[array] if x[0] != tag]
        del self.pending[tag]

    def _missing(self, posted: _Posted) -> int | None:
        """Return the rank that must do something before the exchange is done."""
        for key, (peer, _) in posted.recvs:
            if not posted.arrived and key not in self.queue.sent:
                return peer
        if posted.post.tag in self.relayed and not posted.arrived:
            return self.rank  # its thread still waits for an exchange that was posted before
        if posted.upon is not None and not posted.upon.arrived:
            return next((peer for _, (peer, _) in posted.upon.recvs), self.rank)
        for key, _ in posted.sends:  # gloo sends once the peer has posted its receive
            if key not in self.queue.expected:
                return key[2]
        return None

    def validate_access(self, block: Block) -> None:
        """Raise `PlanError` where the waiting threads may fill or pass on rows of `block` now."""
        for tag, peer, other in self._filled.get(block.array, ()):
            if _overlap(block, other):
                raise PlanError(
                    f"rank {self.rank}: touches {block}, which tag {tag} from {peer} fills and "
                    "relays; wait for it first"
                )


def _heads(block: Block) -> tuple[int, int]:
    return (block.head, block.head + block.heads) if block.heads else (0, 2**31)


def _holds(block: Block, part: Block) -> bool:
    """Return whether all of `part` lies in `block`."""
    low, high = _heads(part)
    first, last = _heads(block)
    rows = block.start <= part.start and part.stop <= block.stop
    return block.array == part.array and rows and first <= low and high <= last


def _overlap(one: Block, other: Block) -> bool:
    """Return whether two blocks share an element."""
    (low, high), (first, last) = _heads(one), _heads(other)
    rows = max(one.start, other.start) < min(one.stop, other.stop)
    return one.array == other.array and rows and max(low, first) < min(high, last)
