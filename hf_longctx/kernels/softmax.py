"""Run kernel calls of softmax attention, and merge partials over different keys.

Two kernels have one shape: the aten flash attention for CPU, and plain PyTorch for soft-capped
scores, `softcap * tanh(score / softcap)`, which the aten kernel lacks. Arrays are `[T, heads, D]`;
a kernel gets `[n, heads, L, D]`. Partials and gradients accumulate in float32 or wider. lse is the
natural log; a row without keys is (0, -inf).
Layer: kernels. Letters: n tiles of one call, T rows, L rows of the longest tile, H query heads, K
key/value heads, D head size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernel_calls import BAND, CAUSAL, KernelCall

Fields = Mapping[str, Tensor]  # the tensors of one array, by field name
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ROW_BLOCK = 256


def merge(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, *, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two partials `(out [..., D], lse [...])` of the same rows over different keys.

    Args:
        out, lse, other_out, other_lse (`Tensor`): Float32 or wider.
        into (`Tensor`, *optional*): Where to write the output; it may be one of the inputs.
    """
    # Only exponents of non-positive numbers are taken, so nothing overflows; and -inf - -inf is
    # avoided, so that two rows without keys merge to a row without keys.
    top = torch.maximum(lse, other_lse)
    safe = torch.where(top.isneginf(), torch.zeros_like(top), top)
    weight, other_weight = torch.exp(lse - safe), torch.exp(other_lse - safe)
    total = weight + other_weight
    ratio = torch.where(total > 0, weight / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
    merged = torch.lerp(other_out, out, ratio[..., None], out=into)  # one pass over the rows
    return merged, safe + torch.log(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashKernel:
    """The aten kernel for one call.

    Args:
        causal (`bool`): Row i sees keys up to i.
        mask (`Tensor`, *optional*): Additive, `[L, keys]`.
        scale (`float`): Factor on the products.
    """

    causal: bool
    mask: Tensor | None
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return `out [n, H, L, D]` in the query's dtype and `lse [n, H, L]` in a wide one."""
        out, lse = _forward(*_one_size(query, key, value), 0.0, self.causal, **self._options())
        return out[..., : value.shape[-1]], lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> Gradients:
        """Return the gradients from the final out and lse of each row; last axes may be padded."""
        rows = _one_size(grad_out, query, key, value, out)
        # With the final out and lse of a row, a tile's weights are those of the whole row.
        found: Gradients = _backward(*rows, lse, 0.0, self.causal, **self._options())
        return found

    def _options(self) -> dict[str, Any]:
        return {"attn_mask": self.mask, "scale": self.scale}


def _one_size(*rows: Tensor) -> list[Tensor]:
    """Pad last axes with zeros: the kernel wants queries, keys and values of one size."""
    size = max(t.shape[-1] for t in rows)
    return [pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftcapKernel:
    """Attention with soft-capped scores for one call.

    Args:
        causal, mask, scale: As in `FlashKernel`.
        softcap (`float`): Bound of the scores, above 0.
    """

    causal: bool
    mask: Tensor | None
    scale: float
    softcap: float

    def _row_blocks(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, `tanh(score / softcap)` and masked scores, `[n, K, H/K, rows, keys]`."""
        # Block by block of rows, so that scores need memory for a block times all keys.
        for start in range(0, query.shape[3], _ROW_BLOCK):
            rows = slice(start, min(start + _ROW_BLOCK, query.shape[3]))
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
        """Return `out [n, H, L, D]` in the query's dtype and `lse [n, H, L]` in a wide one."""
        q, k, v = _wide(query, key.shape[1]), _wide(key), _wide(value)
        outs, lses = [], []
        for _, _, scores in self._row_blocks(q, k):
            lse = torch.logsumexp(scores, dim=-1)
            outs.append(torch.exp(scores - lse[..., None]) @ v[:, :, None])
            lses.append(lse)
        out = torch.cat(outs, dim=3).flatten(1, 2)
        return out.to(query.dtype), torch.cat(lses, dim=3).flatten(1, 2)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> Gradients:
        """Return the gradients, wide, from the final out and lse of each row."""
        groups = key.shape[1]
        q, k, v = _wide(query, groups), _wide(key), _wide(value)
        given, final = _wide(grad_out, groups), _wide(out, groups)
        delta = (given * final).sum(-1)
        norm = lse.unflatten(1, (groups, -1))
        d_query, d_key, d_value = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, bounded, scores in self._row_blocks(q, k):
            weights = torch.exp(scores - norm[..., rows, None])
            d_scores = given[..., rows, :] @ v[:, :, None].transpose(-1, -2)
            d_scores = d_scores - delta[..., rows, None]
            # The derivative of tanh is 1 - tanh^2.
            d_products = weights * d_scores * (1 - bounded * bounded) * self.scale
            d_query[..., rows, :] = d_products @ k[:, :, None]
            d_key += (d_products.transpose(-1, -2) @ q[..., rows, :]).sum(2)
            d_value += (weights.transpose(-1, -2) @ given[..., rows, :]).sum(2)
        return d_query.flatten(1, 2), d_key, d_value


def _wide(tensor: Tensor, groups: int = 0) -> Tensor:
    """Cast to float32 or wider; with `groups`, view query heads as `[n, K, H/K, L, D]`."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.unflatten(1, (groups, -1)) if groups else tensor


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
        """Return the additive mask `[q, k]` of a band; `None` for a kernel that needs none."""
        if call.mask != BAND:
            return None
        rows, keys = call.rows["q"].longest, call.rows["kv"].longest
        distance = call.shift + torch.arange(rows)[:, None] - torch.arange(keys)[None, :]
        lowest = 0 if self.causal else 1 - self.window
        seen = (distance >= lowest) & (distance < self.window)
        return torch.zeros(rows, keys, dtype=like.dtype).masked_fill(~seen, float("-inf"))

    def kernel(self, call: KernelCall, like: Tensor) -> FlashKernel | SoftcapKernel:
        """Return the kernel for a call on rows of `like`'s dtype."""
        mask, causal = self.mask(call, like), call.mask == CAUSAL
        if self.softcap:
            return SoftcapKernel(causal=causal, mask=mask, scale=self.scale, softcap=self.softcap)
        return FlashKernel(causal=causal, mask=mask, scale=self.scale)


def attend(call: KernelCall, *, q: Fields, kv: Fields, into: Fields, scoring: Scoring) -> None:
    """Compute a call's partials `(out, lse)` into the fields of `into`.

    Rows that an earlier tile has written are merged with what it left there.
    """
    rows, keys, target = (call.rows[role] for role in ("q", "kv", "into"))
    query, key, value = rows.read(q["q"]), keys.read(kv["k"]), keys.read(kv["v"])
    out, lse = scoring.kernel(call, query).forward(query, key, value)
    # Merged in lse's dtype: the array of outputs may be narrower.
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

    `grad` holds the gradient of the output, the *final* lse of each row, and its final out or
    delta, the sum of out times its gradient. So a tile that saw only some of a row's keys
    contributes exactly its part.
    """
    rows, keys, given = (call.rows[role] for role in ("q", "kv", "grad"))
    query, key, value = rows.read(q["q"]), keys.read(kv["k"]), keys.read(kv["v"])
    grad_out = given.read_zero_padded(grad["grad_out"])
    width = value.shape[-1]
    if "out" in grad:
        out = given.read(grad["out"])
    elif grad_out.dtype.itemsize < grad["delta"].dtype.itemsize:
        grad_out, out = _out_in_columns(grad_out, given.read_zero_padded(grad["delta"]))
        value = pad(value, (0, out.shape[-1] - width))
    else:
        out = _out_along_grad(grad_out, given.read(grad["delta"]))
    lse = given.read(grad["lse"])[..., 0]
    kernel = scoring.kernel(call, query)
    d_query, d_key, d_value = kernel.backward(grad_out, query, key, value, out, lse)
    # Only rows of padding see keys of padding, and they got no output gradient: theirs is zero.
    call.rows["dq"].add(dq["dq"], d_query[..., : query.shape[-1]])
    call.rows["dkv"].add(dkv["dk"], d_key[..., : key.shape[-1]])
    call.rows["dkv"].add(dkv["dv"], d_value[..., :width])


def _out_in_columns(grad_out: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return a `grad_out` and an out whose products sum to `delta [..., 1]`, in a narrow dtype.

    `grad_out` gets three columns of ones; out is zero but for delta there.
    """
    # Delta is split over three numbers: one narrow number would round it, and rows that see a
    # single key, whose gradient is zero, would get what was rounded off.
    narrow, rest, columns = grad_out.dtype, delta, list[Tensor]()
    for _ in range(3):
        columns.append(rest.to(narrow))
        rest = rest - columns[-1].to(delta.dtype)
    ones = torch.ones_like(delta, dtype=narrow).expand(*delta.shape[:-1], 3)
    return torch.cat([grad_out, ones], -1), torch.cat([torch.zeros_like(grad_out), *columns], -1)


def _out_along_grad(grad_out: Tensor, delta: Tensor) -> Tensor:
    """Return an out whose products with `grad_out` sum to `delta [..., 1]`: all a backward needs.

    That is `grad_out * delta / |grad_out|^2`.
    """
    wide = grad_out.to(delta.dtype)
    # Dividing by the largest entry first keeps squares of small gradients in range.
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(delta.dtype).tiny)
    unit = wide / largest
    square = unit.square().sum(-1, keepdim=True).clamp_min(1.0)  # 0 for a row without gradient
    return (unit * (delta / largest / square)).to(grad_out.dtype)
