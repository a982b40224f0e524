"""No trainer waits for ever: for another's data, for a stopped trainer, for its launcher.

Launches run this file as their script.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import launching, until
from train_cases import LONG_AND_SHORT, UNEVEN, Case, launch, main, trainer_of

from hf_longctx import LongCtxTrainingArguments

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


def test_b62_a_trainer_asleep_outside_an_exchange_ends_the_run(tmp_path):
    ended = launch(tmp_path, "one_sided", "sleeps", processes=2, script=__file__)
    assert ended.code != 0 and ended.left == []
    assert ended.ended - float((tmp_path / "asleep").read_text()) < 30
    assert "Timed out waiting 6000ms" in ended.output, ended.output[-8000:]
    # the first case of the launch, on both ranks
    refusal = "refused: the trainers hold different data sets, in rank order "
    assert ended.output.count(refusal) == 2
    assert "\"eval_dataset['short']\"], ['train_dataset']]; give every process" in ended.output


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_b62_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    with launching(__file__, str(tmp_path), "waits") as under_way:
        half = ["30.0"] * 2  # of the default group's 60 seconds
        until(lambda: [p.read_text() for p in tmp_path.glob("waiting*")] == half, seconds=120)
        under_way.process.kill()
        under_way.process.join()
        until(lambda: not under_way.processes(), seconds=20)


def test_the_default_is_ten_minutes(tmp_path):
    assert LongCtxTrainingArguments(output_dir=str(tmp_path), use_cpu=True).ddp_timeout == 600


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
