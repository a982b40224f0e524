"""Per chunk what it writes and how it decays -> the state that enters each chunk.

Floor: kernels. Letters: n chunks, H heads, C tokens of a chunk, N rows of the state, V its columns.
The loops run over the steps of the grid, batched over segments and heads. Gradients are written out
by hand: autograd would keep several states of every step, this keeps one.
"""

from typing import Any

import torch
from torch import Tensor

from .grid import Grid


class Carried(torch.autograd.Function):
    """Without the delta rule: chunk i turns S into `decay_i * S + write_i`.

    `Carried.apply(write [n, H, N, V], decay [n, H, N or 1, 1], entering [H, N, V] or None, grid)`
    gives the states that enter the chunks, `[n, H, N, V]`.
    """

    @staticmethod
    def forward(
        ctx: Any, write: Tensor, decay: Tensor, entering: Tensor | None, grid: Grid
    ) -> Tensor:
        states = _entering(torch.empty_like(write), entering, grid)
        for now, later in grid.steps():
            kept = slice(now.start, now.start + later.stop - later.start)
            torch.addcmul(write[kept], states[kept], decay[kept], out=states[later])
        ctx.save_for_backward(states, decay)
        ctx.grid, ctx.given = grid, entering is not None
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, decay = ctx.saved_tensors
        total = grad.clone()  # of the state that enters each chunk
        d_write, d_decay = torch.zeros_like(states), torch.zeros_like(decay)
        for now, later in reversed(list(ctx.grid.steps())):
            kept = slice(now.start, now.start + later.stop - later.start)
            d_write[kept] = total[later]
            d_decay[kept] = (states[kept] * total[later]).sum_to_size(decay[kept].shape)
            total[kept].addcmul_(decay[kept], total[later])
        return d_write, d_decay, _leaving(total, ctx.grid, ctx.given), None


class Corrected(torch.autograd.Function):
    """With the delta rule: chunk i turns S into `decay_i * S + keys_i^T (new_i - reads_i S)`.

    `Corrected.apply(new [n, H, C, V], reads [n, H, C, N], keys [n, H, C, N], decay, entering,
    grid)` gives the states that enter the chunks and the corrected values `new_i - reads_i S_i`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        new: Tensor,
        reads: Tensor,
        keys: Tensor,
        decay: Tensor,
        entering: Tensor | None,
        grid: Grid,
    ) -> tuple[Tensor, Tensor]:
        n, heads, _, columns = new.shape
        states = new.new_empty(n, heads, keys.shape[-1], columns)
        _entering(states, entering, grid)
        corrected = torch.empty_like(new)
        for now, later in grid.steps():
            kept = slice(now.start, now.start + later.stop - later.start)
            torch.baddbmm(
                _b(new, now), _b(reads, now), _b(states, now), alpha=-1, out=_b(corrected, now)
            )
            torch.mul(states[kept], decay[kept], out=states[later])
            _b(states, later).baddbmm_(_b(keys, kept).mT, _b(corrected, kept))
        ctx.save_for_backward(states, corrected, reads, keys, decay)
        ctx.grid, ctx.given = grid, entering is not None
        return states, corrected

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_corrected: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, corrected, reads, keys, decay = ctx.saved_tensors
        total = grad.clone()  # of the state that enters each chunk
        d_new = d_corrected.clone()
        d_reads, d_keys = torch.empty_like(reads), torch.zeros_like(keys)
        d_decay = torch.zeros_like(decay)
        for now, later in reversed(list(ctx.grid.steps())):
            kept = slice(now.start, now.start + later.stop - later.start)
            _b(d_new, kept).baddbmm_(_b(keys, kept), _b(total, later))
            torch.bmm(_b(corrected, kept), _b(total, later).mT, out=_b(d_keys, kept))
            d_decay[kept] = (states[kept] * total[later]).sum_to_size(decay[kept].shape)
            total[kept].addcmul_(decay[kept], total[later])
            _b(total, now).baddbmm_(_b(reads, now).mT, _b(d_new, now), alpha=-1)
            torch.bmm(_b(d_new, now), _b(states, now).mT, out=_b(d_reads, now))
        d_reads.neg_()
        return d_new, d_reads, d_keys, d_decay, _leaving(total, ctx.grid, ctx.given), None


def _b(laid: Tensor, chunks: slice) -> Tensor:
    """Some chunks' matrices as one batch, a view."""
    return laid[chunks].flatten(0, 1)


def _entering(states: Tensor, entering: Tensor | None, grid: Grid) -> Tensor:
    """Write the states that enter the first step's chunks."""
    states[: grid.widths[0] if grid.widths else 0] = 0
    if entering is not None and grid.first is not None:
        states[grid.first] = entering
    return states


def _leaving(total: Tensor, grid: Grid, given: bool) -> Tensor | None:
    """The gradient of the state that entered the first segment; zeros if that is empty."""
    if not given:
        return None
    return total.new_zeros(total.shape[1:]) if grid.first is None else total[grid.first]
