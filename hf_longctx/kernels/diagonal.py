"""States of one column whose rows all decay at their own rate -> outputs, token by token.

Floor: kernels. Letters: n chunks, C tokens of a chunk, H heads, K heads of queries and keys, N rows
of the state. This is Mamba's selective scan: a matrix product has nothing to gain where the state
is a vector, so the loops run over the C tokens of all chunks at once, elementwise, twice: from zero
to see what each chunk leaves, then from the state that really enters it. Gradients are written out
by hand and keep what enters each chunk; the states between are computed again.
"""

from typing import Any

import torch
from torch import Tensor

from .grid import Grid
from .recurrence import carry, carry_back, entered, entering_grad


class Diagonal(torch.autograd.Function):
    """Linear attention with one column of values and a decay per row.

    `Diagonal.apply(q [n, C, K, N], k [n, C, K, N], v [n, C, H], log_decay [n, C, H, N],
    entering [1, H, N] or None, grid)` gives `[n, C, H]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        entering: Tensor | None,
        grid: Grid,
    ) -> Tensor:
        decay = log_decay.exp()
        whole, left = torch.ones_like(decay[:, 0]), torch.zeros_like(decay[:, 0])
        for t in range(k.shape[1]):
            whole.mul_(decay[:, t])
            _add(left.mul_(decay[:, t]), v[:, t], k[:, t])
        states = carry(left, whole, entered(torch.empty_like(left), entering, grid), grid)
        out, state = torch.empty_like(v), states.clone()
        for t in range(k.shape[1]):
            _add(state.mul_(decay[:, t]), v[:, t], k[:, t])
            out[:, t] = _over_rows(state, q[:, t])
        ctx.save_for_backward(q, k, v, decay, whole, states)
        ctx.grid, ctx.entering = grid, None if entering is None else entering.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, decay, whole, states = ctx.saved_tensors
        tokens = range(k.shape[1])
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_decay = torch.empty_like(decay)  # first the decayed states, before each token's write
        state = states.clone()
        for t in tokens:
            torch.mul(state, decay[:, t], out=d_decay[:, t])
            _add(state.copy_(d_decay[:, t]), v[:, t], k[:, t])
            d_q[:, t] = _over_heads(state, grad[:, t], q.shape[2])
        total = torch.zeros_like(states)  # of the state before each token, at last of the entering
        for t in reversed(tokens):
            _add(total, grad[:, t], q[:, t]).mul_(decay[:, t])
        after = carry_back(total, whole, ctx.grid)  # of the state after each token
        for t in reversed(tokens):
            _add(after, grad[:, t], q[:, t])
            d_k[:, t] = _over_heads(after, v[:, t], k.shape[2])
            d_v[:, t] = _over_rows(after, k[:, t])
            d_decay[:, t].mul_(after)
            after.mul_(decay[:, t])
        return d_q, d_k, d_v, d_decay, entering_grad(total, ctx.grid, ctx.entering), None


def _add(state_nHN: Tensor, x_nH: Tensor, y_nKN: Tensor) -> Tensor:
    """Add the product of a number per head and the row that the head shares, in place."""
    heads = y_nKN.shape[1], -1
    state_nHN.unflatten(1, heads).addcmul_(x_nH.unflatten(1, heads)[..., None], y_nKN[:, :, None])
    return state_nHN


def _over_rows(state_nHN: Tensor, y_nKN: Tensor) -> Tensor:
    """The sum over N of the product: `[n, H]`."""
    return (state_nHN.unflatten(1, (y_nKN.shape[1], -1)) @ y_nKN[..., None]).flatten(1)


def _over_heads(state_nHN: Tensor, x_nH: Tensor, keys: int) -> Tensor:
    """The sum over the heads that share a key head: `[n, K, N]`."""
    heads = keys, -1
    return (x_nH.unflatten(1, heads)[:, :, None] @ state_nHN.unflatten(1, heads))[:, :, 0]
