"""Train while an attention server is lost, and measure how far that is from an undisturbed run.

A launcher starts the trainers, as a user would. They train twice; the second time their first
server is killed or stopped in the middle of a step. Layer: verify. Letters: R ranks.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

import hf_longctx.attention.registration as registry

from ..config import RECOMPUTE, LongCtxTrainingArguments
from ..planning.program.program import Program
from ..runtime.requests import Request, RequestSender
from ..support import validate_model, validate_name
from ..training.trainer import LongCtxTrainer
from .compare import ROWS, case_lengths
from .rank_pool import RankError
from .twins import build, load_config

logger = logging.getLogger(__name__)

STEPS = 4
STRUCK = 1  # the second step: the first one shows how many requests a step has
BOUND = 1e-5  # of the loss, in float32: without the server, rows are split elsewhere
STALL_SECONDS = 5.0  # how long trainers wait for a stopped server
RUN_SECONDS = 900.0
ORPHAN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run to train, and how to disturb it.

    Args:
        model (`str`): Checkpoint folder or config JSON.
        name (`str`): Attention name.
        ranks (`int`): Number of trainers.
        servers (`int`): Number of servers that they start.
        kill (`str`): `forward` or `backward`: SIGKILL there; `stall`: SIGSTOP in a forward.
        lengths (`Sequence[int]`, *optional*): Document lengths; those of `verify` by default.
        checkpointing (`bool`, *optional*): Train with activation checkpointing.
        flags (`dict[str, Any]`, *optional*): Flags of the run, as `longctx_layout`.
    """

    model: str
    name: str
    ranks: int
    servers: int
    kill: str
    lengths: Sequence[int] | None = None
    checkpointing: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    def documents(self, vocabulary: int) -> list[dict[str, list[int]]]:
        """Draw the rows of a data set of a few batches, with ids below `vocabulary`."""
        if self.lengths is None:
            lengths = [n for batch in case_lengths(self.ranks) for n in batch]
        else:
            lengths = [*self.lengths] * 3
        noise = np.random.default_rng(7)
        return [{"input_ids": noise.integers(0, vocabulary, n).tolist()} for n in lengths]


def verify_fault(trial: Trial) -> dict[str, Any]:
    """Train undisturbed and disturbed, in one launch.

    Returns:
        The report, with the keys of `KILL_FIGURES` in `cli/verify.py`. `orphans` counts processes
        of this run that are alive 5 s after the launcher's end.

    Raises:
        ValueError: where the combination is refused.
        RankError: where the trainers failed.
    """
    validate_name(trial.name)
    if trial.servers < 1 or trial.name != "distca":
        raise ValueError(
            f"--kill {trial.kill} with --servers {trial.servers} under {trial.name}: it needs a "
            "server, which only distca has; use --attn_implementation distca --servers 1"
        )
    validate_model(load_config(trial.model), name=trial.name)
    logger.info("%d trainers, %d servers, twice; --kill %s", trial.ranks, trial.servers, trial.kill)
    with tempfile.TemporaryDirectory(prefix="hf_longctx_kill_") as folder:
        (Path(folder) / "trial.json").write_text(json.dumps(asdict(trial)))
        try:
            ended = _launch(folder, ranks=trial.ranks)
        except subprocess.TimeoutExpired as error:
            raise RankError(f"the trainers took more than {RUN_SECONDS:g} s") from error
        finally:
            left = _processes_of(folder, seconds=ORPHAN_SECONDS)
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if ended.returncode:
            raise RankError(f"the trainers ended with {ended.returncode}\n{ended.stdout[-4000:]}")
        calm, struck = json.loads((Path(folder) / "runs.json").read_text())
    losses, right = np.array(struck["losses"]), np.array(calm["losses"])
    difference = float(np.max(np.abs(losses - right) / np.abs(right)))
    found = {
        "ranks": trial.ranks,
        "servers": trial.servers,
        "kill": trial.kill,
        "steps": len(losses),
        "loss_difference": difference if np.isfinite(difference) else float("inf"),
        "weights_difference": struck["weights_difference"],
        "replayed_steps": struck["replayed"],
        "orphans": len(left),
    }
    return found | {"failed": _failed(found)}


