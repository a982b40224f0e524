"""Place documents by the `zigzag` layout, flat or within nested domains.

Flat, every document lies head-tail over all ranks. With levels, one that fits into a domain stays
inside, so that none of its keys crosses the domain's link, and longer ones lie head-tail over as
few domains as hold them. Ranks hold equal tokens all the same: where no domain has rows left for
all of a document, it is cut too. Layer: planning.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .intervals import Range
from .levels import Levels
from .spread import RankSegment


class _Run(NamedTuple):
    """Rows of a document: one range, or two with a gap in the middle."""

    document: int
    ranges: tuple[Range, ...]

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def work(self) -> float:
        """Score entries of the rows, in a causal document."""
        return sum((start + 1 + stop) * (stop - start) / 2 for start, stop in self.ranges)

    def head_tail(self, taken: Sequence[int]) -> Iterator["_Run"]:
        """Cut it into parts of so many rows, each half from the head and half from the tail."""
        low, high = 0, self.rows
        for rows in taken:
            front, back = low + (rows + 1) // 2, high - rows // 2
            yield _Run(self.document, (*self._ranges(low, front), *self._ranges(back, high)))
            low, high = front, back

    def _ranges(self, low: int, high: int) -> Iterator[Range]:
        """Yield the tokens of rows `[low, high)`, counted over all ranges."""
        for start, stop in self.ranges:
            first, last = max(low, 0), min(high, stop - start)
            if first < last:
                yield start + first, start + last
            low, high = low - (stop - start), high - (stop - start)


def zigzag(lengths: list[int], room: list[int], *, levels: Levels) -> Iterator[RankSegment]:
    """Place each document head-tail over the ranks of the smallest domain that it fits into.

    Args:
        lengths (`list[int]`): Tokens of each document.
        room (`list[int]`): Rows of each rank, as many in all as tokens; they differ by at most one.
        levels (`Levels`): The nested domains of the ranks.
    """
    runs = [_Run(document, ((0, n),)) for document, n in enumerate(lengths)]
    yield from _within(runs, room, 0, levels.sizes)


def _within(
    runs: Sequence[_Run], room: list[int], first: int, sizes: tuple[int, ...]
) -> Iterator[RankSegment]:
    """Place runs in the domain that begins at rank `first` and has these sizes.

    The longest run comes first, to a member that has room for it; then runs that fit into none,
    cut over the members with the most rows left.
    """
    if len(sizes) == 1:
        yield from _over_ranks(runs, room, first)
        return
    width = len(room) // sizes[0]
    members = [room[at : at + width] for at in range(0, len(room), width)]
    free, work = np.array([sum(member) for member in members]), np.zeros(len(members))
    kept: list[list[_Run]] = [[] for _ in members]

    def keep(member: int, run: _Run) -> None:
        kept[member].append(run)
        free[member] -= run.rows
        work[member] += run.work

    cut, rows, unplaced = [], int(free.sum()), sum(run.work for run in runs)
    for run in sorted(runs, key=lambda run: -run.rows):
        # A member's load is its work once rows of average density fill it, that of all runs still
        # to be placed. A denser run goes where that is least, others where it is most.
        density = (unplaced - run.work) / max(rows - run.rows, 1)
        load = work + density * free
        order = load if run.work >= density * run.rows else -load
        best = int(np.where(free >= run.rows, order, np.inf).argmin())
        if free[best] >= run.rows:
            keep(best, run)
            rows, unplaced = rows - run.rows, unplaced - run.work
        else:
            cut.append(run)
    for run in cut:
        most = np.argsort(-free, kind="stable")
        before = np.cumsum(free[most]) - free[most]
        taken = np.zeros_like(free)
        taken[most] = np.clip(run.rows - before, 0, free[most])
        chosen = np.flatnonzero(taken)
        parts = run.head_tail(taken[chosen].tolist())
        for member, part in zip(chosen.tolist(), parts, strict=True):
            keep(member, part)
    # By document and position again: ranks keep their rows so.
    for member, own in enumerate(kept):
        yield from _within(sorted(own), members[member], first + member * width, sizes[1:])


def _over_ranks(runs: Sequence[_Run], room: list[int], first: int) -> Iterator[RankSegment]:
    """Place each run head-tail over all ranks from `first` on, in nearly equal parts."""
    left = list(room)
    for run in runs:
        each, extra = divmod(run.rows, len(left))
        taken = [each] * len(left)
        # The rest goes, a token each, to the ranks with the most room, so nothing is padded.
        for rank in sorted(range(len(left)), key=lambda rank: (-left[rank], rank))[:extra]:
            taken[rank] += 1
        for rank, part in enumerate(run.head_tail(taken)):
            left[rank] -= taken[rank]
            for start, stop in part.ranges:
                yield first + rank, run.document, start, stop
