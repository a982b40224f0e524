"""Cost tables of this machine: which file of the user's cache holds one.

Layer: training. `hf-longctx profile` writes them; a training run reads the one of its layers.

The first trainer's cost table -> every trainer: plans are the same on all of them.

A measured topology and the model's layers -> what `auto` chooses plans by; and what it chose. Plans must be the same on all ranks, so the numbers are agreed: links were probed
together, and a score entry costs what it costs the slowest rank.

Ranks of a group -> the link between neighbours that their scans go by; and what they took. All ranks send to the next one at once, as a chain of states does; the slowest of
them counts. Plans must be the same on all ranks, and so is what they measured together.
"""

import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..attention.spec import layer_specs
from ..comm.channels import Channel
from ..comm.topology import Topology, gather, given_levels, probe
from ..config import LongCtxArguments
from ..data.batch import LongCtxBatch
from ..kernels.kernel_calls import KernelTask, calls
from ..kernels.softmax import Scoring, attend
from ..planning.layouts.cost import CostTable
from ..planning.layouts.levels import Levels, Machine, NeighbourLink
from ..planning.planners.options import Auto, PlanOptions
from ..planning.predict.predict import BACKWARD
from ..planning.predict.scan_schedule import StateSizes
from ..planning.program.counts import Widths
from ..support import NESTED
from ..version import VERSION


def cost_file(*, device: str, dtype: str, heads: int, kv_heads: int, head_dim: int) -> Path:
    """Where the table of a device, a dtype, a layer's shape and this version of the package is.

    In `$XDG_CACHE_HOME/hf_longctx`, or `~/.cache/hf_longctx`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{device}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()
    shape = f"{heads}-{kv_heads}-{head_dim}"
    return cache / "hf_longctx" / f"costs-{name}-{dtype}-{shape}-{VERSION}.json".replace(" ", "_")


def save(table: CostTable, path: Path) -> None:
    """Write a table; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.to_json() + "\n")


def load(path: Path) -> CostTable:
    """Read a table.

    Raises:
        ValueError: where there is none, naming the file and the command that writes it.
    """
    if not path.is_file():
        raise ValueError(f"no cost table at {path}")
    return CostTable.from_json(path.read_text())


def shared_costs(arguments: Any, *, model: Any, device: torch.device) -> CostTable | None:
    """The table that balances attention; `None` where score entries do. All trainers call it.

    Args:
        arguments: Training arguments with `longctx_cost`.
        model: Its attention name, dtype and config; the first layer's sizes count for all.
        device (`torch.device`): Where attention runs, and the table travels.

    Raises:
        ValueError: on every trainer, where the first one's machine has no table that fits, or the
            attention name moves no work.
    """
    if arguments.longctx_cost == "entries":
        return None
    name = model.config._attn_implementation
    if name != "distca":
        raise ValueError(
            f"longctx_cost='measured' balances distca, and {name!r} moves no work; leave it out"
        )
    given = {"table": "", "error": ""}
    if arguments.process_index == 0:
        dtype = torch.bfloat16 if arguments.bf16 else model.dtype
        widths = layer_specs(model.config)[0].widths(dtype)
        shape: dict[str, Any] = {n: getattr(widths, n) for n in ("heads", "kv_heads", "head_dim")}
        known_as: dict[str, Any] = {
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
        }
        try:
            given["table"] = load(cost_file(**known_as, **shape)).to_json()
        except ValueError as error:
            flags = " ".join(f"--{key} {value}" for key, value in (known_as | shape).items())
            given["error"] = f"{error}; run hf-longctx profile {flags} on the first trainer's"
    given = _from_first(given, device=device) if arguments.world_size > 1 else given
    if given["error"]:
        raise ValueError(
            f"longctx_cost='measured': {given['error']} machine, or leave longctx_cost at 'entries'"
        )
    return CostTable.from_json(given["table"])


def _from_first(given: dict[str, str], *, device: torch.device) -> dict[str, str]:
    """What the first trainer gives, on all of them: its bytes' count, then the bytes."""
    text = torch.frombuffer(bytearray(json.dumps(given).encode()), dtype=torch.uint8).to(device)
    count = torch.tensor([len(text)], device=device)
    dist.broadcast(count, src=0)
    if dist.get_rank():
        text = torch.empty(int(count), dtype=torch.uint8, device=device)
    dist.broadcast(text, src=0)
    found: dict[str, str] = json.loads(bytes(text.cpu().numpy()))
    return found


logger = logging.getLogger(__name__)
_ROWS = 512  # of the task that is timed: kernels have their speed by then
_TIMES = 3


