"""Count what plans move, without programs; and run the planners' bench at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import LENGTHS, WINDOWS, examples
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import plan as bench
from benchmarks.__main__ import main
from benchmarks.traffic import traffic
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.operations import Post

ROW = {"q": 6, "out": 6, "part": 12, "kv": 4}  # elements; a partial's count twice


@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    window=WINDOWS,
    causal=st.booleans(),
    tolerance=st.sampled_from([0.0, 0.3]),
    speeds=st.sampled_from([(), (1.0, 0.5)]),
)
@examples(80)
def test_traffic_is_what_the_programs_send(
    lengths: list[int],
    ranks: int,
    layout: str,
    window: int,
    causal: bool,
    tolerance: float,
    speeds: tuple[float, ...],
) -> None:
    kind = LayerKind(window=window, causal=causal, query_width=6, key_value_width=4)
    held = cut(lengths, ranks=ranks, layout=layout)
    plan = make_plan(held, kind=kind, options=PlanOptions(tolerance=tolerance, speeds=speeds))
    moved = np.zeros((2, plan.processes), np.int64)
    for rank in range(plan.processes):
        program = plan.program(rank)
        posts = [op for phase in program.forward for op in phase if isinstance(op, Post)]
        for peer, blocks in (message for post in posts for message in post.sends):
            size = sum((b.stop - b.start) * ROW[program.kinds[b.array]] for b in blocks)
            moved[:, [rank, peer]] += np.array([[size, 0], [0, size]])
    counted = traffic(held, plan.tasks, kind=kind, splits=plan.splits, processes=plan.processes)
    assert counted.elements(kind).tolist() == moved.tolist()


def test_lengths_follow_their_table_and_fill_the_batch() -> None:
    lengths = bench.draw(bench.TABLES["pretrain"], seed=0, tokens=10**8)
    assert sum(lengths) == 10**8 and max(lengths) <= 131072
    assert sum(n > 65536 for n in lengths) / len(lengths) == pytest.approx(0.0053, abs=0.001)
    assert max(bench.draw({1000: 1.0}, seed=1, tokens=2000)) == 500  # a quarter of the batch
    assert len(bench.draw(bench.TABLES["prolong"], seed=0, tokens=10**6, documents=7)) == 7


def test_the_summary_takes_the_worst_balance_and_the_median_exchange() -> None:
    names = ("attention_max_over_mean", "layout_max_over_mean", "short_shards")
    seeds = [
        dict.fromkeys((*names, "max_exchange_vs_allgather", "plan_ms"), float(x)) for x in (1, 2, 6)
    ]
    row = bench.summary(seeds)
    assert {row[name] for name in names} == {6.0}
    assert (row["max_exchange_vs_allgather"], row["plan_ms"]) == (2.0, 2.0)
    assert row["worst_exchange_vs_allgather"] == 6.0


def test_the_command_writes_tables_by_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench.run,
        "__kwdefaults__",
        dict(
            ranks=(8,),
            tokens=16384,
            seeds=3,
            counted={8: 40},
            contiguous=(8,),
            servers=((8, 8),),
            domains=(Levels((2, 4)), 40),
        ),
    )
    assert main(["plan", "--json", str(tmp_path / "f")]) == 0
    report = json.loads((tmp_path / "f").read_text())
    nested = report.pop("domains")
    assert set(report) == {"pretrain", "prolong", "buckets", "counted", "contiguous", "servers"}
    assert set(nested) == {"charm", "ring", "ulysses"}
    assert len({row["operations"] for row in nested.values()}) == 3
    for row in nested.values():
        assert row["documents"] == 40 and row["plan_ms"] > 0 and row["program_ms"] > 0
    assert report["counted"]["8"]["documents"] == 40
    assert report["contiguous"]["8"]["layout_max_over_mean"] > 1.5
    for table in report.values():
        (row,) = table.values()
        assert 1 <= row["attention_max_over_mean"] <= 1.05
        assert 0 < row["max_exchange_vs_allgather"] < 1
        assert row["plan_ms"] > 0 and row["documents"] >= 10
    assert "pretrain, 8 ranks" in capsys.readouterr().err
