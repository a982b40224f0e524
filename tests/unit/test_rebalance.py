"""Charge moves, limit balance, and leave work that cannot move."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.traffic import traffic
from hf_longctx.planning.layouts.cost import GRANULE, LayerKind
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.planners.distca import balance, tasks
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.checker import check

KIND = LayerKind(query_width=2, key_value_width=2)


def test_keys_that_a_server_has_already_are_free() -> None:
    # Two documents, each with its ends on one rank and its middle on the other.
    segments = [(0, 0, 0, 1024), (0, 0, 3072, 4096), (0, 1, 1024, 3072)]
    segments += [(1, 0, 1024, 3072), (1, 1, 0, 1024), (1, 1, 3072, 4096)]
    rows = [0, 1024, 2048, 0, 2048, 3072]
    columns = [(r, row, *of) for row, (r, *of) in zip(rows, segments, strict=True)]
    layout = Layout(np.full(2, 4096, np.int32), 2, np.asarray(columns, np.int32))
    plan = make_plan(layout, kind=KIND, options=PlanOptions(speeds=(1.0,)))
    check(plan)
    served = plan.tasks[plan.tasks[:, 4] == 2]
    assert set(served[:, 3].tolist()) == {0, 1}  # of both ranks,
    assert len(set(served[:, 0].tolist())) == 1  # but of one document
    moved = traffic(layout, plan.tasks, kind=KIND, processes=3)
    assert moved.keys_received[2] == 3072 + 640  # once, as far as the last row needs


@pytest.mark.parametrize("layout", ["spread", "contiguous"])
@pytest.mark.parametrize("speeds", [(), (1.0,), (1.0, 1.0), (0.5, 2.0)], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4], ids="ranks{}".format)
def test_lumps_of_work_are_spread_as_far_as_they_go(
    ranks: int, speeds: tuple[float, ...], layout: str
) -> None:
    # A granule of the longest document is up to a third of a process's share.
    noise = np.random.default_rng(0)
    reached = []
    for _ in range(12):
        short = np.exp(noise.uniform(0, np.log(4000), noise.integers(2, 14)))
        held = cut([*(int(n) for n in short), 4000], ranks=ranks, layout=layout)
        plan = make_plan(held, kind=KIND, options=PlanOptions(speeds=speeds))
        reached.append(plan.attention_max_over_mean())
        document, start, stop = plan.tasks[:, :3].T
        length = held.lengths[document]
        ends = {(0, s.document, s.start) for s in held.segments}
        ends |= {(1, s.document, s.stop) for s in held.segments}
        for d, a, b, n in zip(document, start, stop, length, strict=True):
            outer = (0, d, a) in ends or (1, d, b) in ends  # what is left of an item
            assert outer or n < GRANULE or b - a >= GRANULE
    assert np.median(reached) < (1.05 + 0.05 * len(speeds) if layout == "spread" else 1.25)
    assert max(reached) < (1.3 if layout == "spread" else 1.6)


@pytest.mark.parametrize("linear", [(0.0, 4e6), (0.0, 0.0), (3e6, 0.0)], ids=str)
def test_attention_makes_room_for_other_work(linear: tuple[float, float]) -> None:
    layout = cut([4096, 4096], ranks=2, layout="contiguous")
    table = balance(layout, kind=KIND, tolerance=0.05, linear=linear)
    total = _work(layout, table, processes=2) + linear
    assert total.max() <= 1.05 * total.mean()


def test_a_process_with_more_than_its_share_of_other_work_gives_its_attention_away() -> None:
    layout = cut([4096] * 3, ranks=3, layout="contiguous")
    work = _work(layout, balance(layout, kind=KIND, tolerance=0.0, linear=(0, 9e7, 0)), processes=3)
    assert work[1] == 0 and work[0] == pytest.approx(work[2], rel=0.05)


def _work(layout: Layout, table: np.ndarray, *, processes: int) -> np.ndarray:
    of = tasks(table)
    cost = KIND.entries(of[:, 1], of[:, 2], length=layout.lengths[of[:, 0]])
    return np.bincount(of[:, 4], weights=cost, minlength=processes)
