"""Exchange in head groups and parts of rows: exact, with the planned bytes and peaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import (
    SCALE,
    Results,
    Rows,
    differentiate,
    gather,
    nan_memory,
    reference,
    root_mean_square,
    run_threads,
    shard,
    threads,
)
from test_checker import CHANGES, KIND, rebuilt, tamper, variants
from torch import Tensor

from hf_longctx.comm.channels import Hub
from hf_longctx.config import LongCtxArguments
from hf_longctx.kernels.reference import attention
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners import exchange
from hf_longctx.planning.planners.key_splits import Assignment
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.planning.program.counts import peak_bytes, sent_in_layer
from hf_longctx.planning.program.message_queue import PlanError
from hf_longctx.planning.program.operations import Attend, AttendGrad, Block, Op, Post, Wait
from hf_longctx.planning.program.program import Program
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account

LENGTHS = [900, 1, 37, 260, 129, 2, 3]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows make a part, so that short documents are cut as long ones are."""
    monkeypatch.setattr(exchange, "PART_ROWS", 64)


def planned(rows: Rows, *, ranks: int, overlap: str = "heads", **given) -> Plan:
    """Contiguous, so that tasks move and keys are gathered."""
    sees = {name: given.pop(name) for name in ("window", "causal") if name in given}
    layout = cut(LENGTHS, ranks=ranks, layout=given.pop("layout", "contiguous"))
    kind = rows.kind(**sees)
    return make_plan(
        layout, kind=kind, options=PlanOptions(tolerance=0.0, overlap=overlap, **given)
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "groups"), [(4, 2, 2), (6, 3, 3), (10, 5, 4), (8, 8, 4), (3, 1, 1)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)
def test_ranks_compute_what_one_process_does(
    ranks: int, heads: int, kv_heads: int, groups: int
) -> None:
    rows = Rows.random(sum(LENGTHS), heads=heads, kv_heads=kv_heads, head_dim=4)
    plan = planned(rows, ranks=ranks)
    assert len(plan.groups) == groups
    with nan_memory():
        run = run_threads(plan, rows)
    assert run.results.error(reference(rows, LENGTHS)) < 1e-12
    whole = planned(rows, ranks=ranks, overlap="none")
    for rank in range(ranks):
        program = plan.program(rank)
        assert run.sent[rank] == sent_in_layer(program, rows.widths)
        assert run.sent[rank] == sent_in_layer(whole.program(rank), rows.widths)
        peak = max(peak_bytes(program, rows.widths, backward=b) for b in (False, True))
        assert run.accounts[rank].peak_bytes == peak
    assert plan.digest != whole.digest  # flags that differ between ranks are found out
    if groups == 1:
        assert all(str(plan.program(r)) == str(whole.program(r)) for r in range(ranks))


@pytest.mark.parametrize("layout", ["contiguous", "spread"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [0, 50], ids="window{}".format)
@pytest.mark.parametrize("speeds", [(), (1.0, 0.5)], ids=["in-place", "servers"])
def test_masks_and_servers(
    layout: str, causal: bool, window: int, speeds: tuple[float, ...]
) -> None:
    rows = Rows.random(sum(LENGTHS), heads=4, kv_heads=2)
    sees = {"window": window, "causal": causal}
    plan = planned(rows, ranks=3, layout=layout, speeds=speeds, **sees)
    check(plan)
    run = run_threads(plan, rows)
    assert run.results.error(reference(rows, LENGTHS, **sees)) < 1e-12


def test_softcap_sinks_and_value_heads_of_another_size() -> None:
    noise = torch.Generator().manual_seed(1)
    tokens, heads, kv_heads = sum(LENGTHS), 6, 3
    shapes = {"q": (heads, 8), "k": (kv_heads, 8), "v": (kv_heads, 5), "grad": (heads, 5)}
    rows = Rows(
        **{
            name: torch.randn(tokens, *shape, dtype=torch.float64, generator=noise)
            for name, shape in shapes.items()
        }
    )
    sinks = torch.randn(heads, dtype=torch.float64, generator=noise)
    plan, options = planned(rows, ranks=3), {"scale": SCALE, "softcap": 5.0}
    channels = Hub(3, timeout=20.0).channels()
    shards: dict[int, Results] = {}

    def work(rank: int) -> None:
        layer = Layer(plan.program(rank), channels[rank], Scoring(**options), Account())
        own = shard(plan.layout, rank, rows)
        shards[rank] = differentiate(lambda q, k, v: attend(layer, q, k, v, sinks=sinks)[0], own)

    threads(work, ranks=3)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, lengths=LENGTHS, sinks=sinks, **options)

    right = differentiate(alone, rows)
    assert gather(plan.layout, [shards[r] for r in range(3)]).error(right) < 1e-12


