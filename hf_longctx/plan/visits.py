"""Who sees which rows of whom -> where visiting rows stand in a rank's arrays, and their tasks.

Floor: plan. `ring` and `charm` bring keys and values to queries that stay (or, in backward, queries
to keys). Rows of a rank are named by their owner and its row numbers, whatever array holds them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..intervals import Range, intersect, length, union
from .cost import LayerKind
from .layout import Layout, Placed
from .program import HOME, Attend, AttendGrad, Block, Fold, Held, Message, Op, Phases, Post, Program

Rows = tuple[Range, ...]  # sorted and disjoint
Part = tuple[int, Rows]  # an owner and rows of it
Parcel = tuple[int, int, Rows]  # a peer, the owner of the rows that travel, and these
Run = tuple[Placed, tuple[Block, ...]]  # tokens of one segment, and their block in each array
Q, KV, OUT, GRAD, DQ, DKV = range(len(HOME))


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


class Stand:
    """Rows of owners, end to end in the rows of an array.

    Args:
        layout (`Layout`): Where the tokens lie.
        parts (`Iterable[Part]`): Owners, each once, with their rows.
    """

    def __init__(self, layout: Layout, parts: Iterable[Part]) -> None:
        self.layout, self.rows = layout, 0
        self._starts: dict[int, list[tuple[Range, int]]] = {}
        for owner, rows in parts:
            for part in rows:
                self._starts.setdefault(owner, []).append((part, self.rows))
                self.rows += length(part)

    @property
    def parts(self) -> Iterator[Part]:
        """Owners and rows, in the order of the array."""
        return ((owner, tuple(r for r, _ in held)) for owner, held in self._starts.items())

    def blocks(self, array: int, owner: int, rows: Rows) -> tuple[Block, ...]:
        """Where rows of an owner, all held here, stand in `array`."""
        found, held = [], self._starts[owner] if rows else []
        for start, stop in rows:
            (first, last), at = held[bisect_right(held, start, key=lambda h: h[0][0]) - 1]
            assert first <= start < stop <= last, (owner, rows, held)
            found.append(Block(array, at + start - first, at + stop - first))
        return tuple(found)

    def held(self, array: int) -> Iterator[Held]:
        """What `array` holds if its rows stand like this."""
        for owner, rows in self.parts:
            for s in segments(self.layout, owner, rows):
                (block,) = self.blocks(array, owner, (_rows(s),))
                yield Held(array, block.start, *s[2:])

    def runs(self, arrays: Sequence[int], owner: int, rows: Rows) -> Iterator[Run]:
        """The rows of an owner by segment, each with its block in every array that stands so."""
        for s in segments(self.layout, owner, rows):
            yield s, tuple(b for a in arrays for b in self.blocks(a, owner, (_rows(s),)))


def segments(layout: Layout, owner: int, rows: Rows) -> Iterator[Placed]:
    """The rows of an owner as runs of tokens of one document."""
    held = layout.of_rank(owner)
    for start, stop in rows:
        at = bisect_right(held, start, key=lambda s: s.row) - 1
        while at < len(held) and held[at].row < stop:
            s = held[at]
            low, high = max(start, s.row), min(stop, s.row + s.stop - s.start)
            yield Placed(owner, low, s.document, low - s.row + s.start, high - s.row + s.start)
            at += 1


def _part(run: Run, tokens: Range) -> Run:
    """The rows of a run that hold these tokens of its segment."""
    s, blocks = run
    after, before = tokens[0] - s.start, s.stop - tokens[1]
    part = s._replace(row=s.row + after, start=tokens[0], stop=tokens[1])
    return part, tuple(b._replace(start=b.start + after, stop=b.stop - before) for b in blocks)


def _rows(segment: Placed) -> Range:
    return segment.row, segment.row + segment.stop - segment.start


class Visits:
    """One rank's arrays and operations as a planner makes them, with the rank's own rows in place.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): What a row sees.
    """

    def __init__(self, layout: Layout, *, rank: int, kind: LayerKind) -> None:
        self.layout, self.rank, self.kind = layout, rank, kind
        self.arrays: list[tuple[str, int]] = []
        self._held: list[Held] = []
        self.own_rows: Rows = ((0, layout.rows(rank)),) if layout.rows(rank) else ()
        self.home = Stand(layout, [(rank, self.own_rows)])
        for name in HOME:
            self.array(name, self.home)
        self.total = self.array("part", self.home)
        self._tags = 0
        self._own = Demand(layout, kind, [rank])

    def array(self, kind: str, stand: Stand) -> int:
        """A new array whose rows stand like this."""
        array = len(self.arrays)
        self.arrays.append((kind, stand.rows))
        self._held += stand.held(array)
        return array

    def tag(self) -> int:
        """The number of a new exchange."""
        self._tags += 1
        return self._tags - 1

    def needs(self, owner: int) -> Rows:
        """The keys of `owner` that this rank sees."""
        return self._own.of(owner)

    def own(self, *arrays: int) -> list[Run]:
        """The rank's own segments, each with its block in these arrays of its own."""
        return list(self.home.runs(arrays, self.rank, self.own_rows))

    def pairs(self, queries: Iterable[Run], keys: Iterable[Run]) -> list[tuple[Run, Run]]:
        """(queries, keys) of one document: those keys that some of the queries sees."""
        by_document: dict[int, list[Run]] = {}
        for run in keys:
            by_document.setdefault(run[0].document, []).append(run)
        found = []
        for query in queries:
            s = query[0]
            near = by_document.get(s.document, ())
            size = int(self.layout.lengths[s.document])
            seen = self.kind.keys_seen((s.start, s.stop), length=size)
            parts = ((k, intersect((k[0].start, k[0].stop), seen)) for k in near)
            found += [(query, _part(k, both)) for k, both in parts if both]
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
            direct = first and number == 0
            part = self.total if direct else self.array("part", self.home)
            ops += [Attend(q, kv, q._replace(array=part)) for (_, (q,)), (_, (kv,)) in tasks]
            for (_, (q,)), _ in [] if direct else tasks:
                total = q._replace(array=self.total)
                ops.append(Fold(total, (total, q._replace(array=part)), "lse"))
        return ops

    def attend_grad(self, queries: Iterable[Run], keys: Iterable[Run]) -> list[Op]:
        """Gradients of runs of queries (in q, grad and dq) with runs of keys (in kv and dkv)."""
        return [
            AttendGrad(q, kv, grad, dq, dkv)
            for (_, (q, grad, dq)), (_, (kv, dkv)) in self.pairs(queries, keys)
        ]

    def own_halves(self) -> tuple[list[Op], list[Op]]:
        """Gradients of the own queries with the own keys, the earlier rows and the later."""
        first, second = cut_rows(self.own_rows, 2)
        keys = self.own(KV, DKV)
        early, late = (
            self.attend_grad(self.home.runs((Q, GRAD, DQ), self.rank, rows), keys)
            for rows in (first, second)
        )
        return early, late

    def sum_into(self, array: int, stand: Stand, part: int, came: Stand) -> list[Op]:
        """Add the rows of `part`, which stand as `came`, to those of `array`."""
        ops: list[Op] = []
        for owner, rows in came.parts:
            into, parts = stand.blocks(array, owner, rows), came.blocks(part, owner, rows)
            ops += [Fold(a, (b,), "sum") for a, b in zip(into, parts, strict=True)]
        return ops

    def program(self, forward: Sequence[Op], backward: Sequence[Op]) -> Program:
        """One phase in each direction; forward's ends with the total as the output."""
        everything = Block(OUT, 0, self.home.rows)
        merged = Fold(everything, (everything._replace(array=self.total),), "cat")
        phases: Phases = ((*forward, merged),)
        return Program.build(
            arrays=self.arrays, held=self._held, forward=phases, backward=(tuple(backward),)
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
        by_peer: dict[int, tuple[Block, ...]] = {}
        for peer, blocks in messages:
            if blocks:
                by_peer[peer] = (*by_peer.get(peer, ()), *blocks)
        merged.append(tuple(by_peer.items()))
    return Post(tag, merged[0], merged[1], after if merged[0] else -1, channel)
