"""Test known faults in sharding, counting and averaging over four trainers at once.

One launch runs this file as its script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_loop
from train_cases import CASES, RUNS, UNEVEN, Case, arguments, launch, main

Row = dict[str, list[int]]
TWO_AND_SIX: list[Row] = [{"input_ids": [1] * 3}, {"input_ids": [3] * 7}]
FIRST_FOUR: list[Row] = [{"input_ids": [2] * 8, "labels": [2] * 5 + [-100] * 3}]
ONE_BY_ONE = {"longctx_balance": "none", "train_sampling_strategy": "sequential"}

# Four trainers take these options; those of one trainer hold as many tokens.
NUMBERS: dict[str, tuple[list[Row], dict[str, Any]]] = {
    "accumulated": (
        TWO_AND_SIX,
        {"longctx_max_tokens_per_rank": 2, "gradient_accumulation_steps": 2},
    ),
    "grouped": (TWO_AND_SIX, {"longctx_max_tokens_per_rank": 4, "longctx_group_size": 2}),
    "first_four": (
        FIRST_FOUR,
        {
            "longctx_max_tokens_per_rank": 4,
            "longctx_group_size": 2,
            "longctx_layout": "contiguous",
        },
    ),
}

FOUR = {
    "two_of_two": Case(
        lengths=UNEVEN,
        name="charm",
        options={"longctx_max_tokens_per_rank": 40, "longctx_topology": "2x2"},
    ),
    "two_groups": Case(
        lengths=UNEVEN,
        name="charm",
        options={
            "longctx_group_size": 2,
            "longctx_max_tokens_per_rank": 80,
            "longctx_topology": "2x1",
        },
    ),
    "twelve_packs_of_two": Case(
        lengths=(48,) * 12,
        options={
            "longctx_group_size": 2,
            "longctx_max_tokens_per_rank": 24,
            "gradient_accumulation_steps": 2,
            "lr_scheduler_type": "linear",
        },
    ),
    "evaluate_ten": Case(
        lengths=(40, 25),
        evaluation={"long": (10, 10), "nothing": (1,)},
        options={"eval_strategy": "steps", "eval_steps": 1},
    ),
}


def step_of_numbers(rows: list[Row], folder: Path, **options: Any) -> dict[str, float]:
    """One step in which a target costs as much as its id: its loss and its gradient norm.

    The cost is multiplied by a weight that starts at 1, so both figures are the mean over targets.
    """
    import torch
    from tiny import tiny

    from hf_longctx import LongCtxTrainer

    model = tiny("distca", dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)

    def loss(logits: Any, num_items_in_batch: Any, shift_labels: Any, **given: Any) -> Any:
        costs = shift_labels[shift_labels != -100] * model.model.norm.weight[0]
        return costs.sum() / num_items_in_batch + 0.0 * logits.sum()  # all weights take part

    given = arguments(Case(lengths=()), folder, **ONE_BY_ONE, **options)
    trainer = LongCtxTrainer(model=model, args=given, train_dataset=rows)
    model.loss_function = loss  # the trainer would refuse a model that came with it
    trainer.train()
    (step,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    return {key: step[key] for key in ("loss", "grad_norm")}


def run_numbers(name: str, folder: Path) -> dict[str, Any]:
    """All of `NUMBERS`."""
    return {key: step_of_numbers(rows, folder, **how) for key, (rows, how) in NUMBERS.items()}


def run_evaluation(name: str, folder: Path) -> dict[str, Any]:
    """As any case, and the rows that each rank holds of the evaluation set's batch."""
    from train_cases import run, trainer_of

    loader = trainer_of(CASES[name], folder).get_eval_dataloader("long")
    (batch,) = loader
    rows = int(batch["input_ids"].shape[1])
    return run(name, folder) | {"rows": rows, "padding": int((batch["labels"] == -100).sum())}


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> dict[str, Any]:
    """What each case came to."""
    folder = tmp_path_factory.mktemp("four")
    ended = launch(folder, *FOUR, "one_document", "numbers", processes=4, script=__file__)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    found = json.loads((folder / "results.json").read_text())
    assert found["world"] == 4
    return found["cases"]


def steps(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in case["history"] if "loss" in entry]


