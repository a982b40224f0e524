"""Servers that die or stall: training goes on as if in place. Trainers that die: all ends."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import lose_cases
import numpy as np
import pytest
from launching import launching
from lose_cases import STRUCK
from test_waits import until
from train_cases import launch

from hf_longctx.servers import spawn
from hf_longctx.training import groups

# Servers before each step and at the end.
ROSTERS = {
    "early": [1, 0, 0, 0, 0],
    "lora": [2, 2, 2, 0, 0],
    "fsdp2": [1, 1, 1, 0, 0],
    "evaluating": [1, 1, 0, 1, 1],
    "groups": [1, 1, 1, 0, 0],
    "never": [1, 1, 1, 1, 1],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lose")
    ended = launch(folder, *ROSTERS, processes=2, script=lose_cases.__file__)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["cases"]
    return found


def steps(run: dict[str, Any], key: str) -> list[Any]:
    """A key of the log's steps."""
    return [entry.get(key) for entry in run["history"] if "loss" in entry]


@pytest.mark.parametrize("name", ROSTERS)
def test_b62_a_lost_server_does_not_show_in_the_curve(runs, name):
    calm, struck = runs[name]["calm"], runs[name]["struck"]
    assert struck["replayed"] == (name != "never")
    assert [len(speeds) for speeds in struck["speeds"]] == ROSTERS[name]
    for key in ("loss", "grad_norm"):
        assert steps(struck, key) == pytest.approx(steps(calm, key), rel=1e-5)
    np.testing.assert_allclose(struck["weights"], calm["weights"], rtol=0, atol=1e-4)


def test_one_line_says_what_was_lost_and_what_is_left(runs):
    lines = runs["lora"]["struck"]["lines"]
    assert [line for line in lines if line.startswith("group 0")] == [
        f"group 0 lost 2 attention server(s) in step {STRUCK + 1}, which runs again without "
        "servers, as do all later steps"
    ]
    assert sum(" is lost: " in line for line in lines) == 2
    assert any("exit code -9" in line for line in runs["groups"]["struck"]["lines"])


def test_another_server_joins_after_a_loss_and_ends_with_the_training(runs):
    run = runs["evaluating"]["struck"]
    assert run["visitor"] == 0
    assert steps(run, "longctx_servers") == [1, None, None, 1]
    assert steps(run, "longctx_server_tasks")[-1] > 0
    losses = [entry["eval_some_loss"] for entry in run["history"] if "eval_some_loss" in entry]
    assert len(losses) == 4 and all(map(math.isfinite, losses))


def test_a_server_that_dies_while_it_joins_is_left_out(runs):
    assert runs["never"]["struck"]["died"] == [1, 2]  # asked, and called: it came neither time
    assert steps(runs["never"]["struck"], "longctx_servers") == [1] * 4
    assert min(steps(runs["never"]["struck"], "longctx_server_tasks")) > 0


def test_b62_a_trainer_that_is_killed_ends_everything(tmp_path):
    ended = launch(tmp_path, "trainer", processes=2, script=lose_cases.__file__)
    assert ended.code != 0 and ended.left == []
    assert ended.ended - float((tmp_path / "died").read_text()) < 30


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_b62_servers_end_with_a_launcher_that_is_killed(tmp_path):
    with launching(lose_cases.__file__, str(tmp_path), "launcher") as under_way:
        until(lambda: len([*tmp_path.glob("ready*")]) == 2, seconds=120)
        assert len(under_way.processes()) == 5  # the launcher, two trainers, two servers
        under_way.process.kill()
        under_way.process.join()
        until(lambda: not under_way.processes(), seconds=30)


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_b62_a_trainer_ends_whose_launcher_was_killed_before_it_was_made(monkeypatch):
    asked = []
    library = SimpleNamespace(prctl=lambda *given: asked.append(given))
    monkeypatch.setattr(spawn.ctypes, "CDLL", lambda _: library)  # pytest is not to end early
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    groups.end_with_launcher()  # ours lives
    monkeypatch.setattr(spawn.os, "getppid", lambda: 1)  # no signal comes for one that is gone
    with pytest.raises(RuntimeError, match="launcher that started this trainer is gone"):
        groups.end_with_launcher()
    assert len(asked) == 2