def flag_options(
    arguments: Any, *, name: str, ranks: int, costs: CostTable | None = None
) -> PlanOptions:
    """What plans depend on, as far as flags say it.

    Args:
        arguments: With `longctx_*` fields.
        name (`str`): The attention name.
        ranks (`int`): Ranks that share a batch.
        costs (`CostTable`, *optional*): What `longctx_cost` names.

    Raises:
        ValueError: where the flags do not fit each other, or the ranks.
    """
    algorithm, size = LongCtxArguments.algorithm(arguments, name), arguments.longctx_ulysses_size
    topology = given_levels(arguments.longctx_topology, ranks=ranks, ulysses_size=size)
    return PlanOptions(
        algorithm=algorithm,
        layout=LongCtxArguments.layout_for(arguments, name),
        tolerance=arguments.longctx_tolerance,
        costs=costs,
        overlap=arguments.longctx_overlap,
        topology=topology if algorithm in NESTED else None,
        ulysses_size=size,
        scan=arguments.longctx_scan,
    )


def find_auto(topology: Topology, channel: Channel | None, *, model: Any, arguments: Any) -> Auto:
    """What a group's choices go by; all its ranks call this at once.

    Args:
        topology (`Topology`): As found, the same on all ranks.
        channel (`Channel`, *optional*): Between them; `None` where there is one.
        model: Its dtype and config; the first layer's sizes count for all.
        arguments: Training arguments.
    """
    dtype = torch.bfloat16 if arguments.bf16 else model.dtype
    if channel is None or not topology.rates:
        return Auto(itemsize=dtype.itemsize)
    widths = layer_specs(model.config)[0].widths(dtype)
    mine = torch.tensor([_entry_seconds(widths, dtype, arguments.device)], dtype=torch.float64)
    slowest = gather(channel, mine, ranks=topology.levels.ranks).max()
    machine = Machine(levels=topology.levels, links=topology.links, entry_seconds=float(slowest))
    return Auto(itemsize=dtype.itemsize, machine=machine)


def _entry_seconds(widths: Widths, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a score entry in forward: by this machine's cost table, else measured now."""
    shape = {name: getattr(widths, name) for name in ("heads", "kv_heads", "head_dim")}
    name = str(dtype).removeprefix("torch.")
    path = cost_file(device=device.type, dtype=name, **shape)
    if path.is_file():
        table: CostTable = load(path)
        return table.per_entry[-1][-1] / (1 + BACKWARD)  # of both directions
    return _timed(widths, dtype, device)


def _timed(widths: Widths, dtype: torch.dtype, device: torch.device) -> float:
    """The best of a few runs of one causal task."""
    noise = torch.Generator(device).manual_seed(0)  # dropout must draw as without `auto`
    of: dict[str, Any] = {"dtype": dtype, "device": device, "generator": noise}
    wide = torch.promote_types(dtype, torch.float32)
    query = {"q": torch.randn(_ROWS, widths.heads, widths.head_dim, **of)}
    key = {
        "k": torch.randn(_ROWS, widths.kv_heads, widths.head_dim, **of),
        "v": torch.randn(_ROWS, widths.kv_heads, widths.value_dim, **of),
    }
    into = {
        "out": torch.empty(_ROWS, widths.heads, widths.value_dim, dtype=dtype, device=device),
        "lse": torch.empty(_ROWS, widths.heads, 1, dtype=wide, device=device),
    }
    task = KernelTask(dict.fromkeys(("q", "kv", "into"), 0), 0, _ROWS, 0, _ROWS)
    scoring, taken = Scoring(scale=widths.head_dim**-0.5), list[float]()
    for _ in range(_TIMES):
        began = time.perf_counter()
        for call in calls([task], window=0):
            attend(call, q=query, kv=key, into=into, scoring=scoring)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken) / (_ROWS * (_ROWS + 1) / 2)


def log_choices(batch: LongCtxBatch, *, before: tuple[str, ...]) -> tuple[str, ...]:
    """Log what was chosen for each layer kind of a batch, where that differs from `before`.

    Returns:
        The algorithms, for the next batch; `before` where nothing is chosen.
    """
    chosen = [(kind, each) for part in batch.parts for kind, each in part.binding.choices.items()]
    names = tuple(choice.plan.options.algorithm for _, choice in chosen)
    if not names or names == before:
        return before
    for kind, choice in chosen:
        layers = f"layers of window {kind.window}" if kind.window else "layers without window"
        logger.info("longctx_topology=auto, %s: %s", layers, choice)
    return names


BY_LINK = ("auto", "chain")  # values of longctx_scan that a link changes: a chain's pieces, too


def find_link(channel: Channel, *, ranks: int) -> NeighbourLink:
    """Measure the link between neighbours, the same on all ranks, which call this at once.

    Raises:
        ExchangeError: where a rank does not answer.
    """
    (rate,) = probe(channel, Levels((ranks,)))
    return NeighbourLink(rate.hop, rate.together)


def log_scans(
    batch: LongCtxBatch, *, before: frozenset[tuple[StateSizes, int]]
) -> frozenset[tuple[StateSizes, int]]:
    """Log what the scans of a batch took, for each kind of layer and length of a chain of ranks
    that is not in `before`.

    Returns:
        Those that have been logged, for the next batch.
    """
    for scan in batch.binding.scans.values():
        if (scan.sizes, scan.ranks) not in before:
            logger.info("longctx_scan=%s, %s", batch.options.scan, scan)
    return before | {(scan.sizes, scan.ranks) for scan in batch.binding.scans.values()}
