"""A run that left the checkpoint of an old commit, and one that goes on from it.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml tests/checkpoint_cases.py \
        FOLDER record

writes FOLDER/record/out/checkpoint-2 and FOLDER/record/run.json, which were committed together as
`CHECKPOINT`. What it was trained on and with stands in `run.json`: no later default changes it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import train_cases

CHECKPOINT = Path(__file__).parent / "data" / "checkpoint_0f7a96e"
SAVED_AT, STEPS = 2, 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
}
FLAGS = {
    "use_cpu": True,
    "longctx_max_tokens_per_rank": 48,
    "longctx_overflow": "split",
    "longctx_layout": "spread",
    "longctx_balance": "tokens",
    "longctx_tolerance": 0.1,
    "max_steps": STEPS,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "lr_scheduler_type": "linear",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "ddp_timeout": 60,
    "seed": 7,
}
LENGTHS = (150, 30, 17, 1, 64, 40, 9, 96, 2, 33)


def losses(history: list[dict[str, Any]]) -> dict[str, float]:
    """The loss of each step after the checkpoint's."""
    return {str(e["step"]): e["loss"] for e in history if "loss" in e and e["step"] > SAVED_AT}


def trainer_of(model: Any, rows: list[Any], flags: dict[str, Any], **more: Any) -> Any:
    """A trainer of documents, as `flags` say."""
    from datasets import Dataset

    from hf_longctx import LongCtxTrainer, LongCtxTrainingArguments

    arguments = LongCtxTrainingArguments(**flags, **more)
    return LongCtxTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows))


def record(name: str, folder: Path) -> dict[str, Any]:
    """Train to the end, keeping a checkpoint on the way."""
    import torch
    from tiny import documents
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # so that no place of this machine is saved
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIG), attn_implementation="distca", dtype=torch.float32
    )
    rows = documents(LENGTHS, seed=3)
    saves = {"save_strategy": "steps", "save_steps": SAVED_AT}
    trainer = trainer_of(model, rows, FLAGS, output_dir="out", **saves)
    trainer.train()
    found = {
        "flags": FLAGS,
        "losses": losses(trainer.state.log_history),
        "documents": [row["input_ids"] for row in rows],
    }
    if trainer.is_world_process_zero():
        lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in found.items())
        Path("run.json").write_text(f"{{\n{lines}\n}}\n")
    return found


def resume(name: str, folder: Path) -> dict[str, Any]:
    """Go on from the copy of the checkpoint in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    import hf_longctx  # noqa: F401  (registers the attention names)

    checkpoint = folder.parent / "checkpoint"
    run = json.loads((checkpoint / "run.json").read_text())
    lines = train_cases.Lines()
    logging.getLogger("hf_longctx").addHandler(lines)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="distca", dtype=torch.float32
    )
    rows = [{"input_ids": ids} for ids in run["documents"]]
    more = {"output_dir": str(folder / "out"), "save_strategy": "no"}
    trainer = trainer_of(model, rows, run["flags"], **more)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return {"losses": losses(trainer.state.log_history), "lines": lines.lines}


RUNS = {"record": record, "resume": resume}

if __name__ == "__main__":
    train_cases.RUNS.update(RUNS)
    train_cases.main(Path(sys.argv[1]), sys.argv[2:])
