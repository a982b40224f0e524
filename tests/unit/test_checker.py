"""Check that the checker accepts every plan and rejects every mutation; count bytes by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from helpers import WINDOWS, examples, plans
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, cut
from hf_longctx.planning.planners import state_scan
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.checker import check, lock_step
from hf_longctx.planning.program.counts import Widths, peak_bytes, sent, sent_in_layer
from hf_longctx.planning.program.message_queue import PlanError
from hf_longctx.planning.program.operations import (
    FOLDS,
    Attend,
    AttendGrad,
    Block,
    Fold,
    Op,
    Phases,
    Post,
    Wait,
)
from hf_longctx.planning.program.program import Held, Program

KIND = LayerKind(query_width=2, key_value_width=2)
WIDTHS = Widths(heads=2, kv_heads=1, head_dim=4, value_dim=4)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tampered(Plan):
    """A plan whose ranks run other programs than it made."""

    programs: dict[int, Program]

    def program(self, rank: int) -> Program:
        return self.programs[rank]


def tamper(plan: Plan, programs: dict[int, Program]) -> Tampered:
    """The plan with some ranks' programs exchanged."""
    whole = {rank: plan.program(rank) for rank in range(plan.layout.ranks)} | programs
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return Tampered(**fields, programs=whole)


def rebuilt(
    program: Program, *, forward: Phases | None = None, backward: Phases | None = None
) -> Program:
    """The program with other operations on the same arrays."""
    return Program.build(
        arrays=list(zip(program.kinds, program.rows, strict=True)),
        held=[Held(*row) for row in program.held.tolist()],
        forward=program.forward if forward is None else forward,
        backward=program.backward if backward is None else backward,
    )


Change = Callable[[Op], Iterator[tuple[Op, ...]]]  # one operation -> what may stand in its place


def variants(program: Program, change: Change) -> Iterator[Program]:
    """The program with one operation changed, for every operation and way to change it."""
    both = (program.forward, program.backward)
    for direction, phases in enumerate(both):
        for number, phase in enumerate(phases):
            for at, op in enumerate(phase):
                for instead in change(op):
                    changed = (*phase[:at], *instead, *phase[at + 1 :])
                    new = (*phases[:number], changed, *phases[number + 1 :])
                    yield rebuilt(program, **{("forward", "backward")[direction]: new})


def drop(*kinds: type[Op]) -> Change:
    """Leave an operation out."""

    def change(op: Op) -> Iterator[tuple[Op, ...]]:
        if isinstance(op, kinds):
            yield ()

    return change


def double(*kinds: type[Op]) -> Change:
    """Do an operation twice; what only overwrites its target may be done twice."""

    def change(op: Op) -> Iterator[tuple[Op, ...]]:
        overwrites = isinstance(op, Fold) and op.how != "sum" and op.into not in op.parts
        if isinstance(op, kinds) and not overwrites:
            yield op, op

    return change


def shift(op: Op) -> Iterator[tuple[Op, ...]]:
    """Move one block of a task or fold by one row."""
    if isinstance(op, Attend | AttendGrad):
        for role, block in op._asdict().items():
            moved = block._replace(start=block.start + 1, stop=block.stop + 1)
            yield (op._replace(**{role: moved}),)
    if isinstance(op, Fold):
        into = op.into
        yield (op._replace(into=into._replace(start=into.start + 1, stop=into.stop + 1)),)
        part = op.parts[-1]
        moved = part._replace(start=part.start + 1, stop=part.stop + 1)
        yield (op._replace(parts=(*op.parts[:-1], moved)),)


def shorten(op: Op) -> Iterator[tuple[Op, ...]]:
    """Leave the last key of a task out."""
    if isinstance(op, Attend | AttendGrad):
        fewer = op._replace(kv=op.kv._replace(stop=op.kv.stop - 1))
        yield (fewer,)
        if isinstance(fewer, AttendGrad):
            yield (fewer._replace(dkv=fewer.dkv._replace(stop=fewer.dkv.stop - 1)),)


def refold(op: Op) -> Iterator[tuple[Op, ...]]:
    """Combine in another way, but where that comes to the same: into zeros, or of one part."""
    if isinstance(op, Fold):
        same = {op.how, "cat"} if op.how == "sum" else {op.how}
        if op.how in ("cat", "lse") and len(op.parts) == 1:
            same = {"cat", "lse"}
        yield from ((op._replace(how=how),) for how in FOLDS if how not in same)


