"""Run charm and ring: exact, with the bits, bytes and peaks of the plan at any timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Rows, examples, nan_memory, reference, run_lock_step
from hypothesis import given
from hypothesis import strategies as st
from late_channels import LateHub, assert_delays_change_nothing

from hf_longctx.comm.channels import sent_over_all
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.hierarchical_units import queries_are_lighter
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.counts import sent_in_layer
from hf_longctx.runtime.executor import Account

MASKS: list[dict[str, Any]] = [{}, {"causal": False}, {"window": 9}]
ONE_TO_EIGHT = [(1,), (2,), (3,), (2, 2), (5,), (2, 3), (7,), (2, 2, 2)]


def documents(levels: Levels, *, layout: str) -> list[int]:
    """Some of one token, and shares of ranks that differ: where they lie end to end one ends at a
    domain's edge, else one lies on all ranks."""
    total = 12 * levels.ranks + levels.ranks // 2
    if layout == "zigzag":
        return [1, total - 7, 1, 5]
    whole = cut([total], ranks=levels.ranks, layout=layout)
    edge = sum(whole.rows(rank) for rank in range(levels.below(0)))
    return [1, edge - 1, 1, total - edge - 1] if total > edge + 1 else [1, total - 1]


@pytest.mark.parametrize("sizes", ONE_TO_EIGHT, ids=str)
@pytest.mark.parametrize("name", ["charm", "ring"])
def test_ranks_compute_what_one_process_does(name: str, sizes: tuple[int, ...]) -> None:
    levels = Levels(sizes)
    for turn, kv_heads in enumerate((1, 2, 4, 8)):
        sees = MASKS[(turn + levels.ranks) % len(MASKS)]
        layout = ("contiguous", "zigzag")[turn % 2]
        lengths = documents(levels, layout=layout)
        rows = Rows.random(sum(lengths), heads=8, kv_heads=kv_heads)
        held = cut(lengths, ranks=levels.ranks, layout=layout)
        plan = make_plan(
            held, kind=rows.kind(**sees), options=PlanOptions(algorithm=name, topology=levels)
        )
        with nan_memory():
            ours = run_lock_step(plan, rows, seed=turn)
        assert ours.error(reference(rows, lengths, **sees)) < 1e-12, (kv_heads, sees, layout)


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["keys", "queries"])
def test_random_delays_of_each_message_leave_bits_bytes_and_peaks(
    kv_heads: int, rank_pool: Any
) -> None:
    lengths, levels = [57, 1, 40, 23], Levels((2, 2))
    rows = Rows.random(sum(lengths), kv_heads=kv_heads, dtype=torch.float32)
    held = cut(lengths, ranks=4, layout="zigzag")
    plan = make_plan(
        held, kind=rows.kind(), options=PlanOptions(algorithm="charm", topology=levels)
    )
    assert queries_are_lighter(plan.layout, plan.kind, levels=plan.levels) == (kv_heads == 2)
    assert all(plan.program(rank).relayed(backward=b) for rank in range(4) for b in (False, True))
    found = assert_delays_change_nothing(plan, rows, seeds=5, pool=rank_pool)
    assert found.error(reference(rows, lengths)) < 1e-4


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=2),
    sizes=st.sampled_from([(2, 2), (2, 1), (3, 1), (2, 1, 2)]),
    name=st.sampled_from(["charm", "charm", "ring"]),
    by_heads=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
    sees=st.sampled_from(MASKS),
    seed=st.integers(0, 1000),
)
@examples(200)
def test_two_hundred_plans_end_and_send_what_is_planned(
    lengths: list[int],
    sizes: tuple[int, ...],
    name: str,
    by_heads: bool,
    kv_heads: int,
    sees: dict[str, Any],
    seed: int,
) -> None:
    levels, rows = Levels(sizes), Rows.random(sum(lengths), kv_heads=kv_heads)
    held = cut(lengths, ranks=levels.ranks, layout="zigzag", levels=levels)
    size = 2 if by_heads and sizes[-1] % 2 == 0 else 1
    plan = make_plan(
        held,
        kind=rows.kind(**sees),
        options=PlanOptions(algorithm=name, topology=levels, ulysses_size=size),
    )
    channels = LateHub(levels.ranks, seed=seed).channels()
    ours = run_lock_step(plan, rows, seed=seed, channels=channels)
    assert ours.error(reference(rows, lengths, **sees)) < 1e-12
    for rank, channel in enumerate(channels):
        assert sent_over_all(channel) == sent_in_layer(plan.program(rank), rows.widths)


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["keys", "queries"])
def test_ranks_hold_no_more_where_there_are_more(kv_heads: int) -> None:
    held = {}
    for sizes in ((2, 4), (3, 4), (6, 4)):
        ranks = Levels(sizes).ranks
        rows = Rows.random(32 * ranks, kv_heads=kv_heads)
        layout = cut([32 * ranks], ranks=ranks, layout="zigzag")
        plan = make_plan(
            layout, kind=rows.kind(), options=PlanOptions(algorithm="charm", topology=Levels(sizes))
        )
        account = held[ranks] = Account()  # peaks of the rank that holds most
        run_lock_step(plan, rows, account=account)
    chunk = 32 * rows.widths.row("kv")
    assert max(held[8].peak_bytes, held[24].peak_bytes) <= held[12].peak_bytes <= 8.5 * chunk
    least, some, most = (held[ranks].message_peak_bytes for ranks in (8, 12, 24))
    assert some <= 1.1 * least  # two domains have less to pass on
    assert most <= 1.02 * some <= 11 * chunk
