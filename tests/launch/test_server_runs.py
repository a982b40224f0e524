"""Train with extra attention servers: the same losses as without, and nothing left behind.

One launch runs this file as its script.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import launching, until
from train_cases import SERVED, WITH_SERVERS, Case, Lines, launch, main, trainer_of
from transformers import TrainerCallback


def case(servers: int, **options: Any) -> Case:
    """Documents long enough for the planner to move pieces of them."""
    given = WITH_SERVERS | {"longctx_servers": servers} | options
    evaluation = {"long": (700, 71, 3)}
    return Case(lengths=SERVED, options=given, evaluation=evaluation)


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
    lines, looks = Lines(), Looks()
    logger = logging.getLogger("hf_longctx")
    logger.setLevel("INFO")
    logger.addHandler(lines)
    trainer = trainer_of(CASES[name], folder)
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


PAIRS = {"one": "in_place", "two": "in_place", "one_each": "groups_in_place"}
PEAK = re.compile("at most ([0-9,]+) held")
SERVERS = {"one": 1, "two": 2, "one_each": 2}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Any]:
    """All cases over two trainers."""
    folder = tmp_path_factory.mktemp("servers")
    names = [*PAIRS, "in_place", "groups_in_place"]
    ended = launch(folder, *names, processes=2, script=__file__)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == [], "servers must end with the training"
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["cases"]
    return found | {"tokens_left": list(folder.rglob("*.token"))}


@pytest.mark.parametrize("name", PAIRS)
def test_servers_change_no_loss(cases, name):
    figures = ("loss", "grad_norm", "eval_long_loss", "train_loss")
    ours, plain = (
        [e[key] for e in case["history"] for key in figures if key in e]
        for case in (cases[name], cases[PAIRS[name]])
    )
    assert ours == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_b50_servers_change_no_count(cases, name):
    case, plain = cases[name], cases[PAIRS[name]]
    assert case["steps"] == plain["steps"] and len(set(case["steps"])) == 1
    assert case["summary"]["ranks"] == plain["summary"]["ranks"]
    assert any("2 trainers = " in line for line in case["lines"])


@pytest.mark.parametrize("name", PAIRS)
def test_servers_do_work_and_the_log_says_how_much(cases, name):
    steps = [e for e in cases[name]["history"] if "loss" in e]
    assert all(e["longctx_servers"] == SERVERS[name] for e in steps)
    assert max(e["longctx_server_tasks"] for e in steps) > 0.05
    assert cases[name]["summary"]["servers"] == SERVERS[name]
    assert not any("longctx_servers" in e for e in cases[PAIRS[name]]["history"])
    ends = [line for line in cases[name]["lines"] if " requests, " in line]
    assert any("by servers" in line for line in cases[name]["lines"])
    assert len(ends) == (1 if name == "one_each" else SERVERS[name])  # those of rank 0's group


def test_servers_hold_no_more_than_they_may(cases):
    peaks = {
        name: [
            int(peak.replace(",", ""))
            for line in cases[name]["lines"]
            for peak in PEAK.findall(line)
        ]
        for name in ("one", "two")
    }
    assert max(peaks["one"]) > 200_000 >= max(peaks["two"]) > 0


def test_b57_a_server_waits_while_a_trainer_saves(cases):
    assert cases["one"]["saved"] == ["checkpoint-1", "checkpoint-2"]
    assert cases["one"]["steps"][0] == 2


@pytest.mark.parametrize("name", PAIRS)
def test_the_token_is_its_owners_and_goes_with_the_run(cases, name):
    assert cases[name]["modes"] == [0o600] * 2
    assert cases["tokens_left"] == []
    assert any("hf-longctx serve --join 127.0.0.1:" in line for line in cases[name]["lines"])


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_b62_servers_end_with_a_trainer_that_is_killed(tmp_path):
    with launching(__file__, str(tmp_path), "holds") as under_way:
        held = [tmp_path / "holds" / f"holds{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in held), seconds=120)
        (server,) = [pid for pid in under_way.processes() if _serves(pid)]
        os.kill(int(held[0].read_text()), signal.SIGKILL)  # the trainer that started it
        until(lambda: not Path(f"/proc/{server}").exists(), seconds=30)
        until(lambda: not under_way.processes(), seconds=30)
        assert under_way.wait(seconds=10) != 0, under_way.printed()[-4000:]


def _serves(pid: int) -> bool:
    return b"--token-file" in Path(f"/proc/{pid}/cmdline").read_bytes()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
