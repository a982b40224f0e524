"""States of one column whose rows all decay at their own rate -> outputs, token by token.

Layer: kernels. Letters: T tokens, n chunks, C tokens of a chunk, H heads, K heads of queries and
keys, N rows of the state. This is Mamba's selective scan: a matrix product has nothing to gain
where the state is a vector, so the loops run over the C tokens of all chunks at once, elementwise,
twice: from zero to see what each chunk leaves, then from the state that really enters it. Gradients
are written out by hand and keep what enters each chunk; the states between are computed again.
"""

from typing import Any

import torch
from torch import Tensor

from .chunk_states import Grid, carry, carry_back, entered, entering_grad

_BLOCK = 2**20  # numbers of a block of rows


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


class Ran(torch.autograd.Function):
    """What a run does to the state that enters it, of one column of values.

    `Ran.apply(k [T, K, N], v [T, H], log_decay [T, H, N])` gives what it leaves of zeros and how
    far it decays each row, both `[H, N]`. Blocks of rows go one after another, so that nothing but
    the gradient of the decays is as large as they are.
    """

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
            # a token decays what entered the block, and all that was written before it
            decayed = torch.cat([(before * whole)[None], writes[:-1]]).cumsum_(0)
            torch.addcmul(grad_decay * decay, decayed, grad, out=d_decay[rows])
            share = kept.mul_(grad)
            d_k[rows] = _over_heads(share, v[rows], k.shape[1])
            d_v[rows] = _over_rows(share, k[rows])
            grad = grad * whole
        return d_k, d_v, d_decay


def _blocks(log_decay: Tensor) -> list[slice]:
    """Rows to be taken together."""
    size = max(1, _BLOCK // log_decay.shape[1:].numel())
    return [slice(start, start + size) for start in range(0, len(log_decay), size)]


def _kept(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """How far each token's write has decayed at the block's end `[T, H, N]`, and the decay of the
    whole block `[H, N]`."""
    sums = log_decay.cumsum(0, dtype=torch.float64)  # a difference of float32 would have few digits
    return (sums[-1] - sums).to(log_decay.dtype).exp_(), sums[-1].to(log_decay.dtype).exp()


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
