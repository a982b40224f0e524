"""Plan `ring`: keys and values travel once around all ranks, and queries stay.

Source: arXiv 2310.01889. In hop h, rank r works on the chunk of rank r - h while the next one
travels; a receive is posted one hop ahead. Of a chunk only those rows travel on that some later
rank of the way sees. In backward a chunk's gradient follows one hop behind it, and returns home
from the last rank that adds to it, which half of the owner's own work hides. However many ranks
there are, one holds three received chunks of keys and values (worked on, arriving, expected), and
in backward three of gradients and what has come back of its own. Layer: planning. Letters: R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import touching
from ..layouts.layout import Layout, PlacedSegment
from ..program.builder import BlockRun, post
from ..program.operations import Block, BlockColumns, Fold, Message, Op, Wait
from ..program.program import HomeArray, Program
from .remote_rows import RemoteRowsBuilder
from .visibility import Visibility, visibility


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPieces:
    """Pieces of numbered chunks: one int64 entry a piece in each column, by chunk and row.

    Many chunks pass a rank, so they are tables over all of them at once.

    Args:
        chunk (`np.ndarray`): Its number, from 0 to below `chunks`.
        rank, segment (`np.ndarray`): Its owner, and a number of the segment that it is part of.
        start, stop (`np.ndarray`): The owner's rows.
        document, token (`np.ndarray`): Document and position of the first row.
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
        """Return the first and last piece of each run of chosen pieces that touch.

        With `cut` a run ends where its segment does.
        """
        at = np.flatnonzero(chosen)
        same = (self.chunk, self.segment) if cut else (self.chunk,)
        first, last = touching(self.start[at], self.stop[at], *(column[at] for column in same))
        return at[first], at[last]

    def at_owner(self, chosen: np.ndarray) -> "ChunkBlocks":
        """Return the rows of chosen pieces in arrays of their owner's own rows."""
        first, last = self.runs(chosen)
        return ChunkBlocks(self.start[first], self.stop[last], self.by_chunk(first))

    def by_chunk(self, first: np.ndarray) -> list[int]:
        """Return where the runs of each chunk begin, and where the last ends."""
        bounds: list[int] = np.searchsorted(self.chunk[first], np.arange(self.chunks + 1)).tolist()
        return bounds


class ChunkPlacement:
    """Some of the pieces, those of each chunk end to end in an array of its own.

    Args:
        pieces (`ChunkPieces`): All of them.
        chosen (`np.ndarray`): bool: which are placed.
    """

    def __init__(self, pieces: ChunkPieces, chosen: np.ndarray) -> None:
        self.pieces, self.chosen = pieces, chosen
        size = np.where(chosen, pieces.stop - pieces.start, 0)
        before = np.append(0, np.cumsum(size))
        begins = np.searchsorted(pieces.chunk, np.arange(pieces.chunks + 1))
        self.rows: list[int] = np.diff(before[begins]).tolist()
        self.low = before[:-1] - before[begins[pieces.chunk]]
        self.high = self.low + size

    @cached_property
    def _held(self) -> tuple[np.ndarray, list[int]]:
        pieces = self.pieces
        first, last = pieces.runs(self.chosen, cut=True)
        token = pieces.token[first]
        stop = token + pieces.stop[last] - pieces.start[first]
        columns = np.stack([self.low[first], pieces.document[first], token, stop], axis=1)
        return columns, pieces.by_chunk(first)

    def held(self, chunk: int) -> np.ndarray:
        """Return int64 `[runs, 4]`: what a chunk's rows hold, the fields of `Held` after array."""
        columns, bounds = self._held
        return columns[bounds[chunk] : bounds[chunk + 1]]

    def blocks(self, chosen: np.ndarray) -> "ChunkBlocks":
        """Return the rows of chosen pieces, all of them placed."""
        first, last = self.pieces.runs(chosen)
        return ChunkBlocks(self.low[first], self.high[last], self.pieces.by_chunk(first))


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """Rows `[low, high)` of arrays, by chunk."""

    low: np.ndarray
    high: np.ndarray
    bounds: list[int]

    def of(self, chunk: int, array: int) -> BlockColumns:
        """Return those of a chunk, as blocks of its `array`."""
        of_chunk = slice(self.bounds[chunk], self.bounds[chunk + 1])
        return BlockColumns(array, self.low[of_chunk], self.high[of_chunk])


