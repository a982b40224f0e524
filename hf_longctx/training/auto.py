"""A measured topology and the model's layers -> what `auto` chooses plans by; and what it chose.

Floor: training. Plans must be the same on all ranks, so the numbers are agreed: links were probed
together, and a score entry costs what it costs the slowest rank.
"""

import logging
import time
from typing import Any

import torch

from ..attention.kinds import layer_configs, layer_widths
from ..comm.channels import Channel
from ..comm.topology import Topology, gather
from ..data.batch import LongCtxBatch
from ..kernels.pieces import Task, calls
from ..kernels.softmax import Scoring, attend
from ..plan.auto import Auto
from ..plan.count import Widths
from ..plan.measured import CostTable
from ..plan.predict import BACKWARD, Machine
from ..runtime.costs import cost_file, load

logger = logging.getLogger(__name__)
_ROWS = 512  # of the task that is timed: kernels have their speed by then
_TIMES = 3


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
    widths = layer_widths(layer_configs(model.config)[0], dtype=dtype)
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
    task = Task(dict.fromkeys(("q", "kv", "into"), 0), 0, _ROWS, 0, _ROWS)
    scoring, taken = Scoring(scale=widths.head_dim**-0.5), list[float]()
    for _ in range(_TIMES):
        began = time.perf_counter()
        for call in calls([task], window=0):
            attend(call, q=query, kv=key, into=into, scoring=scoring)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken) / (_ROWS * (_ROWS + 1) / 2)


def say_choices(batch: LongCtxBatch, *, before: tuple[str, ...]) -> tuple[str, ...]:
    """Log what was chosen for each layer kind of a batch, where that differs from `before`.

    Returns:
        The algorithms, for the next batch; `before` where nothing is chosen.
    """
    chosen = [(kind, each) for part in batch.parts for kind, each in part.choices.items()]
    names = tuple(choice.plan.algorithm for _, choice in chosen)
    if not names or names == before:
        return before
    for kind, choice in chosen:
        layers = f"layers of window {kind.window}" if kind.window else "layers without window"
        logger.info("longctx_topology=auto, %s: %s", layers, choice)
    return names
