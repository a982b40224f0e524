"""Find which ranks see which rows, and which rows of others a set of ranks needs.

The later a segment of a document lies, the later the keys that it sees begin and end. So the
segments that see a token are neighbours in their document: a run. A *piece* is a stretch of one
segment whose rows are all seen by the same run. Documents on a single rank have no pieces, as
nobody else needs their rows. `ring` and `charm` send by these tables. Layer: planning.
"""

from functools import lru_cache

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import Ranges, touching
from ..layouts.layout import Layout


class Visibility:
    """Tables of who sees what, the same on all ranks.

    Args:
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): What a row sees.
        queries (`bool`): The other way round: whose keys the queries of a piece see.

    Attributes:
        rank, start, stop (`np.ndarray`): int64 `[pieces]`: owner and its rows; sorted by these.
        document, token (`np.ndarray`): int64 `[pieces]`: document and position of the first row.
        segment (`np.ndarray`): int64 `[pieces]`: index in `viewers` of the segment it is cut from.
        viewers (`np.ndarray`): int64 `[segments]`: the rank of each, by document and position.
        first, last (`np.ndarray`): int64 `[pieces]`: the run of `viewers` that see it.
    """

    def __init__(self, layout: Layout, kind: LayerKind, *, queries: bool) -> None:
        rank, row, document, start, stop = _on_several_ranks(layout)
        length = layout.lengths.astype(np.int64)
        # Positions are numbered through all documents. The gap of one keeps neighbours apart.
        begins = np.cumsum(length + 1) - (length + 1)
        offset, length = begins[document], length[document]
        if queries:  # reversed in time, a causal mask looks the other way
            high, low = kind.keys_seen_by(length - stop, length - start, length=length)
            low, high = length - low, length - high
        else:
            low, high = kind.keys_seen_by(start, stop, length=length)
        low, high = offset + low, offset + high
        edges = np.concatenate([offset + start, offset + stop])
        if kind.window:  # without one, what is seen begins and ends where segments do
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
        # `low` and `high` rise with the segments, so those that see a piece are a slice of them.
        self.first = np.searchsorted(high, begin, side="right")
        self.last = np.searchsorted(low, begin, side="right")

    def over(self, ufunc: np.ufunc, numbers: np.ndarray) -> np.ndarray:
        """Reduce, for each piece, the numbers `[segments]` of all segments that see it."""
        if not len(self.first):
            return numbers[:0]
        # One number more, as `reduceat` takes no end past the last; every other slice is a piece's.
        ends = np.stack([self.first, self.last], axis=1).ravel()
        found: np.ndarray = ufunc.reduceat(np.append(numbers, numbers[:1]), ends)[::2]
        return found

    def viewers_of(self, rank: int) -> np.ndarray:
        """Return the ranks, itself included, that see rows of `rank`."""
        first, end = np.searchsorted(self.rank, (rank, rank + 1))
        runs = zip(self.first[first:end].tolist(), self.last[first:end].tolist(), strict=True)
        seen = [self.viewers[low:high] for low, high in runs]
        return np.unique(np.concatenate(seen)) if seen else self.viewers[:0]

    def seen_by(self, ranks: range) -> np.ndarray:
        """Return bool `[pieces]`: whether a rank of these, none of which holds it, sees it."""
        among = (self.viewers >= ranks.start) & (self.viewers < ranks.stop)
        before = np.append(0, np.cumsum(among))
        outside = (self.rank < ranks.start) | (self.rank >= ranks.stop)
        seen: np.ndarray = (before[self.last] > before[self.first]) & outside
        return seen


def visibility(layout: Layout, kind: LayerKind, *, queries: bool = False) -> Visibility:
    """Return the tables of all layers of a kind, whatever their widths."""
    return _visibility(layout, kind.window, kind.causal, queries)


@lru_cache(maxsize=4)
def _visibility(layout: Layout, window: int, causal: bool, queries: bool) -> Visibility:
    # A memo of a pure function: a layout hashes by identity.
    return Visibility(layout, LayerKind(window=window, causal=causal), queries=queries)


def _on_several_ranks(layout: Layout) -> tuple[np.ndarray, ...]:
    """Return int64 columns of the segments of documents on several ranks, by position."""
    columns = layout.columns.astype(np.int64)
    columns = columns[np.lexsort((columns[:, 3], columns[:, 2]))]
    begins = np.flatnonzero(np.append(True, np.diff(columns[:, 2])))
    least, most = (f.reduceat(columns[:, 0], begins) for f in (np.minimum, np.maximum))
    counts = np.diff(np.append(begins, len(columns)))
    return tuple(columns[np.repeat(least != most, counts)].T)


class NeededRows:
    """The rows of others that some rank of a set needs, by owner.

    Args:
        seen (`Visibility`): Who sees what.
        ranks (`range`): The set.
    """

    def __init__(self, seen: Visibility, ranks: range) -> None:
        some = seen.seen_by(ranks)
        rank, start, stop = seen.rank[some], seen.start[some], seen.stop[some]
        self.rows = int((stop - start).sum())
        first, last = touching(start, stop, rank)
        self._rank, self._start, self._stop = rank[first], start[first], stop[last]

    @property
    def owners(self) -> np.ndarray:
        """The ranks whose rows are needed."""
        return np.unique(self._rank)

    def of(self, owner: int) -> Ranges:
        """Return the rows of `owner` that are needed."""
        first, end = np.searchsorted(self._rank, (owner, owner + 1))
        starts, stops = self._start[first:end].tolist(), self._stop[first:end].tolist()
        return tuple(zip(starts, stops, strict=True))
