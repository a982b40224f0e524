"""A layout and nested domains -> which rows of a rank travel to whom, hop by hop.

Layer: planning. In a *unit* every rank sends a piece of its rows to the rank `offset` domains further
on at one level. Who receives rows passes them on at each deeper level, to the ranks that differ
from it there alone, so the rows of a domain reach those of another once and spread inside it. Only
rows travel that some rank of the domain at the other end needs.
"""

from typing import NamedTuple

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import Ranges, common, split
from ..layouts.layout import Layout
from ..layouts.levels import Levels
from .remote_rows import RowPlacement
from .visibility import NeededRows, visibility

Transfer = tuple[int, int, Ranges]  # a peer, the owner of the rows that travel, and these


class Unit(NamedTuple):
    """Piece `piece` of rows that cross `level` by `offset` domains."""

    level: int
    offset: int
    piece: int


class Hop(NamedTuple):
    """One exchange of a unit: over the link of `level`, once hop `after` has come (-1: at once)."""

    level: int
    after: int
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]


class HierarchicalUnits:
    """What one rank sends and receives.

    Args:
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): What a row sees.
        levels (`Levels`): The nested domains.
        rank (`int`): The rank.
        pieces (`int`): Parts of the rows that cross a level, at least: as many as ranks share them
            behind it, so that what is under way does not grow with those. Inside the innermost
            level rows go whole.
        queries (`bool`): Queries travel to keys that they see, not keys to queries.
    """

    def __init__(
        self,
        layout: Layout,
        kind: LayerKind,
        levels: Levels,
        *,
        rank: int,
        pieces: int,
        queries: bool = False,
    ) -> None:
        self.layout, self.levels, self.rank, self.pieces = layout, levels, rank, pieces
        self.innermost = len(levels.sizes) - 1
        self._sight = visibility(layout, kind, queries=queries)
        self._onlookers = self._sight.viewers_of(rank)
        self._demands: dict[range, NeededRows] = {}
        self._pieces: dict[tuple[int, range], tuple[Ranges, ...]] = {}
        self._needed: dict[tuple[int, range], Ranges] = {}
        self._hops: dict[Unit, tuple[list[Hop], RowPlacement]] = {}
        self._linked = [self._links(level) for level in range(self.innermost + 1)]

    def units(self, level: int) -> list[Unit]:
        """The units that cross a level, in order."""
        pieces, offsets = range(self._count(level)), range(1, self.levels.sizes[level])
        return [Unit(level, offset, piece) for offset in offsets for piece in pieces]

    def _count(self, level: int) -> int:
        return max(self.pieces, self.levels.below(level)) if level < self.innermost else 1

    def order(self, *, backward: bool) -> list[Unit]:
        """All units as they are worked on: those of each level spread evenly over the time.

        In forward the last is a foreign one. In backward local ones follow it, during which its
        gradient travels home.
        """
        placed = []
        for level in range(self.innermost + 1):
            units = self.units(level)
            local = level == self.innermost
            for i, unit in enumerate(units):
                if backward:
                    at = i / max(len(units) - 1, 1) if local else (i + 1) / (len(units) + 1)
                else:
                    at = (i + 1) / (len(units) + local)
                placed.append((at, -level, unit))
        return [unit for _, _, unit in sorted(placed)]

    def _links(self, level: int) -> tuple[frozenset[int], frozenset[int]]:
        """The domains behind a level that need rows of this rank, and whose rows its own needs."""
        size = self.levels.below(level)
        owners = self._demand(self._domain(self.rank, level)).owners
        needing, needed = (np.unique(ranks // size) for ranks in (self._onlookers, owners))
        return frozenset(needing.tolist()), frozenset(needed.tolist())

    def moves(self, unit: Unit) -> bool:
        """Whether rows of this rank, or those that its domain needs, may be in a unit."""
        size = self.levels.below(unit.level)
        target, source = (rank // size for rank in self._ends(unit))
        needing, needed = self._linked[unit.level]
        return target in needing or source in needed

    def _ends(self, unit: Unit) -> tuple[int, int]:
        """To whom this rank sends in a unit, and from whom it receives."""
        step, size = self.levels.below(unit.level), self.levels.sizes[unit.level]
        mine = self.rank // step % size
        first = self.rank - mine * step
        target, source = ((mine + by) % size for by in (unit.offset, -unit.offset))
        return first + target * step, first + source * step

    def hops(self, unit: Unit) -> tuple[list[Hop], RowPlacement]:
        """The exchanges of a unit, and how the rows that they bring stand here."""
        if unit not in self._hops:
            hops = self._made(unit)
            parts = [(owner, rows) for hop in hops for _, owner, rows in hop.recvs]
            self._hops[unit] = hops, RowPlacement(self.layout, parts)
        return self._hops[unit]

    def _made(self, unit: Unit) -> list[Hop]:
        """The crossing, then what is passed on inside."""
        level, rank = unit.level, self.rank
        target, source = self._ends(unit)
        sent, came = (self._rows(a, b, unit, level) for a, b in ((rank, target), (source, rank)))
        hops = [Hop(level, -1, ((target, rank, sent),), ((source, source, came),))]
        at = 0
        while at < len(hops):
            inner = range(hops[at].level + 1, self.innermost + 1)
            hops += [self._relay(unit, at, hops[at], deeper) for deeper in inner]
            at += 1
        return hops

    def _relay(self, unit: Unit, at: int, upon: Hop, level: int) -> Hop:
        """What came with a hop goes to the peers at a deeper level, and theirs comes here."""
        sends: list[Transfer] = []
        recvs: list[Transfer] = []
        for peer in self.levels.peers(self.rank, level):
            if peer != self.rank:
                for _, owner, _ in upon.recvs:
                    theirs = owner + peer - self.rank  # it has our place there, at this level too
                    sends.append((peer, owner, self._rows(owner, peer, unit, level)))
                    recvs.append((peer, theirs, self._rows(theirs, self.rank, unit, level)))
        return Hop(level, at, tuple(sends), tuple(recvs))

    def needed(self, owner: int) -> Ranges:
        """The rows of `owner` that this rank itself needs."""
        return self._need(owner, range(self.rank, self.rank + 1))

    def _rows(self, owner: int, receiver: int, unit: Unit, level: int) -> Ranges:
        """The rows of a piece that the receiver's domain below `level` needs."""
        domain = self._domain(receiver, unit.level)
        if (owner, domain) not in self._pieces:
            rows = self._need(owner, domain)
            self._pieces[owner, domain] = split(rows, self._count(unit.level))
        piece = self._pieces[owner, domain][unit.piece]
        if level == unit.level or not piece:
            return piece
        return common(piece, self._need(owner, self._domain(receiver, level)))

    def _domain(self, rank: int, level: int) -> range:
        size = self.levels.below(level)
        return range(rank // size * size, (rank // size + 1) * size)

    def _need(self, owner: int, domain: range) -> Ranges:
        if (owner, domain) not in self._needed:
            self._needed[owner, domain] = self._demand(domain).of(owner)
        return self._needed[owner, domain]

    def _demand(self, domain: range) -> NeededRows:
        if domain not in self._demands:
            self._demands[domain] = NeededRows(self._sight, domain)
        return self._demands[domain]


def queries_are_lighter(layout: Layout, kind: LayerKind, *, levels: Levels) -> bool:
    """Whether a backward crosses the outermost level with fewer bytes if queries travel.

    Counted with two bytes an element and gradients in float32. Keys go with values, and the
    gradients of both come back; queries go with their output gradient and two numbers a head
    (float32), and theirs comes back.
    """
    head = kind.key_value_width / (2 * kind.kv_heads)
    key, query = 6 * kind.key_value_width, 8 * kind.query_width + 8 * kind.query_width / head
    if levels.sizes[0] == 1 or query >= 2 * key:  # nearly as many rows travel either way
        return False
    of_keys, of_queries = (_crossing(layout, kind, levels, queries=q) for q in (False, True))
    return of_queries * query < of_keys * key


def _crossing(layout: Layout, kind: LayerKind, levels: Levels, *, queries: bool) -> int:
    """Rows that cross the outermost level, of all ranks."""
    size = levels.below(0)
    domains = (range(first, first + size) for first in range(0, layout.ranks, size))
    seen = visibility(layout, kind, queries=queries)
    return sum(NeededRows(seen, domain).rows for domain in domains)
