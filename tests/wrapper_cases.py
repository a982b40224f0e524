"""Training runs whose model is wrapped otherwise than by DDP, in one launch -> results as JSON.

It is started as `tests/train_cases.py` is, by `train_cases.launch(..., script=__file__)`.

A name begins with its wrapper: `fsdp2` is native FSDP2, `deepspeed0` to `deepspeed2` ZeRO stages.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_cases import LONG_AND_SHORT, UNEVEN, Case, arguments, main, trainer_of

CLIPPED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
ACCUMULATED = Case(lengths=UNEVEN, options=CLIPPED)
ONE_STEP = Case(lengths=UNEVEN, options={"max_steps": 1, "max_grad_norm": 1e9})
SAVED = Case(
    lengths=UNEVEN,
    options={"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_only_model": True},
)
RESUMED = Case(
    lengths=UNEVEN,
    options={"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"},
)
CASES = {
    "fsdp2": ACCUMULATED,
    "fsdp2_checkpointing": replace(
        ACCUMULATED, options=CLIPPED | {"activation_checkpointing": True}, name="ring"
    ),
    "fsdp2_groups": Case(
        lengths=UNEVEN,
        options={
            "longctx_group_size": 1,
            "gradient_accumulation_steps": 2,
            "longctx_overflow": "truncate",
        },
    ),
    "fsdp2_evaluate": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4},
    ),
    "fsdp2_save": SAVED,
    "fsdp2_save_optimizer": RESUMED,
    **{f"deepspeed{stage}": ACCUMULATED for stage in range(3)},
    **{f"deepspeed{stage}_one_step": ONE_STEP for stage in range(3)},
    "deepspeed2_checkpointing": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "epoch", "activation_checkpointing": True},
    ),
    "deepspeed2_resume": RESUMED,
}


def deepspeed_config(name: str) -> dict[str, Any]:
    """DeepSpeed's configuration, with the ZeRO stage of a case's name."""
    stage = int(name.removeprefix("deepspeed")[0])
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    auto = dict.fromkeys((*sizes, "gradient_clipping"), "auto")
    return {**auto, "zero_optimization": {"stage": stage}}


def wrapped_trainer(name: str, folder: Path, **changes: Any) -> Any:
    """The trainer of a case, with the wrapper that its name begins with."""
    case = CASES[name]
    if name.startswith("deepspeed"):
        import deepspeed.ops

        # else DeepSpeed compiles a C++ extension that training does not use, for 40 seconds
        deepspeed.ops.__compatible_ops__ = {}
        return trainer_of(case, folder, deepspeed=deepspeed_config(name), **changes)
    arguments(case, folder)  # makes the default group
    return trainer_of(case, folder, model=sharded(case.name, folder), **changes)


def sharded(name: str, folder: Path, *, family: str = "llama") -> Any:
    """A tiny model under an attention name, from a checkpoint, sharded while it loads."""
    import torch
    import torch.distributed as dist
    from tiny import tiny
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        tiny("sdpa", family=family, dtype=torch.float32).save_pretrained(folder / "start")
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder / "start",
        attn_implementation=name,
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    )


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case to its end and save the model, or note why it is refused."""
    started = time.time()
    try:
        trainer = wrapped_trainer(name, folder)
    except ValueError as error:
        return {"error": str(error)}
    before = trainer.evaluate() if name == "fsdp2_evaluate" else {}
    trainer.train()
    trainer.save_model(str(folder / "final"))
    result = {
        "before": before.get("eval_long_loss"),
        "history": trainer.state.log_history,
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameters": sorted({type(p).__name__ for p in trainer.model.parameters()}),
        "seconds": time.time() - started,
    }
    if name.endswith("_save"):
        again = wrapped_trainer(name, folder / "again")
        try:
            again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        except ValueError as error:
            result["resume_error"] = str(error)
    if name.endswith("_resume"):
        again = wrapped_trainer(name, folder / "again", save_strategy="no")
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        again.save_model(str(folder / "resumed"))
    return result


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
