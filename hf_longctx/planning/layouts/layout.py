"""Cut the documents of a batch over ranks: who holds which segments, in which order.

Ranks hold equal token counts (they differ by at most one). Within a rank, segments lie by document
and position, so a rank's rows of one document read from left to right.

For ping-pong, `halve` makes two layouts of nearly equal tokens, by documents that are not cut. Each
half is a layout of its own over all ranks, planned and balanced apart, so that one half computes
while the other's exchanges travel. A rank's rows are those of the first half, then those of the
second. Layer: planning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from .intervals import touching
from .levels import Levels
from .spread import RankSegment, spread
from .zigzag import zigzag

LAYOUTS = ("contiguous", "zigzag", "spread")


class PlacedSegment(NamedTuple):
    """Tokens `[start, stop)` of `document`, kept by `rank` from local row `row` on."""

    rank: int
    row: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The rank and row of every token of a batch.

    Args:
        lengths (`np.ndarray`): int32, tokens of each document.
        ranks (`int`): Ranks of the group.
        columns (`np.ndarray`): int32 `[segments, 5]`: the fields of `PlacedSegment`, by rank
            and row.
    """

    lengths: np.ndarray
    ranks: int
    columns: np.ndarray

    def __reduce__(self) -> tuple[type["Layout"], tuple[np.ndarray, int, np.ndarray]]:
        """Pickle the columns alone: views are made again."""
        return Layout, (self.lengths, self.ranks, self.columns)

    @cached_property
    def segments(self) -> tuple[PlacedSegment, ...]:
        """All segments, by rank and row."""
        return tuple(PlacedSegment(*row) for row in self.columns.tolist())

    @cached_property
    def by_document(self) -> dict[int, tuple[PlacedSegment, ...]]:
        """The segments of each document, by position."""
        held: dict[int, list[PlacedSegment]] = defaultdict(list)
        for segment in self.segments:
            held[segment.document].append(segment)
        return {d: tuple(sorted(held[d], key=lambda s: s.start)) for d in held}

    @cached_property
    def _of_ranks(self) -> dict[int, tuple[PlacedSegment, ...]]:
        return {}

    def within(self, rank: int) -> slice:
        """Return which rows of `columns` are of `rank`; none for an extra server."""
        first, end = np.searchsorted(self.columns[:, 0], (rank, rank + 1)).tolist()
        return slice(first, end)

    def of_rank(self, rank: int) -> tuple[PlacedSegment, ...]:
        """Return the segments that `rank` holds, in row order."""
        if rank not in self._of_ranks:
            self._of_ranks[rank] = tuple(
                PlacedSegment(*row) for row in self.columns[self.within(rank)].tolist()
            )
        return self._of_ranks[rank]

    def rows(self, rank: int) -> int:
        """Count the tokens that `rank` holds."""
        held = self.columns[self.within(rank)]
        return int((held[:, 4] - held[:, 3]).sum())

    def positions(self, rank: int) -> np.ndarray:
        """Return int64 `[rows]`: the position of each row of `rank` in its document."""
        runs = [np.arange(s.start, s.stop) for s in self.of_rank(rank)]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def flat_rows(self, rank: int) -> np.ndarray:
        """Return int64 `[rows]`: the index of each row of `rank` in the documents end to end."""
        first = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        runs = [first[s.document] + np.arange(s.start, s.stop) for s in self.of_rank(rank)]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def inverse(self) -> np.ndarray:
        """Return int64 `[tokens]`: where each token of the documents lies in all ranks' rows.

        `concat(rows of all ranks)[inverse()]` restores the order of the documents.
        """
        return np.argsort(np.concatenate([self.flat_rows(r) for r in range(self.ranks)]))

    @property
    def spanning_documents(self) -> int:
        """How many documents have tokens on more than one rank."""
        return sum(len({s.rank for s in held}) > 1 for held in self.by_document.values())


