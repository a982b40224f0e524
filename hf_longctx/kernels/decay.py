"""Multiply queries with keys of a chunk, decayed from one token to the other.

With `b` the sums of the log decays from the chunk's start on, the product of query i with key j is
`sum_N q_i k_j exp(b_i - b_j)` for `j <= i`, and 0 above the diagonal. Exponents are never above
zero, so nothing overflows however fast the decay.
Layer: kernels. Letters: n chunks, C tokens of a chunk, N rows of the state.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def decay_sums(decay_nCN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of log decays up to each token, and of those behind it to the chunk's end."""
    size = decay_nCN.shape[-2]
    ones = decay_nCN.new_ones(size, size)
    return ones.tril() @ decay_nCN, ones.triu(1) @ decay_nCN


# Exponents are sums of what lies between two tokens, not differences of b: a fast token would leave
# no digits of the slow ones after it in such a difference.
class HeadDecayScores(torch.autograd.Function):
    """Decayed products under one decay for all rows of the state.

    `HeadDecayScores.apply(log_decay [n, C, 1], k [n, C, N], *queries [n, C, N])` returns
    `[n, C, C]` for each of the queries. C is a power of two.
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
        d_k, d_queries, d_exponents = torch.zeros_like(k), [], torch.zeros_like(decay)
        for grad, q, score in zip(grads, queries, scores, strict=True):
            d_exponents.addcmul_(grad, score)
            products = grad * decay
            d_queries.append(products @ k)
            d_k.baddbmm_(products.mT, q)
        # A token's decay is in the exponents of its own and later rows with earlier ones. They are
        # summed as such: taking them from sums over all tokens would lose digits, as above.
        size = decay.shape[-1]
        later = decay.new_ones(size, size).triu() @ d_exponents
        d_decay = later.tril(-1).sum(-1, keepdim=True)
        return d_decay, d_k, *d_queries


class RowDecayScores(torch.autograd.Function):
    """Decayed products under a decay for each row of the state.

    `RowDecayScores.apply(log_decay [n, C, N], k [n, C, N], *queries [n, C, N])` returns `[n, C, C]`
    for each of the queries. C is a power of two.
    """

    # A block on the diagonal is halved: its later half meets its earlier one through the token
    # between them, by a matrix product of the two halves' decayed rows; then each half is halved.
    # So no exponent per pair of tokens is ever formed.
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
            d_late = torch.zeros_like(early_k)  # of the exponents
            for grad, q, d_q in zip(grads, queries, d_queries, strict=True):
                late_q, lower = _halved(q, half)[1], _below(grad, half)
                d_late_q = (lower @ early).mul_(late_decay)
                _halved(d_q, half)[1].add_(d_late_q)
                d_late.addcmul_(late_q, d_late_q)
                d_early.addcmul_(lower.mT @ (late_q * late_decay), early_decay)
            _halved(d_k, half)[0].add_(d_early)
            ones = k.new_ones(half, half)
            _halved(d_decay, half)[1].add_(ones.triu() @ d_late)
            _halved(d_decay, half)[0].add_(ones.tril(-1) @ (early_k * d_early))
        for grad, q, d_q in zip(grads, queries, d_queries, strict=True):
            own = grad.diagonal(dim1=-2, dim2=-1)[..., None]  # a token with itself: no decay
            d_q.addcmul_(own, k)
            d_k.addcmul_(own, q)
        return d_decay, d_k, *d_queries


def _halves(log_decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each level the tokens of a half, and log decays `[n, m, half, N]` in its m blocks.

    They lead from the middle of a block to its later tokens, and from its earlier tokens to the
    middle. Both are overwritten for the next level.
    """
    # Of each token since its block's start, and until its block's end.
    since, until = log_decay.clone(), torch.zeros_like(log_decay)
    half = 1
    while half < log_decay.shape[-2]:
        (first, late), (early, _) = _halved(since, half), _halved(until, half)
        yield half, late, early
        early += late[..., -1:, :]
        late += first[..., -1:, :]
        half *= 2


def _halved(rows_nCN: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the earlier and the later rows of each block, views `[n, m, half, N]`."""
    blocks = rows_nCN.unflatten(-2, (-1, 2, half))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _below(scores_nCC: Tensor, half: int) -> Tensor:
    """Return later tokens against earlier ones of each block, a view `[n, m, half, half]`."""
    blocks = scores_nCC.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half))
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


class UnitLowerInverse(torch.autograd.Function):
    """Invert matrices with ones on the diagonal and zeros above it, `[..., C, C]`.

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
