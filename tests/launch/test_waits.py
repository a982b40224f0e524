"""No trainer waits for ever: for another's data, for a stopped one, for its launcher."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
import wait_cases
from launching import launching
from train_cases import launch

from hf_longctx import LongCtxTrainingArguments


def test_b62_a_trainer_asleep_outside_an_exchange_ends_the_run(tmp_path):
    ended = launch(tmp_path, "one_sided", "sleeps", processes=2, script=wait_cases.__file__)
    assert ended.code != 0 and ended.left == []
    assert ended.ended - float((tmp_path / "asleep").read_text()) < 30
    assert "Timed out waiting 6000ms" in ended.output, ended.output[-8000:]
    # the first case of the launch, on both ranks
    refusal = "refused: the trainers hold different data sets, in rank order "
    assert ended.output.count(refusal) == 2
    assert "\"eval_dataset['short']\"], ['train_dataset']]; give every process" in ended.output


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_b62_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    with launching(wait_cases.__file__, str(tmp_path), "waits") as under_way:
        half = ["30.0"] * 2  # of the default group's 60 seconds
        until(lambda: [p.read_text() for p in tmp_path.glob("waiting*")] == half, seconds=120)
        under_way.process.kill()
        under_way.process.join()
        until(lambda: not under_way.processes(), seconds=20)


def until(done: Callable[[], bool], *, seconds: float) -> None:
    """Return once `done()` is true; fail where it takes longer."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def test_the_default_is_ten_minutes(tmp_path):
    assert LongCtxTrainingArguments(output_dir=str(tmp_path), use_cpu=True).ddp_timeout == 600
