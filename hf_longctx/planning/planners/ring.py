"""Pieces of numbered chunks -> where some of them stand, each chunk's in an array of its own.

Layer: planning. Many chunks pass a rank of a ring: these are tables over all of them at once.

A layout -> ring attention: keys and values travel once around, queries stay. Source: arXiv 2310.01889. In hop h rank r works on the chunk of rank r - h while the
next one travels; a receive is posted one hop ahead. Of a chunk only those rows travel on that some
later rank of the way sees. In backward a chunk's gradient travels one hop behind it, and goes home
from the last rank that adds to it, which half of the home's own work hides. However many ranks
there are, one holds three visiting chunks of keys and values (worked on, coming, expected), and in
backward three of gradients and what has come home of its own. Letters: R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import touching
from ..layouts.layout import Layout, Placed
from ..program.operations import Block, BlockColumns, Fold, Message, Op, Wait
from ..program.program import Program
from .remote_rows import DKV, DQ, GRAD, KV, Q, RemoteRows, Run, post
from .visibility import Visibility


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPieces:
    """Rows of chunks, one int64 entry a piece in each array, by chunk and row.

    Args:
        chunk (`np.ndarray`): Its number, from 0 to below `chunks`.
        rank, segment (`np.ndarray`): Its owner, and a number of the segment that it is part of.
        start, stop (`np.ndarray`): The owner's rows.
        document, token (`np.ndarray`): What the first row holds.
        chunks (`int`): How many numbers there are.
    """

    chunk: np.ndarray
    rank: np.ndarray
    segment: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    document: np.ndarray
    token: np.ndarray
    chunks: int

    def runs(self, chosen: np.ndarray, *, cut: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """First and last piece of each run of chosen pieces that touch; `cut`: of one segment."""
        at = np.flatnonzero(chosen)
        same = (self.chunk, self.segment) if cut else (self.chunk,)
        first, last = touching(self.start[at], self.stop[at], *(column[at] for column in same))
        return at[first], at[last]

    def at_home(self, chosen: np.ndarray) -> "ChunkBlocks":
        """Where chosen pieces stand at their owner."""
        first, last = self.runs(chosen)
        return ChunkBlocks(self.start[first], self.stop[last], self.by_chunk(first))

    def by_chunk(self, first: np.ndarray) -> list[int]:
        """Where those of each chunk begin among runs, and the end."""
        bounds: list[int] = np.searchsorted(self.chunk[first], np.arange(self.chunks + 1)).tolist()
        return bounds


class ChunkPlacement:
    """Some of the pieces, those of each chunk end to end.

    Args:
        pieces (`ChunkPieces`): All of them.
        held (`np.ndarray`): bool, which stand here.
    """

    def __init__(self, pieces: ChunkPieces, held: np.ndarray) -> None:
        self.pieces, self.held = pieces, held
        size = np.where(held, pieces.stop - pieces.start, 0)
        before = np.append(0, np.cumsum(size))
        begins = np.searchsorted(pieces.chunk, np.arange(pieces.chunks + 1))
        self.rows: list[int] = np.diff(before[begins]).tolist()
        self.low = before[:-1] - before[begins[pieces.chunk]]
        self.high = self.low + size

    @cached_property
    def _segments(self) -> tuple[np.ndarray, list[int]]:
        pieces = self.pieces
        first, last = pieces.runs(self.held, cut=True)
        token = pieces.token[first]
        stop = token + pieces.stop[last] - pieces.start[first]
        columns = np.stack([self.low[first], pieces.document[first], token, stop], axis=1)
        return columns, pieces.by_chunk(first)

    def segments(self, chunk: int) -> np.ndarray:
        """int64 `[runs, 4]`: what a chunk's array holds, the fields of `Held` but the array."""
        columns, bounds = self._segments
        return columns[bounds[chunk] : bounds[chunk + 1]]

    def blocks(self, chosen: np.ndarray) -> "ChunkBlocks":
        """Where chosen pieces, all of which stand here, do so."""
        first, last = self.pieces.runs(chosen)
        return ChunkBlocks(self.low[first], self.high[last], self.pieces.by_chunk(first))


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Rows `[low, high)` of arrays, by chunk."""

    low: np.ndarray
    high: np.ndarray
    bounds: list[int]

    def of(self, chunk: int, array: int) -> BlockColumns:
        """Those of a chunk, which stands in `array`."""
        of_chunk = slice(self.bounds[chunk], self.bounds[chunk + 1])
        return BlockColumns(array, self.low[of_chunk], self.high[of_chunk])


def program(layout: Layout, *, rank: int, kind: LayerKind) -> Program:
    """The program of one rank, one phase in each direction."""
    return _Ring(layout, rank, kind).build()


class _Passing:
    """Which rows pass a rank, by hop, and which of its own gradients come home.

    A chunk on its way has hop h here, and comes next to the rank where it has hop h + 1. So of the
    ranks that see a row those with a smaller hop had it before, and those with a larger one have it
    later, as this rank itself, whose own hop is 0.
    """

    def __init__(self, sight: Visibility, *, rank: int, ranks: int) -> None:
        hops = (rank - sight.rank) % ranks
        order = np.argsort(hops, kind="stable")
        viewers = (rank - sight.viewers) % ranks
        others = np.where(viewers, viewers, ranks)
        hop = hops[order]
        first, last = (sight.over(f, viewers)[order] for f in (np.minimum, np.maximum))
        before, here = (sight.over(f, others)[order] for f in (np.minimum, np.maximum))
        self.leaving = last > hop
        self.seen = (hop > 0) & (first == 0)
        visiting = (hop > 0) & (here > hop)
        graded = visiting & (first < hop)
        self.coming = visiting & (before < hop)
        self.on, self.whole = graded & self.leaving, graded & ~self.leaving
        names = ("rank", "segment", "start", "stop", "document", "token")
        columns = {name: getattr(sight, name)[order] for name in names}
        self.pieces = ChunkPieces(chunk=hop, chunks=ranks, **columns)
        self.visiting, self.graded = (ChunkPlacement(self.pieces, of) for of in (visiting, graded))
        self.came = ChunkPlacement(self.pieces, self.coming)
        # The last rank that sees an own row sends its gradient home.
        mine = np.flatnonzero((hop == 0) & (before < ranks))
        mine = mine[np.argsort(ranks - before[mine], kind="stable")]
        own = {name: column[mine] for name, column in columns.items()}
        returned = ChunkPieces(chunk=ranks - before[mine], chunks=ranks, **own)
        self.home = ChunkPlacement(returned, np.ones(len(mine), bool))

    def runs(self) -> tuple[list[tuple[Placed, int, int]], list[int]]:
        """What this rank sees, by segment: tokens, and the rows where they stand, of keys and of
        gradients; and where those of each hop begin."""
        pieces = self.pieces
        first, last = pieces.runs(self.seen, cut=True)
        rank, row, document, token, key, grad = (
            column[first].tolist()
            for column in (pieces.rank, pieces.start, pieces.document, pieces.token,
                           self.visiting.low, self.graded.low)
        )  # fmt: skip
        size = (pieces.stop[last] - pieces.start[first]).tolist()
        found = [
            (Placed(rank[i], row[i], document[i], token[i], token[i] + size[i]), key[i], grad[i])
            for i in range(len(size))
        ]
        return found, pieces.by_chunk(first)


class _Ring:
    def __init__(self, layout: Layout, rank: int, kind: LayerKind) -> None:
        self.rank, self.ranks = rank, layout.ranks
        self.visits = RemoteRows(layout, rank=rank, kind=kind)
        self.after = (rank + 1) % self.ranks
        self.before = (rank - 1) % self.ranks
        self.hops = range(1, self.ranks)
        passing = _Passing(self.visits.sight, rank=rank, ranks=self.ranks)
        self.passing, self.runs = passing, passing.runs()
        self.kv = {0: KV} | self._arrays("kv", passing.visiting)
        stands = passing.visiting
        self.visiting, self.leaving = map(stands.blocks, (stands.held, passing.leaving))
        self.own_leaving = passing.pieces.at_home(passing.leaving)

    def _arrays(self, kind: str, stands: ChunkPlacement) -> dict[int, int]:
        """By hop, an array for its chunk, if rows of it stand there."""
        held = (hop for hop in self.hops if stands.rows[hop])
        return {h: self.visits.place(kind, stands.rows[h], stands.segments(h)) for h in held}

    def _keys(self, hop: int, *arrays: int) -> list[Run]:
        """What this rank sees of a chunk, with its block in the array of keys, and of gradients."""
        runs, bounds = self.runs
        found: list[Run] = []
        for s, *rows in runs[bounds[hop] : bounds[hop + 1]]:
            blocks = (
                Block(a, low, low + s.stop - s.start) for a, low in zip(arrays, rows, strict=False)
            )
            found.append((s, tuple(blocks)))
        return found

    def _post(
        self, tags: dict[int, int], hop: int, sends: list[Message], recvs: list[Message]
    ) -> list[Op]:
        """An exchange, whose tag is kept by hop, if it moves anything."""
        exchange = post(self.visits.tag(), sends, recvs, channel=0)
        if not exchange.sends and not exchange.recvs:
            return []
        tags[hop] = exchange.tag
        return [exchange]

    def _shift(self, hop: int) -> list[Op]:
        """Send the chunk of a hop on, and take the one after the next; hop -1 only takes."""
        sends: list[Message] = []
        recvs: list[Message] = []
        if hop in self.kv:
            leaving = self.leaving if hop else self.own_leaving
            sends.append((self.after, leaving.of(hop, self.kv[hop])))
        if (taken := hop + 2) in self.kv:
            recvs.append((self.before, self.visiting.of(taken, self.kv[taken])))
        return self._post(self.taken, taken, sends, recvs)

    @staticmethod
    def _wait(tags: dict[int, int], hop: int) -> list[Op]:
        return [Wait(tags[hop])] if hop in tags else []

    def _forward(self) -> Iterator[Op]:
        self.taken: dict[int, int] = {}  # by hop: the tag under which its chunk comes
        yield from self._shift(-1)
        for hop in range(self.ranks):
            if hop + 1 < self.ranks:
                yield from self._shift(hop)
            if hop in self.kv:
                keys = self._keys(hop, self.kv[hop]) if hop else self.visits.own(KV)
                yield from self.visits.attend(keys, first=not hop)
            yield from self._wait(self.taken, hop + 1)

    def _backward(self) -> Iterator[Op]:
        passing, visits = self.passing, self.visits
        self.taken = {}
        self.sent: dict[int, int] = {}  # by hop: the tag under which the chunk's gradient goes
        first, second = visits.own_halves()
        self.dkv = self._arrays("dkv", passing.graded)
        self.arrived = self._arrays("dkv", passing.came)
        self.homes = self._arrays("dkv", passing.home)
        graded, came, home = passing.graded, passing.came, passing.home
        self.on, self.whole = map(graded.blocks, (passing.on, passing.whole))
        self.coming, self.returned = (stands.blocks(stands.held) for stands in (came, home))
        added, own = graded.blocks(came.held), home.pieces.at_home(home.held)
        queries = visits.own(Q, GRAD, DQ)
        yield from (*self._shift(-1), *self._shift(0), *self._return(0), *first)
        yield from self._wait(self.taken, 1)
        for hop in self.hops:
            if hop + 1 < self.ranks:
                yield from self._shift(hop)
            if hop in self.dkv:
                keys = self._keys(hop, self.kv[hop], self.dkv[hop])
                yield from visits.attend_grad(queries, keys)
            yield from self._wait(self.sent, hop - 2)
            if hop in self.arrived:
                parts = self.coming.of(hop, self.arrived[hop])
                yield from _added(added.of(hop, self.dkv[hop]), parts)
            yield from (*self._return(hop), *self._wait(self.taken, hop + 1))
        yield from second
        for hop in range(max(self.ranks - 2, 0), self.ranks):
            yield from self._wait(self.sent, hop)
        for hop, array in self.homes.items():
            yield from _added(own.of(hop, DKV), self.returned.of(hop, array))

    def _return(self, hop: int) -> list[Op]:
        """Send a chunk's gradient on, and home what is whole; take that of the hop after the
        next, and the own rows that are whole at the same hop elsewhere."""
        sends: list[Message] = []
        recvs: list[Message] = []
        if hop in self.dkv:
            array, owner = self.dkv[hop], (self.rank - hop) % self.ranks
            sends.append((self.after, self.on.of(hop, array)))
            sends.append((owner, self.whole.of(hop, array)))
        if hop in self.homes:
            home = self.returned.of(hop, self.homes[hop])
            recvs.append(((self.rank + hop) % self.ranks, home))
        if (taken := hop + 2) in self.arrived:
            recvs.append((self.before, self.coming.of(taken, self.arrived[taken])))
        return self._post(self.sent, hop, sends, recvs)

    def build(self) -> Program:
        """One phase in each direction."""
        return self.visits.program(self._forward(), self._backward())


def _added(into: BlockColumns, parts: BlockColumns) -> Iterator[Op]:
    """Add rows to others."""
    columns = (x.tolist() for x in (into.starts, into.stops, parts.starts, parts.stops))
    rows = zip(*columns, strict=True)
    for low, high, start, stop in rows:
        yield Fold(Block(into.array, low, high), (Block(parts.array, start, stop),), "sum")
