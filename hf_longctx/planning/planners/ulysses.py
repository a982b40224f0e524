"""Plan `ulysses`: ranks of a domain change tokens for heads, attend, and change back.

Source: arXiv 2309.14509. Each rank attends to its part of the heads over all tokens of its domain,
so even a document that lies on one rank changes heads. One domain of all ranks is Ulysses. Several
are the hybrid: between the ranks with the same heads, another algorithm runs as if each domain were
one rank. Key/value heads that several ranks need travel to each of them, and home adds their
gradients in rank order. Backward resends queries and keys, with delta in place of out (see
`serve`): home keeps q, k, v, out and lse, and nobody else keeps anything. Layer: planning.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.intervals import touching
from ..layouts.layout import Layout
from ..program.builder import ProgramBuilder, post
from ..program.operations import (
    CODES,
    Attend,
    AttendGrad,
    Block,
    Fold,
    HeadRange,
    Op,
    Phases,
    Post,
    Wait,
    map_blocks,
)
from ..program.program import HomeArray, Program
from . import ring, serve
from .distca import tasks
from .exchange import ExchangePlan
from .key_splits import NO_SPLITS, Assignment, assignments
from .rebalance import items

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
    """Return the program of one rank, one phase in each direction.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): This rank; domains are runs of `size` ranks.
        kind (`LayerKind`): Its `heads` and `kv_heads` are divided among the ranks of a domain.
        size (`int`): Ranks of a domain. It divides the ranks, and they can divide the heads; see
            `support.validate_heads`.
        across (`Callable`, *optional*, defaults to `ring.program`): Plans what several domains
            exchange.
        level (`int`, *optional*, defaults to 0): Whose channels the domain exchanges heads over.
    """
    if size == layout.ranks:
        across = _alone
    return _HeadExchange(layout, rank, kind, size, across, level).build()


def head_shares(size: int, *, kind: LayerKind) -> tuple[int, tuple[HeadRange, ...]]:
    """Return the head groups altogether, and which of them each rank of a domain attends to."""
    groups = kind.kv_heads if size <= kind.kv_heads else kind.heads
    edges = pairwise(groups * i // size for i in range(size + 1))
    return groups, tuple((low, high - low) for low, high in edges)


def domains(layout: Layout, *, size: int) -> tuple[Layout, np.ndarray]:
    """Make a layout whose ranks are domains of `size` ranks.

    Rows lie by document and position, so that segments which touch become one.

    Returns:
        The layout, and the row there of each segment (int64, as in `layout.columns`).
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
    """Return the program of a single domain, in which nothing is exchanged."""
    table = assignments(layout, tasks(items(layout)), NO_SPLITS, kind=kind)
    views = [Assignment(*row) for row in table.tolist()]
    return serve.program(ExchangePlan(layout, views, kind=kind), rank=rank)