def program(layout: Layout, *, rank: int, kind: LayerKind) -> Program:
    """Return the program of one rank, one phase in each direction."""
    return _Ring(layout, rank, kind).build()


class _Passing:
    """Which rows pass a rank, by hop, and which of its own gradients return.

    A chunk on its way has hop h here, and comes next to the rank where it has hop h + 1. So of the
    ranks that see a row those with a smaller hop had it before, and those with a larger one have it
    later, as this rank itself, whose own hop is 0.
    """

    def __init__(self, seen: Visibility, *, rank: int, ranks: int) -> None:
        hops = (rank - seen.rank) % ranks
        order = np.argsort(hops, kind="stable")
        viewers = (rank - seen.viewers) % ranks
        others = np.where(viewers, viewers, ranks)
        hop = hops[order]
        first, last = (seen.over(f, viewers)[order] for f in (np.minimum, np.maximum))
        before, here = (seen.over(f, others)[order] for f in (np.minimum, np.maximum))
        self.leaving = last > hop
        self.seen = (hop > 0) & (first == 0)
        received = (hop > 0) & (here > hop)
        graded = received & (first < hop)  # an earlier rank or this one adds to the gradient
        self.coming = received & (before < hop)
        self.on, self.complete = graded & self.leaving, graded & ~self.leaving
        names = ("rank", "segment", "start", "stop", "document", "token")
        columns = {name: getattr(seen, name)[order] for name in names}
        self.pieces = ChunkPieces(chunk=hop, chunks=ranks, **columns)
        self.received, self.graded = (ChunkPlacement(self.pieces, of) for of in (received, graded))
        self.summands = ChunkPlacement(self.pieces, self.coming)
        # The last rank that sees an own row sends its gradient home.
        mine = np.flatnonzero((hop == 0) & (before < ranks))
        mine = mine[np.argsort(ranks - before[mine], kind="stable")]
        own = {name: column[mine] for name, column in columns.items()}
        returned = ChunkPieces(chunk=ranks - before[mine], chunks=ranks, **own)
        self.returned = ChunkPlacement(returned, np.ones(len(mine), bool))

    def runs(self) -> tuple[list[tuple[PlacedSegment, int, int]], list[int]]:
        """Return what this rank sees, by segment, and where the entries of each hop begin.

        An entry is the tokens, and the rows at which they begin in the arrays of keys and of
        gradients.
        """
        pieces = self.pieces
        first, last = pieces.runs(self.seen, cut=True)
        rank, row, document, token, key, grad = (
            column[first].tolist()
            for column in (pieces.rank, pieces.start, pieces.document, pieces.token,
                           self.received.low, self.graded.low)
        )  # fmt: skip
        size = (pieces.stop[last] - pieces.start[first]).tolist()
        found = [
            (PlacedSegment(rank[i], row[i], document[i], token[i], token[i] + n), key[i], grad[i])
            for i, n in enumerate(size)
        ]
        return found, pieces.by_chunk(first)