def drop_send(op: Op) -> Iterator[tuple[Op, ...]]:
    """Leave one message, or one block of it, out."""
    if isinstance(op, Post):
        for number, (peer, blocks) in enumerate(op.sends):
            before, after = op.sends[:number], op.sends[number + 1 :]
            yield (op._replace(sends=(*before, *after)),)
            yield (op._replace(sends=(*before, (peer, blocks[1:]), *after)),)


def drop_receive(op: Op) -> Iterator[tuple[Op, ...]]:
    """Do not receive one message."""
    if isinstance(op, Post):
        for number in range(len(op.recvs)):
            yield (op._replace(recvs=(*op.recvs[:number], *op.recvs[number + 1 :])),)


def garble(op: Op) -> Iterator[tuple[Op, ...]]:
    """Send a block of a message from one row further on, or in another place of the message."""
    if isinstance(op, Post):
        for number, (peer, blocks) in enumerate(op.sends):
            for at, block in enumerate(blocks):
                moved = block._replace(start=block.start + 1, stop=block.stop + 1)
                others = [(*blocks[:at], moved, *blocks[at + 1 :])]
                if at:
                    others.append((*blocks[: at - 1], block, blocks[at - 1], *blocks[at + 1 :]))
                for other in others:
                    sends = (*op.sends[:number], (peer, other), *op.sends[number + 1 :])
                    yield (op._replace(sends=sends),)


def waits_first(phases: Phases) -> Phases:
    """Receive and wait before sending, at the first exchange."""
    ops = [op for phase in phases for op in phase]
    at, post = next((at, op) for at, op in enumerate(ops) if isinstance(op, Post))
    early = (post._replace(sends=()), Wait(post.tag), post._replace(recvs=()))
    return ((*ops[:at], *early, *ops[at + 1 :]),)


def busy_plan(algorithm: str, *, kind: LayerKind = KIND) -> Plan:
    """Three ranks, in which every operation matters: each chunk of the ring is seen by each rank;
    under distca tasks move and keys are gathered."""
    if algorithm == "ring":
        return make_plan(
            cut([1537, 40, 1], ranks=3, layout="spread"),
            kind=kind,
            options=PlanOptions(algorithm="ring"),
        )
    made = make_plan(
        cut([1500, 37, 301, 1, 500], ranks=3, layout="contiguous"), kind=kind, options=PlanOptions()
    )
    assert (made.tasks[:, 3] != made.tasks[:, 4]).sum() >= 2
    return made


any_plan = given(
    lengths=st.lists(
        st.one_of(st.integers(1, 4), st.integers(1, 60), st.integers(200, 600)),
        min_size=1,
        max_size=5,
    ),
    ranks=st.integers(1, 4),
    window=WINDOWS,
    causal=st.booleans(),
    tolerance=st.sampled_from([0.0, 0.05, 0.5]),
    layout=st.sampled_from(LAYOUTS),
    other=st.sampled_from(("charm", "ulysses")),
)


def planners_are_accepted(
    lengths: list[int],
    ranks: int,
    window: int,
    causal: bool,
    tolerance: float,
    layout: str,
    other: str,
) -> None:
    """Check every planner that needs no topology on these documents, and one of the others."""
    kind = replace(KIND, window=window, causal=causal, heads=ranks)
    plans = [(at, algorithm) for at in LAYOUTS for algorithm in ("distca", "ring")]
    for at, algorithm in [*plans, (layout, other)]:
        held = cut(lengths, ranks=ranks, layout=at)
        check(
            make_plan(
                held, kind=kind, options=PlanOptions(algorithm=algorithm, tolerance=tolerance)
            )
        )


@any_plan
@examples(150)
def test_plans_of_random_document_sets_are_accepted(**drawn: Any) -> None:
    planners_are_accepted(**drawn)


@pytest.mark.slow
@any_plan
@examples(1000)
def test_plans_of_a_thousand_document_sets_are_accepted(**drawn: Any) -> None:
    planners_are_accepted(**drawn)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "window"), [("distca", 64, 0), ("distca", 64, 200), ("ring", 16, 0)]
)
def test_many_ranks_are_accepted(algorithm: str, ranks: int, window: int) -> None:
    noise = np.random.default_rng(0)
    lengths = [3000, *np.exp(noise.uniform(0, 7, 6 * ranks)).astype(int).tolist()]
    for layout in ("contiguous", "spread"):
        held = cut(lengths, ranks=ranks, layout=layout)
        check(
            make_plan(
                held, kind=replace(KIND, window=window), options=PlanOptions(algorithm=algorithm)
            )
        )


