"""Runs that go on from a checkpoint, and runs over streams, in one `accelerate launch`.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml tests/stream_cases.py FOLDER CASES

As `train_cases`, whose machinery it uses.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import train_cases
from train_cases import UNEVEN, Case, arguments

EPOCHS = {"num_train_epochs": 3}
STREAM = {"max_steps": 14, "longctx_lookahead": 4}
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
GROUPS = {"longctx_group_size": 1}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run and the step whose checkpoint another run goes on from.

    Args:
        options (`dict[str, Any]`): Training arguments.
        step (`int`): Of the checkpoint.
        stream (`bool`): Whether the documents are streamed, in another order each pass.
    """

    options: dict[str, Any]
    step: int
    stream: bool = False


# 442 tokens make 5 batches an epoch: steps 3, 8, 12 are in the first, second and third.
RESUMED = {
    "first_epoch": Resumed(options=EPOCHS, step=3),
    "third_epoch": Resumed(options=EPOCHS, step=12),
    "accumulated": Resumed(options=EPOCHS | ACCUMULATED, step=8),  # of 3 steps an epoch
    "workers": Resumed(options=EPOCHS | WORKERS, step=8),
    "groups": Resumed(options=EPOCHS | GROUPS, step=12),
    "stream_first_pass": Resumed(options=STREAM, step=3, stream=True),
    "stream_third_pass": Resumed(options=STREAM, step=12, stream=True),
    "stream_accumulated": Resumed(options=STREAM | ACCUMULATED, step=6, stream=True),
    "stream_workers": Resumed(options=STREAM | WORKERS, step=8, stream=True),
    "stream_groups": Resumed(options=STREAM | GROUPS, step=8, stream=True),
}


def stream() -> Any:
    """The documents, shuffled anew in each pass."""
    from datasets import Dataset

    rows = Dataset.from_list(Case(lengths=UNEVEN).rows())
    return rows.to_iterable_dataset().shuffle(seed=3, buffer_size=len(UNEVEN))


def trainer_of(folder: Path, rows: Any, **options: Any) -> Any:
    """A trainer of rows, whose optimizer has a state to restore."""
    import torch
    from tiny import tiny

    from hf_longctx import LongCtxTrainer

    case = Case(lengths=UNEVEN)
    given = {"optim": "adamw_torch", "learning_rate": 0.01} | options
    return LongCtxTrainer(
        model=tiny("distca", dtype=torch.float32),
        args=arguments(case, folder, **given),
        train_dataset=rows,
    )


def run_resumed(name: str, folder: Path) -> dict[str, Any]:
    """Train to the end, keeping a checkpoint; then go on from it in a new trainer."""
    from datasets import Dataset

    case = RESUMED[name]
    checkpoint = str(folder / f"checkpoint-{case.step}")

    def make(where: Path, **options: Any) -> Any:
        rows = stream() if case.stream else Dataset.from_list(Case(lengths=UNEVEN).rows())
        return trainer_of(where, rows, **case.options | options)

    first = make(folder, save_strategy="steps", save_steps=case.step)
    first.train()
    first.save_model(str(folder / "final"))
    second = make(folder / "again")
    second.train(resume_from_checkpoint=checkpoint)
    second.save_model(str(folder / "resumed"))
    found = {"history": first.state.log_history, "resumed": second.state.log_history}
    if name == "stream_third_pass":
        third = make(folder / "anew", ignore_data_skip=True)
        third.train(resume_from_checkpoint=checkpoint)
        found["anew"] = third.state.log_history
    return found


def run_differing(name: str, folder: Path) -> dict[str, Any]:
    """Rank 1 streams another document than rank 0, among the first ones or later; or, as a group
    of its own, the same ones in another order."""
    from datasets import Dataset
    from tiny import documents

    rows = documents([48] * 16)
    at = 2 if name == "differs_early" else 12
    options = GROUPS if name == "differs_in_order" else {}
    if os.environ["RANK"] == "1" and options:
        rows[at:] = rows[at:][::-1]
    elif os.environ["RANK"] == "1":
        rows[at]["input_ids"][5] += 1 if rows[at]["input_ids"][5] < 63 else -1
    try:
        given = Dataset.from_list(rows).to_iterable_dataset()
        trainer = trainer_of(folder, given, max_steps=12, longctx_lookahead=1, **options)
        trainer.train()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


RUNS = dict.fromkeys(RESUMED, run_resumed)
RUNS |= dict.fromkeys(["differs_early", "differs_late", "differs_in_order"], run_differing)


if __name__ == "__main__":
    train_cases.RUNS.update(RUNS)
    train_cases.main(Path(sys.argv[1]), sys.argv[2:])
