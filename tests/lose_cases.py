"""Runs whose attention servers die or stall, beside runs in place -> what came of them, as JSON.

It is started as `tests/train_cases.py` is, by `train_cases.launch(..., script=__file__)`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_cases import with_lora
from server_cases import LENGTHS, OPTIONS
from train_cases import UNEVEN, Case, Lines, arguments, main, trainer_of
from transformers import TrainerCallback
from wrapper_cases import sharded

from hf_longctx.servers import rendezvous
from hf_longctx.servers.handshake import ServerInfo, introduce, receive
from hf_longctx.servers.listener import connect

RUN = OPTIONS | {
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
    return Case(lengths=LENGTHS, options=RUN | options)


CASES = {
    "lora": case(longctx_servers=2, **RECOMPUTED),
    "fsdp2": case(longctx_servers=1),
    "early": case(longctx_servers=1),
    "evaluating": Case(
        lengths=LENGTHS,
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
        callers = self.trainer.longctx_runtime.callers
        struck = {"lora": False, "fsdp2": True, "groups": False}
        if callers and self.name in struck and (self.name != "groups" or args.process_index == 0):
            told = Told(callers[0], self, backward=struck[self.name])
            self.trainer.longctx_runtime.callers = (told, *callers[1:])

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
    """Stands for a server's `Caller`: strikes in the second step, while the server is asked."""

    caller: Any
    strikes: Strikes
    backward: bool
    calls: int = 0

    def call(self, request: Any, program: Any) -> None:
        self.caller.call(request, program)
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

if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2:],
        perform=lambda name, folder: RUNS.get(name, perform)(name, folder),
    )
