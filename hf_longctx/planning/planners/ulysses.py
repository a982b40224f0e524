"""A layout -> Ulysses: ranks of a domain change tokens for heads, attend, and change back.

Layer: planning. Source: arXiv 2309.14509. Each rank attends to its share of the heads over all tokens
of its domain: a document that lies whole on one rank changes heads, too. One domain of all ranks is
Ulysses. Several are the hybrid: between the ranks with the same heads, another algorithm runs as if
each domain were one rank. Key/value heads that several ranks share travel to each of them, and home
adds their gradients in rank order. Backward resends queries and keys, with delta in place of out
(see `serve`): home keeps q, k, v, out and lse, and nobody else keeps anything.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import touching
from ..layouts.layout import Layout
from ..program.operations import Attend, AttendGrad, Block, Fold, HeadRange, Op, Phases, Post, Wait
from ..program.program import HOME, Held, Program
from . import ring, serve
from .distca import tasks
from .exchange import ExchangePlan
from .key_splits import NO_SPLITS, Assignment, assignments
from .rebalance import items

_Q, _KV, _OUT, _GRAD, _DQ, _DKV = range(6)
_INNER = len(HOME)  # first array of the program across domains
_Blocks = dict[int, list[Block]]  # by member of the domain
Across = Callable[..., Program]  # (layout, *, rank, kind) -> the program between domains


def program(
    layout: Layout,
    *,
    rank: int,
    kind: LayerKind,
    size: int,
    across: Across = ring.program,
    level: int = 0,
) -> Program:
    """The program of one rank, one phase in each direction.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): This rank; domains are runs of `size` ranks.
        kind (`LayerKind`): Its `heads` and `kv_heads` are shared out.
        size (`int`): Ranks of a domain, which must divide the ranks and can share the heads; see
            `support.heads`.
        across (`Callable`, *optional*, defaults to `ring.program`): Plans what several domains
            exchange.
        level (`int`, *optional*, defaults to 0): Whose channels the domain exchanges heads over.
    """
    if size == layout.ranks:
        across = _alone
    return _HeadExchange(layout, rank, kind, size, across, level).build()


def head_shares(size: int, *, kind: LayerKind) -> tuple[int, tuple[HeadRange, ...]]:
    """Head groups altogether, and which of them each rank of a domain attends to."""
    groups = kind.kv_heads if size <= kind.kv_heads else kind.heads
    edges = pairwise(groups * i // size for i in range(size + 1))
    return groups, tuple((low, high - low) for low, high in edges)


def domains(layout: Layout, *, size: int) -> tuple[Layout, np.ndarray]:
    """Domains of `size` ranks as the ranks of a layout, and the row there of each segment (int64,
    as in `layout.columns`).

    Rows lie by document and position, so that segments which touch become one.
    """
    columns = layout.columns.astype(np.int64)
    order = np.lexsort((columns[:, 3], columns[:, 2], columns[:, 0] // size))
    rank, _, document, start, stop = columns[order].T
    domain = rank // size
    before = np.append(0, np.cumsum(stop - start))
    row = before[:-1] - before[np.searchsorted(domain, domain)]
    first, last = touching(start, stop, domain, document)
    kept = [domain[first], row[first], document[first], start[first], stop[last]]
    merged = np.stack(kept, axis=1).astype(np.int32)
    begins = np.empty_like(row)
    begins[order] = row
    return Layout(layout.lengths, layout.ranks // size, merged), begins


def _alone(layout: Layout, *, rank: int, kind: LayerKind) -> Program:
    """All documents on one rank: nothing is exchanged."""
    table = assignments(layout, tasks(items(layout)), NO_SPLITS, kind=kind)
    views = [Assignment(*row) for row in table.tolist()]
    return serve.program(ExchangePlan(layout, views, kind=kind), rank=rank)


class _HeadExchange:
    """Builds one program around that of its domain."""

    def __init__(
        self, layout: Layout, rank: int, kind: LayerKind, size: int, across: Across, level: int
    ) -> None:
        self.layout, self.rank, self.size, self.kind = layout, rank, size, kind
        self.channel = 2 * level
        self.groups, by_member = head_shares(size, kind=kind)
        self.heads = {rank // size * size + i: heads for i, heads in enumerate(by_member)}
        merged, self.begins = domains(layout, size=size)
        self.inner = across(merged, rank=rank // size, kind=self._share())
        assert not self.inner.blocks[:, 7].any(), "a program across domains cuts no heads"
        kinds = ["delta" if kind == "grad" else kind for kind in self.inner.kinds]
        self.arrays = [(kind, layout.rows(rank)) for kind in HOME]
        self.held = [Held(a, s.row, *s[2:]) for a in range(_INNER) for s in layout.of_rank(rank)]
        self.arrays += zip(kinds, self.inner.rows, strict=True)
        self.held += [Held(a + _INNER, *rest) for a, *rest in self.inner.held.tolist()]

    def _share(self) -> LayerKind:
        """The layers as this rank's heads see them."""
        kind, count = self.kind, self.heads[self.rank][1]
        heads = kind.heads * count // self.groups
        kv_heads = max(1, kind.kv_heads * count // self.groups)
        return replace(
            kind,
            heads=heads,
            kv_heads=kv_heads,
            query_width=kind.query_width * heads // kind.heads,
            key_value_width=kind.key_value_width * kv_heads // kind.kv_heads,
        )

    def _own_array(self, kind: str) -> int:
        array = len(self.arrays)
        self.arrays.append((kind, self.layout.rows(self.rank)))
        self.held += [Held(array, s.row, *s[2:]) for s in self.layout.of_rank(self.rank)]
        return array

    def _runs(self, rank: int) -> list[tuple[int, int, int]]:
        """Rows `[start, stop)` of a rank, and the domain's row where they begin."""
        runs: list[tuple[int, int, int]] = []
        begins = self.begins[self.layout.within(rank)].tolist()
        for s, there in zip(self.layout.of_rank(rank), begins, strict=True):
            stop = s.row + s.stop - s.start
            if runs and there - s.row == runs[-1][2] - runs[-1][0]:
                runs[-1] = (runs[-1][0], stop, runs[-1][2])
            else:
                runs.append((s.row, stop, there))
        return runs

    def _home(self, *arrays: int) -> _Blocks:
        """This rank's own rows, of the heads that each member of the domain attends to."""
        runs = self._runs(self.rank)
        return {
            member: [Block(a, start, stop, *heads) for a in arrays for start, stop, _ in runs]
            for member, heads in self.heads.items()
        }

    def _domain(self, *arrays: int) -> _Blocks:
        """The domain's rows that each member holds, of the heads that this rank attends to."""
        own = self.heads[self.rank]
        return {
            member: [
                Block(a + _INNER, there, there + stop - start, *own)
                for a in arrays
                for start, stop, there in self._runs(member)
            ]
            for member in self.heads
        }

    def _exchange(
        self, tag: int, sent: _Blocks, received: _Blocks, *, gradients: bool = False
    ) -> list[Op]:
        """Send each member its blocks; what stays here is copied meanwhile."""
        kept = zip(received[self.rank], sent[self.rank], strict=True)
        copies = [Fold(into, (block,), "cat") for into, block in kept]
        sides = [
            tuple((p, tuple(blocks)) for p, blocks in side.items() if blocks and p != self.rank)
            for side in (sent, received)
        ]
        if not any(sides):
            return [*copies]
        post = Post(tag, sides[0], sides[1], channel=self.channel + gradients)
        return [post, *copies, Wait(tag)]

    def _within(self, phases: Phases) -> Iterator[Op]:
        """The domain's operations, on this rank's heads and with peers of the same heads."""
        ops = (op for phase in phases for op in phase)
        for kind, run in groupby(ops, key=type):
            if kind is Attend or kind is AttendGrad:
                same = [op for op in run if isinstance(op, Attend | AttendGrad)]
                for heads in self._evenly_shared():
                    for op in same:
                        yield type(op)(*(self._moved(block, heads) for block in op))
            else:
                yield from map(self._carried, run)

    def _evenly_shared(self) -> Iterator[HeadRange]:
        """This rank's heads, cut where another key/value head begins if query heads are counted."""
        low, count = self.heads[self.rank]
        each = self.groups // self.kind.kv_heads
        if each == 1:
            yield low, count
            return
        edges = [low, *range((low // each + 1) * each, low + count, each), low + count]
        yield from ((first, stop - first) for first, stop in pairwise(edges))

    def _carried(self, op: Op) -> Op:
        own = self.heads[self.rank]
        if isinstance(op, Fold):
            # The gradient's rows came with delta already.
            delta = op.how == "delta" and op.parts[0].array == _GRAD
            parts = tuple(self._moved(part, own) for part in op.parts)
            return Fold(self._moved(op.into, own), parts, "cat" if delta else op.how)
        if isinstance(op, Post):
            member = self.rank % self.size
            sends, recvs = (
                tuple(
                    (peer * self.size + member, tuple(self._moved(b, own) for b in blocks))
                    for peer, blocks in side
                )
                for side in (op.sends, op.recvs)
            )
            return op._replace(sends=sends, recvs=recvs)
        assert isinstance(op, Wait), op
        return op

    def _moved(self, block: Block, heads: HeadRange) -> Block:
        return Block(block.array + _INNER, block.start, block.stop, *heads)

    def build(self) -> Program:
        """One phase in each direction."""
        inner = self.inner
        used = [op.tag for phases in (inner.forward, inner.backward) for phase in phases
                for op in phase if isinstance(op, Post)]  # fmt: skip
        bring = max(used, default=-1) + 1
        give = bring + 1
        forward = [
            *self._exchange(bring, self._home(_Q, _KV), self._domain(_Q, _KV)),
            *self._within(inner.forward),
            *self._exchange(give, self._domain(_OUT), self._home(_OUT)),
        ]
        rows, delta = self.layout.rows(self.rank), self._own_array("delta")
        sums = {member: self._own_array("dkv") for member in self.heads}
        results = {p: self._home(_DQ)[p] + self._home(sums[p])[p] for p in self.heads}
        whole = self._home(_DKV)
        added = {p: zip(whole[p], self._home(sums[p])[p], strict=True) for p in self.heads}
        backward = [
            Fold(Block(delta, 0, rows), (Block(_GRAD, 0, rows),), "delta"),
            *self._exchange(bring, self._home(delta, _Q, _KV), self._domain(_GRAD, _Q, _KV)),
            *self._within(inner.backward),
            *self._exchange(give, self._domain(_DQ, _DKV), results, gradients=True),
            *(Fold(into, (part,), "sum") for pairs in added.values() for into, part in pairs),
        ]
        return Program.build(
            arrays=self.arrays,
            held=self.held,
            forward=(tuple(forward),),
            backward=(tuple(backward),),
            head_groups=self.groups,
        )
