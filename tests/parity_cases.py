"""Fifty steps of a tiny Llama: stock Trainer on one process, or ours on several -> curves.

    python tests/parity_cases.py          # stock Trainer: writes tests/invariant/curves.json

Every step has four documents of uneven lengths. Stock Trainer takes each alone, with stock `sdpa`,
four accumulated; ours packs all four into one batch of `TOKENS` over all ranks, or two and two into
batches half as large. `train_cases.launch` starts this file for ours.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from train_cases import main

CURVES = Path(__file__).parent / "launch" / "curves.json"
STEPS = 50
TOKENS = 192  # of a step, at most: 2 ranks of 96, or 3 of 64
EVERY_RUN = {
    "use_cpu": True,
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "fsdp2": {},
}


def lengths() -> list[int]:
    """Half a step is a long and a short document; the next long one fits into no room left."""
    noise, half = np.random.default_rng(0), TOKENS // 2
    found = []
    for _ in range(2 * STEPS):
        long = int(noise.integers(half // 2 + 2, half - 1))
        found += [long, int(noise.integers(max(1, half - long - 7), half - long + 1))]
    return found


def rows() -> list[dict[str, list[int]]]:
    """Documents in which a token mostly tells the next, so that there is something to learn."""
    noise, found = np.random.default_rng(1), []
    for length in lengths():
        ids = noise.integers(0, 64, length)
        for at in np.flatnonzero(noise.random(length - 1) < 0.9):
            ids[at + 1] = (5 * ids[at] + 7) % 64
        found.append({"input_ids": ids.tolist(), "labels": ids.tolist()})
    return found


def curves(history: list[dict[str, float]]) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    steps = [entry for entry in history if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in ("loss", "grad_norm")}


def stock(folder: Path) -> dict[str, list[float]]:
    """Train with stock Trainer in this process, each document alone."""
    import torch
    from datasets import Dataset
    from tiny import tiny
    from transformers import Trainer, TrainingArguments, default_data_collator

    trainer = Trainer(
        model=tiny("sdpa", dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            num_train_epochs=1,
            **EVERY_RUN,
        ),
        train_dataset=Dataset.from_list(rows()),
        data_collator=default_data_collator,
    )
    trainer.train()
    return curves(trainer.state.log_history)


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train with ours, on the ranks of this launch."""
    import torch
    from datasets import Dataset
    from tiny import tiny
    from wrapper_cases import sharded

    from hf_longctx import LongCtxTrainer, LongCtxTrainingArguments

    options = EVERY_RUN | CASES[name]
    args = LongCtxTrainingArguments(output_dir=str(folder), longctx_balance="none", **options)
    shares = args.world_size * args.gradient_accumulation_steps
    args.longctx_max_tokens_per_rank = TOKENS // shares
    args.num_train_epochs = 1
    model = sharded("distca", folder) if name == "fsdp2" else tiny("distca", dtype=torch.float32)
    trainer = LongCtxTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows()))
    trainer.train()
    tokens = [e["longctx_tokens"] for e in trainer.state.log_history if "loss" in e]
    return {**curves(trainer.state.log_history), "tokens": tokens}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
    else:
        import torch

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            CURVES.write_text(json.dumps(stock(Path(folder)), indent=1) + "\n")
