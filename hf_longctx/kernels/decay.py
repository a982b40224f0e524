"""Log decays of chunks -> products of rows of queries and keys, decayed from one to the other.

Layer: kernels. Letters: n chunks, C tokens of a chunk, N rows of the state.
With `b` the sums of the log decays from the chunk's start on, the product of
query i with key j is `sum_N q_i k_j exp(b_i - b_j)` for `j <= i`, and 0 above the diagonal.
Exponents are never above zero, so nothing overflows however fast the decay. They are formed as sums
of what lies between, not as differences of b: a fast token would leave the slow ones after it no
digits there.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def sums(decay_nCN: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of log decays up to each token, and of those after it to the chunk's end."""
    size = decay_nCN.shape[-2]
    ones = decay_nCN.new_ones(size, size)
    return ones.tril() @ decay_nCN, ones.triu(1) @ decay_nCN


class PerHead(torch.autograd.Function):
    """One decay for all rows of the state.

    `PerHead.apply(log_decay [n, C, 1], k [n, C, N], *queries [n, C, N])` gives `[n, C, C]` for
    each. C is a power of two.
    """

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, k: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
        decay = log_decay.new_zeros(*k.shape[:-1], k.shape[-2])
        for half, late, early in _halves(log_decay):
            torch.add(late, early.mT, out=_below(decay, half))
        decay.exp_().tril_()
        scores = tuple((q @ k.mT).mul_(decay) for q in queries)
        ctx.save_for_backward(k, decay, *queries, *scores)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        k, decay, *others = ctx.saved_tensors
        queries, scores = others[: len(grads)], others[len(grads) :]
        d_k, d_queries, shares = torch.zeros_like(k), [], torch.zeros_like(decay)
        for grad, q, score in zip(grads, queries, scores, strict=True):
            shares.addcmul_(grad, score)
            products = grad * decay
            d_queries.append(products @ k)
            d_k.baddbmm_(products.mT, q)
        # a token's decay lies in what later rows and it have of earlier ones
        size = shares.shape[-1]
        d_decay = (shares.new_ones(size, size).triu() @ shares).tril(-1).sum(-1, keepdim=True)
        return d_decay, d_k, *d_queries


class PerRow(torch.autograd.Function):
    """A decay of each row of the state.

    `PerRow.apply(log_decay [n, C, N], k [n, C, N], *queries [n, C, N])` gives `[n, C, C]` for each.

    A block on the diagonal is halved: its later half meets its earlier one through the token
    between them, by a matrix product of the two halves' decayed rows; then each half is halved. So
    no exponent per pair of tokens is ever formed. C is a power of two.
    """

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, k: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
        scores = tuple(k.new_zeros(*k.shape[:-1], k.shape[-2]) for _ in queries)
        for half, *exponents in _halves(log_decay):
            late_decay, early_decay = (x.exp() for x in exponents)
            early = _halved(k, half)[0] * early_decay
            for q, score in zip(queries, scores, strict=True):
                late = _halved(q, half)[1] * late_decay
                _below(score, half).copy_(late @ early.mT)
        for q, score in zip(queries, scores, strict=True):
            score.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        ctx.save_for_backward(log_decay, k, *queries)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        log_decay, k, *queries = ctx.saved_tensors
        d_k, d_queries = torch.zeros_like(k), [torch.zeros_like(k) for _ in queries]
        d_decay = torch.zeros_like(k)
        for half, *exponents in _halves(log_decay):
            late_decay, early_decay = (x.exp() for x in exponents)
            early_k = _halved(k, half)[0]
            early, d_early = early_k * early_decay, torch.zeros_like(early_k)
            d_late = torch.zeros_like(early_k)  # of the exponents, as of the rows
            for grad, q, d_q in zip(grads, queries, d_queries, strict=True):
                late_q, lower = _halved(q, half)[1], _below(grad, half)
                share = (lower @ early).mul_(late_decay)
                _halved(d_q, half)[1].add_(share)
                d_late.addcmul_(late_q, share)
                d_early.addcmul_(lower.mT @ (late_q * late_decay), early_decay)
            _halved(d_k, half)[0].add_(d_early)
            ones = k.new_ones(half, half)
            _halved(d_decay, half)[1].add_(ones.triu() @ d_late)
            _halved(d_decay, half)[0].add_(ones.tril(-1) @ (early_k * d_early))
        for grad, q, d_q in zip(grads, queries, d_queries, strict=True):
            own = grad.diagonal(dim1=-2, dim2=-1)[..., None]  # without decay
            d_q.addcmul_(own, k)
            d_k.addcmul_(own, q)
        return d_decay, d_k, *d_queries


def _halves(log_decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """At each level the tokens of a half, and the log decays `[n, m, half, N]` from the middle of
    each of m blocks to its later tokens, and from its earlier tokens to the middle; they change
    with the next level."""
    since, until = log_decay.clone(), torch.zeros_like(log_decay)  # its block's start, its end
    half = 1
    while half < log_decay.shape[-2]:
        (first, late), (early, _) = _halved(since, half), _halved(until, half)
        yield half, late, early
        early += late[..., -1:, :]
        late += first[..., -1:, :]
        half *= 2


def _halved(rows_nCN: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The earlier and the later rows of each block, views `[n, m, half, N]`."""
    blocks = rows_nCN.unflatten(-2, (-1, 2, half))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _below(scores_nCC: Tensor, half: int) -> Tensor:
    """Later tokens against earlier ones of each block, a view `[n, m, half, half]`."""
    blocks = scores_nCC.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half))
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


class UnitLowerInverse(torch.autograd.Function):
    """The inverse of matrices with ones on the diagonal and zeros above it, `[..., C, C]`.

    What is given on and above the diagonal is not read.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        one = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, one, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ grad @ inverse.mT).tril_(-1).neg_()
