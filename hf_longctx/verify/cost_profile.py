"""Measure what attention tasks cost on this machine, for plans that balance seconds.

`hf-longctx profile` times the kernels that training runs, forward and backward, over a grid of
(query rows, keys) and keeps the table in the user's cache. A comparison (`--compare N`) plans drawn
batches by score entries and by the table, then runs each rank's tasks of both plans, one rank after
the other and without exchanges. Layer: verify.
"""

import ctypes
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from ..kernels.kernel_calls import KernelTask, calls
from ..kernels.softmax import Scoring, attend, attend_grad
from ..planning.layouts.cost import CostTable, LayerKind, max_over_mean
from ..planning.layouts.layout import cut
from ..planning.planners.options import PlanOptions
from ..planning.planners.plan import make_plan
from ..training.measurements import cost_file, save_costs

logger = logging.getLogger(__name__)
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
KEYS = (*ROWS, 4096, 8192)
LARGEST = 2048 * 8192 * 8 * 64  # rows x keys x heads x head size of one task: a few seconds
TOGETHER = 1024  # keys of tasks that run at once
REPEATED = 0.3  # seconds: a task that takes less is timed again, and the best counts
LAYOUTS = ("spread", "contiguous")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Documents by length: the largest length of each bucket, and its share in percent.
BUCKETS = {
    10: 0.22, 50: 2.91, 100: 5.20, 200: 10.23, 500: 28.19, 1024: 24.64, 2048: 15.65,
    4096: 7.34, 8192: 3.05, 16384: 1.29, 32768: 0.85, 65536: 0.14, 131072: 0.17, 196608: 0.14,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Size of the batches of a comparison: ranks of a group, and tokens of each."""

    ranks: int = 4
    tokens: int = 4096


COMPARED = Compared()


class Tasks:
    """Causal tasks on random rows, ready to run.

    Args:
        sizes (`list[tuple[int, int]]`): Query rows and keys of each task; the last row of a task
            sees all its keys.
        heads, kv_heads, head_dim (`int`): Shape of the layer.
        dtype (`torch.dtype`, *optional*): Dtype of the rows.
    """

    def __init__(
        self,
        sizes: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rows, keys = sum(q for q, _ in sizes), sum(k for _, k in sizes)
        wide = torch.promote_types(dtype, torch.float32)
        self.scoring = Scoring(scale=head_dim**-0.5)
        self.q = {"q": torch.randn(rows, heads, head_dim, dtype=dtype)}
        self.kv = {name: torch.randn(keys, kv_heads, head_dim, dtype=dtype) for name in "kv"}
        self.into = {
            "out": torch.empty(rows, heads, head_dim, dtype=dtype),
            "lse": torch.empty(rows, heads, 1, dtype=wide),
        }
        self.grad = {"grad_out": torch.randn(rows, heads, head_dim, dtype=dtype), **self.into}
        self.dq = {"dq": torch.zeros(rows, heads, head_dim, dtype=wide)}
        self.dkv = {f"d{name}": torch.zeros_like(t, dtype=wide) for name, t in self.kv.items()}
        self.forward = calls(_placed(sizes, ("q", "into"), ("kv",)), window=0)
        self.backward = calls(_placed(sizes, ("q", "grad", "dq"), ("kv", "dkv")), window=0)

    def seconds(self) -> float:
        """Run forward and backward once; returns CPU seconds."""
        # CPU time, not wall time: nothing waits here, and other processes must not count.
        started = time.process_time()
        for call in self.forward:
            attend(call, q=self.q, kv=self.kv, into=self.into, scoring=self.scoring)
        for call in self.backward:
            attend_grad(
                call,
                q=self.q,
                kv=self.kv,
                grad=self.grad,
                dq=self.dq,
                dkv=self.dkv,
                scoring=self.scoring,
            )
        return time.process_time() - started


def _placed(
    sizes: list[tuple[int, int]], by_row: tuple[str, ...], by_key: tuple[str, ...]
) -> Iterator[KernelTask]:
    """Yield the kernel tasks, whose rows and keys lie end to end."""
    row = key = 0
    for q, k in sizes:
        rows = dict.fromkeys(by_row, row) | dict.fromkeys(by_key, key)
        yield KernelTask(rows, k - q, q, 0, k)
        row, key = row + q, key + k


def profile(
    *,
    device: str = "cpu",
    dtype: str = "float32",
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 64,
    rows: tuple[int, ...] | None = None,
    keys: tuple[int, ...] | None = None,
) -> CostTable:
    """Time attention tasks over a grid of (query rows, keys).

    Args:
        device (`str`, *optional*, defaults to `"cpu"`): Only `cpu` has kernels so far.
        dtype (`str`, *optional*, defaults to `"float32"`): Dtype of queries, keys and values.
        heads, kv_heads, head_dim (`int`, *optional*): Shape of the layer.
        rows, keys (`tuple[int, ...]`, *optional*): The grid, by default `ROWS` and `KEYS` without
            tasks of more than `LARGEST`.

    Raises:
        ValueError: on another device or dtype, or heads that do not divide.
    """
    if device != "cpu":
        raise ValueError(f"--device {device}: no kernels for it are built yet; use cpu")
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype} must be one of {', '.join(_DTYPES)}")
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise ValueError(
            f"--heads {heads} --kv_heads {kv_heads} --head_dim {head_dim}: all must be at least 1, "
            "and kv_heads divide heads; take them from the model's config"
        )
    torch.set_num_threads(1)
    width, rows, keys = heads * head_dim, rows or ROWS, keys or KEYS
    keys = tuple(k for k in keys if min(k, rows[-1]) * k * width <= LARGEST) or keys[:1]
    rows = tuple(q for q in rows if q <= keys[-1])
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    rates = [[0.0] * len(keys) for _ in rows]
    for i, q in enumerate(rows):
        logger.info("%d query rows, of %s", q, ", ".join(map(str, rows)))
        for j, k in enumerate(keys):
            if k >= q:
                count = max(1, TOGETHER // k)  # several short tasks at once, as in a packed batch
                tasks = Tasks([(q, k)] * count, dtype=_DTYPES[dtype], **shape)
                rates[i][j] = _best(tasks) / (count * (q * k - q * (q - 1) / 2))
        # No causal task has more rows than keys; interpolation near the diagonal reads such cells
        # of the grid all the same, so they hold the rate of the smallest square task.
        square = next(rate for rate in rates[i] if rate)
        rates[i] = [rate or square for rate in rates[i]]
    return CostTable(rows=rows, keys=keys, per_entry=tuple(map(tuple, rates)))


def _best(tasks: Tasks) -> float:
    """Return the seconds of the fastest of a few runs; the first of short tasks warms up."""
    taken = [tasks.seconds()]
    while len(taken) < 4 and taken[-1] < REPEATED:
        taken.append(tasks.seconds())
    return min(taken)


def compare_layouts(
    *, device: str, dtype: str, heads: int, kv_heads: int, head_dim: int, compare: int = 0
) -> dict[str, Any]:
    """Time the grid, save the table, and compare plans by it.

    Args:
        device, dtype, heads, kv_heads, head_dim: As `profile` takes them.
        compare (`int`, *optional*, defaults to 0): Batches to compare plans on, for each layout.

    Returns:
        The report, with the keys of `FIGURES` in `cli/profile.py` and, for each layout, those of
        `COMPARED_FIGURES`.
    """
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    allocator = keep_pages()
    table = profile(device=device, dtype=dtype, **shape)
    path = cost_file(device=device, dtype=dtype, **shape)
    save_costs(table, path)
    rates = np.asarray(table.per_entry)
    report = setting(shape, processes=1, allocator=allocator, clock="CPU seconds of the process")
    report |= {"dtype": dtype, "file": str(path)}
    report |= {"ns_per_entry_slowest": 1e9 * rates.max(), "ns_per_entry_fastest": 1e9 * rates.min()}
    for layout in LAYOUTS if compare else ():
        logger.info("%d batches of %s, layout %s", compare, COMPARED, layout)
        seeds = [
            _compared(seed, table=table, layout=layout, dtype=_DTYPES[dtype], **shape)
            for seed in range(compare)
        ]
        report[layout] = {name: median(seed[name] for seed in seeds) for name in seeds[0]}
    return report


def _compared(
    seed: int,
    *,
    table: CostTable,
    layout: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> dict[str, float]:
    """Plan one batch in three ways, run every rank's tasks, and form the figures."""
    ranks = COMPARED.ranks
    lengths = draw(BUCKETS, seed=seed, tokens=ranks * COMPARED.tokens)
    held = cut(lengths, ranks=ranks, layout=layout)
    kind = LayerKind(query_width=heads * head_dim, key_value_width=2 * kv_heads * head_dim)
    plans = {
        "static": make_plan(held, kind=kind, options=PlanOptions(tolerance=float("inf"))),
        "entries": make_plan(held, kind=kind, options=PlanOptions()),
        "measured": make_plan(held, kind=kind, options=PlanOptions(costs=table)),
    }
    figures = {"entries_max_over_mean": plans["entries"].attention_max_over_mean()}
    errors = []
    for name, plan in plans.items():
        taken = np.zeros(ranks)
        for rank in range(ranks):
            _, start, stop, _, server = plan.tasks.T
            sizes = [(int(b - a), int(b)) for a, b in zip(start, stop, strict=True)]
            own = [size for size, at in zip(sizes, server, strict=True) if at == rank]
            tasks = Tasks(own, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
            taken[rank] = min(tasks.seconds() for _ in range(3))
        figures[f"seconds_max_over_mean_{name}"] = max_over_mean(taken)
        figures[f"busiest_seconds_{name}"] = float(taken.max())
        by_table = replace(plan.options, costs=table)
        predicted = replace(plan, options=by_table).work(balanced=True)
        figures[f"predicted_max_over_mean_{name}"] = max_over_mean(predicted)
        errors.append(float(np.abs(predicted / taken - 1).max()))
    return figures | {"prediction_error": max(errors)}


def draw(
    table: Mapping[int, float], *, seed: int, tokens: int, documents: int | None = None
) -> list[int]:
    """Draw document lengths, log-uniform inside their bucket, at most a quarter of `tokens`.

    Args:
        table (`Mapping[int, float]`): Largest length of each bucket, and its share of documents.
        seed (`int`): Seed of the draw.
        tokens (`int`): Tokens of the batch; the last document is cut to fit.
        documents (`int`, *optional*): Draw that many, whatever their tokens.
    """
    noise = np.random.default_rng(seed)
    highs = np.asarray(list(table), np.float64)
    lows = np.concatenate([[1.0], highs[:-1] + 1])
    shares = np.asarray(list(table.values()))
    count = documents or tokens // 64
    bucket = noise.choice(len(highs), p=shares / shares.sum(), size=count)
    drawn = np.exp(noise.uniform(np.log(lows[bucket]), np.log(highs[bucket] + 1)))
    lengths = np.minimum(drawn.astype(np.int64), tokens // 4)
    if documents:
        return [int(n) for n in lengths]
    ends = np.minimum(np.cumsum(lengths), tokens)
    assert ends[-1] == tokens, (tokens, count)
    lengths = np.diff(ends, prepend=0)
    return [int(n) for n in lengths[lengths > 0]]


def keep_pages() -> str:
    """Let the allocator keep freed memory; returns a description of what it did.

    glibc returns each freed tensor above 32 MiB to the system, which hands its pages out again,
    zeroed. On a virtual machine that took a twentieth to a quarter of a packed step, whichever
    attention ran.
    """
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return "default"
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)
    return "glibc, freed pages kept (mallopt M_MMAP_MAX=0, M_TRIM_THRESHOLD=2**31-1)"


def setting(
    shape: object, *, processes: int, allocator: str, clock: str, seed: int = 0
) -> dict[str, Any]:
    """Return what a figure holds for: shape, seed, versions, machine, and the clock."""
    return {
        "shape": str(shape),
        "dtype": "float32",
        "seed": seed,
        "processes": processes,
        "threads_per_process": 1,
        "allocator": allocator,
        "clock": clock,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu() -> str:
    """Return the processor's name, with the vector instructions that PyTorch uses on it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