def test_b50_twelve_packs_over_two_groups_of_two_take_three_steps(four):
    case = four["twelve_packs_of_two"]
    assert case["batches"] == 6 and case["steps"] == case["max_steps"] == case["scheduler"] == 3
    (arithmetic,) = [line for line in case["lines"] if "trainers" in line]
    assert "4 trainers = 2 group(s) of 2 ranks; a batch holds 2 x 24 = 48 tokens" in arithmetic
    assert "12 packs / 2 group(s) = 6 batches per epoch, accumulated 2 at a time" in arithmetic
    assert arithmetic.endswith("3 steps; overlap none, 0 server(s)")
    right = plain_loop(FOUR["twelve_packs_of_two"], world=4)
    assert [e["loss"] for e in steps(case)] == pytest.approx(right.losses, rel=1e-5)
    assert [e["grad_norm"] for e in steps(case)] == pytest.approx(right.norms, rel=1e-5)


@pytest.mark.parametrize("name", ["two_of_two", "two_groups"])
def test_nested_domains_change_no_number(four, name):
    case = four[name]
    right = plain_loop(FOUR[name], world=4)
    assert [e["loss"] for e in steps(case)] == pytest.approx(right.losses, rel=1e-5)
    assert [e["grad_norm"] for e in steps(case)] == pytest.approx(right.norms, rel=1e-5)


def test_the_log_tells_what_crosses_nested_domains(four):
    for name, inside in (("two_of_two", True), ("two_groups", False)):  # 2x2, and 2x1 twice
        for entry in steps(four[name]):
            across, within = (entry[f"longctx_bytes_level_{level}"] for level in (0, 1))
            assert across > 0 and (within > 0) is inside
            assert across + within == entry["longctx_bytes_moved"]
    assert any("by level" in line for line in four["two_of_two"]["lines"])
    flat = steps(four["twelve_packs_of_two"])
    assert not any(key.startswith("longctx_bytes_level") for entry in flat for key in entry)


def test_b08_gradient_norm_of_four_is_that_of_one(four):
    (right,) = plain_loop(CASES["one_document"], world=1).norms
    (step,) = steps(four["one_document"])
    assert step["grad_norm"] / right == pytest.approx(1.0, abs=1e-3)


def test_b51_an_evaluation_set_is_split_also_where_it_does_not_divide(four):
    case = four["evaluate_ten"]
    assert (case["rows"], case["padding"]) == (5, 0)  # 20 tokens of 2 documents on 4 ranks
    right = plain_loop(FOUR["evaluate_ten"], world=4).evaluations
    found = [e["eval_long_loss"] for e in case["history"] if "eval_long_loss" in e]
    assert found[: len(right)] == pytest.approx([e["long"] for e in right], rel=1e-5)
    assert case["test_loss"] == pytest.approx(right[-1]["long"], rel=1e-5)


def test_b05_an_evaluation_set_without_targets_has_loss_0(four):
    history = four["evaluate_ten"]["history"]
    found = [entry["eval_nothing_loss"] for entry in history if "eval_nothing_loss" in entry]
    assert found and set(found) == {0.0}


def test_b05_a_rank_without_targets_does_not_enter_the_mean(four, tmp_path):
    one = step_of_numbers(FIRST_FOUR, tmp_path, longctx_max_tokens_per_rank=8)
    assert one == four["numbers"]["first_four"] == {"loss": 2.0, "grad_norm": 2.0}


def test_b07_unequal_micro_batches_count_by_targets(four, tmp_path):
    options = {"longctx_max_tokens_per_rank": 8, "gradient_accumulation_steps": 2}
    one = step_of_numbers(TWO_AND_SIX, tmp_path, **options)
    whole = step_of_numbers(TWO_AND_SIX, tmp_path, longctx_max_tokens_per_rank=10)
    mean_of_means = torch.tensor([1.0, 3.0]).mean().item()
    assert mean_of_means == 2.0  # what a mean over micro-batches, ranks or groups would give
    for found in (one, whole, four["numbers"]["accumulated"], four["numbers"]["grouped"]):
        assert found == {"loss": 2.5, "grad_norm": 2.5}


if __name__ == "__main__":
    CASES.update(FOUR)
    RUNS.update({"numbers": run_numbers, "evaluate_ten": run_evaluation})
    main(Path(sys.argv[1]), sys.argv[2:])