def test_bf16_is_as_exact_as_whole_exchanges() -> None:
    samples = [
        Rows.random(sum(LENGTHS), heads=6, kv_heads=3, head_dim=5, dtype=torch.bfloat16, seed=seed)
        for seed in range(3)
    ]
    right = [reference(rows.to(torch.float64), LENGTHS) for rows in samples]
    split, whole = (
        root_mean_square(
            [run_threads(planned(rows, ranks=3, overlap=o), rows).results for rows in samples],
            right,
        )
        for o in ("heads", "none")
    )
    for name, error in split.items():
        assert error <= 1.2 * whole[name], name


def test_small_gradients_survive_as_delta() -> None:
    rows = Rows.random(sum(LENGTHS), heads=2, kv_heads=2, dtype=torch.float32)
    tiny = replace(rows, grad=rows.grad * 1e-25)  # squares of these are 0 in float32
    assert (tiny.grad.square() == 0).all()
    plan = planned(rows, ranks=2)
    ours, right = (run_threads(plan, x).results for x in (tiny, rows))
    for name in ("dq", "dk", "dv"):
        scaled = getattr(ours, name) * 1e25
        assert torch.allclose(scaled, getattr(right, name), rtol=1e-3, atol=1e-5)


def test_results_are_sent_while_later_groups_and_own_tasks_are_due() -> None:
    layout = cut([4000, 700, 300, 1, 2000, 999], ranks=2, layout="contiguous")
    kind = replace(KIND, kv_heads=2)
    plan = make_plan(layout, kind=kind, options=PlanOptions(overlap="heads", speeds=(1.0,)))
    seen = set()
    for rank in range(plan.processes):
        start, serve, _ = plan.program(rank).forward
        posts = [op for op in start if isinstance(op, Post)]
        asked = [op for op in posts if op.sends]
        assert asked == posts[: len(asked)], "a receive of results stands before a request"
        kinds = "".join({Attend: "a", Wait: "w", Post: "p"}[type(op)] for op in serve)
        seen.add("".join(k for i, k in enumerate(kinds) if not i or k != kinds[i - 1]))
    # a rank: own, parts of group 0 and 1, own, which hides the last results; a server: the parts
    assert {"awapwapwapwapwapwapwapwapa", "wapwapwapwapwapwapwapwap"} <= seen, seen


def test_parts_bring_new_keys_alone_and_are_about_equal() -> None:
    plan = make_plan(
        cut([4096, 4096], ranks=2, layout="contiguous"), kind=KIND, options=PlanOptions()
    )
    views = [Assignment(0, 0, 4096, 0, 1, 0, 4096, 0), Assignment(1, 0, 300, 0, 1, 0, 300, 0)]
    cut_up = exchange.ExchangePlan(plan.layout, views, kind=KIND, parts=4)
    rows = [[0, 0, 1152], [0, 1152, 2176], [0, 2176, 3328], [0, 3328, 4096], [1, 0, 300]]
    assert [list(s[:3]) for s in cut_up.served[1]] == rows
    assert [s.part for s in cut_up.served[1]] == [0, 1, 2, 3, 3]
    first = [cut_up.keys_of(0, 1, part) for part in range(4)]
    last = [cut_up.keys_of(0, 1, part, last=True) for part in range(4)]
    edges = [0, 1152, 2176, 3328, 4096]
    assert first == [[(0, edge)] for edge in pairwise(edges)]
    assert last == [[], [], [], [(0, (0, 4096))]]