class _HeadExchange:
    """Build one program around that of its domain, whose arrays follow the rank's own."""

    def __init__(
        self, layout: Layout, rank: int, kind: LayerKind, size: int, across: Across, level: int
    ) -> None:
        self.layout, self.rank, self.size, self.kind = layout, rank, size, kind
        self.channel = 2 * level
        self.groups, by_member = head_shares(size, kind=kind)
        self.heads = {rank // size * size + i: heads for i, heads in enumerate(by_member)}
        self.own_heads = self.heads[rank]
        merged, self.begins = domains(layout, size=size)
        self.inner = across(merged, rank=rank // size, kind=self._own_kind())
        assert not self.inner.blocks[:, 7].any(), "a program across domains cuts no heads"
        self.builder = ProgramBuilder(layout, rank=rank, head_groups=self.groups)
        # The gradient's rows arrive with delta, which home formed.
        self.first = self.builder.include(self.inner, kinds={"grad": "delta"})

    def _own_kind(self) -> LayerKind:
        """Return the layers as this rank's heads see them."""
        kind, count = self.kind, self.own_heads[1]
        heads = kind.heads * count // self.groups
        kv_heads = max(1, kind.kv_heads * count // self.groups)
        return replace(
            kind,
            heads=heads,
            kv_heads=kv_heads,
            query_width=kind.query_width * heads // kind.heads,
            key_value_width=kind.key_value_width * kv_heads // kind.kv_heads,
        )

    def _runs(self, rank: int) -> list[tuple[int, int, int]]:
        """Return rows `[start, stop)` of a rank, and the domain's row where they begin."""
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
        """Return this rank's own rows, of the heads that each member of the domain attends to."""
        runs = self._runs(self.rank)
        return {
            member: [Block(a, start, stop, *heads) for a in arrays for start, stop, _ in runs]
            for member, heads in self.heads.items()
        }

    def _domain(self, *arrays: int) -> _Blocks:
        """Return the domain's rows that each member holds, of this rank's heads."""
        return {
            member: [
                self._inner_block(Block(a, there, there + stop - start), self.own_heads)
                for a in arrays
                for start, stop, there in self._runs(member)
            ]
            for member in self.heads
        }

    def _exchange(
        self, tag: int, sent: _Blocks, received: _Blocks, *, gradients: bool = False
    ) -> list[Op]:
        """Send each member its blocks, and copy meanwhile what stays here."""
        kept = zip(received.pop(self.rank), sent.pop(self.rank), strict=True)
        copies = [Fold(into, (block,), "cat") for into, block in kept]
        exchange = post(tag, sent.items(), received.items(), channel=self.channel + gradients)
        if not exchange.sends and not exchange.recvs:
            return [*copies]
        return [exchange, *copies, Wait(tag)]

    def _within(self, phases: Phases) -> Iterator[Op]:
        """Yield the domain's operations, on this rank's heads and with peers of the same heads."""
        ops = (op for phase in phases for op in phase)
        for kind, run in groupby(ops, key=type):
            if kind is Attend or kind is AttendGrad:
                same = list(run)
                # Heads outside, tasks inside: neighbouring tasks on equal heads fuse.
                for heads in self._evenly_shared():
                    for op in same:
                        yield map_blocks(op, partial(self._inner_block, heads=heads))
            else:
                yield from map(self._carried, run)

    def _evenly_shared(self) -> Iterator[HeadRange]:
        """Yield this rank's heads, cut where the next key/value head begins.

        A kernel needs as many query heads for each key/value head. Where groups are key/value
        heads there is nothing to cut.
        """
        low, count = self.own_heads
        each = self.groups // self.kind.kv_heads
        if each == 1:
            yield low, count
            return
        edges = [low, *range((low // each + 1) * each, low + count, each), low + count]
        yield from ((first, stop - first) for first, stop in pairwise(edges))

    def _carried(self, op: Op) -> Op:
        op = map_blocks(op, partial(self._inner_block, heads=self.own_heads))
        if isinstance(op, Fold) and op.how == "delta":
            grad = op.parts[0].array == self.first + HomeArray.GRAD  # has delta already
            return op._replace(how="cat") if grad else op
        if isinstance(op, Post):
            member = self.rank % self.size
            sends, recvs = (
                tuple((peer * self.size + member, blocks) for peer, blocks in side)
                for side in (op.sends, op.recvs)
            )
            return op._replace(sends=sends, recvs=recvs)
        return op

    def _inner_block(self, block: Block, heads: HeadRange) -> Block:
        return Block(self.first + block.array, block.start, block.stop, *heads)

    def build(self) -> Program:
        """Return the program of one phase in each direction."""
        inner, builder = self.inner, self.builder
        # The first numbers of exchanges are those of the program across domains.
        tags = inner.ops[inner.ops[:, 2] == CODES[Post], 3]
        bring = int(tags.max(initial=-1)) + 1
        give = bring + 1
        q, kv, out, grad, dq, dkv = HomeArray
        forward = [
            *self._exchange(bring, self._home(q, kv), self._domain(q, kv)),
            *self._within(inner.forward),
            *self._exchange(give, self._domain(out), self._home(out)),
        ]
        rows, delta = self.layout.rows(self.rank), builder.own_array("delta")
        sums = {member: builder.own_array("dkv") for member in self.heads}
        parts = {member: self._home(sums[member])[member] for member in self.heads}
        results = {member: self._home(dq)[member] + parts[member] for member in self.heads}
        added = {
            member: zip(self._home(dkv)[member], parts[member], strict=True) for member in parts
        }
        backward = [
            Fold(Block(delta, 0, rows), (Block(grad, 0, rows),), "delta"),
            *self._exchange(bring, self._home(delta, q, kv), self._domain(grad, q, kv)),
            *self._within(inner.backward),
            *self._exchange(give, self._domain(dq, dkv), results, gradients=True),
            *(Fold(into, (part,), "sum") for pairs in added.values() for into, part in pairs),
        ]
        return builder.build([forward], [backward])
