"""Runs over four trainers that known faults call for, in one launch; see `train_cases`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from train_cases import CASES, RUNS, UNEVEN, Case, arguments, main

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


if __name__ == "__main__":
    CASES.update(FOUR)
    RUNS.update({"numbers": run_numbers, "evaluate_ten": run_evaluation})
    main(Path(sys.argv[1]), sys.argv[2:])
