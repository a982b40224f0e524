"""A mask and ranks -> which rows of other ranks they need.

Floor: plan. Rows of a rank are named by their owner and its row numbers, whatever array holds them.
"""

from collections.abc import Iterable

from ..intervals import Range, intersect, length, union
from .cost import LayerKind
from .layout import Layout, Placed

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
    """Which rows of others a growing set of ranks needs for its own rows.

    Args:
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): What a row sees.
        ranks (`Iterable[int]`): The set to begin with.
        queries (`bool`, *optional*): Count queries that see the ranks' keys, not keys that their
            queries see.
    """

    def __init__(
        self, layout: Layout, kind: LayerKind, ranks: Iterable[int] = (), *, queries: bool = False
    ) -> None:
        self.layout, self.kind, self.queries = layout, kind, queries
        self._ranks = set(ranks)
        self._needed: dict[int, Rows] = {}  # tokens, by document, of those that were asked for

    def add(self, rank: int) -> None:
        """Count what `rank` needs, too."""
        self._ranks.add(rank)
        for s in self.layout.of_rank(rank):
            if (had := self._needed.get(s.document)) is not None:
                needed = sees(self, s)
                if not any(low <= needed[0] and needed[1] <= high for low, high in had):
                    self._needed[s.document] = union((*had, needed))

    def of(self, owner: int) -> Rows:
        """The rows of `owner` that some rank of the set needs."""
        found = []
        for s in self.layout.of_rank(owner):
            for tokens in self._tokens(s.document):
                if both := intersect(tokens, (s.start, s.stop)):
                    found.append((both[0] - s.start + s.row, both[1] - s.start + s.row))
        return union(found)

    def elsewhere(self) -> int:
        """How many rows of ranks outside the set it needs."""
        documents = {s.document for rank in self._ranks for s in self.layout.of_rank(rank)}
        return sum(
            length((max(start, s.start), min(stop, s.stop)))
            for document in documents
            for start, stop in self._tokens(document)
            for s in self.layout.by_document[document]
            if s.rank not in self._ranks
        )

    def _tokens(self, document: int) -> Rows:
        """The tokens of a document that the set needs."""
        if document not in self._needed:
            held = self.layout.by_document[document]
            self._needed[document] = union(sees(self, s) for s in held if s.rank in self._ranks)
        return self._needed[document]


def sees(demand: Demand, segment: Placed) -> Range:
    """The keys that the queries of a segment see, or the queries that see its keys."""
    size = int(demand.layout.lengths[segment.document])
    if not demand.queries:
        return demand.kind.keys_seen((segment.start, segment.stop), length=size)
    mirrored = size - segment.stop, size - segment.start
    low, high = demand.kind.keys_seen(mirrored, length=size)
    return size - high, size - low  # reversed in time, a causal mask looks the other way
