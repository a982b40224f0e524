"""Relay key chunks down trees of ranks: exact, and equal bits, bytes and peaks at any timing.

Every chunk of keys travels down a tree of ranks; gradients are summed on the way up the same tree.
Letters: R ranks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from helpers import Rows, execution, reference, run_lock_step, run_threads, shard
from late_channels import LateHub, LateThreads, assert_delays_change_nothing, lose_a_relay

from hf_longctx.comm.channels import ExchangeError, Hub, ThreadChannel
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.intervals import intersect
from hf_longctx.planning.layouts.layout import LAYOUTS, Layout, PlacedSegment, cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.checker import check, lock_step
from hf_longctx.planning.program.counts import (
    message_peak_bytes,
    peak_bytes,
    sent_by_channel,
    sent_by_level,
)
from hf_longctx.planning.program.message_queue import PlanError
from hf_longctx.planning.program.operations import Attend, AttendGrad, Block, Fold, Op, Post, Wait
from hf_longctx.planning.program.program import Held, HomeArray, Program, pack, unpack
from hf_longctx.runtime import exchanges
from hf_longctx.runtime.executor import Execution

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
        for array in HomeArray:
            self._array(array.kind, rank)
        others = [c for c in range(layout.ranks) if c != rank]
        self.kv = {rank: HomeArray.KV} | {c: self._array("kv", c) for c in others}
        self.dkv = {rank: HomeArray.DKV} | {c: self._array("dkv", c) for c in others}
        self.total, self.begun = self._array("part", rank), set[PlacedSegment]()

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

    def _tasks(self, chunk: int) -> list[tuple[PlacedSegment, PlacedSegment]]:
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
            ops.append(
                Attend(
                    Block(HomeArray.Q, *_rows(mine)), Block(self.kv[chunk], *_rows(theirs)), part
                )
            )
            ops.append(Fold(total, (total, part) if mine in self.begun else (part,), "lse"))
            self.begun.add(mine)
        return ops

    def _attend_grad(self, chunk: int) -> list[Op]:
        return [
            AttendGrad(
                *(Block(HomeArray.Q, *_rows(mine)), Block(self.kv[chunk], *_rows(theirs))),
                *(Block(array, *_rows(mine)) for array in (HomeArray.GRAD, HomeArray.DQ)),
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
        forward.append(Fold(Block(HomeArray.OUT, 0, rows), (Block(self.total, 0, rows),), "cat"))
        reduced = [self._reduce(chunk) for chunk in self.ways.order]
        backward += [op for ops, _ in reduced for op in ops]
        backward += [op for _, left in reduced for op in left]
        return Program.build(
            arrays=self.arrays,
            held=self.held,
            forward=(tuple(forward),),
            backward=(tuple(backward),),
        )


def _rows(segment: PlacedSegment) -> tuple[int, int]:
    return segment.row, segment.row + segment.stop - segment.start


ROWS = Rows.random(sum(LENGTHS), heads=4, kv_heads=2, dtype=torch.float32)


def accepted(plan: Plan) -> bool:
    """Whether the checker finds the plan exact; it may only find that ranks wait for each other."""
    try:
        check(plan)
    except PlanError as error:
        assert "no progress" in str(error)
        return False
    return True


def test_programs_that_the_checker_accepts_end_and_are_exact() -> None:
    rows = Rows.random(sum(LENGTHS))
    right = reference(rows, LENGTHS)
    ran = relays = 0
    for seed in range(20):
        plan = random_plan(seed, ranks=2 + seed % 4, kind=rows.kind())
        if accepted(plan):
            ran += 1
            relays += sum(len(plan.program(r).relayed(backward=False)) for r in range(2))
            assert run_lock_step(plan, rows, seed=seed).error(right) < 1e-12
    assert ran >= 16 and relays > ran


BUSY = 25  # a seed whose plan relays at every rank over all three pairs of channels


def test_the_plan_of_the_delays_is_a_busy_one() -> None:
    plan = random_plan(BUSY, ranks=4, kind=ROWS.kind())
    check(plan)
    programs = [plan.program(rank) for rank in range(4)]
    assert sum(bool(p.relayed(backward=False)) for p in programs) >= 3
    used = set().union(*(sent_by_channel(p, ROWS.widths, backward=True) for p in programs))
    assert len(used) >= 4, used


def test_random_delays_of_each_message_leave_bits_bytes_and_peaks(rank_pool) -> None:
    plan = random_plan(BUSY, ranks=4, kind=ROWS.kind())
    found = assert_delays_change_nothing(plan, ROWS, seeds=10, pool=rank_pool)
    assert found.error(reference(ROWS, LENGTHS)) < 1e-4


def test_each_chunk_crosses_once_and_memory_does_not_grow_with_the_ranks() -> None:
    found = {}
    for sizes in ((2, 2), (2, 4), (4, 4), (8, 8)):
        levels = Levels(sizes)
        lengths = [16 * levels.ranks]
        plan = relay_plan(
            lengths, layout="contiguous", ways=ways_over(levels), kind=ROWS.kind(causal=False)
        )
        if levels.ranks <= 16:
            check(plan)
        sent = sent_by_level(plan.program(0), ROWS.widths, rank=0, levels=levels, backward=False)
        chunk = 16 * ROWS.widths.row("kv")
        assert sent == {0: (sizes[0] - 1) * chunk, 1: sizes[0] * (sizes[1] - 1) * chunk}
        # its gradients stay to the end, so forward alone is bounded
        found[levels.ranks] = peak_bytes(plan.program(0), ROWS.widths, backward=False)
    assert 0 < found[64] <= found[16] <= found[8], found


def test_columns_json_and_packed_form_keep_relays() -> None:
    program = random_plan(BUSY, ranks=4, kind=ROWS.kind()).program(1)
    assert program.relayed(backward=False)
    for run in (Program.from_json(program.to_json()), unpack(pack(program).columns)):
        assert (run.forward, run.backward) == (program.forward, program.backward)
    older = program.to_json() | {"ops": [row[:4] for row in program.to_json()["ops"]]}
    with pytest.raises(ValueError, match="reshape"):
        Program.from_json(older)


def arrivals() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("longctx arrivals")]


def test_no_thread_waits_where_nothing_is_relayed_nor_when_all_is_done() -> None:
    rows = Rows.random(sum(LENGTHS))
    seen: list[str] = []

    class Watched(LateThreads):
        def send(self, data, key) -> None:
            seen.extend(arrivals())
            super().send(data, key)

    for plan, expected in (
        (replace_by_ring(random_plan(BUSY, ranks=4, kind=rows.kind())), False),
        (random_plan(BUSY, ranks=4, kind=rows.kind()), True),
    ):
        seen.clear()
        hub = LateHub(4, seed=0)
        run_threads(plan, rows, channels=[Watched(hub, r) for r in range(4)])
        assert bool(seen) == expected
    ends = time.monotonic() + 60.0
    while arrivals() and time.monotonic() < ends:
        time.sleep(0.001)
    assert not arrivals()


def replace_by_ring(plan: Plan) -> Plan:
    """A plan without relays on the same layout."""
    from hf_longctx.planning.planners.plan import make_plan

    return make_plan(plan.layout, kind=plan.kind, options=PlanOptions(algorithm="ring"))


# Errors


def alone(seed: int, *, timeout: float) -> tuple[Plan, int, list[ThreadChannel]]:
    """A plan, a rank that relays in it, and channels."""
    plan = random_plan(seed, ranks=3, kind=ROWS.kind())
    relaying = next(r for r in range(3) if plan.program(r).relayed(backward=False))
    return plan, relaying, LateHub(3, seed=0, timeout=timeout).channels()


def test_a_lost_peer_is_named_at_the_next_wait() -> None:
    plan, rank, channels = alone(BUSY, timeout=0.3)
    run = execution(plan, rank, ROWS, channels[rank], backward=False)
    own = shard(plan.layout, rank, ROWS)
    run.bind(0, q=own.q)
    run.bind(1, k=own.k, v=own.v)
    expected = rf"rank {rank}: exchange \d+ of forward phase 0 with rank \d did not finish: no mess"
    started = time.monotonic()
    with pytest.raises(ExchangeError, match=expected):
        for exchange in run.phase(0):
            exchange.wait()
    assert time.monotonic() - started < 10.0


def of_rank_0(ops: tuple[Op, ...], channel: ThreadChannel) -> Execution:
    """Rank 0 about to run the operations, on keys 1 and 2."""
    fields = {n: getattr(BASE, n) for n in BASE.__dataclass_fields__ if n != "programs"}
    plan = Made(**fields, programs=(two_keys(ops),))
    run = execution(plan, 0, ROWS, channel, backward=False)
    for array in (1, 2):
        run.bind(array, k=torch.full((1, 2, 4), float(array)), v=torch.zeros(1, 2, 4))
    return run


def test_what_several_peers_get_is_copied_once(monkeypatch) -> None:
    copied: list[int] = []
    pack = exchanges.pack
    monkeypatch.setattr(exchanges, "pack", lambda x: copied.append(exchanges.size(x)) or pack(x))
    other, hub = Block(2, 0, 1), Hub(4)
    op = Post(0, ((1, (KEYS,)), (2, (KEYS, other)), (3, (KEYS,))), ())
    run = of_rank_0((op, Wait(0)), hub.channels()[0])
    run._exchanges.post(op, phase=0)
    held = message_peak_bytes(run.program, ROWS.widths, backward=False)
    assert sum(copied) == run._exchanges.peak_bytes == held == 3 * ROWS.widths.row("kv")
    came = {peer: message.view(torch.float32) for (_, _, peer, _), message in hub.messages.items()}
    keys = [torch.cat([torch.full((8,), float(array)), torch.zeros(8)]) for array in (1, 2)]
    assert torch.equal(came[1], keys[0]) and torch.equal(came[3], keys[0])
    assert torch.equal(came[2], torch.cat(keys))


def test_an_error_of_a_relay_is_met_at_the_next_wait_of_another_exchange() -> None:
    hub = LateHub(2, seed=0, timeout=0.1)
    keys, other = Block(1, 0, 1), Block(2, 0, 1)
    ops = (
        Post(0, (), ((1, (keys,)),)),
        Post(1, ((1, (keys,)),), (), after=0, channel=2),
        Post(2, (), ((1, (other,)),), channel=1),
        Wait(2),
        Wait(1),
        Wait(0),
    )
    run = of_rank_0(ops, hub.channels()[0])
    for post in ops[:3]:
        run._exchanges.post(post, phase=0)
    time.sleep(0.5)  # the waiting thread gives up meanwhile
    with pytest.raises(ExchangeError, match="rank 0: exchange 0 of forward phase 0 with rank 1"):
        next(run._exchanges.wait(2))


def test_gloo_names_rank_operation_and_peer(rank_pool) -> None:
    said = rank_pool.run(lose_a_relay, ranks=4)
    assert [said[rank] for rank in (0, 1, 3)] == [""] * 3
    assert said[2].startswith("rank 2: exchange 4 of forward phase 0 with rank 1 did not finish")


# What the checker refuses

BASE = random_plan(BUSY, ranks=2, kind=ROWS.kind())
KEYS = Block(1, 0, 1)


def two_keys(ops: tuple[Op, ...]) -> Program:
    """Two arrays of keys, one row each, in forward."""
    return Program.build(
        arrays=[("q", 1), ("kv", 1), ("kv", 1)],
        held=[Held(1, 0, 0, 0, 1), Held(2, 0, 0, 0, 1)],
        forward=(ops,),
        backward=(),
    )


def ranks_of(*ops: tuple[Op, ...]) -> dict[int, Program]:
    return {rank: two_keys(of_rank) for rank, of_rank in enumerate(ops)}


RECEIVE, RELAY = Post(0, (), ((0, (KEYS,)),)), Post(1, ((2, (KEYS,)),), (), after=0, channel=2)
FIRST = (Post(0, ((1, (KEYS,)),), ()), Wait(0))
LAST = (Post(0, (), ((1, (KEYS,)),), channel=2), Wait(0))
TOUCH = Fold(Block(2, 0, 1), (KEYS,), "cat")


def test_a_relay_passes_on_what_arrives() -> None:
    for middle in ((Wait(0), Wait(1)), (Wait(1), Wait(0)), (Wait(1), Wait(0), TOUCH)):
        ranks = lock_step(ranks_of(FIRST, (RECEIVE, RELAY, *middle), LAST), backward=False)
        first, _, last = (rank.values[1] for rank in ranks)
        assert (first == last).all()


@pytest.mark.parametrize(
    ("middle", "why"),
    [
        ((RELAY, RECEIVE, Wait(0), Wait(1)), "rank 1: 1 relays 0, not under way then"),
        ((RECEIVE, Wait(0), RELAY, Wait(1)), "rank 1: 1 relays 0, not under way then"),
        ((RECEIVE, RELAY, TOUCH, Wait(0), Wait(1)), "rank 1: touches .* fills and relays"),
        (
            (RECEIVE, RELAY._replace(sends=((2, (Block(2, 0, 1),)),)), Wait(0), Wait(1)),
            "rank 1: 1 relays .*, which 0 does not receive",
        ),
        ((RECEIVE, RECEIVE, RELAY, Wait(0), Wait(1)), "rank 1: (posts 0|touches)"),
        ((RECEIVE, RELAY._replace(channel=4), Wait(0), Wait(1)), "no progress"),
        ((RECEIVE, RELAY, Wait(0)), "rank 1: exchanges .1. are never waited for"),
    ],
)
def test_the_checker_refuses(middle: tuple[Op, ...], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        lock_step(ranks_of(FIRST, middle, LAST), backward=False)


@pytest.mark.parametrize("channel", [0, 4], ids=["one-thread", "two-threads"])
def test_a_cycle_of_relays_behind_each_other_is_found(channel: int) -> None:
    # Each of two ranks first waits for what the other relays, then for what it relays itself, and
    # a third feeds both: one thread per channel stands still, two do not.
    other = Block(2, 0, 1)

    def rank(peer: int) -> tuple[Op, ...]:
        return (
            Post(0, (), ((peer, (KEYS,)),), channel=channel),
            Post(1, ((2, (KEYS,)),), (), after=0, channel=2),
            Post(2, (), ((2, (other,)),)),
            Post(3, ((peer, (other,)),), (), after=2, channel=channel),
            *map(Wait, range(4)),
        )

    feed = tuple(Post(n, ((n, (KEYS,)),), ()) for n in (0, 1))
    back = tuple(Post(2 + n, (), ((n, (Block(2, 0, 1),)),), channel=2) for n in (0, 1))
    ranks = ranks_of(
        rank(1), rank(0), (*feed, back[0], Wait(0), Wait(1), Wait(2), back[1], Wait(3))
    )
    if channel == 0:
        with pytest.raises(PlanError, match="no progress: rank 0 waits for 1"):
            lock_step(ranks, backward=False)
    else:
        lock_step(ranks, backward=False)
