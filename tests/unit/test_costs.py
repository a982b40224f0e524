"""Test measured costs: a table's arithmetic, plans that balance by it, and the commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import LENGTHS, examples
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.cli import main as cli
from hf_longctx.kernels import softmax
from hf_longctx.planning.layouts.cost import CostTable, LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, cut
from hf_longctx.planning.planners.key_splits import NO_SPLITS
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.verify import cost_profile as bench

KIND = LayerKind(query_width=2, key_value_width=2)
# A kernel that runs short pieces at a quarter, and few keys at half of its best rate.
TABLE = CostTable(
    rows=(16, 256, 1024),
    keys=(16, 1024),
    per_entry=((8e-8, 4e-8), (2e-8, 2e-8), (2e-8, 1e-8)),
)


def seconds(rows: int, keys: int, entries: int, *, table: CostTable = TABLE) -> float:
    return float(table.seconds(*(np.asarray([x]) for x in (rows, keys, entries)))[0])


@pytest.mark.parametrize(
    ("rows", "keys", "rate"),
    [
        (16, 16, 8e-8),  # a grid point
        (1024, 1024, 1e-8),
        (64, 16, 5e-8),  # half way from 16 to 256, in octaves
        (16, 128, 6e-8),
        (64, 128, 4e-8),  # half way along both: the mean of four
        (1, 1, 8e-8),  # beyond the grid, the rate of its edge
        (4096, 9999, 1e-8),
        (64, 9999, 3e-8),
    ],
)
def test_rates_are_interpolated_and_saturate(rows: int, keys: int, rate: float) -> None:
    assert seconds(rows, keys, 1000) == pytest.approx(1000 * rate)


def test_pieces_are_padded_to_tiles() -> None:
    tiled = replace(TABLE, tile=128)
    assert seconds(1024, 1024, 7, table=tiled) == seconds(1024, 1024, 7)
    one = seconds(1, 1024, 1024, table=tiled)
    assert one == pytest.approx(seconds(128, 1024, 128 * 1024, table=tiled))
    assert seconds(0, 0, 0, table=tiled) == 0.0


def test_a_table_survives_its_text_and_a_wrong_one_is_named() -> None:
    assert CostTable.from_json(TABLE.to_json()) == TABLE
    fields = json.loads(TABLE.to_json())
    rates = [[1e-9] * len(TABLE.keys)] * len(TABLE.rows)
    for wrong in (
        {"rows": [16, 16, 1024]}, {"keys": [16]}, {"tile": 0}, {"per_entry": [[0.0]]},
        {"tile": 1.5}, {"tile": None}, {"rows": [16.5, *TABLE.rows[1:]]}, {"keys": "12"},
        {"per_entry": [*rates[1:], [float("inf"), *rates[0][1:]]]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="sizes must be whole and rise, and rates be positive"):
            CostTable.from_json(json.dumps(fields | wrong))
    for text in (
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps(fields | {"per_entry": [[1.0], [1.0, 2.0]]}),
    ):
        with pytest.raises(ValueError, match="write it with hf-longctx profile"):
            CostTable.from_json(text)


def test_seconds_are_balanced_where_entries_mislead() -> None:
    # Short documents have few score entries, each of them dearer.
    layout = cut([4096, *[16] * 256, *[128] * 32], ranks=3, layout="contiguous")
    by_entries = make_plan(layout, kind=KIND, options=PlanOptions())
    by_seconds = make_plan(layout, kind=KIND, options=PlanOptions(costs=TABLE))
    check(by_seconds)
    same_tasks = replace(by_entries, options=PlanOptions(costs=TABLE))
    assert by_seconds.attention_max_over_mean() <= 1.05 < same_tasks.attention_max_over_mean()
    assert len({by_entries.digest, by_seconds.digest, same_tasks.digest}) == 3


@given(lengths=LENGTHS, ranks=st.integers(2, 4), layout=st.sampled_from(LAYOUTS))
@examples(30)
def test_plans_by_seconds_are_no_slower(lengths: list[int], ranks: int, layout: str) -> None:
    held = cut(lengths, ranks=ranks, layout=layout)
    by_entries, by_seconds = (
        make_plan(held, kind=KIND, options=PlanOptions(costs=costs)) for costs in (None, TABLE)
    )
    before = replace(
        by_entries, options=by_seconds.options, splits=NO_SPLITS
    )  # chosen to save bytes, by entries
    busiest = before.work(balanced=True).max()
    assert by_seconds.work(balanced=True).max() <= busiest * (1 + 1e-9)


def test_equal_rates_plan_as_entries_do() -> None:
    flat = replace(TABLE, per_entry=((1.0, 1.0),) * 3)
    layout = cut([4000, 700, 300, 1, 2000, 999], ranks=3, layout="contiguous")
    plans = [
        make_plan(layout, kind=KIND, options=PlanOptions(costs=costs)) for costs in (None, flat)
    ]
    assert (plans[0].tasks == plans[1].tasks).all()


@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 4),
    layout=st.sampled_from(LAYOUTS),
    window=st.sampled_from([0, 7]),
    causal=st.booleans(),
    speeds=st.sampled_from([(), (1.0, 0.5)]),
)
@examples(40)
def test_plans_by_seconds_compute_everything_once(
    lengths: list[int],
    ranks: int,
    layout: str,
    window: int,
    causal: bool,
    speeds: tuple[float, ...],
) -> None:
    kind = LayerKind(window=window, causal=causal, query_width=2, key_value_width=1)
    held = cut(lengths, ranks=ranks, layout=layout)
    check(
        make_plan(held, kind=kind, options=PlanOptions(tolerance=0.0, speeds=speeds, costs=TABLE))
    )


class Known(bench.Tasks):
    """Tasks that run, and take a microsecond per score entry whatever the machine does besides."""

    def __init__(self, sizes: list[tuple[int, int]], **given: Any) -> None:
        super().__init__(sizes, **given)
        self.entries = sum(q * (k - q) + q * (q + 1) // 2 for q, k in sizes)

    def seconds(self) -> float:
        assert super().seconds() >= 0
        return 1e-6 * self.entries


def test_the_profile_is_the_seconds_of_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Tasks", Known)
    table = bench.profile(heads=2, kv_heads=1, head_dim=8, rows=(16, 64), keys=(16, 64, 256))
    assert (table.rows, table.keys) == ((16, 64), (16, 64, 256))
    for of_rows in table.per_entry:
        assert of_rows == pytest.approx([1e-6] * len(of_rows))
    assert (bench.attend, bench.attend_grad) == (softmax.attend, softmax.attend_grad)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "cuda"), "--device cuda: no kernels for it are built yet; use cpu"),
        (("--dtype", "int8"), "--dtype int8 must be one of float32, bfloat16, float64"),
        (("--heads", "3", "--kv_heads", "2"), "--heads 3 --kv_heads 2 --head_dim 64: all must be"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_command_keeps_a_table_and_compares_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "ROWS", (16, 128))
    monkeypatch.setattr(bench, "KEYS", (16, 128, 512))
    monkeypatch.setattr(bench, "COMPARED", bench.Compared(ranks=2, tokens=512))
    shape = ("--heads", "2", "--kv_heads", "1", "--head_dim", "8")
    report = tmp_path / "report.json"
    assert cli.main(["profile", *shape, "--compare", "1", "--json", str(report)]) == 0
    (kept,) = (tmp_path / "cache" / "hf_longctx").iterdir()
    assert re.fullmatch(r"costs-cpu-.*-float32-2-1-8-[0-9.]+\.json", kept.name)
    assert CostTable.from_json(kept.read_text()).rows == (16, 128)
    figures = json.loads(report.read_text())
    assert figures["file"] == str(kept)
    for layout in ("spread", "contiguous"):
        compared = figures[layout]
        assert compared["seconds_max_over_mean_entries"] >= 1
        assert compared["seconds_max_over_mean_measured"] >= 1
    assert "16 query rows, of 16, 128" in capsys.readouterr().err
