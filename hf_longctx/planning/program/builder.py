"""Collect one rank's program: its arrays, what their rows hold, and the numbers of its exchanges.

Every planner builds its programs with a `ProgramBuilder`, so that arrays are numbered, and rows
described, in one place. A planner decides what is sent and computed; the builder knows in which
rows of which array that is. Layer: planning.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, count
from operator import attrgetter, itemgetter

import numpy as np

from ..layouts.intervals import Ranges
from ..layouts.layout import Layout, PlacedSegment
from .operations import Block, Message, Op, Post
from .program import HomeArray, Program

TokenRun = tuple[int, int, int]  # document, start, stop
OwnedRows = tuple[int, Ranges]  # a rank and some of the rows that it owns
BlockRun = tuple[PlacedSegment, tuple[Block, ...]]  # tokens of one segment, their rows by array
HOME_KINDS = tuple(array.kind for array in HomeArray)


class RowPlacement:
    """Rows of several owners, end to end in the rows of an array.

    Rows are named by their owner and its row numbers, whatever array they are copied to.

    Args:
        layout (`Layout`): Where the tokens lie.
        owned (`Iterable[OwnedRows]`): The rows, by owner. An owner may come up more than once, with
            rising rows.
    """

    def __init__(self, layout: Layout, owned: Iterable[OwnedRows]) -> None:
        self.layout, self.rows = layout, 0
        # By owner: its row ranges, and the row here at which each begins.
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}
        for owner, ranges in owned:
            for start, stop in ranges:
                self._ranges.setdefault(owner, []).append((start, stop, self.rows))
                self.rows += stop - start

    @property
    def owned(self) -> Iterator[OwnedRows]:
        """The rows by owner, in the order of the array."""
        for owner, ranges in self._ranges.items():
            yield owner, tuple((start, stop) for start, stop, _ in ranges)

    def blocks(self, array: int, owner: int, rows: Ranges) -> tuple[Block, ...]:
        """Return the blocks of `array`, placed like this, that hold rows of an owner."""
        found = []
        for start, stop in rows:
            ranges = self._ranges[owner]
            # Most owners have a single range: the search would be most of the time.
            after = bisect_right(ranges, start, key=itemgetter(0)) if len(ranges) > 1 else 1
            first, last, at = ranges[after - 1]
            assert first <= start < stop <= last, (owner, rows, ranges)
            found.append(Block(array, at + start - first, at + stop - first))
        return tuple(found)

    @cached_property
    def held(self) -> np.ndarray:
        """int64 `[runs, 4]`: what the rows hold, the fields of `Held` after the array."""
        table = [
            (at + s.row - start, *s[2:])
            for owner, ranges in self._ranges.items()
            for start, stop, at in ranges
            for s in segments(self.layout, owner, ((start, stop),))
        ]
        return np.asarray(table, np.int64).reshape(len(table), 4)

    def runs(self, arrays: Sequence[int], owner: int, rows: Ranges) -> Iterator[BlockRun]:
        """Yield rows of an owner by segment, with their block in each of `arrays`."""
        for s in segments(self.layout, owner, rows):
            (block,) = self.blocks(0, owner, ((s.row, s.row + s.stop - s.start),))
            yield s, tuple(Block(array, block.start, block.stop) for array in arrays)


def segments(layout: Layout, owner: int, rows: Ranges) -> Iterator[PlacedSegment]:
    """Yield rows of an owner as runs of tokens of one document."""
    held = layout.of_rank(owner)
    for start, stop in rows:
        at = bisect_right(held, start, key=attrgetter("row")) - 1
        while at < len(held) and held[at].row < stop:
            s = held[at]
            low, high = max(start, s.row), min(stop, s.row + s.stop - s.start)
            shift = s.start - s.row  # from a row to the position of its token
            yield PlacedSegment(owner, low, s.document, low + shift, high + shift)
            at += 1


class ProgramBuilder:
    """The arrays of one rank's program, as a planner makes them.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): Whose program it is. An extra server owns no rows.
        own (`Sequence[str]`, *optional*): Kinds of the arrays that hold the rank's own rows, which
            are the first; by default those of `HomeArray`.
        head_groups (`int`, *optional*, defaults to 0): Head groups that blocks count in; 0 for one
            per key/value head.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int,
        own: Sequence[str] = HOME_KINDS,
        head_groups: int = 0,
    ) -> None:
        self.layout, self.rank, self.head_groups = layout, rank, head_groups
        self.own_rows: Ranges = ((0, layout.rows(rank)),) if layout.rows(rank) else ()
        self.home = RowPlacement(layout, [(rank, self.own_rows)])
        self._arrays: list[tuple[str, int]] = []
        self._held: list[np.ndarray] = []
        self._tags = count()
        for kind in own:
            self.own_array(kind)

    def array(self, kind: str, rows: int, held: np.ndarray | Sequence[Sequence[int]] = ()) -> int:
        """Add an array and return its number.

        Args:
            kind (`str`): One of `program.KINDS`.
            rows (`int`): Its rows.
            held (`np.ndarray`, *optional*): int `[runs, 4]`: what they hold, the fields of `Held`
                after the array.
        """
        number = len(self._arrays)
        self._arrays.append((kind, rows))
        table = np.empty((len(held), 5), np.int64)
        table[:, 0] = number
        if len(held):
            table[:, 1:] = held
        self._held.append(table)
        return number

    def placed(self, kind: str, placement: RowPlacement) -> int:
        """Add an array whose rows are placed like this, and return its number."""
        return self.array(kind, placement.rows, placement.held)

    def own_array(self, kind: str) -> int:
        """Add an array with as many rows as the rank owns, and return its number."""
        return self.placed(kind, self.home)

    def packed(self, kind: str, runs: Sequence[TokenRun]) -> list[Block]:
        """Add an array of runs of tokens, end to end, and return the block of each run."""
        stops = list(accumulate(stop - start for _, start, stop in runs))
        starts = [0, *stops][: len(stops)]
        held = [(row, *run) for row, run in zip(starts, runs, strict=True)]
        number = self.array(kind, stops[-1] if stops else 0, held)
        return [Block(number, *rows) for rows in zip(starts, stops, strict=True)]

    def include(self, program: Program, *, kinds: Mapping[str, str]) -> int:
        """Add the arrays of another program, and return the number of its first.

        Args:
            program (`Program`): Its array `a` becomes this number + a.
            kinds (`Mapping[str, str]`): Kinds of its arrays that are of another kind here.
        """
        first = len(self._arrays)
        for kind, rows in zip(program.kinds, program.rows, strict=True):
            self._arrays.append((kinds.get(kind, kind), rows))
        self._held.append(program.held + np.array([first, 0, 0, 0, 0], np.int64))
        return first

    def tag(self) -> int:
        """Return the number of a new exchange."""
        return next(self._tags)

    def build(self, forward: Iterable[Iterable[Op]], backward: Iterable[Iterable[Op]]) -> Program:
        """Encode the phases of both directions.

        Operations are read once, forward before backward, and may add arrays while they are read.
        """
        return Program.build(
            arrays=self._arrays,
            held=self._held,
            forward=tuple(forward),
            backward=tuple(backward),
            head_groups=self.head_groups,
        )


def post(
    tag: int,
    sends: Iterable[Message],
    recvs: Iterable[Message],
    *,
    channel: int = 0,
    after: int = -1,
) -> Post:
    """Make an exchange with one message per peer and none without blocks.

    Args:
        tag (`int`): Its number.
        sends, recvs (`Iterable[Message]`): Several of a peer are joined in their order.
        channel (`int`, *optional*, defaults to 0): Its channel.
        after (`int`, *optional*, defaults to -1): The exchange that it relays.
    """
    sides: list[tuple[Message, ...]] = []
    for messages in (sends, recvs):
        by_peer: dict[int, Sequence[Block]] = {}
        for peer, blocks in messages:
            if blocks:
                by_peer[peer] = (*by_peer[peer], *blocks) if peer in by_peer else blocks
        sides.append(tuple(by_peer.items()))
    # Only sends are relayed: an exchange that just receives must not wait for another.
    return Post(tag, sides[0], sides[1], after if sides[0] else -1, channel)
