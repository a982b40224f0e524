"""The first trainer's cost table -> every trainer: plans are the same on all of them.

Floor: training.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

from ..attention.kinds import layer_configs, layer_widths
from ..plan.measured import CostTable
from ..runtime.costs import cost_file, load


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
        widths = layer_widths(layer_configs(model.config)[0], dtype=dtype)
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