CHANGES: dict[str, Change] = {
    "drop-task": drop(Attend, AttendGrad),
    "double-task": double(Attend, AttendGrad),
    "shift-block": shift,
    "shorten-keys": shorten,
    "drop-send": drop_send,
    "drop-receive": drop_receive,
    "garble-message": garble,
    "drop-post": drop(Post),
    "drop-wait": drop(Wait),
    "double-wait": double(Wait),
    "drop-fold": drop(Fold),
    "double-fold": double(Fold),
    "other-fold": refold,
}


@pytest.mark.parametrize(
    ("algorithm", "causal"), [("distca", True), ("ring", True), ("distca", False)]
)
@pytest.mark.parametrize("change", CHANGES)
def test_every_mutation_is_rejected(algorithm: str, change: str, causal: bool) -> None:
    plan = busy_plan(algorithm, kind=replace(KIND, causal=causal))
    check(tamper(plan, {rank: rebuilt(plan.program(rank)) for rank in range(3)}))
    tried = 0
    for rank in range(3):
        for program in variants(plan.program(rank), CHANGES[change]):
            with pytest.raises(PlanError, match="rank|no progress|never received"):
                check(tamper(plan, {rank: program}))
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("algorithm", ["distca", "ring"])
def test_a_wait_cycle_names_who_waits_for_whom(algorithm: str) -> None:
    plan = make_plan(
        cut([1537, 40, 1], ranks=3, layout="spread"),
        kind=KIND,
        options=PlanOptions(algorithm=algorithm),
    )
    programs = {
        rank: rebuilt(plan.program(rank), forward=waits_first(plan.program(rank).forward))
        for rank in range(3)
    }
    with pytest.raises(PlanError, match=r"no progress: (rank . waits for . \(tag 0\)(; )?){3}"):
        check(tamper(plan, programs))


def test_errors_name_rank_and_rows() -> None:
    plan = busy_plan("ring")
    first = plan.program(1).forward[0]
    with pytest.raises(PlanError, match=r"rank 1: exchanges \[0\] are never waited for"):
        only = tuple(op for op in first if op != Wait(0))
        check(tamper(plan, {1: rebuilt(plan.program(1), forward=(only,))}))
    with pytest.raises(PlanError, match=r"rank 1: waits for 0, never posted"):
        check(tamper(plan, {1: rebuilt(plan.program(1), forward=((Wait(0), *first),))}))
    with pytest.raises(PlanError, match=r"rank 1: out differs in rows \[0 1 2 3 4 5 6 7\]"):
        lost = tuple(op for op in first if not isinstance(op, Fold) or op.how != "cat")
        check(tamper(plan, {1: rebuilt(plan.program(1), forward=(lost,))}))
    with pytest.raises(PlanError, match=r"document 0 attends to 1"):
        swapped = {
            d: next(op for op in first if isinstance(op, Attend) and in_document(plan, op, d))
            for d in (0, 1)
        }
        mixed = swapped[0]._replace(kv=swapped[1].kv)
        other = tuple(mixed if op == swapped[0] else op for op in first)
        check(tamper(plan, {1: rebuilt(plan.program(1), forward=(other,))}))


def in_document(plan: Plan, op: Attend, document: int) -> bool:
    return plan.program(1).tokens(op.q)[0][0] == document


@given(plan=plans(ranks=3))
@examples(20)
def test_programs_survive_json(plan: Plan) -> None:
    for rank in range(plan.layout.ranks):
        program = plan.program(rank)
        text = json.dumps(program.to_json())
        assert text == str(program)
        again = Program.from_json(json.loads(text))
        assert (again.forward, again.backward) == (program.forward, program.backward)
        assert (again.kinds, again.rows, again.runs) == (program.kinds, program.rows, program.runs)
        assert all(column.dtype == np.int32 for column in (again.ops, again.blocks, again.held))


def test_columns_keep_every_operation() -> None:
    block, group = Block(0, 1, 3), Block(1, 0, 2, 1, 2)
    ops: tuple[Op, ...] = (
        Post(7, ((2, (block, group)), (0, (group,))), ((1, (block,)),)),
        Post(8, ((0, (block,)),), (), after=7, channel=3),
        Wait(7),
        Attend(block, group, block),
        AttendGrad(block, group, block, block, group),
        Fold(block, (group, block), "lse"),
    )
    program = Program.build(
        arrays=[("q", 4), ("kv", 2)], held=[], forward=(ops, ()), backward=(ops[1:],)
    )
    assert (program.forward, program.backward) == ((ops, ()), (ops[1:],))
    assert program.relayed(backward=False) == program.relayed(backward=True) == {7}


