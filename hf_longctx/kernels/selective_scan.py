"""Run recurrences of one column whose rows all decay at their own rate: Mamba's selective scan.

Where the state is a vector a matrix product has nothing to gain, so the loops run over the C tokens
of all chunks at once, elementwise, twice: from zero, to see what each chunk leaves, then from the
state that really enters it. Gradients are written out by hand and keep what enters each chunk; the
states between are computed again.
Layer: kernels. Letters: T tokens, n chunks, C tokens of a chunk, H heads, K heads of queries and
keys, N rows of the state.
"""

from typing import Any

import torch
from torch import Tensor

from .chunk_states import ChunkGrid, carry, carry_back, entering_grad, fill_first

_BLOCK = 2**20  # numbers in a block of rows


class SelectiveScan(torch.autograd.Function):
    """Linear attention with one column of values and a decay per row.

    `SelectiveScan.apply(q [n, C, K, N], k [n, C, K, N], v [n, C, H], log_decay [n, C, H, N],
    entering [1, H, N] or None, grid)` returns `[n, C, H]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        entering: Tensor | None,
        grid: ChunkGrid,
    ) -> Tensor:
        decay = log_decay.exp()
        whole, left = torch.ones_like(decay[:, 0]), torch.zeros_like(decay[:, 0])
        for t in range(k.shape[1]):
            whole.mul_(decay[:, t])
            _add(left.mul_(decay[:, t]), v[:, t], k[:, t])
        states = carry(left, whole, fill_first(torch.empty_like(left), entering, grid), grid)
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
        # The largest tensor: it first holds the decayed states, before each token's write, which
        # its own gradient is made of.
        d_decay = torch.empty_like(decay)
        state = states.clone()
        for t in tokens:
            torch.mul(state, decay[:, t], out=d_decay[:, t])
            _add(state.copy_(d_decay[:, t]), v[:, t], k[:, t])
            d_q[:, t] = _over_heads(state, grad[:, t], q.shape[2])
        # Within each chunk as if it were the last; then what comes from the chunks behind it.
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


class SelectiveSummary(torch.autograd.Function):
    """What a run does to the state that enters it, with one column of values.

    `SelectiveSummary.apply(k [T, K, N], v [T, H], log_decay [T, H, N])` returns the state that
    leaves if zeros entered, and the factor on each row, both `[H, N]`.
    """

    # Blocks of rows go one after another, so that nothing but the gradient of the decays is as
    # large as they are.
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        left, entering = log_decay.new_zeros(log_decay.shape[1:]), []
        for rows in _blocks(log_decay):
            entering.append(left)
            kept, whole = _kept(log_decay[rows])
            left = left * whole + _add(torch.zeros_like(kept), v[rows], k[rows]).mul_(kept).sum(0)
        decay = log_decay.sum(0).exp()
        ctx.save_for_backward(k, v, log_decay, decay, *entering)
        return left, decay

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_decay: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        k, v, log_decay, decay, *entering = ctx.saved_tensors
        d_k, d_v, d_decay = torch.empty_like(k), torch.empty_like(v), torch.empty_like(log_decay)
        for rows, before in reversed(list(zip(_blocks(log_decay), entering, strict=True))):
            kept, whole = _kept(log_decay[rows])
            writes = _add(torch.zeros_like(kept), v[rows], k[rows]).mul_(kept)
            # A token decays what entered the block, and all that was written before it.
            decayed = torch.cat([(before * whole)[None], writes[:-1]]).cumsum_(0)
            torch.addcmul(grad_decay * decay, decayed, grad, out=d_decay[rows])
            d_writes = kept.mul_(grad)
            d_k[rows] = _over_heads(d_writes, v[rows], k.shape[1])
            d_v[rows] = _over_rows(d_writes, k[rows])
            grad = grad * whole
        return d_k, d_v, d_decay


def _blocks(log_decay: Tensor) -> list[slice]:
    """Return the rows of each block."""
    size = max(1, _BLOCK // log_decay.shape[1:].numel())
    return [slice(start, start + size) for start in range(0, len(log_decay), size)]


def _kept(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return each write's decay to the block's end `[T, H, N]`, and the block's `[H, N]`."""
    # In float64: a difference of sums in float32 would have few digits.
    sums = log_decay.cumsum(0, dtype=torch.float64)
    return (sums[-1] - sums).to(log_decay.dtype).exp_(), sums[-1].to(log_decay.dtype).exp()


def _add(state_nHN: Tensor, x_nH: Tensor, y_nKN: Tensor) -> Tensor:
    """Add the product of a number per head and the row that the head shares, in place."""
    heads = y_nKN.shape[1], -1
    state_nHN.unflatten(1, heads).addcmul_(x_nH.unflatten(1, heads)[..., None], y_nKN[:, :, None])
    return state_nHN


def _over_rows(state_nHN: Tensor, y_nKN: Tensor) -> Tensor:
    """Sum the product over N: `[n, H]`."""
    return (state_nHN.unflatten(1, (y_nKN.shape[1], -1)) @ y_nKN[..., None]).flatten(1)


def _over_heads(state_nHN: Tensor, x_nH: Tensor, keys: int) -> Tensor:
    """Sum the product over the heads that share a key head: `[n, K, N]`."""
    heads = keys, -1
    return (x_nH.unflatten(1, heads)[:, :, None] @ state_nHN.unflatten(1, heads))[:, :, 0]
