"""Split tasks by keys where that saves bytes: exact, and merged in one order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import LENGTHS as ANY_LENGTHS
from helpers import (
    WINDOWS,
    Results,
    Rows,
    assert_bf16_rule,
    examples,
    nan_memory,
    reference,
    run_lock_step,
)
from helpers import run_threads as run
from hypothesis import given
from hypothesis import strategies as st
from test_checker import CHANGES, tamper, variants

from hf_longctx.kernels.reference import visible
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, cut
from hf_longctx.planning.planners.key_splits import NO_SPLITS
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.planning.program.counts import peak_bytes, sent_in_layer
from hf_longctx.planning.program.message_queue import PlanError
from hf_longctx.planning.program.operations import Fold, Op

# The second and the fourth document end a few rows behind a rank's edge; the last rank is busiest.
EDGES = [100, 550, 300, 340, 640]
# One document spans four ranks, the last one of which is busiest, and ends on the fifth.
SPANNING = [1290, 310]


def planned(rows: Rows, lengths: list[int], *, overlap: str = "none", **sees) -> Plan:
    """So wide a tolerance that nothing moves for balance; only keys are lent."""
    layout = cut(lengths, ranks=3 if lengths is EDGES else 5, layout="contiguous")
    plan = make_plan(
        layout, kind=rows.kind(**sees), options=PlanOptions(tolerance=2.0, overlap=overlap)
    )
    assert len(plan.splits), "no task is split"
    return plan


def bytes_sent(plan: Plan, rows: Rows) -> int:
    return sum(sent_in_layer(plan.program(r), rows.widths) for r in range(plan.processes))


@pytest.mark.parametrize("overlap", ["none", "heads"])
@pytest.mark.parametrize(
    ("lengths", "causal", "window"),
    [(EDGES, True, 0), (EDGES, False, 0), (EDGES, True, 200), (EDGES, False, 200),
     (SPANNING, True, 0)],
    ids=["causal", "bidirectional", "window", "bidirectional-window", "spanning"],
)  # fmt: skip
def test_lent_keys_are_exact_and_save_bytes(
    lengths: list[int], overlap: str, causal: bool, window: int
) -> None:
    rows = Rows.random(sum(lengths), heads=4, kv_heads=2, head_dim=8)
    sees = {"window": window, "causal": causal}
    plan = planned(rows, lengths, overlap=overlap, **sees)
    check(plan)
    with nan_memory():
        ran = run(plan, rows)
    assert ran.results.error(reference(rows, lengths, **sees)) < 1e-12
    for rank in range(plan.processes):
        program = plan.program(rank)
        assert ran.sent[rank] == sent_in_layer(program, rows.widths)
        peak = max(peak_bytes(program, rows.widths, backward=b) for b in (False, True))
        assert ran.accounts[rank].peak_bytes == peak
    assert sum(ran.sent) < bytes_sent(replace(plan, splits=NO_SPLITS), rows)


def test_rows_of_one_task_see_keys_of_several_owners() -> None:
    rows = Rows.random(sum(SPANNING), heads=8, kv_heads=8, head_dim=16, dtype=torch.bfloat16)
    plan = planned(rows, SPANNING)
    per_task = np.bincount(plan.splits[:, 0])
    assert per_task.max() >= 2
    ours = run(plan, rows).results
    assert_bf16_rule(
        lambda rows: run_lock_step(planned(rows, SPANNING), rows),
        lengths=SPANNING,
        samples=2,
        heads=8,
        kv_heads=8,
        head_dim=16,
    )
    first = run_lock_step(plan, rows)
    assert torch.equal(first.out, ours.out)
    for seed in (1, 2):  # partials are merged in the order of their keys, not of arrival
        again = run_lock_step(plan, rows, seed=seed)
        for name in Results.__slots__:
            assert torch.equal(getattr(again, name), getattr(first, name))


def test_a_few_rows_go_to_the_long_prefix() -> None:
    rows = Rows.random(sum(EDGES), heads=4, kv_heads=2, head_dim=8)
    plan = planned(rows, EDGES)
    assert plan.tasks[2].tolist() == [1, 544, 550, 1, 1]
    assert plan.splits[0].tolist() == [2, 0, 0, 544]
    # 6 rows of q, then of q, grad_out, delta and lse; and out, lse and dq of 3 rows of rank 2
    sent = sent_in_layer(plan.program(1), rows.widths)
    assert sent == 8 * (6 * (32 + 32 + 32 + 4 + 4) + 3 * (32 + 4 + 32))


@given(
    lengths=ANY_LENGTHS,
    ranks=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
    window=WINDOWS,
    causal=st.booleans(),
    tolerance=st.sampled_from([0.0, 0.05, 0.5, 3.0]),
    speeds=st.sampled_from([(), (0.5,)]),
)
@examples(150)
def test_key_splits_keep_the_balance_and_the_work(
    lengths: list[int], ranks: int, layout: str, window: int, causal: bool, tolerance: float,
    speeds: tuple[float, ...],
) -> None:  # fmt: skip
    held = cut(lengths, ranks=ranks, layout=layout)
    kind = LayerKind(window=window, causal=causal, query_width=4, key_value_width=2)
    plan = make_plan(held, kind=kind, options=PlanOptions(tolerance=tolerance, speeds=speeds))
    whole = replace(plan, splits=NO_SPLITS)
    assert plan.work(balanced=True).sum() == whole.work(balanced=True).sum()
    assert plan.attention_max_over_mean() <= whole.attention_max_over_mean() * (1 + 1e-12)
    check(plan)


def test_nothing_is_lent_where_nothing_shall_move() -> None:
    layout = cut(EDGES, ranks=3, layout="contiguous")
    plan = make_plan(layout, kind=LayerKind(), options=PlanOptions(tolerance=float("inf")))
    assert len(plan.splits) == 0


def fewer_parts(op: Op) -> Iterator[tuple[Op, ...]]:
    """Leave one partial of a merge out."""
    if isinstance(op, Fold) and op.how == "lse":
        for at in range(len(op.parts)):
            yield (op._replace(parts=op.parts[:at] + op.parts[at + 1 :]),)


@pytest.mark.parametrize(
    "change", ["fewer-parts", "drop-task", "double-task", "shorten-keys", "drop-fold"]
)
def test_every_mutation_is_rejected(change: str) -> None:
    plan = planned(Rows.random(sum(SPANNING)), SPANNING)
    changes = {**CHANGES, "fewer-parts": fewer_parts}
    tried = 0
    for rank in range(5):
        for program in variants(plan.program(rank), changes[change]):
            with pytest.raises(PlanError, match="rank|no progress|never received"):
                check(tamper(plan, {rank: program}))
            tried += 1
    assert tried >= 2


@given(causal=st.booleans(), window=st.integers(0, 9), length=st.integers(1, 20), data=st.data())
@examples(200)
def test_entries_over_some_keys(
    causal: bool, window: int, length: int, data: st.DataObject
) -> None:
    ends = st.lists(st.integers(0, length), min_size=2, max_size=2).map(sorted)
    (start, stop), (low, high) = data.draw(ends), data.draw(ends)
    positions = torch.arange(length)
    seen = visible(positions[start:stop], positions[low:high], window=window, causal=causal)
    kind = LayerKind(window=window, causal=causal)
    found = kind.entries_over(*(np.asarray([x]) for x in (start, stop, low, high)), length=length)
    assert found.tolist() == [int(seen.sum())]
