"""Per chunk what it writes and how it decays -> the state that enters each chunk.

Floor: kernels. Letters: n chunks, h heads, C tokens of a chunk, N rows of the state, V its columns.
The loops run over the steps of the grid, batched over segments and heads. Gradients are written out
by hand: autograd would keep several states of every step, this keeps one.
"""

from typing import Any

import torch
from torch import Tensor

from .grid import Grid


class Carried(torch.autograd.Function):
    """Without the delta rule: chunk i turns S into `decay_i * S + write_i`.

    `Carried.apply(write [n, N, V], decay [n, N or 1, 1], entering [h, N, V] or None, grid)`
    gives the states that enter the chunks, `[n, N, V]`.
    """

    @staticmethod
    def forward(
        ctx: Any, write: Tensor, decay: Tensor, entering: Tensor | None, grid: Grid
    ) -> Tensor:
        states = carry(write, decay, entered(torch.empty_like(write), entering, grid), grid)
        ctx.save_for_backward(states, decay)
        ctx.grid, ctx.entering = grid, None if entering is None else entering.shape
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, decay = ctx.saved_tensors
        total = grad.clone()
        d_write = carry_back(total, decay, ctx.grid)
        d_decay = (states * d_write).sum_to_size(decay.shape)
        return d_write, d_decay, entering_grad(total, ctx.grid, ctx.entering), None


class Corrected(torch.autograd.Function):
    """With the delta rule: chunk i turns S into `decay_i * S + keys_i^T (new_i - reads_i S)`.

    `Corrected.apply(new [n, C, V], reads [n, C, N], keys [n, C, N], decay, entering,
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
        shape = len(new), keys.shape[-1], new.shape[-1]
        states = entered(new.new_empty(shape), entering, grid)
        corrected = torch.empty_like(new)
        for now, kept, later in grid.steps():
            torch.baddbmm(new[now], reads[now], states[now], alpha=-1, out=corrected[now])
            torch.mul(states[kept], decay[kept], out=states[later])
            states[later].baddbmm_(keys[kept].mT, corrected[kept])
        ctx.save_for_backward(states, corrected, reads, keys, decay)
        ctx.grid, ctx.entering = grid, None if entering is None else entering.shape
        return states, corrected

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_corrected: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, corrected, reads, keys, decay = ctx.saved_tensors
        total = grad.clone()  # of the state that enters each chunk
        d_new = d_corrected.clone()
        d_reads, d_keys = torch.empty_like(reads), torch.zeros_like(keys)
        d_decay = torch.zeros_like(decay)
        for now, kept, later in reversed(list(ctx.grid.steps())):
            d_new[kept].baddbmm_(keys[kept], total[later])
            torch.bmm(corrected[kept], total[later].mT, out=d_keys[kept])
            d_decay[kept] = (states[kept] * total[later]).sum_to_size(decay[kept].shape)
            total[kept].addcmul_(decay[kept], total[later])
            total[now].baddbmm_(reads[now].mT, d_new[now], alpha=-1)
            torch.bmm(d_new[now], states[now].mT, out=d_reads[now])
        d_reads.neg_()
        d_entering = entering_grad(total, ctx.grid, ctx.entering)
        return d_new, d_reads, d_keys, d_decay, d_entering, None


def carry(write: Tensor, decay: Tensor, states: Tensor, grid: Grid) -> Tensor:
    """Fill `states`, what enters each chunk `[n, ...]`, from those that enter the first step's."""
    for _, kept, later in grid.steps():
        torch.addcmul(write[kept], states[kept], decay[kept], out=states[later])
    return states


def carry_back(total: Tensor, decay: Tensor, grid: Grid) -> Tensor:
    """Add to `total`, the gradient of what enters each chunk, the part that comes by what leaves
    it; the gradient of what leaves it is returned, zero where nothing continues the chunk."""
    leaving = torch.zeros_like(total)
    for _, kept, later in reversed(list(grid.steps())):
        leaving[kept] = total[later]
        total[kept].addcmul_(decay[kept], total[later])
    return leaving


def entered(states: Tensor, entering: Tensor | None, grid: Grid) -> Tensor:
    """`states [n, ...]`, empty until now, with those that enter the first step's chunks."""
    states[: grid.widths[0] if grid.widths else 0] = 0
    if entering is not None and grid.first.stop:
        states[grid.first] = entering
    return states


def entering_grad(total: Tensor, grid: Grid, shape: torch.Size | None) -> Tensor | None:
    """The gradient of the state that entered the first segment, of a given shape if any did; zeros
    if that segment is empty."""
    if shape is None:
        return None
    return total[grid.first] if grid.first.stop else total.new_zeros(shape)