def cut(
    lengths: Sequence[int],
    *,
    ranks: int,
    layout: str,
    odd: int = 0,
    levels: Levels | None = None,
) -> Layout:
    """Cut documents over ranks.

    Args:
        lengths (`Sequence[int]`): Tokens of each document, each at least 1.
        ranks (`int`): Ranks of the group, at least 1.
        layout (`str`): `contiguous` (documents end to end, cut in equal parts), `zigzag` (every
            document head-tail over all ranks) or `spread` (long documents head-tail over as many
            ranks as balance attention, others on one rank, or cut where none has room).
        odd (`int`, *optional*, defaults to 0): The ranks from `odd % ranks` on get one token more,
            where tokens do not divide.
        levels (`Levels`, *optional*): Nested domains, which `zigzag` keeps documents in.

    Raises:
        ValueError: on an unknown layout, fewer than one rank, no document or an empty document.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"longctx_layout={layout!r} is not built yet; use one of {LAYOUTS}")
    if ranks < 1:
        raise ValueError(f"a layout needs at least one rank, got ranks={ranks}")
    levels = levels or Levels((ranks,))
    if levels.ranks != ranks:
        raise ValueError(f"levels {levels} hold {levels.ranks} ranks, but the layout has {ranks}")
    if not len(lengths) or min(lengths) < 1:
        raise ValueError(f"a batch needs documents of at least one token, got lengths {lengths}")
    total = int(sum(lengths))
    room = [total // ranks + ((r - odd) % ranks < total % ranks) for r in range(ranks)]
    place: dict[str, Callable[[list[int], list[int]], Iterator[RankSegment]]] = {
        "contiguous": _contiguous,
        "zigzag": partial(zigzag, levels=levels),
        "spread": spread,
    }
    placed = np.asarray(list(place[layout](list(map(int, lengths)), list(room))), np.int64)
    rank, document, start, stop = placed[np.lexsort(placed.T[[2, 1, 0]])].T
    # A document may be placed in pieces that meet on a rank: they are one segment.
    first, last = touching(start, stop, rank, document)
    rank, document, start, stop = rank[first], document[first], start[first], stop[last]
    rows = np.bincount(rank, weights=stop - start, minlength=ranks).astype(np.int64)
    assert rows.tolist() == room, (rows, room)
    row = np.cumsum(stop - start) - (stop - start)
    row -= np.append(0, np.cumsum(rows))[rank]
    columns = np.stack([rank, row, document, start, stop], axis=1).astype(np.int32)
    return Layout(np.asarray(lengths, np.int32), ranks, columns)


def _contiguous(lengths: list[int], room: list[int]) -> Iterator[RankSegment]:
    """Place documents end to end, cut where a rank is full."""
    rank = 0
    for document, n in enumerate(lengths):
        start = 0
        while start < n:
            while not room[rank]:
                rank += 1
            taken = min(room[rank], n - start)
            yield rank, document, start, start + taken
            room[rank] -= taken
            start += taken


SMALLEST = 1 / 4  # of a batch's tokens: a smaller half hides too little of the other's exchanges


@dataclass(frozen=True, eq=False, slots=True)
class Halves:
    """A batch and its two halves for ping-pong.

    Args:
        whole (`Layout`): All documents, as they were numbered.
        parts (`tuple[Layout, Layout]`): The halves, each with documents of its own numbering.
    """

    whole: Layout
    parts: tuple[Layout, Layout]


def halve(lengths: Sequence[int], *, ranks: int, layout: str) -> Halves | None:
    """Cut documents over ranks as two halves of nearly equal tokens.

    The longest documents go first, each to the half with fewer tokens.

    Args:
        lengths (`Sequence[int]`): Tokens of each document, each at least 1.
        ranks (`int`): Ranks of the group.
        layout (`str`): How each half is cut; see `layout.cut`.

    Returns:
        The halves, on whose ranks token counts differ by at most one, together too; `None` where
        the smaller half would hold less than a quarter of the tokens, or less than one per rank.
    """
    documents: tuple[list[int], list[int]] = [], []
    tokens = [0, 0]
    for d in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        half = int(tokens[1] < tokens[0])
        documents[half].append(d)
        tokens[half] += lengths[d]
    if min(tokens) < max(ranks, SMALLEST * sum(tokens)):
        return None
    each = [sorted(of_half) for of_half in documents]
    first, second = (
        cut([lengths[d] for d in each[half]], ranks=ranks, layout=layout, odd=half * tokens[0])
        for half in range(2)
    )
    return Halves(_end_to_end(lengths, (first, second), each), (first, second))


def _end_to_end(
    lengths: Sequence[int], parts: Sequence[Layout], documents: Sequence[Sequence[int]]
) -> Layout:
    """Join layouts into one in which a rank's rows of the parts lie one after the other."""
    columns, rows = [], np.zeros(parts[0].ranks, np.int32)
    for part, numbers in zip(parts, documents, strict=True):
        moved = part.columns.copy()
        moved[:, 1] += rows[moved[:, 0]]
        moved[:, 2] = np.asarray(numbers, np.int32)[moved[:, 2]]
        columns.append(moved)
        rows += np.asarray([part.rows(rank) for rank in range(part.ranks)], np.int32)
    joined = np.concatenate(columns)
    order = np.lexsort((joined[:, 1], joined[:, 0]))
    return Layout(np.asarray(lengths, np.int32), parts[0].ranks, joined[order])
