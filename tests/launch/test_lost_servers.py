"""Kill or stall attention servers: training goes on as if in place. Kill a trainer: the run ends.

One launch runs this file as its script: each case in place, then with servers that are struck.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launching import launching, until
from tiny import with_lora
from train_cases import (
    SERVED,
    UNEVEN,
    WITH_SERVERS,
    Case,
    Lines,
    arguments,
    launch,
    main,
    sharded,
    trainer_of,
)
from transformers import TrainerCallback

from hf_longctx.servers import rendezvous, spawn
from hf_longctx.servers.handshake import ServerInfo, introduce, receive
from hf_longctx.servers.listener import connect
from hf_longctx.training import groups

RUN = WITH_SERVERS | {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.3,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
}
RECOMPUTED = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
}


def case(**options: Any) -> Case:
    """A case with documents long enough for servers to get work."""
    return Case(lengths=SERVED, options=RUN | options)


CASES = {
    "lora": case(longctx_servers=2, **RECOMPUTED),
    "fsdp2": case(longctx_servers=1),
    "early": case(longctx_servers=1),
    "evaluating": Case(
        lengths=SERVED,
        evaluation={"some": UNEVEN},
        options=RUN | {"longctx_servers": 1, "eval_strategy": "steps", "eval_steps": 1},
    ),
    "groups": case(longctx_servers=2, longctx_group_size=1, longctx_server_timeout=8.0),
    "never": case(longctx_servers=1),
    "trainer": case(longctx_servers=2),
    "launcher": case(longctx_servers=2),
}
STRUCK = 2  # the third step: it has two micro-batches, as the first; the second has one


@dataclass
class Strikes(TrainerCallback):
    """Kills this trainer's servers, and lets another one join.

    Args:
        trainer: This process's.
        name (`str`): The case.
        folder (`Path`): For what it must tell from outside.
    """

    trainer: Any
    name: str
    folder: Path
    speeds: list[tuple[float, ...]] = field(default_factory=list)
    lines: Lines = field(default_factory=Lines)
    visitor: subprocess.Popen[bytes] | None = None
    died: list[int] = field(default_factory=list)

    def strike(self, number: int = signal.SIGKILL) -> None:
        for process in self.trainer.longctx_servers.process_ids:
            os.kill(process, number)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.name == "early":
            self.strike()
        if self.name == "launcher":
            (self.folder.parent / f"ready{args.process_index}").write_text("")
            time.sleep(300)
        senders = self.trainer.longctx_runtime.senders
        struck = {"lora": False, "fsdp2": True, "groups": False}
        if senders and self.name in struck and (self.name != "groups" or args.process_index == 0):
            told = Told(senders[0], self, backward=struck[self.name])
            self.trainer.longctx_runtime.senders = (told, *senders[1:])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.speeds.append(self.trainer.longctx_servers.speeds)
        if self.name == "trainer" and state.global_step == 1 and args.process_index == 1:
            (self.folder.parent / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.name == "never":
            rendezvous.BUILD_SECONDS = 2.0  # that a server which is gone is waited for
        if self.name == "never" and args.process_index == 0 and state.global_step < 3:
            come_and_go(self.lines.lines, called=state.global_step == 2)
            self.died.append(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.name == "lora" and state.global_step == STRUCK and args.process_index == 1:
            self.strike()  # the other server of the same window

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.name == "evaluating" and state.global_step == 1:
            self.strike()
        if self.name == "evaluating" and state.global_step == 2 and args.process_index == 0:
            self.visitor = join(self.lines.lines, self.trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.speeds.append(self.trainer.longctx_servers.speeds)


@dataclass
class Told:
    """Stands for a server's `RequestSender`: strikes in the second step, as the server is asked."""

    sender: Any
    strikes: Strikes
    backward: bool
    calls: int = 0

    def send(self, request: Any, program: Any) -> None:
        self.sender.send(request, program)
        if self.strikes.trainer.state.global_step == STRUCK and request.backward == self.backward:
            self.calls += 1
            if self.calls == 2:
                stalls = self.strikes.name == "groups"
                self.strikes.strike(signal.SIGSTOP if stalls else signal.SIGKILL)


def join(lines: list[str], trainer: Any) -> subprocess.Popen[bytes]:
    """Start a server with the line that the trainers log, and wait until it asks to be taken in."""
    line = next(line for line in lines if "hf-longctx serve" in line)
    words = line.split("hf-longctx ")[1].split()
    visitor = subprocess.Popen([sys.executable, "-m", "hf_longctx.cli.main", *words])
    end = time.monotonic() + 60
    while not trainer.longctx_servers.joining() and time.monotonic() < end:
        time.sleep(0.1)
    return visitor


def come_and_go(lines: list[str], *, called: bool) -> None:
    """A server that leaves before it is called, or when it is to build its bridge."""
    line = next(line for line in lines if "hf-longctx serve" in line)
    *_, address, _, token = line.split()
    host, port = address.split(":")
    connection = connect(host, int(port))
    info = ServerInfo(name="one that goes", device="cpu")
    introduce(connection, token=Path(token).read_bytes(), server=info)

    def go() -> None:
        if called:
            message = receive(connection)
            store = rendezvous.open_store(host, message["store"], seconds=10.0)
            store.set(f"{message['bridge']}/ready", "1")
        connection.close()

    threading.Thread(target=go, daemon=True).start()


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case in place, and then with servers that are struck."""
    found = {}
    for struck in (False, True):
        found["struck" if struck else "calm"] = train(name, folder, struck=struck)
    return found


def train(name: str, folder: Path, *, struck: bool) -> dict[str, Any]:
    """One run."""
    import torch
    from tiny import tiny

    of = CASES[name]
    if not struck:
        of = Case(**{**vars(of), "options": of.options | {"longctx_servers": 0}})
    torch.manual_seed(0)
    arguments(of, folder)  # makes the default group
    model = sharded(of.name, folder) if name == "fsdp2" else tiny(of.name, dtype=torch.float32)
    trainer = trainer_of(of, folder, model=with_lora(model) if name == "lora" else model)
    strikes = Strikes(trainer, name, folder)
    if struck:
        trainer.add_callback(strikes)
    logger = logging.getLogger("hf_longctx")
    logger.setLevel(logging.INFO)
    logger.addHandler(strikes.lines)
    trainer.train()
    logger.removeHandler(strikes.lines)
    trained = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in trained]
    return {
        "history": trainer.state.log_history,
        "replayed": trainer.longctx_replayed,
        "speeds": strikes.speeds,
        "lines": [line for line in strikes.lines.lines if " lost" in line],
        "died": strikes.died,
        "visitor": strikes.visitor and strikes.visitor.wait(timeout=30),
        "weights": torch.cat([w.flatten() for w in weights]).tolist(),
    }


RUNS: dict[str, Callable[[str, Path], Any]] = {
    "trainer": lambda name, folder: train(name, folder, struck=True),
    "launcher": lambda name, folder: train(name, folder, struck=True),
}


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
    ended = launch(folder, *ROSTERS, processes=2, script=__file__)
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
    ended = launch(tmp_path, "trainer", processes=2, script=__file__)
    assert ended.code != 0 and ended.left == []
    assert ended.ended - float((tmp_path / "died").read_text()) < 30


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
def test_b62_servers_end_with_a_launcher_that_is_killed(tmp_path):
    with launching(__file__, str(tmp_path), "launcher") as under_way:
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


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2:],
        perform=lambda name, folder: RUNS.get(name, perform)(name, folder),
    )
