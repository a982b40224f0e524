"""Kernel calls -> partials and gradients, with the aten flash attention kernels for CPU.

Floor: kernels. Letters: n pieces of one call, T rows, H query heads, K key/value heads, D head
size. Arrays are `[T, heads, D]`; partials and gradients are accumulated in float32 or wider.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .merge import merge
from .pieces import BAND, CAUSAL, Call

Fields = Mapping[str, Tensor]  # the tensors of one array, by field name
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Rows:
    """n runs of rows of an array: read as `[n, heads, L, D]`, written or added back unpadded."""

    def __init__(self, starts: np.ndarray, lens: np.ndarray) -> None:
        self.n, self.longest = len(starts), int(lens.max())
        self.first = int(starts[0])
        steps = np.diff(starts)
        self.regular = bool((lens == self.longest).all() and (steps == self.longest).all())
        if not self.regular:
            offset = np.arange(self.longest)
            self.index = torch.from_numpy(starts[:, None] + np.minimum(offset, lens[:, None] - 1))
            self.real = torch.from_numpy(offset < lens[:, None])

    def _view(self, array: Tensor) -> Tensor:
        rows = array[self.first : self.first + self.n * self.longest]
        return rows.unflatten(0, (self.n, self.longest))

    def read(self, array: Tensor) -> Tensor:
        """`[n, heads, L, ...]`; rows past a run's end repeat its last row."""
        return (self._view(array) if self.regular else array[self.index]).transpose(1, 2)

    def read_zero_padded(self, array: Tensor) -> Tensor:
        """As `read`, with zeros past a run's end."""
        read = self.read(array)
        return read if self.regular else read * self.real[:, None, :, None]

    def write(self, array: Tensor, values: Tensor) -> None:
        """Store `[n, heads, L, ...]` in the array's rows."""
        values = values.transpose(1, 2)
        if self.regular:
            self._view(array).copy_(values)
        else:
            array[self.index[self.real]] = values[self.real].to(array.dtype)

    def add(self, array: Tensor, values: Tensor) -> None:
        """Add `[n, heads, L, ...]` to the array's rows; a row may stand in several runs."""
        values = values.transpose(1, 2)
        if self.regular:
            self._view(array).add_(values)
        else:
            array.index_add_(0, self.index[self.real], values[self.real].to(array.dtype))


def _mask(call: Call, window: int, like: Tensor) -> Tensor | None:
    """A band's additive mask `[q, k]`; `None` where the kernel needs none."""
    if call.mask != BAND:
        return None
    rows, keys = int(call.q_lens[0]), int(call.k_lens[0])
    distance = call.shift + torch.arange(rows)[:, None] - torch.arange(keys)[None, :]
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(rows, keys, dtype=like.dtype).masked_fill(~seen, float("-inf"))


def attend(call: Call, *, q: Fields, kv: Fields, into: Fields, scale: float, window: int) -> None:
    """Compute a call's partials `(out, lse)` and store them in `into`, or merge them with what
    earlier pieces of the same rows left there."""
    rows, keys = _Rows(call.rows["q"], call.q_lens), _Rows(call.rows["kv"], call.k_lens)
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
    target = _Rows(call.rows["into"], call.q_lens)
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
    rows, keys = _Rows(call.rows["q"], call.q_lens), _Rows(call.rows["kv"], call.k_lens)
    given = _Rows(call.rows["grad"], call.q_lens)
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
    _Rows(call.rows["dq"], call.q_lens).add(dq["dq"], d_query)
    _Rows(call.rows["dkv"], call.k_lens).add(dkv["dk"], d_key)
    _Rows(call.rows["dkv"], call.k_lens).add(dkv["dv"], d_value)
