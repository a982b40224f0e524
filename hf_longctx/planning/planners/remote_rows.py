"""Visiting rows -> where they stand in a rank's arrays, and the tasks that they take part in.

Layer: planning. `ring` and `charm` bring keys and values to queries that stay (or, in backward, queries
to keys). What an operation names is a block: rows of an array.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter, itemgetter

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import Range, Ranges, intersect, split
from ..layouts.layout import Layout, Placed
from ..program.operations import Attend, AttendGrad, Block, Fold, Message, Op, Post
from ..program.program import HOME, Program
from .visibility import NeededRows, visibility

Part = tuple[int, Ranges]  # an owner and rows of it
Run = tuple[Placed, tuple[Block, ...]]  # tokens of one segment, and their block in each array
Q, KV, OUT, GRAD, DQ, DKV = range(len(HOME))


class RowPlacement:
    """Rows of owners, end to end in the rows of an array.

    Args:
        layout (`Layout`): Where the tokens lie.
        parts (`Iterable[Part]`): Owners, each once, with their rows.
    """

    def __init__(self, layout: Layout, parts: Iterable[Part]) -> None:
        self.layout, self.rows = layout, 0
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}  # rows, and where the first stands
        for owner, rows in parts:
            for start, stop in rows:
                self._ranges.setdefault(owner, []).append((start, stop, self.rows))
                self.rows += stop - start

    @property
    def parts(self) -> Iterator[Part]:
        """Owners and rows, in the order of the array."""
        for owner, ranges in self._ranges.items():
            yield owner, tuple((start, stop) for start, stop, _ in ranges)

    def blocks(self, array: int, owner: int, rows: Ranges) -> tuple[Block, ...]:
        """Where rows of an owner, all held here, stand in `array`."""
        found = []
        for start, stop in rows:
            ranges = self._ranges[owner]
            after = bisect_right(ranges, start, key=itemgetter(0)) if len(ranges) > 1 else 1
            first, last, at = ranges[after - 1]
            assert first <= start < stop <= last, (owner, rows, ranges)
            found.append(Block(array, at + start - first, at + stop - first))
        return tuple(found)

    @cached_property
    def segments(self) -> np.ndarray:
        """int64 `[runs, 4]`: what the rows hold, the fields of `Held` but the array."""
        held = [
            (at + s.row - start, *s[2:])
            for owner, ranges in self._ranges.items()
            for start, stop, at in ranges
            for s in segments(self.layout, owner, ((start, stop),))
        ]
        return np.asarray(held, np.int64).reshape(len(held), 4)

    def runs(self, arrays: Sequence[int], owner: int, rows: Ranges) -> Iterator[Run]:
        """The rows of an owner by segment, each with its block in every array that stands so."""
        for s in segments(self.layout, owner, rows):
            (block,) = self.blocks(0, owner, ((s.row, s.row + s.stop - s.start),))
            yield s, tuple(Block(a, block.start, block.stop) for a in arrays)


def segments(layout: Layout, owner: int, rows: Ranges) -> Iterator[Placed]:
    """The rows of an owner as runs of tokens of one document."""
    held = layout.of_rank(owner)
    for start, stop in rows:
        at = bisect_right(held, start, key=attrgetter("row")) - 1
        while at < len(held) and held[at].row < stop:
            s = held[at]
            low, high = max(start, s.row), min(stop, s.row + s.stop - s.start)
            yield Placed(owner, low, s.document, low - s.row + s.start, high - s.row + s.start)
            at += 1


def _part(run: Run, tokens: Range) -> Run:
    """The rows of a run that hold these tokens of its segment."""
    s, blocks = run
    after, before = tokens[0] - s.start, s.stop - tokens[1]
    if not after and not before:
        return run
    part = Placed(s.rank, s.row + after, s.document, *tokens)
    return part, tuple(Block(b.array, b.start + after, b.stop - before) for b in blocks)


class RemoteRows:
    """One rank's arrays and operations as a planner makes them, with the rank's own rows in place.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): What a row sees.
    """

    def __init__(self, layout: Layout, *, rank: int, kind: LayerKind) -> None:
        self.layout, self.rank, self.kind = layout, rank, kind
        self.arrays: list[tuple[str, int]] = []
        self._held: list[np.ndarray] = []
        self.own_rows: Ranges = ((0, layout.rows(rank)),) if layout.rows(rank) else ()
        self.home = RowPlacement(layout, [(rank, self.own_rows)])
        for name in HOME:
            self.array(name, self.home)
        self.total = self.array("part", self.home)
        self._tags = 0
        self._runs: dict[tuple[int, ...], list[Run]] = {}
        self.sight = visibility(layout, kind)
        self._own = NeededRows(self.sight, range(rank, rank + 1))

    def array(self, kind: str, stand: RowPlacement) -> int:
        """A new array whose rows stand like this."""
        return self.place(kind, stand.rows, stand.segments)

    def place(self, kind: str, rows: int, segments: np.ndarray) -> int:
        """A new array of so many rows; what they hold as `[runs, 4]`, the fields of `Held` but the
        array."""
        array = len(self.arrays)
        self.arrays.append((kind, rows))
        held = np.empty((len(segments), 5), np.int64)
        held[:, 0], held[:, 1:] = array, segments
        self._held.append(held)
        return array

    def tag(self) -> int:
        """The number of a new exchange."""
        self._tags += 1
        return self._tags - 1

    def needs(self, owner: int) -> Ranges:
        """The keys of `owner` that this rank sees."""
        return self._own.of(owner)

    def own(self, *arrays: int) -> list[Run]:
        """The rank's own segments, each with its block in these arrays of its own."""
        if arrays not in self._runs:
            self._runs[arrays] = list(self.home.runs(arrays, self.rank, self.own_rows))
        return self._runs[arrays]

    def pairs(self, queries: Iterable[Run], keys: Iterable[Run]) -> list[tuple[Run, Run]]:
        """(queries, keys) of one document: those keys that some of the queries sees, joined where
        they stand side by side and one task can take them."""
        by_document: dict[int, list[Run]] = {}
        for run in keys:
            by_document.setdefault(run[0].document, []).append(run)
        found = []
        for query in queries if by_document else ():
            s = query[0]
            near = by_document.get(s.document)
            if not near:
                continue
            size = int(self.layout.lengths[s.document])
            seen = self.kind.keys_seen((s.start, s.stop), length=size)
            parts = ((k, intersect((k[0].start, k[0].stop), seen)) for k in near)
            runs = (_part(k, both) for k, both in parts if both)
            found += [(query, run) for run in self.joined(s, runs)]
        return found

    def joined(self, query: Placed, keys: Iterable[Run]) -> list[Run]:
        """Key runs, neighbours as one where a task that takes them for tokens in a row, up to those
        of the last, shows each query the same (see `Program.task`)."""
        found: list[Run] = []
        for run in keys:
            s, blocks = run
            if found and not self.kind.window:
                last, before = found[-1]
                touch = all(a.stop == b.start for a, b in zip(before, blocks, strict=True))
                rows = before[0].stop - before[0].start
                seen = not self.kind.causal or max(last.stop - 1, s.start) <= query.start
                if touch and seen and rows <= s.start:
                    ends = zip(before, blocks, strict=True)
                    whole = tuple(a._replace(stop=b.stop) for a, b in ends)
                    found[-1] = s._replace(start=s.start - rows), whole
                    continue
            found.append(run)
        return found

    def attend(self, keys: Iterable[Run], *, first: bool = False) -> list[Op]:
        """Attend to key runs, one partial per pair of runs, and merge these into the total.

        The `first` to come are the rank's own keys, which each own row sees: their first partial is
        the total itself. Partials of different segments share an array: their tasks fuse.
        """
        rounds: list[list[tuple[Run, Run]]] = []
        met: Counter[Placed] = Counter()
        for pair in self.pairs(self.own(Q), keys):
            mine = pair[0][0]
            if met[mine] == len(rounds):
                rounds.append([])
            rounds[met[mine]].append(pair)
            met[mine] += 1
        ops: list[Op] = []
        for number, tasks in enumerate(rounds):
            queries = [q for q, _ in tasks]
            direct = first and number == 0
            partials = self._totals(queries) if direct else self._partials(queries)
            ops += [
                Attend(q, kv, into)
                for ((_, (q,)), (_, (kv,))), into in zip(tasks, partials, strict=True)
            ]
            if not direct:
                ops += self._merged(self._totals(queries), partials)
        return ops

    def _totals(self, queries: Iterable[Run]) -> list[Block]:
        """The rows of the total that own queries have."""
        return [Block(self.total, q.start, q.stop) for _, (q,) in queries]

    def _partials(self, queries: Sequence[Run]) -> list[Block]:
        """A new array of these rows alone."""
        stops = list(accumulate(s.stop - s.start for s, _ in queries))
        starts = [0, *stops[:-1]]
        held = [(at, *s[2:]) for at, (s, _) in zip(starts, queries, strict=True)]
        part = self.place("part", stops[-1], np.asarray(held, np.int64))
        return [Block(part, *rows) for rows in zip(starts, stops, strict=True)]

    def _merged(self, totals: Iterable[Block], partials: Iterable[Block]) -> list[Op]:
        """Merge partials into the total, those whose rows are neighbours in one go."""
        joined: list[tuple[Block, Block]] = []
        for total, part in zip(totals, partials, strict=True):
            if joined and joined[-1][0].stop == total.start:  # partials stand end to end
                before = joined.pop()
                total, part = (
                    total._replace(start=before[0].start),
                    part._replace(start=before[1].start),
                )
            joined.append((total, part))
        return [Fold(total, (total, part), "lse") for total, part in joined]

    def attend_grad(self, queries: Iterable[Run], keys: Iterable[Run]) -> list[AttendGrad]:
        """Gradients of runs of queries (in q, grad and dq) with runs of keys (in kv and dkv)."""
        return [
            AttendGrad(q, kv, grad, dq, dkv)
            for (_, (q, grad, dq)), (_, (kv, dkv)) in self.pairs(queries, keys)
        ]

    def own_halves(self) -> tuple[list[AttendGrad], list[AttendGrad]]:
        """Gradients of the own queries with the own keys, the earlier rows and the later."""
        alone = self.layout.ranks == 1  # nothing comes between
        first, second = (self.own_rows, ()) if alone else split(self.own_rows, 2)
        keys = self.own(KV, DKV)
        early, late = (
            self.attend_grad(self.home.runs((Q, GRAD, DQ), self.rank, rows), keys)
            for rows in (first, second)
        )
        return early, late

    def sum_into(self, array: int, stand: RowPlacement, part: int, came: RowPlacement) -> list[Op]:
        """Add the rows of `part`, which stand as `came`, to those of `array`."""
        ops: list[Op] = []
        for owner, rows in came.parts:
            into, parts = stand.blocks(array, owner, rows), came.blocks(part, owner, rows)
            ops += [Fold(a, (b,), "sum") for a, b in zip(into, parts, strict=True)]
        return ops

    def program(self, forward: Iterable[Op], backward: Iterable[Op]) -> Program:
        """One phase in each direction; forward's ends with the total as the output. Operations may
        make arrays as they are read."""
        everything = Block(OUT, 0, self.home.rows)
        merged = Fold(everything, (everything._replace(array=self.total),), "cat")
        return Program.build(
            arrays=self.arrays,
            held=self._held,
            forward=(chain(forward, (merged,)),),
            backward=(backward,),
        )


def post(
    tag: int,
    sends: Iterable[Message],
    recvs: Iterable[Message],
    *,
    channel: int,
    after: int = -1,
) -> Post:
    """An exchange with the blocks of each peer in one message, and without empty messages."""
    merged: list[tuple[Message, ...]] = []
    for messages in (sends, recvs):
        by_peer: dict[int, Sequence[Block]] = {}
        for peer, blocks in messages:
            if blocks:
                by_peer[peer] = (*by_peer[peer], *blocks) if peer in by_peer else blocks
        merged.append(tuple(by_peer.items()))
    return Post(tag, merged[0], merged[1], after if merged[0] else -1, channel)
