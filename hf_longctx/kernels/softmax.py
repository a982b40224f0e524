"""Kernel calls -> partials and gradients, with the aten flash attention kernels for CPU.

Floor: kernels. Letters: n pieces of one call, T rows, H query heads, K key/value heads, D head
size. Arrays are `[T, heads, D]`; partials and gradients are accumulated in float32 or wider.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .capped import Capped
from .merge import merge
from .pieces import BAND, CAUSAL, Call

Fields = Mapping[str, Tensor]  # the tensors of one array, by field name
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores are formed from queries and keys.

    Args:
        scale (`float`, *optional*, defaults to 1.0): Factor on the products.
        window (`int`, *optional*, defaults to 0): Keys a row sees on one side, itself included;
            0 for all.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key.
        softcap (`float`, *optional*, defaults to 0.0): Bound of the scores; 0 for none.
    """

    scale: float = 1.0
    window: int = 0
    causal: bool = True
    softcap: float = 0.0

    def mask(self, call: Call, like: Tensor) -> Tensor | None:
        """A band's additive mask `[q, k]`; `None` where the kernel needs none."""
        if call.mask != BAND:
            return None
        rows, keys = call.rows["q"].longest, call.rows["kv"].longest
        distance = call.shift + torch.arange(rows)[:, None] - torch.arange(keys)[None, :]
        lowest = 0 if self.causal else 1 - self.window
        seen = (distance >= lowest) & (distance < self.window)
        return torch.zeros(rows, keys, dtype=like.dtype).masked_fill(~seen, float("-inf"))

    def capped(self, call: Call, like: Tensor) -> Capped:
        """The same scores for the kernel that caps them."""
        mask, causal = self.mask(call, like), call.mask == CAUSAL
        return Capped(causal=causal, mask=mask, scale=self.scale, softcap=self.softcap)


def attend(call: Call, *, q: Fields, kv: Fields, into: Fields, scoring: Scoring) -> None:
    """Compute a call's partials `(out, lse)` and store them in `into`, or merge them with what
    earlier pieces of the same rows left there."""
    rows, keys, target = (call.rows[role] for role in ("q", "kv", "into"))
    query, key, value = rows.read(q["q"]), keys.read(kv["k"]), keys.read(kv["v"])
    if scoring.softcap:
        out, lse = scoring.capped(call, query).forward(query, key, value)
    else:
        size = max(query.shape[-1], value.shape[-1])
        out, lse = _forward(
            *(_padded(t, size) for t in (query, key, value)),
            0.0,
            call.mask == CAUSAL,
            attn_mask=scoring.mask(call, query),
            scale=scoring.scale,
        )
        out = out[..., : value.shape[-1]]
    if call.merges:
        wide = into["lse"].dtype
        before = target.read(into["out"]).to(wide), target.read(into["lse"])[..., 0]
        out, lse = merge(*before, out.to(wide), lse.to(wide))
    target.write(into["out"], out)
    target.write(into["lse"], lse[..., None])


def attend_grad(
    call: Call, *, q: Fields, kv: Fields, grad: Fields, dq: Fields, dkv: Fields, scoring: Scoring
) -> None:
    """Add a call's gradients to `dq` and `dkv`.

    `grad` holds the output's gradient and the *final* out (or delta, see `_rebuilt`) and lse of
    each row, so a piece that saw only some of a row's keys gives its exact share.
    """
    rows, keys, given = (call.rows[role] for role in ("q", "kv", "grad"))
    query, key, value = rows.read(q["q"]), keys.read(kv["k"]), keys.read(kv["v"])
    grad_out = given.read_zero_padded(grad["grad_out"])
    width = value.shape[-1]
    if "out" in grad:
        out = given.read(grad["out"])
    elif grad_out.dtype.itemsize < grad["delta"].dtype.itemsize:
        grad_out, out = _split(grad_out, given.read_zero_padded(grad["delta"]))
        value = _padded(value, out.shape[-1])
    else:
        out = _rebuilt(grad_out, given.read(grad["delta"]))
    lse = given.read(grad["lse"])[..., 0]
    if scoring.softcap:
        capped = scoring.capped(call, query)
        d_query, d_key, d_value = capped.backward(grad_out, query, key, value, out, lse)
    else:
        size = max(query.shape[-1], value.shape[-1])
        d_query, d_key, d_value = _backward(
            *(_padded(t, size) for t in (grad_out, query, key, value, out)),
            lse,
            0.0,
            call.mask == CAUSAL,
            attn_mask=scoring.mask(call, query),
            scale=scoring.scale,
        )
    # Rows of padding got no output gradient and are the only ones that see padding: theirs is zero.
    call.rows["dq"].add(dq["dq"], d_query[..., : query.shape[-1]])
    call.rows["dkv"].add(dkv["dk"], d_key[..., : key.shape[-1]])
    call.rows["dkv"].add(dkv["dv"], d_value[..., :width])


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Zeros behind the last axis: the kernel wants queries, keys and values of one size."""
    return pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def _split(grad_out: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """`grad_out` and three columns of ones, and an out that is zero but for `delta [..., 1]` there.

    Their products sum to delta, split over three numbers of the narrow dtype: one would round it,
    and rows that see a single key, whose gradient is zero, would get what was rounded off.
    """
    narrow, rest, columns = grad_out.dtype, delta, list[Tensor]()
    for _ in range(3):
        columns.append(rest.to(narrow))
        rest = rest - columns[-1].to(delta.dtype)
    ones = torch.ones_like(delta, dtype=narrow).expand(*delta.shape[:-1], 3)
    return torch.cat([grad_out, ones], -1), torch.cat([torch.zeros_like(grad_out), *columns], -1)


def _rebuilt(grad_out: Tensor, delta: Tensor) -> Tensor:
    """An out whose products with `grad_out` sum to `delta` `[..., 1]`: all that a backward needs.

    That is `grad_out * delta / |grad_out|^2`; dividing by the largest entry first keeps squares of
    small gradients in range.
    """
    wide = grad_out.to(delta.dtype)
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(delta.dtype).tiny)
    unit = wide / largest
    square = unit.square().sum(-1, keepdim=True).clamp_min(1.0)  # 0 for a row without gradient
    return (unit * (delta / largest / square)).to(grad_out.dtype)
