"""Run `python -m benchmarks trainer` at a tiny size: both sides train the same documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import trainer
from benchmarks.__main__ import main
from benchmarks.common import Shape
from benchmarks.peers import bfd_packs
from benchmarks.steps import Launch, figures
from benchmarks.texts import package_folder
from benchmarks.trainer import Case, measure

BUDGET = 128
# One batch of both ranks, and exactly two of TRL's packs: both sides' first step holds all of it.
LENGTHS = (128, 100, 28)
DOCUMENTS = [[(7 * n + i) % 61 + 1 for i in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64
    )
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    case = Case(folder=str(folder), documents=DOCUMENTS, tokens_per_rank=BUDGET, steps=1)
    return measure(case, launches=1)


def test_both_sides_train_the_same_documents(found: dict[str, Any]) -> None:
    ours, stock = found["ours"], found["stock"]
    assert (found["documents"], found["tokens"], found["tokens_kept_stock"]) == (3, 256, 256)
    assert ours["tokens_per_step"] == stock["tokens_per_step"] == 256
    assert ours["loss_first_step"] == pytest.approx(stock["loss_first_step"], rel=1e-4)
    assert ours["loss_first_step"] > 3  # ln 64 is 4.16


def test_it_reports_setting_ratios_and_both_sides(found: dict[str, Any]) -> None:
    for key in ("step_time_ratio", "token_time_ratio", "token_cpu_ratio", "peak_memory_ratio"):
        assert found[key] > 0, key
    assert found["attention_max_over_mean"] >= 1
    assert {"shape", "seed", "cpu", "cores", "allocator", "torch", "trl", "clock"} <= found.keys()
    for side in ("ours", "stock"):
        for key in ("seconds_per_step", "cpu_seconds_per_step", "seconds_per_1000_tokens"):
            assert found[side][key] > 0, (side, key)
        assert 0 < found[side]["bound_seconds"] == found["ours"]["bound_seconds"]
        assert all(found[side][f"peak_memory_rank{rank}"] > 0 for rank in range(2))
    json.dumps(found, allow_nan=False)


def test_bfd_cuts_documents_at_one_ranks_budget_and_keeps_their_beginnings() -> None:
    documents = [[*range(300)], [*range(300, 350)]]
    packs = bfd_packs(documents, length=BUDGET)
    held = [pack["input_ids"] for pack in packs]
    assert sorted(held) == [[*range(BUDGET)], [*range(300, 350)]]
    assert sorted(pack["seq_lengths"] for pack in packs) == [[50], [BUDGET]]


def launch(wall: list[float], tokens: int, *, peak: int, loss: float) -> Launch:
    balance = {"longctx_attention_before": 2.0, "longctx_attention_after": 1.25}
    log = {"loss": loss, "longctx_tokens": tokens, "longctx_wait_seconds": 0.5, **balance}
    return Launch(
        wall=wall,
        cpu=[seconds / 2 for seconds in wall],
        tokens=[tokens] * len(wall),
        documents=[[3, 4]] * len(wall),
        peak_memory=peak,
        history=[log, log],
    )


def test_figures_from_known_seconds() -> None:
    ours = [
        [launch([4.0, 2.0], 100, peak=7, loss=5.0), launch([3.0, 4.0], 100, peak=6, loss=5.0)],
        [launch([6.0, 6.0], 100, peak=8, loss=5.0), launch([1.0, 1.0], 100, peak=5, loss=5.0)],
    ]
    stock = [[launch([2.0, 3.0], 80, peak=4, loss=6.0), launch([2.0, 1.0], 80, peak=4, loss=6.0)]]
    shape = Shape(layers=1, hidden=2, mlp=3, heads=1, kv_heads=1, head_dim=2, vocabulary=5)
    made = figures({"ours": ours, "stock": stock}, shape=shape, rate=10.0)
    assert made["ours"]["seconds_per_step"] == (4.0 + 6.0) / 2  # the slower rank of each step
    assert made["stock"]["seconds_per_step"] == 2.5
    assert made["step_time_ratio"] == 2.0
    assert made["token_time_ratio"] == pytest.approx((5.0 / 100) / (2.5 / 80))
    assert (made["step_cpu_ratio"], made["peak_memory_ratio"]) == (2.0, 2.0)
    bound = shape.operations([3, 4, 3, 4]) / 2 / 10.0  # both ranks' documents, evenly
    assert made["ours"]["bound_seconds"] == made["stock"]["bound_seconds"] == bound
    assert made["stock"]["fraction_of_bound"] == bound / 2.5
    assert (made["ours"]["peak_memory_rank0"], made["ours"]["peak_memory_rank1"]) == (8, 6)
    assert (made["attention_max_over_mean_before"], made["attention_max_over_mean"]) == (2.0, 1.25)
    assert (made["ours"]["loss_first_step"], made["stock"]["loss_first_step"]) == (5.0, 6.0)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ValueError, match="'no_such_package'; run `make setup`"):
        package_folder("no_such_package")


def test_the_command_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "run", lambda: {"step_time_ratio": 0.5})
    assert main(["trainer", "--json", str(tmp_path / "f")]) == 0
    assert json.loads((tmp_path / "f").read_text()) == {"step_time_ratio": 0.5}
