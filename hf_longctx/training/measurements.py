"""Collect what plans depend on: flags, cost tables of this machine, and links that ranks measure.

Plans must be the same on all ranks, so every number here is agreed: a cost table is the first
trainer's, links are probed together, and the slowest rank counts. What was chosen by these numbers
is logged here, too. Layer: training.
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

logger = logging.getLogger(__name__)

BY_LINK = ("auto", "chain")  # values of longctx_scan that a link changes: also a chain's pieces
_ROWS, _REPEATS = 512, 3  # of the task that is timed: kernels reach their speed at these rows


def flag_options(
    arguments: Any, *, name: str, ranks: int, costs: CostTable | None = None
) -> PlanOptions:
    """Make the options of plans from the flags; what ranks measure is added later.

    Args:
        arguments: With `longctx_*` fields.
        name (`str`): The attention name.
        ranks (`int`): Ranks that share a batch.
        costs (`CostTable`, *optional*): The table that `longctx_cost` asks for.

    Raises:
        ValueError: The flags do not fit each other, or the ranks.
    """
    algorithm, size = LongCtxArguments.algorithm(arguments, name), arguments.longctx_ulysses_size
    topology = given_levels(arguments.longctx_topology, ranks=ranks, ulysses_size=size)
    return PlanOptions(
        algorithm=algorithm,
        layout=LongCtxArguments.layout_for(arguments, name),
        tolerance=arguments.longctx_tolerance,
        costs=costs,
        overlap=arguments.longctx_overlap,
        # Left out for other algorithms: their digests must not depend on domains.
        topology=topology if algorithm in NESTED else None,
        ulysses_size=size,
        scan=arguments.longctx_scan,
    )


def cost_file(*, device: str, dtype: str, heads: int, kv_heads: int, head_dim: int) -> Path:
    """Return where the cost table of a device, a dtype and a layer's shape is kept.

    It is in `$XDG_CACHE_HOME/hf_longctx`, or `~/.cache/hf_longctx`. Each version of the package has
    tables of its own, since its kernels may differ.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{device}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()
    shape = f"{heads}-{kv_heads}-{head_dim}"
    return cache / "hf_longctx" / f"costs-{name}-{dtype}-{shape}-{VERSION}.json".replace(" ", "_")


def save_costs(table: CostTable, path: Path) -> None:
    """Write a cost table, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.to_json() + "\n")


def _load_costs(path: Path) -> CostTable:
    """Read a cost table.

    Raises:
        ValueError: There is none, or it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"no cost table at {path}")
    return CostTable.from_json(path.read_text())


def _layer(model: Any, arguments: Any) -> tuple[Widths, torch.dtype]:
    """Return the sizes and the dtype of a model's first softmax layer, which stands for all."""
    dtype = torch.bfloat16 if arguments.bf16 else model.dtype  # autocast
    return layer_specs(model.config)[0].widths(dtype), dtype


