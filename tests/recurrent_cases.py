"""Training runs of a tiny Qwen3.5 over several trainers, in one launch -> results as JSON.

It is started as `tests/train_cases.py` is, by `train_cases.launch(..., script=__file__)`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from train_cases import LONG_AND_SHORT, UNEVEN, Case, Lines, arguments, main, trainer_of

FAMILY = "qwen3_5"  # without experts, whose choices a rounding may turn
ACCUMULATED = {"gradient_accumulation_steps": 2}
CHECKPOINTING = ACCUMULATED | {"activation_checkpointing": True}
CASES = {
    "ddp": Case(  # three steps: after five, a rounding of the weights moves a norm by a thousandth
        lengths=UNEVEN,
        options={"longctx_softmax": "ring", "longctx_scan": "tree", "max_steps": 3},
    ),
    "groups": Case(lengths=UNEVEN, options=ACCUMULATED | {"longctx_group_size": 1}),
    "reentrant": Case(
        lengths=UNEVEN,
        options=CHECKPOINTING | {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "evaluate": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2},
    ),
    "fsdp2": Case(lengths=UNEVEN, options=CHECKPOINTING),
    "deepspeed2": Case(lengths=UNEVEN, options=CHECKPOINTING),
}


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case to its end and save the model."""
    import torch
    from tiny import tiny
    from wrapper_cases import deepspeed_config, sharded

    given: dict[str, Any] = {}
    if name.startswith("deepspeed"):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # else it compiles an extension, for 40 seconds
        given = {"deepspeed": deepspeed_config(name)}
    if name.startswith("fsdp2"):
        arguments(CASES[name], folder)  # makes the default group
        model = sharded("zeco_linear", folder, family=FAMILY)
    else:
        model = tiny("zeco_linear", family=FAMILY, dtype=torch.float32)
    lines, logger = Lines(), logging.getLogger("hf_longctx")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    trainer = trainer_of(CASES[name], folder, model=model, **given)
    trainer.train()
    logger.removeHandler(lines)
    trainer.save_model(str(folder / "final"))
    return {
        "history": trainer.state.log_history,
        "wrapper": type(trainer.model_wrapped).__name__,
        "recompute_bytes": trainer.longctx_runtime.account.recompute_bytes,
        "recomputed": trainer.longctx_runtime.account.recomputed,
        "scans": [line for line in lines.lines if line.startswith("longctx_scan=")],
    }


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