def test_ring_bytes_and_peaks_by_hand() -> None:
    # A key row holds k and v of 1 head x 4: 32 bytes, as does its gradient in float32; a partial's
    # row holds 2 heads x (4 + 1): 40 bytes. Each rank has 4 rows of one document.
    plan = make_plan(
        cut([8], ranks=2, layout="contiguous"), kind=KIND, options=PlanOptions(algorithm="ring")
    )
    first, second = plan.program(0), plan.program(1)
    assert sent(first, WIDTHS, backward=False) == {1: 4 * 32}
    assert sent(second, WIDTHS, backward=False) == {}  # rank 0 sees none of its keys
    assert sent(second, WIDTHS, backward=True) == {0: 4 * 32}
    assert sent_in_layer(first, WIDTHS) == 2 * sent_in_layer(second, WIDTHS) == 2 * 4 * 32
    assert peak_bytes(first, WIDTHS, backward=False) == 4 * 40
    assert peak_bytes(second, WIDTHS, backward=False) == 4 * 32 + 2 * 4 * 40
    # the visiting keys with their gradient
    assert peak_bytes(second, WIDTHS, backward=True) == 2 * 4 * 32


def test_distca_bytes_and_peaks_by_hand() -> None:
    # Rank 0 holds documents of 6 and 2 tokens, rank 1 four of 2: 24 and 12 entries. The second
    # document moves: 2 rows of q (32 bytes each) and kv (32) go, out and lse (32 + 8) return;
    # backward sends their gradient (32), delta and lse (8 each), the queries and the keys again.
    plan = make_plan(
        cut([6, 2, 2, 2, 2, 2], ranks=2, layout="contiguous"), kind=KIND, options=PlanOptions()
    )
    assert plan.work(balanced=True).tolist() == [21, 15]
    home, server = plan.program(0), plan.program(1)
    assert sent(home, WIDTHS, backward=False) == {1: 2 * (32 + 32)}
    assert sent(server, WIDTHS, backward=False) == {0: 2 * 40}
    assert sent(home, WIDTHS, backward=True) == {1: 2 * (32 + 8 + 8) + 2 * (32 + 32)}
    assert sent(server, WIDTHS, backward=True) == {0: 2 * (32 + 32)}  # dq and dkv
    assert peak_bytes(home, WIDTHS, backward=False) == 0
    assert peak_bytes(server, WIDTHS, backward=False) == 2 * (32 + 32 + 40)
    assert peak_bytes(server, WIDTHS, backward=True) == 2 * (32 + 32 + 48 + 32 + 32)
    assert peak_bytes(home, WIDTHS, backward=True) == 2 * 48  # what it sends with the queries
    half = replace(WIDTHS, itemsize=2)  # bf16: lse and gradients stay float32
    assert sent(home, half, backward=True) == {1: 2 * (16 + 8 + 8) + 2 * (16 + 16)}
    assert sent(server, half, backward=True) == {0: 2 * (32 + 32)}


def test_distca_gathers_only_keys_where_nothing_moves() -> None:
    plan = make_plan(cut([8], ranks=2, layout="contiguous"), kind=KIND, options=PlanOptions())
    left, right = plan.program(0), plan.program(1)
    assert sent(left, WIDTHS, backward=False) == {1: 4 * 32}
    assert sent(right, WIDTHS, backward=False) == {}
    assert sent(left, WIDTHS, backward=True) == {1: 4 * 32}
    assert sent(right, WIDTHS, backward=True) == {0: 4 * 32}
    assert peak_bytes(right, WIDTHS, backward=True) == 8 * 32 + 8 * 32


def test_head_groups_count_their_share() -> None:
    widths = Widths(heads=8, kv_heads=4, head_dim=16, value_dim=8, state=6, itemsize=2)
    assert widths.row("kv") == 4 * (16 + 8) * 2
    assert widths.row("kv", heads=(1, 1)) * 4 == widths.row("kv")
    assert widths.row("grad", heads=(0, 2)) * 2 == widths.row("grad") == 8 * (8 * 2 * 2 + 4)
    assert widths.row("state") == 8 * 8 * 4  # of its six rows each
    assert widths.row("matrix") == 4 * 6 * 4


def test_lock_step_runs_programs_without_attention() -> None:
    held, state = cut([9], ranks=3, layout="contiguous"), state_scan.State(4, "row")
    chain = {
        r: made
        for r in range(3)
        if (made := state_scan.scan_program(held, rank=r, state=state, schedule="chain", pieces=2))
    }
    assert len(chain) == 3
    for backward in (False, True):
        lock_step(chain, backward=backward)
    lone = {0: chain[0], 1: chain[1]}
    with pytest.raises(PlanError, match="sent but never received"):
        lock_step(lone, backward=False)
