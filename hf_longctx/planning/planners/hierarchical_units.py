"""Find which rows of a rank travel to whom over nested domains, hop by hop.

In a *unit* every rank sends a piece of its rows to the rank `offset` domains further on at one
level. The receiver passes the rows on at each deeper level, to the ranks that differ from it there
alone. So the rows of a domain reach another domain once and spread inside it, and only rows that
some rank of the receiving domain needs travel at all. Layer: planning.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import Ranges, common, split
from ..layouts.layout import Layout
from ..layouts.levels import Levels
from ..program.builder import RowPlacement
from .visibility import NeededRows, visibility

Transfer = tuple[int, int, Ranges]  # a peer, the owner of the rows that travel, and these


class Unit(NamedTuple):
    """Piece `piece` of the rows that cross `level` by `offset` domains."""

    level: int
    offset: int
    piece: int


class Hop(NamedTuple):
    """One exchange of a unit: over links of `level`, once hop `after` has arrived (-1: at once)."""

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
            level rows are not cut.
        queries (`bool`, *optional*, defaults to `False`): Queries travel to keys that they see, not
            keys to queries.
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
        seen = visibility(layout, kind, queries=queries)
        # Caches of this object, not of the class: they go when the program is built.
        self._rows_for = cache(partial(NeededRows, seen))
        self._need = cache(lambda owner, domain: self._rows_for(domain).of(owner))
        self._pieces = cache(lambda owner, domain, parts: split(self._need(owner, domain), parts))
        self.hops = cache(self._hops)
        self._viewers = seen.viewers_of(rank)
        self._linked = [self._links(level) for level in range(self.innermost + 1)]

    def units(self, level: int) -> list[Unit]:
        """Return the units that cross a level, in order."""
        pieces, offsets = range(self._count(level)), range(1, self.levels.sizes[level])
        return [Unit(level, offset, piece) for offset in offsets for piece in pieces]

    def _count(self, level: int) -> int:
        return max(self.pieces, self.levels.below(level)) if level < self.innermost else 1

    def order(self, *, backward: bool) -> list[Unit]:
        """Return all units as they are worked on: those of each level spread evenly over the time.

        In forward the last unit comes from another domain. In backward local ones follow it, during
        which its gradient travels home.
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
        """Return the domains below a level that need rows of this rank, and those it needs."""
        size = self.levels.below(level)
        owners = self._rows_for(self._domain(self.rank, level)).owners
        needing, needed = (np.unique(ranks // size) for ranks in (self._viewers, owners))
        return frozenset(needing.tolist()), frozenset(needed.tolist())

    def moves(self, unit: Unit) -> bool:
        """Return whether rows that this rank sends or its domain needs may be in a unit."""
        size = self.levels.below(unit.level)
        target, source = (rank // size for rank in self._ends(unit))
        needing, needed = self._linked[unit.level]
        return target in needing or source in needed

    def _ends(self, unit: Unit) -> tuple[int, int]:
        """Return to whom this rank sends in a unit, and from whom it receives."""
        step, size = self.levels.below(unit.level), self.levels.sizes[unit.level]
        mine = self.rank // step % size
        first = self.rank - mine * step
        target, source = ((mine + by) % size for by in (unit.offset, -unit.offset))
        return first + target * step, first + source * step

    def _hops(self, unit: Unit) -> tuple[list[Hop], RowPlacement]:
        """Return the exchanges of a unit, and how the rows that they bring are placed here."""
        level, rank = unit.level, self.rank
        target, source = self._ends(unit)
        sent, came = (self._rows(a, b, unit, level) for a, b in ((rank, target), (source, rank)))
        hops = [Hop(level, -1, ((target, rank, sent),), ((source, source, came),))]
        at = 0
        while at < len(hops):  # every hop is passed on at each deeper level
            inner = range(hops[at].level + 1, self.innermost + 1)
            hops += [self._relay(unit, at, hops[at], deeper) for deeper in inner]
            at += 1
        owned = [(owner, rows) for hop in hops for _, owner, rows in hop.recvs]
        return hops, RowPlacement(self.layout, owned)

    def _relay(self, unit: Unit, at: int, upon: Hop, level: int) -> Hop:
        """Return the hop that passes on what hop `at` brought, and brings what peers pass on."""
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
        """Return the rows of `owner` that this rank itself needs."""
        needed: Ranges = self._need(owner, range(self.rank, self.rank + 1))
        return needed

    def _rows(self, owner: int, receiver: int, unit: Unit, level: int) -> Ranges:
        """Return the rows of a piece that the receiver's domain below `level` needs."""
        domain = self._domain(receiver, unit.level)
        piece: Ranges = self._pieces(owner, domain, self._count(unit.level))[unit.piece]
        if level == unit.level or not piece:
            return piece
        return common(piece, self._need(owner, self._domain(receiver, level)))

    def _domain(self, rank: int, level: int) -> range:
        size = self.levels.below(level)
        return range(rank // size * size, (rank // size + 1) * size)


def queries_are_lighter(layout: Layout, kind: LayerKind, *, levels: Levels) -> bool:
    """Return whether a backward crosses the outermost level with fewer bytes if queries travel.

    Counted with two bytes an element and gradients in float32. Keys travel with values, and the
    gradients of both return; queries travel with their output gradient and two numbers a head
    (float32), and theirs returns.
    """
    head = kind.key_value_width / (2 * kind.kv_heads)
    key, query = 6 * kind.key_value_width, 8 * kind.query_width + 8 * kind.query_width / head
    if levels.sizes[0] == 1 or query >= 2 * key:  # nearly as many rows travel either way
        return False
    of_keys, of_queries = (_crossing(layout, kind, levels, queries=q) for q in (False, True))
    return of_queries * query < of_keys * key


def _crossing(layout: Layout, kind: LayerKind, levels: Levels, *, queries: bool) -> int:
    """Count the rows that cross the outermost level, of all ranks."""
    size = levels.below(0)
    domains = (range(first, first + size) for first in range(0, layout.ranks, size))
    seen = visibility(layout, kind, queries=queries)
    return sum(NeededRows(seen, domain).rows for domain in domains)
