"""Two sides' launches -> what their steps took, as ratios (ours / stock) and beside a bound.

A step lasts from the end of the one before, on the rank that ends last: data,
forward, backward, optimizer and log. The bound is the time of the same multiplications, split
evenly over the ranks, at the rate of one large matrix product.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from transformers import TrainerCallback

from benchmarks.common import Shape
from hf_longctx.attention.boundaries import local_documents
from hf_longctx.data.batch import KEY


@dataclass(slots=True)
class Launch:
    """What one rank measured in one launch.

    Args:
        wall, cpu (`list[float]`): Seconds of each step after the first.
        tokens (`list[int]`): Tokens of all ranks in those steps.
        documents (`list[list[int]]`): Lengths of the documents in those steps; of a batch that all
            ranks share, on rank 0 only.
        peak_memory (`int`): Bytes by which the resident set grew at most, from before loading.
        history (`list[dict[str, float]]`): The trainer's log.
        allocator (`str`): How memory is kept.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    documents: list[list[int]] = field(default_factory=list)
    peak_memory: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    allocator: str = ""


class StepClock(TrainerCallback):
    """Seconds, tokens and documents between the ends of steps, into a `Launch`.

    Args:
        launch (`Launch`): Filled in.
        rank (`int`): This rank.
    """

    def __init__(self, launch: Launch, *, rank: int) -> None:
        self.launch, self.rank = launch, rank
        self.last: tuple[float, float, int] | None = None
        self.lengths: list[int] = []

    def see(self, module: Any, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of the model: which documents it gets."""
        if KEY not in kwargs:
            ids, positions = kwargs["input_ids"], kwargs["position_ids"]
            self.lengths = list(local_documents(batch=1, rows=ids.shape[1], position_ids=positions))
        elif self.rank == 0:
            self.lengths = [int(n) for n in kwargs[KEY].layout.lengths]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note how far it is from the step before."""
        now = time.perf_counter(), time.process_time(), int(state.num_input_tokens_seen)
        if self.last is not None:
            self.launch.wall.append(now[0] - self.last[0])
            self.launch.cpu.append(now[1] - self.last[1])
            self.launch.tokens.append(now[2] - self.last[2])
            self.launch.documents.append(self.lengths)
        self.last = now


class PeakMemory:
    """How far the resident set of this process has grown at most since this was made, in bytes.

    Linux only. `ru_maxrss` would not do: a started process takes over its parent's.
    """

    def __init__(self) -> None:
        with suppress(OSError):  # where it may not be reset, the peak of the imports stands
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def grown(self) -> int:
        """Bytes so far."""
        return _status("VmHWM") - self.before


def _status(name: str) -> int:
    """A field of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def figures(
    found: Mapping[str, Sequence[Sequence[Launch]]], *, shape: Shape, rate: float
) -> dict[str, Any]:
    """What the ranks of each side's launches measured -> ratios (ours / stock), and both sides.

    Args:
        found (`Mapping[str, Sequence[Sequence[Launch]]]`): By side, launch and rank.
        shape (`Shape`): The model.
        rate (`float`): Floating-point operations per second of one large matrix product.
    """
    sides = {
        name: side_figures(launches, shape=shape, rate=rate) for name, launches in found.items()
    }
    ours, stock = sides["ours"], sides["stock"]
    logs = [
        log
        for launch in found["ours"]
        for log in [log for log in launch[0].history if "longctx_tokens" in log][1:]
    ]
    return {
        "step_time_ratio": ours["seconds_per_step"] / stock["seconds_per_step"],
        "token_time_ratio": ours["seconds_per_1000_tokens"] / stock["seconds_per_1000_tokens"],
        "step_cpu_ratio": ours["cpu_seconds_per_step"] / stock["cpu_seconds_per_step"],
        "token_cpu_ratio": ours["cpu_seconds_per_1000_tokens"]
        / stock["cpu_seconds_per_1000_tokens"],
        "peak_memory_ratio": ours["peak_memory"] / stock["peak_memory"],
        "attention_max_over_mean_before": mean(log["longctx_attention_before"] for log in logs),
        "attention_max_over_mean": mean(log["longctx_attention_after"] for log in logs),
        "wait_seconds_per_step": mean(log["longctx_wait_seconds"] for log in logs),
        **sides,
    }


def side_figures(
    launches: Sequence[Sequence[Launch]], *, shape: Shape, rate: float
) -> dict[str, Any]:
    """One side: medians over its launches of a launch's mean step."""
    wall = median(mean(slowest(ranks, "wall")) for ranks in launches)
    cpu = median(mean(slowest(ranks, "cpu")) for ranks in launches)
    tokens = mean(mean(ranks[0].tokens) for ranks in launches)
    bound = median(
        mean(
            shape.operations([n for lengths in step for n in lengths]) / len(ranks) / rate
            for step in zip(*(rank.documents for rank in ranks), strict=True)
        )
        for ranks in launches
    )
    peaks = {
        f"peak_memory_rank{rank}": max(ranks[rank].peak_memory for ranks in launches)
        for rank in range(len(launches[0]))
    }
    return {
        "seconds_per_step": wall,
        "cpu_seconds_per_step": cpu,
        "tokens_per_step": tokens,
        "seconds_per_1000_tokens": 1000 * wall / tokens,
        "cpu_seconds_per_1000_tokens": 1000 * cpu / tokens,
        "bound_seconds": bound,
        "fraction_of_bound": bound / wall,
        "cpu_fraction_of_bound": bound / cpu,
        "peak_memory": max(peaks.values()),
        **peaks,
        "loss_first_step": launches[0][0].history[0]["loss"],
        "seconds_of_steps": [[round(s, 2) for s in slowest(r, "wall")] for r in launches],
        "tokens_of_steps": [ranks[0].tokens for ranks in launches],
    }


def slowest(ranks: Sequence[Launch], clock: str) -> list[float]:
    """The seconds of each step on the rank that took longest."""
    return [max(taken) for taken in zip(*(getattr(r, clock) for r in ranks), strict=True)]
