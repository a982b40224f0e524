"""A mask and ranks -> which rows of other ranks they need.

Floor: plan. Rows of a rank are named by their owner and its row numbers, whatever array holds them.
"""

from collections.abc import Iterable

from ..intervals import Range, intersect, length, union
from .cost import LayerKind
from .layout import Layout

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
        self._tokens: dict[int, Rows] = {}  # by document
        for rank in ranks:
            self.add(rank)

    def add(self, rank: int) -> None:
        """Count what `rank` needs, too."""
        for s in self.layout.of_rank(rank):
            needed = sees(self, (s.start, s.stop), document=s.document)
            self._tokens[s.document] = union((*self._tokens.get(s.document, ()), needed))

    def of(self, owner: int) -> Rows:
        """The rows of `owner` that some rank of the set needs."""
        found = []
        for s in self.layout.of_rank(owner):
            for tokens in self._tokens.get(s.document, ()):
                if both := intersect(tokens, (s.start, s.stop)):
                    found.append((both[0] - s.start + s.row, both[1] - s.start + s.row))
        return union(found)


def sees(demand: Demand, tokens: Range, *, document: int) -> Range:
    """The keys that these queries of a document see, or the queries that see these keys."""
    size = int(demand.layout.lengths[document])
    if not demand.queries:
        return demand.kind.keys_seen(tokens, length=size)
    low, high = demand.kind.keys_seen((size - tokens[1], size - tokens[0]), length=size)
    return size - high, size - low  # reversed in time, a causal mask looks the other way
