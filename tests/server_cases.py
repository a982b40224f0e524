"""Training runs with extra attention servers, in one `accelerate launch` -> what came of them.

It is started as `tests/train_cases.py` is, by `train_cases.launch(..., script=__file__)`.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import train_cases
from transformers import TrainerCallback

LENGTHS = (900, 30, 17, 1, 364, 640, 9, 96, 2, 833)
OPTIONS = {
    "longctx_max_tokens_per_rank": 640,
    "num_train_epochs": 1,
    "gradient_accumulation_steps": 2,
    "longctx_server_timeout": 20.0,
}


def case(servers: int, **options: Any) -> train_cases.Case:
    """Documents long enough for the planner to move pieces of them."""
    given = OPTIONS | {"longctx_servers": servers} | options
    evaluation = {"long": (700, 71, 3)}
    return train_cases.Case(lengths=LENGTHS, options=given, evaluation=evaluation)


EACH = {"longctx_group_size": 1, "eval_strategy": "steps", "eval_steps": 1}
CASES = {
    "in_place": case(0),
    "one": case(1, save_strategy="steps", save_steps=1),
    "two": case(2, longctx_server_devices="cpu", longctx_server_memory=200_000),
    "groups_in_place": case(0, **EACH),
    "holds": case(1),
    "one_each": case(2, **EACH),  # a trainer alone with its server, and evaluation between steps
}


class Looks(TrainerCallback):
    """Looks at the token files when training begins."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tokens = list(Path(args.output_dir).rglob("*.token"))
        self.seen["modes"] = [stat.S_IMODE(token.stat().st_mode) for token in tokens]


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case; what rank 0 saw."""
    lines, looks = train_cases.Lines(), Looks()
    logger = train_cases.logging.getLogger("hf_longctx")
    logger.setLevel("INFO")
    logger.addHandler(lines)
    trainer = train_cases.trainer_of(CASES[name], folder)
    trainer.add_callback(looks)
    if name == "holds":
        trainer.add_callback(Holds())
    trainer.train()
    logger.removeHandler(lines)
    state = trainer.state
    return {
        "history": state.log_history,
        "steps": [
            trainer.state.global_step,
            trainer.state.max_steps,
            trainer.lr_scheduler.last_epoch,
        ],
        "summary": trainer.longctx_summary(),
        "lines": lines.lines,
        "saved": sorted(path.name for path in folder.glob("checkpoint-*")),
        **looks.seen,
    }


class Holds(TrainerCallback):
    """Waits before the second step, until somebody ends this process."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            (Path(args.output_dir) / f"holds{args.process_index}").write_text(str(os.getpid()))
            time.sleep(600)


if __name__ == "__main__":
    train_cases.main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
