"""Partials of one query row over different keys -> the softmax over all of them.

Layer: kernels. Partials are float32 or wider; lse is the natural log; a row without keys is
(0, -inf).

Attention with soft-capped scores, `softcap * tanh(score / softcap)`, in plain PyTorch. The aten kernel has no softcap. Rows are taken in tiles, so that scores need
`tile x keys` of memory. Letters: n pieces, H query heads, K key/value heads, L rows, D head size.
Computed in float32 or wider.

Kernel calls -> partials and gradients, with the aten flash attention kernels for CPU. Letters: n pieces of one call, T rows, H query heads, K key/value heads, D head
size. Arrays are `[T, heads, D]`; partials and gradients are accumulated in float32 or wider.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernel_calls import BAND, CAUSAL, KernelCall


def merge(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, *, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two partials `(out [..., D], lse [...])`, the output `into` a tensor if one is given.

    Only exponents of non-positive numbers are taken, so nothing overflows, and two rows without
    keys merge to a row without keys.
    """
    top = torch.maximum(lse, other_lse)
    safe = torch.where(top.isneginf(), torch.zeros_like(top), top)
    weight, other_weight = torch.exp(lse - safe), torch.exp(other_lse - safe)
    total = weight + other_weight
    share = torch.where(total > 0, weight / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
    merged = torch.lerp(other_out, out, share[..., None], out=into)  # one pass over the rows
    return merged, safe + torch.log(total)


_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """How the scores of one call are formed.

    Args:
        causal (`bool`): Row i sees keys up to i.
        mask (`Tensor`, *optional*): Additive, `[L, keys]`.
        scale (`float`): Factor on the products.
        softcap (`float`): Bound of the scores, above 0.
    """

    causal: bool
    mask: Tensor | None
    scale: float
    softcap: float

    def _tiles(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Each tile's rows, `tanh(score / softcap)`, masked scores (`[n, K, H/K, rows, keys]`)."""
        for start in range(0, query.shape[3], _TILE):
            rows = slice(start, min(start + _TILE, query.shape[3]))
            products = query[..., rows, :] @ key[:, :, None].transpose(-1, -2)
            bounded = torch.tanh(products * (self.scale / self.softcap))
            scores = bounded * self.softcap
            if self.mask is not None:
                scores = scores + self.mask[rows].to(scores.dtype)
            if self.causal:
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(start)
                scores = scores.masked_fill(~seen, float("-inf"))
            yield rows, bounded, scores

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`out [n, H, L, D]` in the query's dtype and `lse [n, H, L]` in a wide one."""
        q, k, v = _wide(query, key.shape[1]), _wide(key), _wide(value)
        outs, lses = [], []
        for _, _, scores in self._tiles(q, k):
            lse = torch.logsumexp(scores, dim=-1)
            outs.append(torch.exp(scores - lse[..., None]) @ v[:, :, None])
            lses.append(lse)
        out = torch.cat(outs, dim=3).flatten(1, 2)
        return out.to(query.dtype), torch.cat(lses, dim=3).flatten(1, 2)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, wide, from the final out and lse of each row."""
        groups = key.shape[1]
        q, k, v = _wide(query, groups), _wide(key), _wide(value)
        given, final = _wide(grad_out, groups), _wide(out, groups)
        delta = (given * final).sum(-1)
        norm = lse.unflatten(1, (groups, -1))
        d_query, d_key, d_value = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, bounded, scores in self._tiles(q, k):
            weights = torch.exp(scores - norm[..., rows, None])
            pull = given[..., rows, :] @ v[:, :, None].transpose(-1, -2) - delta[..., rows, None]
            d_products = weights * pull * (1 - bounded * bounded) * self.scale
            d_query[..., rows, :] = d_products @ k[:, :, None]
            d_key += (d_products.transpose(-1, -2) @ q[..., rows, :]).sum(2)
            d_value += (weights.transpose(-1, -2) @ given[..., rows, :]).sum(2)
        return d_query.flatten(1, 2), d_key, d_value


def _wide(tensor: Tensor, groups: int = 0) -> Tensor:
    """In float32 or wider; with `groups`, query heads as `[n, K, H/K, L, D]`."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.unflatten(1, (groups, -1)) if groups else tensor


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

    def mask(self, call: KernelCall, like: Tensor) -> Tensor | None:
        """A band's additive mask `[q, k]`; `None` where the kernel needs none."""
        if call.mask != BAND:
            return None
        rows, keys = call.rows["q"].longest, call.rows["kv"].longest
        distance = call.shift + torch.arange(rows)[:, None] - torch.arange(keys)[None, :]
        lowest = 0 if self.causal else 1 - self.window
        seen = (distance >= lowest) & (distance < self.window)
        return torch.zeros(rows, keys, dtype=like.dtype).masked_fill(~seen, float("-inf"))

    def capped(self, call: KernelCall, like: Tensor) -> Capped:
        """The same scores for the kernel that caps them."""
        mask, causal = self.mask(call, like), call.mask == CAUSAL
        return Capped(causal=causal, mask=mask, scale=self.scale, softcap=self.softcap)


def attend(call: KernelCall, *, q: Fields, kv: Fields, into: Fields, scoring: Scoring) -> None:
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
    call: KernelCall,
    *,
    q: Fields,
    kv: Fields,
    grad: Fields,
    dq: Fields,
    dkv: Fields,
    scoring: Scoring,
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
