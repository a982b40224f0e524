"""A layer's shape -> a table of what attention tasks cost on this device, and where it is kept.

Layer: cli. The kernels that training runs are timed, forward and backward, over a grid of (query
rows, keys), one thread, in CPU seconds: nothing waits, so other processes must not count. Short
tasks run several at once, as in a packed batch.

A comparison plans drawn batches by score entries and by the table, and runs each rank's tasks of
both plans, rank after rank and without exchanges. Its figures are medians over batches:

- `entries_max_over_mean`: score entries of the busiest rank over the mean, planned by entries.
- `seconds_max_over_mean_static`, `_entries`, `_measured`: measured seconds of the busiest rank over
  the mean: with every task at home, planned by entries, and by the table.
- `busiest_seconds_entries`, `_measured`: measured seconds of the busiest rank.
- `predicted_max_over_mean_entries`, `_measured`: the same as the table says.
- `prediction_error`: of a rank's seconds by the table, the worst rank.

`hf-longctx profile`: measures what attention costs here, for plans that balance seconds. Exit codes: 0 done, 2 refused.
"""

import argparse
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import keep_pages, setting
from benchmarks.plan import TABLES, draw

from ..kernels.kernel_calls import KernelTask, calls
from ..kernels.softmax import Scoring, attend, attend_grad
from ..planning.layouts.cost import CostTable, LayerKind, max_over_mean
from ..planning.layouts.layout import cut
from ..planning.planners.options import PlanOptions
from ..planning.planners.plan import make_plan
from ..training.measurements import cost_file, save
from .common import add_json, progress, show

logger = logging.getLogger(__name__)
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
KEYS = (*ROWS, 4096, 8192)
LARGEST = 2048 * 8192 * 8 * 64  # rows x keys x heads x head size of one task: a few seconds
TOGETHER = 1024  # keys of tasks that run at once
REPEATED = 0.3  # seconds: a task that takes less is timed again, and the best counts
LAYOUTS = ("spread", "contiguous")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The batches of a comparison: group size, and tokens of each rank."""

    ranks: int = 4
    tokens: int = 4096


COMPARED = Compared()


class Tasks:
    """Equal causal tasks on random rows, ready to run.

    Args:
        sizes (`list[tuple[int, int]]`): Query rows and keys of each task; its last row sees all.
        heads, kv_heads, head_dim (`int`): Of the layer.
        dtype (`torch.dtype`, *optional*): Of the rows.
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
        """CPU seconds of one forward and backward."""
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
    """Tasks whose rows and keys lie end to end."""
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
    """Time the grid.

    Args:
        device (`str`, *optional*, defaults to `"cpu"`): The only one with kernels so far.
        dtype (`str`, *optional*, defaults to `"float32"`): Of queries, keys and values.
        heads, kv_heads, head_dim (`int`, *optional*): Of the layer.
        rows, keys (`tuple[int, ...]`, *optional*): The grid, `ROWS` and `KEYS` by default; tasks of
            more than `LARGEST` are left out of it.

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
                count = max(1, TOGETHER // k)
                tasks = Tasks([(q, k)] * count, dtype=_DTYPES[dtype], **shape)
                rates[i][j] = _best(tasks) / (count * (q * k - q * (q - 1) / 2))
        # No causal task has more rows than keys: where one is asked for between two sizes of the
        # grid, the square's rate stands in.
        square = next(rate for rate in rates[i] if rate)
        rates[i] = [rate or square for rate in rates[i]]
    return CostTable(rows=rows, keys=keys, per_entry=tuple(map(tuple, rates)))


def _best(tasks: Tasks) -> float:
    """Seconds of the fastest of a few runs; the first one of short tasks warms up."""
    taken = [tasks.seconds()]
    while len(taken) < 4 and taken[-1] < REPEATED:
        taken.append(tasks.seconds())
    return min(taken)


def compare_layouts(
    *, device: str, dtype: str, heads: int, kv_heads: int, head_dim: int, compare: int = 0
) -> dict[str, Any]:
    """Time the grid, keep the table, and compare plans.

    Args:
        device, dtype, heads, kv_heads, head_dim: As `profile` takes them.
        compare (`int`, *optional*, defaults to 0): Batches to compare plans on, for each layout.

    Returns:
        The file, the largest and smallest seconds per score entry, and figures by layout.
    """
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    allocator = keep_pages()
    table = profile(device=device, dtype=dtype, **shape)
    path = cost_file(device=device, dtype=dtype, **shape)
    save(table, path)
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
    """The figures of one batch."""
    ranks = COMPARED.ranks
    lengths = draw(TABLES["buckets"], seed=seed, tokens=ranks * COMPARED.tokens)
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


def add_profile(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    profile = commands.add_parser(
        "profile",
        help="measure what attention costs on this device, for --longctx_cost measured",
        description=(
            "Times the attention kernels over a grid of query rows and keys, on one thread, and "
            "keeps the table in the user's cache. Takes 10 to 60 seconds. The shape is that of "
            "the model's config: num_attention_heads, num_key_value_heads, head_dim."
        ),
        epilog="example: hf-longctx profile --heads 9 --kv_heads 3 --head_dim 64 --compare 3",
    )
    profile.add_argument("--device", default="cpu", help="cpu (default)")
    profile.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    profile.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    profile.add_argument("--kv_heads", type=int, default=4, help="key/value heads (default 4)")
    profile.add_argument("--head_dim", type=int, default=64, help="head size (default 64)")
    profile.add_argument(
        "--compare",
        type=int,
        default=0,
        metavar="N",
        help="also run the attention of N batches as planned by score entries and by the table",
    )
    add_json(profile)
    profile.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, keep the table, print the report; returns the exit code."""
    pass

    with progress(arguments):
        report = compare_layouts(
            device=arguments.device,
            dtype=arguments.dtype,
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            compare=arguments.compare,
        )
    show(report, arguments.json)
    return 0
