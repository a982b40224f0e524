"""Who sees what -> the rows of others that some ranks need.

Floor: plan. Rows of a rank are named by their owner and its row numbers, whatever array holds them.
"""

import numpy as np

from ..intervals import Range, intersect, length
from .sight import Sight

Rows = tuple[Range, ...]  # sorted and disjoint


def common(one: Rows, other: Rows) -> Rows:
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


def without(rows: Rows, others: Rows) -> Rows:
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


def count(rows: Rows) -> int:
    """How many rows these are."""
    return sum(map(length, rows))


def cut_rows(rows: Rows, pieces: int) -> tuple[Rows, ...]:
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


class Demand:
    """The rows of others that some of a set of ranks needs, by owner.

    Args:
        sight (`Sight`): Who sees what.
        ranks (`range`): The set.
    """

    def __init__(self, sight: Sight, ranks: range) -> None:
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

    def of(self, owner: int) -> Rows:
        """The rows of `owner` that are needed."""
        first, end = np.searchsorted(self._rank, (owner, owner + 1))
        starts, stops = self._start[first:end].tolist(), self._stop[first:end].tolist()
        return tuple(zip(starts, stops, strict=True))
