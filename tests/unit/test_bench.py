"""Run benches at tiny sizes: keys, counts, balance, equal results on all sides, never times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import packed
from benchmarks.__main__ import main
from benchmarks.common import Shape, gradient_error, inputs

TINY = Shape(layers=2, hidden=32, mlp=48, heads=2, kv_heads=1, head_dim=16, vocabulary=64)
SETTING = {"shape", "dtype", "seed", "processes", "threads_per_process", "allocator", "cpu"}
SETTING |= {"clock", "cores", "torch", "transformers", "rounds", "documents", "tokens"}


@pytest.fixture(scope="module")
def packed_figures() -> dict[str, Any]:
    return packed.run(shape=TINY, lengths=[70, 1, 300, 29], short=[8] * 20, rounds=2)


def test_lengths_follow_the_table() -> None:
    lengths = packed.draw_lengths()
    assert lengths == [607, 51, 1928, 844, 978, 1026, 1049, 1157, 552]
    many = packed.draw_lengths(tokens=4 * 10**6)
    assert sum(many) == 4 * 10**6
    assert max(many) == 2048
    short = sum(n <= 500 for n in many) / len(many)
    assert short == pytest.approx(0.4675, abs=0.03)  # the table's first five buckets


def test_inputs_end_targets_with_their_document() -> None:
    made = inputs([3, 1, 2], vocabulary=9)
    ids = made["input_ids"][0].tolist()
    assert made["shift_labels"][0].tolist() == [ids[1], ids[2], -100, -100, ids[5], -100]
    assert made["position_ids"][0].tolist() == [0, 1, 2, 0, 0, 1]
    assert int(made["num_items_in_batch"]) == 3


def test_operations_count_products() -> None:
    shape = Shape(layers=1, hidden=2, mlp=3, heads=1, kv_heads=1, head_dim=2, vocabulary=5)
    weights = 4 * 2 * 2 + 3 * 2 * 3 + 2 * 5
    assert shape.operations([1, 2]) == 6 * weights * 3 + 7 * 2 * 2 * (1 + 3)


def test_gradient_error_sees_a_difference() -> None:
    right = [torch.ones(3), torch.tensor([1e-9])]
    assert gradient_error(right, right) == 0
    assert gradient_error([right[0] * 1.5, right[1]], right) == 0.5
    assert gradient_error([right[0], right[1] * 2], right) == pytest.approx(1e-6)  # below the floor


def test_packed_sides_compute_the_same(packed_figures: dict[str, Any]) -> None:
    for case in (packed_figures, packed_figures["short"]):
        assert case["loss_error"] < 1e-5
        assert case["grad_error"] < 1e-4


def test_packed_reports_its_setting_sides_and_bound(packed_figures: dict[str, Any]) -> None:
    short = packed_figures["short"]
    assert packed_figures.keys() >= SETTING
    assert (packed_figures["documents"], packed_figures["tokens"]) == (4, 400)
    assert (short["documents"], short["tokens"]) == (20, 160)
    for side in ("separate", "ours", "loop", "sdpa"):
        assert packed_figures[f"seconds_{side}"] > 0
        assert packed_figures[f"fraction_of_bound_{side}"] > 0
    ratios = {"speedup_vs_sdpa", "loop_speedup", "fraction_of_separate"}
    assert packed_figures.keys() >= ratios
    assert short["speedup_vs_separate"] > 0
    json.dumps(packed_figures, allow_nan=False)


def test_command_prints_nested_figures_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"speedup_vs_sdpa": 3.5, "short": {"speedup_vs_separate": 1.5}}
    monkeypatch.setattr(packed, "run", lambda: report)
    assert main(["packed", "--json", str(tmp_path / "f")]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed == [["speedup_vs_sdpa", "3.5"], ["short.speedup_vs_separate", "1.5"]]
    assert json.loads((tmp_path / "f").read_text()) == report
