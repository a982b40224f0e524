"""Kernel calls -> partials and gradients, with the aten flash attention kernels for CPU.

Floor: kernels. Letters: n pieces of one call, T rows, H query heads, K key/value heads, D head
size. Arrays are `[T, heads, D]`; partials and gradients are accumulated in float32 or wider.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .merge import merge
from .pieces import BAND, CAUSAL, Call

Fields = Mapping[str, Tensor]  # the tensors of one array, by field name
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _mask(call: Call, window: int, like: Tensor) -> Tensor | None:
    """A band's additive mask `[q, k]`; `None` where the kernel needs none."""
    if call.mask != BAND:
        return None
    rows, keys = call.rows["q"].longest, call.rows["kv"].longest
    distance = call.shift + torch.arange(rows)[:, None] - torch.arange(keys)[None, :]
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(rows, keys, dtype=like.dtype).masked_fill(~seen, float("-inf"))


def attend(call: Call, *, q: Fields, kv: Fields, into: Fields, scale: float, window: int) -> None:
    """Compute a call's partials `(out, lse)` and store them in `into`, or merge them with what
    earlier pieces of the same rows left there."""
    rows, keys, target = (call.rows[role] for role in ("q", "kv", "into"))
    query = rows.read(q["q"])
    out, lse = _forward(
        query,
        keys.read(kv["k"]),
        keys.read(kv["v"]),
        0.0,
        call.mask == CAUSAL,
        attn_mask=_mask(call, window, query),
        scale=scale,
    )
    if call.merges:
        wide = into["lse"].dtype
        before = target.read(into["out"]).to(wide), target.read(into["lse"])[..., 0]
        out, lse = merge(*before, out.to(wide), lse.to(wide))
    target.write(into["out"], out)
    target.write(into["lse"], lse[..., None])


def attend_grad(
    call: Call,
    *,
    q: Fields,
    kv: Fields,
    grad: Fields,
    dq: Fields,
    dkv: Fields,
    scale: float,
    window: int,
) -> None:
    """Add a call's gradients to `dq` and `dkv`.

    `grad` holds the output's gradient and the *final* out and lse of each row, so a piece that saw
    only some of a row's keys gives its exact share.
    """
    rows, keys, given = (call.rows[role] for role in ("q", "kv", "grad"))
    query = rows.read(q["q"])
    d_query, d_key, d_value = _backward(
        given.read_zero_padded(grad["grad_out"]),
        query,
        keys.read(kv["k"]),
        keys.read(kv["v"]),
        given.read(grad["out"]),
        given.read(grad["lse"])[..., 0],
        0.0,
        call.mask == CAUSAL,
        attn_mask=_mask(call, window, query),
        scale=scale,
    )
    # Rows of padding got no output gradient and are the only ones that see padding: theirs is zero.
    call.rows["dq"].add(dq["dq"], d_query)
    call.rows["dkv"].add(dkv["dk"], d_key)
    call.rows["dkv"].add(dkv["dv"], d_value)
