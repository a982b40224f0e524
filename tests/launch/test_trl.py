"""Run TRL's own training script through `hf_longctx.run` and compare with a plain loop."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM
from run_scripts import documents_of, full_batch, launch, training_flags
from tiny import Document
from transformers import AutoModelForCausalLM
from trl import pack_dataset

MAX_LENGTH = 96


def sft(folder: Path, name: str, *flags: str) -> tuple[str, list[dict[str, Any]]]:
    """Run `trl.scripts.sft`; what it printed, and the entries of its optimizer steps."""
    printed = launch(
        "-m", "trl.scripts.sft", "--model_name_or_path", str(folder / "model"),
        "--dataset_name", str(folder / "texts"), "--attn_implementation", "distca",
        *training_flags(folder, name, save=True), "--bf16", "False", *flags,
    )  # fmt: skip
    state = json.loads((folder / name / "checkpoint-3" / "trainer_state.json").read_text())
    return printed, [entry for entry in state["log_history"] if "loss" in entry]


def packed(folder: Path, strategy: str) -> list[Document]:
    """The documents that TRL's packing makes of the texts, one row each."""
    rows = Dataset.from_list(documents_of(folder, end=True))
    found = []
    for row in pack_dataset(rows, MAX_LENGTH, strategy):
        ends = np.cumsum([0, *row["seq_lengths"]])
        found += [{"input_ids": row["input_ids"][start:stop]} for start, stop in pairwise(ends)]
    return found


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_trl_packs_train_as_their_documents_alone(checkpoint, strategy):
    printed, steps = sft(
        checkpoint, strategy, "--packing", "--packing_strategy", strategy,
        "--max_length", str(MAX_LENGTH),
    )  # fmt: skip
    rows = packed(checkpoint, strategy)
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert [entry["longctx_tokens"] for entry in steps] == [tokens] * 3
    losses, norms, weights = full_batch(rows)
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-5)
    assert [e["grad_norm"] for e in steps] == pytest.approx(norms, rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(checkpoint / strategy)
    for key, weight in saved.named_parameters():
        torch.testing.assert_close(weight.detach(), weights[key], rtol=0, atol=1e-5)
    assert "went to the script's own flag" in printed
    assert "SFTTrainer takes documents and shares batches" in printed


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_trl_peft_trains_adapters_alone(checkpoint):
    _, steps = sft(
        checkpoint, "lora", "--max_length", "200", "--use_peft", "--lora_r", "4",
        "--lora_dropout", "0", "--lora_target_modules", "q_proj", "v_proj",
    )  # fmt: skip
    losses, norms, _ = full_batch(documents_of(checkpoint, end=True))
    assert steps[0]["loss"] == pytest.approx(losses[0], rel=1e-5)  # adapters start as nothing
    assert steps[0]["longctx_bytes_moved"] > 0 and steps[2]["loss"] < steps[0]["loss"]
    assert "distca" not in (checkpoint / "lora" / "adapter_config.json").read_text()
    saved = AutoPeftModelForCausalLM.from_pretrained(checkpoint / "lora")
    moved = [p for name, p in saved.named_parameters() if "lora_B" in name]
    assert len(moved) == 4 and all(float(p.detach().abs().max()) > 0 for p in moved)