def busy_plan() -> Plan:
    layout = cut([1500, 37, 301, 1, 500], ranks=3, layout="contiguous")
    return make_plan(layout, kind=replace(KIND, kv_heads=3), options=PlanOptions(overlap="heads"))


def other_head(op: Op) -> list[tuple[Op, ...]]:
    """Take one block of a task from the next head group."""
    if not isinstance(op, Attend | AttendGrad):
        return []
    blocks = op._asdict().items()
    return [(op._replace(**{role: b._replace(head=(b.head + 1) % 3)}),) for role, b in blocks]


def crossed_message(op: Op) -> list[tuple[Op, ...]]:
    """Send or receive the next group's heads."""

    def moved(messages: tuple[tuple[int, tuple[Block, ...]], ...]):
        (peer, blocks), *others = messages
        crossed = tuple(b._replace(head=(b.head + 1) % 3) for b in blocks)
        return ((peer, crossed), *others)

    if not isinstance(op, Post):
        return []
    found: list[tuple[Op, ...]] = []
    if op.sends:
        found.append((op._replace(sends=moved(op.sends)),))
    if op.recvs:
        found.append((op._replace(recvs=moved(op.recvs)),))
    return found


HEAD_CHANGES = {
    "other-head": other_head,
    "crossed-message": crossed_message,
    **{name: CHANGES[name] for name in ("drop-task", "double-task", "drop-post", "drop-fold")},
}


@pytest.mark.parametrize("change", HEAD_CHANGES)
def test_every_mutation_of_a_group_is_rejected(change: str) -> None:
    plan = busy_plan()
    check(tamper(plan, {}))
    tried = 0
    for rank in range(3):
        for number, program in enumerate(variants(plan.program(rank), HEAD_CHANGES[change])):
            if number % 3 == rank:  # every third: many are alike
                with pytest.raises(PlanError, match="rank|no progress|never received"):
                    check(tamper(plan, {rank: program}))
                tried += 1
    assert tried >= 3


def without_last_group(program: Program) -> Program:
    """The program without anything on its last head."""
    first = 2 * 4 * 3  # tag of the third group: three tags for each of four parts

    def kept(op: Op) -> bool:
        if isinstance(op, Wait):
            return op.tag < first
        if isinstance(op, Post):
            return op.tag < first
        blocks = (op.into,) if hasattr(op, "parts") else op
        return all(b.head < 2 for b in blocks)

    forward, backward = (
        tuple(tuple(op for op in phase if kept(op)) for phase in phases)
        for phases in (program.forward, program.backward)
    )
    return rebuilt(program, forward=forward, backward=backward)


def test_a_group_that_all_ranks_leave_out_is_found() -> None:
    plan = busy_plan()
    programs = {rank: without_last_group(plan.program(rank)) for rank in range(3)}
    with pytest.raises(PlanError, match="rank [01]: out differs"):
        check(tamper(plan, programs))


def test_only_distca_overlaps_heads() -> None:
    with pytest.raises(ValueError, match="'heads' for 'ring': use none or, with distca"):
        make_plan(
            cut([8], ranks=2, layout="contiguous"),
            kind=KIND,
            options=PlanOptions(algorithm="ring", overlap="heads"),
        )
    arguments = LongCtxArguments(longctx_overlap="heads")
    assert arguments.plan_overlap("distca") == "heads"
    with pytest.raises(ValueError, match="longctx_overlap=heads: the exchanges of 'ring'"):
        arguments.plan_overlap("ring")
