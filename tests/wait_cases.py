"""Trainers that wait for something that does not come -> how long, and with which error.

It is started as `tests/train_cases.py` is, by `train_cases.launch(..., script=__file__)`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from train_cases import LONG_AND_SHORT, UNEVEN, Case, main, trainer_of

ALONE = {"longctx_group_size": 1, "longctx_overflow": "truncate"}  # no exchange: DDP alone waits


def run_one_sided(folder: Path) -> None:
    """Only rank 0 has evaluation sets; every rank tells the error."""
    sets = {} if int(os.environ["RANK"]) else LONG_AND_SHORT
    try:
        trainer_of(Case(lengths=UNEVEN, evaluation=sets, options=ALONE), folder)
    except ValueError as error:
        sys.stdout.write(f"refused: {error}\n")


def run_sleeps(folder: Path) -> None:
    """Rank 1 sleeps after its first step, outside of any exchange."""
    from transformers import TrainerCallback

    class Sleeps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.process_index == 1:
                (folder.parent / "asleep").write_text(str(time.time()))
                time.sleep(300)

    trainer = trainer_of(Case(lengths=UNEVEN, options=ALONE), folder, ddp_timeout=6)
    trainer.add_callback(Sleeps())
    trainer.train()


def run_waits(folder: Path) -> None:
    """Both ranks sleep until they are ended from outside."""
    channel = trainer_of(Case(lengths=UNEVEN), folder).longctx_runtime.channel
    seconds = channel.timeout.total_seconds()
    (folder.parent / f"waiting{os.environ['RANK']}").write_text(str(seconds))
    time.sleep(300)


RUNS = {"one_sided": run_one_sided, "sleeps": run_sleeps, "waits": run_waits}


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Run one case."""
    RUNS[name](folder)
    return {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
