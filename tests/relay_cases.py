"""Plans in which every chunk of keys travels down a tree of ranks, relayed.

Gradients are summed on the way up the same tree. Letters: R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.intervals import intersect
from hf_longctx.planning.layouts.layout import LAYOUTS, Layout, Placed, cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.operations import Attend, AttendGrad, Block, Fold, Op, Post, Wait
from hf_longctx.planning.program.program import HOME, Held, Program

_Q, _KV, _OUT, _GRAD, _DQ, _DKV = range(6)
LENGTHS = [90, 1, 37, 60, 2, 10]
Tree = dict[int, int]  # rank -> the rank that sends it the chunk; none for the owner


@dataclass(frozen=True, eq=False, kw_only=True)
class Made(Plan):
    """A plan whose programs are given."""

    programs: tuple[Program, ...]

    def program(self, rank: int) -> Program:
        return self.programs[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How chunks travel.

    Args:
        order (`tuple[int, ...]`): Of the chunks, the same on every rank.
        trees (`tuple[Tree, ...]`): Of each chunk.
        channels (`tuple[int, ...]`): Of keys and values, by depth in the tree; gradients use the
            one after.
        pieces (`int`): Of each chunk.
        window (`int`): Pieces that are posted ahead.
    """

    order: tuple[int, ...]
    trees: tuple[Tree, ...]
    channels: tuple[int, ...]
    pieces: int
    window: int


def random_ways(ranks: int, random: Random) -> Ways:
    """Any trees over any of three pairs of channels."""
    trees = []
    for owner in range(ranks):
        reached, tree = [owner], {}
        for rank in random.sample([r for r in range(ranks) if r != owner], ranks - 1):
            tree[rank] = random.choice(reached)
            reached.append(rank)
        trees.append(tree)
    return Ways(
        order=tuple(random.sample(range(ranks), ranks)),
        trees=tuple(trees),
        channels=tuple(random.choice([0, 2, 4]) for _ in range(ranks + 1)),
        pieces=random.randint(1, 3),
        window=random.randint(1, 6),
    )


