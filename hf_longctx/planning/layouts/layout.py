"""Document lengths and a group size -> which rank holds which segments, in which order.

Layer: planning. Ranks hold equal token counts (they differ by at most one). Within a rank, segments lie
by document and position, so a rank's rows of one document read from left to right.

Document lengths of a batch -> two layouts of nearly equal tokens, by whole documents. Each half is a layout of its own over all ranks, planned and balanced apart, so that
one half computes while the other's exchanges travel. A rank's rows are those of the first half,
then those of the second.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from .intervals import touching
from .levels import Levels
from .spread import DocumentShare, spread
from .zigzag import zigzag

LAYOUTS = ("contiguous", "zigzag", "spread")


class Placed(NamedTuple):
    """Tokens `[start, stop)` of `document`, kept by `rank` from local row `row` on."""

    rank: int
    row: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every token of a batch lies.

    Args:
        lengths (`np.ndarray`): int32, tokens of each document.
        ranks (`int`): Ranks of the group.
        columns (`np.ndarray`): int32 `[segments, 5]`, the fields of `Placed`, by rank and row.
    """

    lengths: np.ndarray
    ranks: int
    columns: np.ndarray

    def __reduce__(self) -> tuple[type["Layout"], tuple[np.ndarray, int, np.ndarray]]:
        """Pickle the columns alone: views are made again."""
        return Layout, (self.lengths, self.ranks, self.columns)

    @cached_property
    def segments(self) -> tuple[Placed, ...]:
        """All segments as views on the columns, by rank and row."""
        return tuple(Placed(*row) for row in self.columns.tolist())

    @cached_property
    def by_document(self) -> dict[int, tuple[Placed, ...]]:
        """The segments of each document, by position."""
        held: dict[int, list[Placed]] = defaultdict(list)
        for segment in self.segments:
            held[segment.document].append(segment)
        return {d: tuple(sorted(held[d], key=lambda s: s.start)) for d in held}

    @cached_property
    def _of_ranks(self) -> dict[int, tuple[Placed, ...]]:
        return {}

    def within(self, rank: int) -> slice:
        """Which rows of `columns` are of `rank`; none of another than a rank."""
        first, end = np.searchsorted(self.columns[:, 0], (rank, rank + 1)).tolist()
        return slice(first, end)

    def of_rank(self, rank: int) -> tuple[Placed, ...]:
        """The segments that `rank` holds, in row order; views are made on first use."""
        if rank not in self._of_ranks:
            self._of_ranks[rank] = tuple(
                Placed(*row) for row in self.columns[self.within(rank)].tolist()
            )
        return self._of_ranks[rank]

    def rows(self, rank: int) -> int:
        """Tokens that `rank` holds."""
        held = self.columns[self.within(rank)]
        return int((held[:, 4] - held[:, 3]).sum())

    def positions(self, rank: int) -> np.ndarray:
        """int64 `[rows]`: the position of each local row inside its document."""
        runs = [np.arange(s.start, s.stop) for s in self.of_rank(rank)]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def flat_rows(self, rank: int) -> np.ndarray:
        """int64 `[rows]`: the index of each local row in the documents laid end to end."""
        first = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        runs = [first[s.document] + np.arange(s.start, s.stop) for s in self.of_rank(rank)]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def inverse(self) -> np.ndarray:
        """int64 `[tokens]`: for each token of the documents laid end to end, its index in the
        ranks' rows laid end to end. `concat(rows of all ranks)[inverse()]` restores document order.
        """
        return np.argsort(np.concatenate([self.flat_rows(r) for r in range(self.ranks)]))

    @property
    def spanning_documents(self) -> int:
        """Documents with tokens on more than one rank."""
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
            document head-tail over all ranks) or `spread` (long documents head-tail over several
            ranks, as wide as balances attention, the rest whole, and cut where none has room).
        odd (`int`, *optional*, defaults to 0): Where tokens that do not divide begin to go, one to
            a rank: at rank `odd % ranks`.

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
    place: dict[str, Callable[[list[int], list[int]], Iterator[DocumentShare]]] = {
        "contiguous": _contiguous,
        "zigzag": partial(zigzag, levels=levels),
        "spread": spread,
    }
    shares = np.asarray(list(place[layout](list(map(int, lengths)), list(room))), np.int64)
    rank, document, start, stop = shares[np.lexsort(shares.T[[2, 1, 0]])].T
    first, last = touching(start, stop, rank, document)
    rank, document, start, stop = rank[first], document[first], start[first], stop[last]
    rows = np.bincount(rank, weights=stop - start, minlength=ranks).astype(np.int64)
    assert rows.tolist() == room, (rows, room)
    row = np.cumsum(stop - start) - (stop - start)
    row -= np.append(0, np.cumsum(rows))[rank]
    columns = np.stack([rank, row, document, start, stop], axis=1).astype(np.int32)
    return Layout(np.asarray(lengths, np.int32), ranks, columns)


def _contiguous(lengths: list[int], room: list[int]) -> Iterator[DocumentShare]:
    """Documents end to end, cut where a rank is full."""
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


SMALLEST = 1 / 4  # of a batch's tokens: a half below it hides too little of the other's exchanges


@dataclass(frozen=True, eq=False, slots=True)
class Halves:
    """A batch and its two halves.

    Args:
        whole (`Layout`): All documents, as they were numbered.
        parts (`tuple[Layout, Layout]`): The halves, each with documents of its own numbering.
    """

    whole: Layout
    parts: tuple[Layout, Layout]


def halve(lengths: Sequence[int], *, ranks: int, layout: str) -> Halves | None:
    """Cut documents over ranks as two halves; the same everywhere.

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
    """One layout in which a rank's rows of each part lie one after the other."""
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