class _Ring:
    """Build one rank's program, hop by hop."""

    def __init__(self, layout: Layout, rank: int, kind: LayerKind) -> None:
        self.rank, self.ranks = rank, layout.ranks
        self.builder = RemoteRowsBuilder(layout, rank=rank, kind=kind)
        self.after = (rank + 1) % self.ranks
        self.before = (rank - 1) % self.ranks
        self.hops = range(1, self.ranks)
        passing = _Passing(visibility(layout, kind), rank=rank, ranks=self.ranks)
        self.passing, self.runs = passing, passing.runs()
        self.kv: dict[int, int] = {0: HomeArray.KV, **self._arrays("kv", passing.received)}
        placement = passing.received
        self.received, self.leaving = map(placement.blocks, (placement.chosen, passing.leaving))
        self.own_leaving = passing.pieces.at_owner(passing.leaving)
        # By hop: the exchange that brings its chunk, and the one that takes the gradient on.
        self.taken: dict[int, int] = {}
        self.sent: dict[int, int] = {}

    def _arrays(self, kind: str, placement: ChunkPlacement) -> dict[int, int]:
        """Add, by hop, an array for its chunk, where any rows are placed."""
        rows, held = placement.rows, placement.held
        return {h: self.builder.array(kind, rows[h], held(h)) for h in self.hops if rows[h]}

    def _keys(self, hop: int, *arrays: int) -> list[BlockRun]:
        """Return what this rank sees of a chunk, with its block in the arrays of keys and dkv."""
        runs, bounds = self.runs
        found: list[BlockRun] = []
        for s, *rows in runs[bounds[hop] : bounds[hop + 1]]:
            starts = zip(arrays, rows, strict=False)  # forward has no array of gradients
            found.append((s, tuple(Block(a, low, low + s.stop - s.start) for a, low in starts)))
        return found

    def _post(
        self, tags: dict[int, int], hop: int, sends: list[Message], recvs: list[Message]
    ) -> list[Op]:
        """Return an exchange, whose tag is kept by hop, if it moves anything."""
        exchange = post(self.builder.tag(), sends, recvs)
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
            recvs.append((self.before, self.received.of(taken, self.kv[taken])))
        return self._post(self.taken, taken, sends, recvs)

    @staticmethod
    def _wait(tags: dict[int, int], hop: int) -> list[Op]:
        return [Wait(tags[hop])] if hop in tags else []

    def _forward(self) -> Iterator[Op]:
        yield from self._shift(-1)
        for hop in range(self.ranks):
            if hop + 1 < self.ranks:
                yield from self._shift(hop)
            if hop in self.kv:
                keys = self._keys(hop, self.kv[hop]) if hop else self.builder.own(HomeArray.KV)
                yield from self.builder.attend(keys, first=not hop)
            yield from self._wait(self.taken, hop + 1)

    def _backward(self) -> Iterator[Op]:
        passing, builder = self.passing, self.builder
        self.taken = {}
        first, second = builder.own_halves()
        graded, summands, returned = passing.graded, passing.summands, passing.returned
        self.dkv = self._arrays("dkv", graded)
        self.arrived = self._arrays("dkv", summands)
        self.homes = self._arrays("dkv", returned)
        self.on, self.complete = map(graded.blocks, (passing.on, passing.complete))
        self.coming, self.returned = (p.blocks(p.chosen) for p in (summands, returned))
        added, own = graded.blocks(summands.chosen), returned.pieces.at_owner(returned.chosen)
        queries = builder.own(HomeArray.Q, HomeArray.GRAD, HomeArray.DQ)
        yield from (*self._shift(-1), *self._shift(0), *self._return(0), *first)
        yield from self._wait(self.taken, 1)
        for hop in self.hops:
            if hop + 1 < self.ranks:
                yield from self._shift(hop)
            if hop in self.dkv:
                keys = self._keys(hop, self.kv[hop], self.dkv[hop])
                yield from builder.attend_grad(queries, keys)
            yield from self._wait(self.sent, hop - 2)
            if hop in self.arrived:
                parts = self.coming.of(hop, self.arrived[hop])
                yield from _added(added.of(hop, self.dkv[hop]), parts)
            yield from (*self._return(hop), *self._wait(self.taken, hop + 1))
        yield from second  # hides how the last gradients travel home
        for hop in range(max(self.ranks - 2, 0), self.ranks):
            yield from self._wait(self.sent, hop)
        for hop, array in self.homes.items():
            yield from _added(own.of(hop, HomeArray.DKV), self.returned.of(hop, array))

    def _return(self, hop: int) -> list[Op]:
        """Send a chunk's gradient on, and home those rows of it that are complete.

        Take the gradient of the hop after the next, and the own rows that are complete at the same
        hop elsewhere.
        """
        sends: list[Message] = []
        recvs: list[Message] = []
        if hop in self.dkv:
            array, owner = self.dkv[hop], (self.rank - hop) % self.ranks
            sends.append((self.after, self.on.of(hop, array)))
            sends.append((owner, self.complete.of(hop, array)))
        if hop in self.homes:
            home = self.returned.of(hop, self.homes[hop])
            recvs.append(((self.rank + hop) % self.ranks, home))
        if (taken := hop + 2) in self.arrived:
            recvs.append((self.before, self.coming.of(taken, self.arrived[taken])))
        return self._post(self.sent, hop, sends, recvs)

    def build(self) -> Program:
        """Return the program of one phase in each direction."""
        return self.builder.program(self._forward(), self._backward())


def _added(into: BlockColumns, parts: BlockColumns) -> Iterator[Op]:
    """Yield sums of rows into others, block by block."""
    for block, part in zip(into, parts, strict=True):
        yield Fold(block, (part,), "sum")