def _cost_key(widths: Widths, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `cost_file`, which are also flags of `hf-longctx profile`."""
    shape = {name: getattr(widths, name) for name in ("heads", "kv_heads", "head_dim")}
    return {"device": device.type, "dtype": str(dtype).removeprefix("torch."), **shape}


def shared_costs(arguments: Any, *, model: Any, device: torch.device) -> CostTable | None:
    """Return the cost table of the first trainer on all of them; all trainers call this at once.

    Args:
        arguments: Training arguments with `longctx_cost`.
        model: Its attention name, dtype and config; the first layer's sizes stand for all.
        device (`torch.device`): Where attention runs, and how the table travels.

    Returns:
        `None` if score entries are balanced, not seconds.

    Raises:
        ValueError: On every trainer, if the first one's machine has no table that fits, or if the
            attention name moves no work.
    """
    if arguments.longctx_cost == "entries":
        return None
    name = model.config._attn_implementation
    if name != "distca":
        raise ValueError(
            f"longctx_cost='measured' balances distca, and {name!r} moves no work; leave it out"
        )
    table, error = None, ""
    if arguments.process_index == 0:
        key = _cost_key(*_layer(model, arguments), device)
        try:
            table = _load_costs(cost_file(**key)).to_json()
        except ValueError as found:
            flags = " ".join(f"--{flag} {value}" for flag, value in key.items())
            error = f"{found}; run hf-longctx profile {flags}"
    # The error travels, too: raised by the first trainer alone, it would leave the others waiting.
    given = {"table": table, "error": error}
    if arguments.world_size > 1:
        given = _from_first(given, device=device)
    if given["table"] is None:
        raise ValueError(
            f"longctx_cost='measured': {given['error']} on the first trainer's machine, or leave "
            "longctx_cost at 'entries'"
        )
    return CostTable.from_json(given["table"])


def _from_first(given: dict[str, Any], *, device: torch.device) -> dict[str, Any]:
    """Send what the first trainer gives to all trainers, as JSON: first its length, then its bytes.

    Objects are not pickled: what arrives must not be able to run code.
    """
    text = torch.frombuffer(bytearray(json.dumps(given).encode()), dtype=torch.uint8).to(device)
    count = torch.tensor([len(text)], device=device)
    dist.broadcast(count, src=0)
    if dist.get_rank():
        text = torch.empty(int(count), dtype=torch.uint8, device=device)
    dist.broadcast(text, src=0)
    found: dict[str, Any] = json.loads(bytes(text.cpu().numpy()))
    return found


def find_auto(topology: Topology, channel: Channel | None, *, model: Any, arguments: Any) -> Auto:
    """Return what `auto` chooses plans by; all ranks of a group call this at once.

    Args:
        topology (`Topology`): As found, the same on all ranks.
        channel (`Channel`, *optional*): Between the ranks; `None` if there is one rank.
        model: Its dtype and config; the first layer's sizes stand for all.
        arguments: Training arguments.
    """
    widths, dtype = _layer(model, arguments)
    if channel is None or not topology.rates:
        return Auto(itemsize=dtype.itemsize)
    mine = torch.tensor([_entry_seconds(widths, dtype, arguments.device)], dtype=torch.float64)
    slowest = gather(channel, mine, ranks=topology.levels.ranks).max()
    machine = Machine(levels=topology.levels, links=topology.links, entry_seconds=float(slowest))
    return Auto(itemsize=dtype.itemsize, machine=machine)


def _entry_seconds(widths: Widths, dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a score entry in forward, from this machine's cost table or timed."""
    path = cost_file(**_cost_key(widths, dtype, device))
    if path.is_file():
        return _load_costs(path).per_entry[-1][-1] / (1 + BACKWARD)  # a table has both directions
    return _timed(widths, dtype, device)


def _timed(widths: Widths, dtype: torch.dtype, device: torch.device) -> float:
    """Time one causal task and return the seconds of a score entry, the best of a few runs."""
    noise = torch.Generator(device).manual_seed(0)  # the run's own random state stays as it is
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
    scoring, seconds = Scoring(scale=widths.head_dim**-0.5), list[float]()
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for call in calls([task], window=0):
            attend(call, q=query, kv=key, into=into, scoring=scoring)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / (_ROWS * (_ROWS + 1) / 2)


def find_link(channel: Channel, *, ranks: int) -> NeighbourLink:
    """Measure the link between neighbours; all ranks of a group call this at once.

    Raises:
        ExchangeError: A rank does not answer.
    """
    # All ranks send to the next one at once, as a chain of states does; the slowest counts.
    (rate,) = probe(channel, Levels((ranks,)))
    return NeighbourLink(rate.hop, rate.together)


def log_choices(batch: LongCtxBatch, *, before: tuple[str, ...]) -> tuple[str, ...]:
    """Log what was chosen for each layer kind of a batch, if it differs from `before`.

    Returns:
        The algorithms, for the next batch; `before` if nothing was chosen.
    """
    chosen = [(kind, each) for part in batch.parts for kind, each in part.binding.choices.items()]
    names = tuple(choice.plan.options.algorithm for _, choice in chosen)
    if not names or names == before:
        return before
    for kind, choice in chosen:
        layers = f"layers of window {kind.window}" if kind.window else "layers without window"
        logger.info("longctx_topology=auto, %s: %s", layers, choice)
    return names


def log_scans(
    batch: LongCtxBatch, *, before: frozenset[tuple[StateSizes, int]]
) -> frozenset[tuple[StateSizes, int]]:
    """Log how the state scans of a batch run: once per state size and number of ranks in a chain.

    Returns:
        What has been logged, for the next batch.
    """
    scans = {(scan.sizes, scan.ranks): scan for scan in batch.binding.scans.values()}
    for key, scan in scans.items():
        if key not in before:
            logger.info("longctx_scan=%s, %s", batch.options.scan, scan)
    return before | scans.keys()