def _failed(found: dict[str, Any]) -> list[str]:
    failed = []
    if not found["loss_difference"] <= BOUND:
        failed.append(f"loss_difference {found['loss_difference']:.3g} > {BOUND}")
    if found["replayed_steps"] < 1:
        failed.append("replayed_steps 0 < 1: nothing was lost; give the server more work")
    if found["orphans"]:
        failed.append(f"orphans {found['orphans']} > 0")
    return failed


def _launch(folder: str, *, ranks: int) -> "subprocess.CompletedProcess[str]":
    """Run `main` in R trainers, with the folder in their command lines and the servers'."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", __name__, folder]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
    )


def _processes_of(folder: str, *, seconds: float) -> list[int]:
    """Find processes with the folder in their command line that do not end within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found = [process for process, line in _command_lines() if folder in line]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _command_lines() -> Iterator[tuple[int, str]]:
    """Yield number and command line of every process of this machine."""
    if not Path("/proc/self/cmdline").exists():  # not Linux
        for line in subprocess.check_output(["ps", "-A", "-o", "pid=,args="], text=True).split(
            "\n"
        ):
            process, _, words = line.strip().partition(" ")
            if process:
                yield int(process), words
        return
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            yield int(place.parent.name), place.read_bytes().decode(errors="replace")


class _Strike(TrainerCallback):
    """Replace the first server's `RequestSender`, and kill or stop that server in a step.

    Args:
        trainer (`LongCtxTrainer`): The group's first trainer, which started that server.
        kill (`str`): See `Trial`.
    """

    def __init__(self, trainer: LongCtxTrainer, kill: str) -> None:
        self.trainer, self.backward = trainer, kill == "backward"
        self.signal = signal.SIGSTOP if kill == "stall" else signal.SIGKILL
        self.requests: Counter[int] = Counter()  # by step, of the direction to disturb

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the place of the first server's sender, once the servers have started."""
        self.sender: RequestSender
        runtime = self.trainer.longctx_runtime
        self.sender, *others = runtime.senders
        self.server = self.trainer.longctx_servers.process_ids[0]
        runtime.senders = (self, *others)  # type: ignore[arg-type]

    def send(self, request: Request, program: Program) -> None:
        """Pass the request on, and strike while the server waits for the rows of the request."""
        self.sender.send(request, program)
        step = self.trainer.state.global_step
        self.requests[step] += request.backward == self.backward
        half = max(1, self.requests[0] // 2)
        if step == STRUCK and request.backward == self.backward and self.requests[step] == half:
            os.kill(self.server, self.signal)


def _train(trial: Trial, folder: Path, *, disturbed: bool) -> tuple[dict[str, Any], list[Any]]:
    """Train once; returns the figures and the weights."""
    arguments = LongCtxTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        longctx_max_tokens_per_rank=ROWS,
        longctx_overflow="split",
        longctx_servers=trial.servers,
        longctx_server_timeout=STALL_SECONDS if trial.kill == "stall" else 30.0,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(trial.flags | {RECOMPUTE: trial.checkpointing}),
    )
    model = build(trial.model, name=trial.name, dtype=torch.float32)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    rows = Dataset.from_list(trial.documents(vocabulary))
    trainer = LongCtxTrainer(model=model, args=arguments, train_dataset=rows)
    if disturbed and trainer.longctx_group.rank == 0:
        trainer.add_callback(_Strike(trainer, trial.kill))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    figures = {"losses": losses, "replayed": trainer.longctx_replayed}
    return figures, [p.detach().clone() for p in model.parameters()]


def main(folder: str) -> None:
    """Run both runs as one trainer; the first rank writes their figures."""
    registry.register()
    torch.set_num_threads(1)
    place = Path(folder)
    trial = Trial(**json.loads((place / "trial.json").read_text()))
    calm, right = _train(trial, place / "calm", disturbed=False)
    struck, weights = _train(trial, place / "struck", disturbed=True)
    largest = max(float(w.abs().max()) for w in right)
    apart = [float((a - b).abs().max()) for a, b in zip(weights, right, strict=True)]
    struck["weights_difference"] = float(np.max(apart)) / largest
    if int(os.environ["RANK"]) == 0:
        (place / "runs.json").write_text(json.dumps([calm, struck]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