def ways_over(levels: Levels, *, pieces: int = 2, window: int = 4) -> Ways:
    """Each chunk crosses once to each domain, and is relayed inside it."""
    trees = []
    for owner in range(levels.ranks):
        inside = levels.below(0)
        there = {r: owner % inside + r // inside * inside for r in range(levels.ranks)}
        trees.append({r: owner if r in (there[r], owner) else there[r] for r in there})
        del trees[-1][owner]
    order = tuple(range(levels.ranks))
    return Ways(order=order, trees=tuple(trees), channels=(0, 0, 2), pieces=pieces, window=window)


def relay_plan(lengths: Sequence[int], *, layout: str, ways: Ways, kind: LayerKind) -> Plan:
    """The plan in which chunks go these ways."""
    held = cut(lengths, ranks=len(ways.trees), layout=layout)
    base = make_plan(held, kind=kind, options=PlanOptions(algorithm="ring"))
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    programs = tuple(_Rank(held, r, kind, ways).build() for r in range(held.ranks))
    return Made(**fields, programs=programs)


def random_plan(seed: int, *, ranks: int, kind: LayerKind) -> Plan:
    """A plan drawn from a seed."""
    random = Random(seed)
    ways = random_ways(ranks, random)
    return relay_plan(LENGTHS, layout=random.choice(LAYOUTS), ways=ways, kind=kind)


class _Rank:
    def __init__(self, layout: Layout, rank: int, kind: LayerKind, ways: Ways) -> None:
        self.layout, self.rank, self.kind, self.ways = layout, rank, kind, ways
        self.arrays: list[tuple[str, int]] = []
        self.held: list[Held] = []
        for array_kind in HOME:
            self._array(array_kind, rank)
        others = [c for c in range(layout.ranks) if c != rank]
        self.kv = {rank: _KV} | {c: self._array("kv", c) for c in others}
        self.dkv = {rank: _DKV} | {c: self._array("dkv", c) for c in others}
        self.total, self.begun = self._array("part", rank), set[Placed]()

    def _array(self, kind: str, owner: int) -> int:
        array = len(self.arrays)
        self.arrays.append((kind, self.layout.rows(owner)))
        self.held += [Held(array, s.row, *s[2:]) for s in self.layout.of_rank(owner)]
        return array

    def _children(self, chunk: int) -> list[int]:
        return sorted(r for r, parent in self.ways.trees[chunk].items() if parent == self.rank)

    def _channel(self, chunk: int, rank: int) -> int:
        """Over which `rank` receives the chunk."""
        depth, tree = 0, self.ways.trees[chunk]
        while rank in tree:
            rank, depth = tree[rank], depth + 1
        return self.ways.channels[depth]

    def _travel(self, chunk: int, piece: int) -> tuple[list[Op], list[Op]]:
        """Posts and waits of one piece."""
        rows, tag = self.layout.rows(chunk), 2 * (chunk * self.ways.pieces + piece)
        edges = [rows * p // self.ways.pieces for p in (piece, piece + 1)]
        block, posts = (Block(self.kv[chunk], *edges),), []
        if edges[0] == edges[1]:
            return [], []
        if chunk != self.rank:
            channel, parent = self._channel(chunk, self.rank), self.ways.trees[chunk][self.rank]
            posts.append(Post(tag, (), ((parent, block),), channel=channel))
        if children := self._children(chunk):
            channel = self._channel(chunk, children[0])
            sends, after = tuple((r, block) for r in children), tag if posts else -1
            posts.append(Post(tag + 1, sends, (), after=after, channel=channel))
        return [*posts], [Wait(post.tag) for post in posts]

    def _tasks(self, chunk: int) -> list[tuple[Placed, Placed]]:
        return [
            (mine, theirs)
            for mine in self.layout.of_rank(self.rank)
            for theirs in self.layout.of_rank(chunk)
            if mine.document == theirs.document
            and intersect(
                (theirs.start, theirs.stop),
                self.kind.keys_seen(
                    (mine.start, mine.stop), length=int(self.layout.lengths[mine.document])
                ),
            )
        ]

    def _attend(self, chunk: int) -> list[Op]:
        ops: list[Op] = []
        for mine, theirs in self._tasks(chunk):
            part = Block(self._array("part", self.rank), *_rows(mine))
            total = Block(self.total, *_rows(mine))
            ops.append(Attend(Block(_Q, *_rows(mine)), Block(self.kv[chunk], *_rows(theirs)), part))
            ops.append(Fold(total, (total, part) if mine in self.begun else (part,), "lse"))
            self.begun.add(mine)
        return ops

    def _attend_grad(self, chunk: int) -> list[Op]:
        return [
            AttendGrad(
                *(Block(_Q, *_rows(mine)), Block(self.kv[chunk], *_rows(theirs))),
                *(Block(array, *_rows(mine)) for array in (_GRAD, _DQ)),
                Block(self.dkv[chunk], *_rows(theirs)),
            )
            for mine, theirs in self._tasks(chunk)
        ]

    def _reduce(self, chunk: int) -> tuple[list[Op], list[Op]]:
        """Add what the children send, in their order, and send the sum to the parent."""
        rows, tag, ops = self.layout.rows(chunk), 1000 + 2 * chunk, []
        into, left = Block(self.dkv[chunk], 0, rows), []
        children = self._children(chunk) if rows else []
        if children:
            parts = [Block(self._array("dkv", chunk), 0, rows) for _ in children]
            recvs = tuple((r, (part,)) for r, part in zip(children, parts, strict=True))
            channel = 1 + self._channel(chunk, children[0])
            ops += [Post(tag, (), recvs, channel=channel), Wait(tag)]
            ops.append(Fold(into, tuple(parts), "sum"))
        if rows and chunk != self.rank:
            sends = ((self.ways.trees[chunk][self.rank], (into,)),)
            ops.append(Post(tag + 1, sends, (), channel=1 + self._channel(chunk, self.rank)))
            left.append(Wait(tag + 1))
        return ops, left

    def _pass(self, *, backward: bool) -> list[Op]:
        items = [(c, p) for c in self.ways.order for p in range(self.ways.pieces)]
        travel = [self._travel(*item) for item in items]
        work = self._attend_grad if backward else self._attend
        ops = [op for posts, _ in travel[: self.ways.window] for op in posts]
        for at, (chunk, piece) in enumerate(items):
            ops += travel[at][1]
            ops += [op for posts, _ in travel[at + self.ways.window :][:1] for op in posts]
            if piece == self.ways.pieces - 1:
                ops += work(chunk)
        return ops

    def build(self) -> Program:
        forward, backward = self._pass(backward=False), self._pass(backward=True)
        rows = self.layout.rows(self.rank)
        forward.append(Fold(Block(_OUT, 0, rows), (Block(self.total, 0, rows),), "cat"))
        reduced = [self._reduce(chunk) for chunk in self.ways.order]
        backward += [op for ops, _ in reduced for op in ops]
        backward += [op for _, left in reduced for op in left]
        return Program.build(
            arrays=self.arrays,
            held=self.held,
            forward=(tuple(forward),),
            backward=(tuple(backward),),
        )


def _rows(segment: Placed) -> tuple[int, int]:
    return segment.row, segment.row + segment.stop - segment.start
