"""A layout and a mask -> pieces of segments, and whose queries see the keys of each.

Layer: planning. The later a segment of a document lies, the later begin and end the keys that it sees.
So the segments that see a token are neighbours, a run of the document's segments, and where that
run changes a piece ends. Only documents on several ranks have pieces: others are seen by one.

Who sees what -> the rows of others that some ranks need. Rows of a rank are named by their owner and its row numbers, whatever array holds them.
"""

from functools import lru_cache

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import Range, intersect, length
from ..layouts.layout import Layout


class Visibility:
    """Who sees what, in arrays that are the same on all ranks.

    Args:
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): What a row sees.
        queries (`bool`): The other way round: whose keys the queries of a piece see.

    Attributes:
        rank, start, stop (`np.ndarray`): int64 `[pieces]`: owner and its rows, by these.
        document, token (`np.ndarray`): int64 `[pieces]`: what the first row holds.
        segment (`np.ndarray`): int64 `[pieces]`: which of `viewers` the piece is cut from.
        viewers (`np.ndarray`): int64 `[segments]`: the rank of each, by document and position.
        first, last (`np.ndarray`): int64 `[pieces]`: the run of `viewers` that see it.
    """

    def __init__(self, layout: Layout, kind: LayerKind, *, queries: bool) -> None:
        rank, row, document, start, stop = _shared(layout)
        length = layout.lengths.astype(np.int64)
        begins = np.cumsum(length + 1) - (length + 1)  # documents end to end, with a gap between
        offset, length = begins[document], length[document]
        if queries:  # reversed in time, a causal mask looks the other way
            high, low = kind.keys_seen_by(length - stop, length - start, length=length)
            low, high = length - low, length - high
        else:
            low, high = kind.keys_seen_by(start, stop, length=length)
        low, high = offset + low, offset + high
        edges = np.concatenate([offset + start, offset + stop])
        if kind.window:  # else what is seen begins and ends where segments do
            edges = np.concatenate([edges, low, high])
        edges = np.unique(edges)
        begin, end = edges[:-1], edges[1:]
        of = np.searchsorted(offset + start, begin, side="right") - 1
        inside = begin < (offset + stop)[of]  # a gap is in no segment
        begin, end, of = begin[inside], end[inside], of[inside]
        at = row[of] + begin - (offset + start)[of]
        order = np.lexsort((at, rank[of]))
        begin, end, of, at = begin[order], end[order], of[order], at[order]
        self.viewers, self.segment, self.rank = rank, of, rank[of]
        self.start, self.stop = at, at + end - begin
        self.document, self.token = document[of], begin - offset[of]
        self.first = np.searchsorted(high, begin, side="right")
        self.last = np.searchsorted(low, begin, side="right")

    def over(self, ufunc: np.ufunc, numbers: np.ndarray) -> np.ndarray:
        """`[pieces]`: a reduction over the numbers of all segments that see each piece."""
        if not len(self.first):
            return numbers[:0]
        ends = np.stack([self.first, self.last], axis=1).ravel()
        found: np.ndarray = ufunc.reduceat(np.append(numbers, numbers[:1]), ends)[::2]
        return found

    def onlookers(self, rank: int) -> np.ndarray:
        """The ranks, itself included, that see rows of `rank` on documents of several."""
        first, end = np.searchsorted(self.rank, (rank, rank + 1))
        runs = zip(self.first[first:end].tolist(), self.last[first:end].tolist(), strict=True)
        seen = [self.viewers[low:high] for low, high in runs]
        return np.unique(np.concatenate(seen)) if seen else self.viewers[:0]

    def seen_by(self, ranks: range) -> np.ndarray:
        """bool `[pieces]`: whether some of these ranks, which do not hold it, sees it."""
        among = (self.viewers >= ranks.start) & (self.viewers < ranks.stop)
        before = np.append(0, np.cumsum(among))
        outside = (self.rank < ranks.start) | (self.rank >= ranks.stop)
        seen: np.ndarray = (before[self.last] > before[self.first]) & outside
        return seen


def visibility(layout: Layout, kind: LayerKind, *, queries: bool = False) -> Visibility:
    """The sight of layers of a kind, whatever their widths."""
    return _visibility(layout, kind.window, kind.causal, queries)


@lru_cache(maxsize=4)
def _visibility(layout: Layout, window: int, causal: bool, queries: bool) -> Visibility:
    """Memo of a pure function, keyed by the layout's identity."""
    return Visibility(layout, LayerKind(window=window, causal=causal), queries=queries)


def _shared(layout: Layout) -> tuple[np.ndarray, ...]:
    """int64 columns of the segments of documents on several ranks, by document and position."""
    columns = layout.columns.astype(np.int64)
    columns = columns[np.lexsort((columns[:, 3], columns[:, 2]))]
    begins = np.flatnonzero(np.append(True, np.diff(columns[:, 2])))
    least, most = (f.reduceat(columns[:, 0], begins) for f in (np.minimum, np.maximum))
    counts = np.diff(np.append(begins, len(columns)))
    return tuple(columns[np.repeat(least != most, counts)].T)


RowRanges = tuple[Range, ...]  # sorted and disjoint


def common(one: RowRanges, other: RowRanges) -> RowRanges:
    """The rows in both."""
    found, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        if both := intersect(one[a], other[b]):
            found.append(both)
        if one[a][1] <= other[b][1]:
            a += 1
        else:
            b += 1
    return tuple(found)


def without(rows: RowRanges, others: RowRanges) -> RowRanges:
    """The rows that are not among others."""
    found, first = [], 0
    for start, stop in rows:
        while first < len(others) and others[first][1] <= start:
            first += 1
        for low, high in others[first:]:
            if low >= stop:
                break
            if start < low:
                found.append((start, low))
            start = high
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def count(rows: RowRanges) -> int:
    """How many rows these are."""
    return sum(map(length, rows))


def cut_rows(rows: RowRanges, pieces: int) -> tuple[RowRanges, ...]:
    """The rows in `pieces` parts whose sizes differ by one at most, in order."""
    total, found, start = count(rows), [], 0
    for piece in range(pieces):
        low, high = total * piece // pieces, total * (piece + 1) // pieces
        part, start = [], 0
        for first, last in rows:
            of_range = intersect((low, high), (start, start + last - first))
            if of_range:
                part.append((first + of_range[0] - start, first + of_range[1] - start))
            start += last - first
        found.append(tuple(part))
    return tuple(found)


class NeededRows:
    """The rows of others that some of a set of ranks needs, by owner.

    Args:
        sight (`Visibility`): Who sees what.
        ranks (`range`): The set.
    """

    def __init__(self, sight: Visibility, ranks: range) -> None:
        seen = sight.seen_by(ranks)
        rank, start, stop = sight.rank[seen], sight.start[seen], sight.stop[seen]
        self.rows = int((stop - start).sum())
        opens = np.append(True, (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1]))[: len(rank)]
        closes = np.append(opens[1:], True)[: len(rank)]
        self._rank, self._start, self._stop = rank[opens], start[opens], stop[closes]

    @property
    def owners(self) -> np.ndarray:
        """The ranks whose rows are needed."""
        return np.unique(self._rank)

    def of(self, owner: int) -> RowRanges:
        """The rows of `owner` that are needed."""
        first, end = np.searchsorted(self._rank, (owner, owner + 1))
        starts, stops = self._start[first:end].tolist(), self._stop[first:end].tolist()
        return tuple(zip(starts, stops, strict=True))
