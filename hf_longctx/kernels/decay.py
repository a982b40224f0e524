"""Log decays of chunks -> products of rows of queries and keys, decayed from one to the other.

Floor: kernels. Letters: n chunks, C tokens of a chunk, N rows of the state, F queries that share
their keys. With `b` the sums of the log decays from the chunk's start on, the product of
query i with key j is `sum_N q_i k_j exp(b_i - b_j)` for `j <= i`, and 0 above the diagonal.
Exponents are formed as differences that are never above zero, so nothing overflows however fast the
decay.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class PerHead(torch.autograd.Function):
    """One decay for all rows of the state.

    `PerHead.apply(q [F, n, C, N], k [n, C, N], b [n, C, 1])` gives `[F, n, C, C]`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, sums: Tensor) -> Tensor:
        size = k.shape[-2]
        upper = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        decay = (sums - sums.mT).masked_fill_(upper, float("-inf")).exp_()
        scores = (q @ k.mT).mul_(decay)
        ctx.save_for_backward(q, k, decay, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, decay, scores = ctx.saved_tensors
        shares = (grad * scores).sum(0)
        products = grad * decay
        d_k = (products.mT @ q).sum(0)
        return products @ k, d_k, shares.sum(-1, keepdim=True) - shares.sum(-2)[..., None]


class PerRow(torch.autograd.Function):
    """A decay of each row of the state.

    `PerRow.apply(q [F, n, C, N], k [n, C, N], b [n, C, N])` gives `[F, n, C, C]`.

    A block on the diagonal is halved: its later half meets its earlier one through the token
    between them, by a matrix product of the two halves' decayed rows; then each half is halved. So
    no exponent per pair of tokens is ever formed. C is a power of two.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, sums: Tensor) -> Tensor:
        scores = q.new_zeros(*q.shape[:-1], k.shape[-2])
        for lower, (q_late, _), (k_early, _) in _halves(scores, q, k, sums):
            lower.copy_(q_late @ k_early.mT)
        scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        ctx.save_for_backward(q, k, sums)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, sums = ctx.saved_tensors
        d_q, d_k = torch.zeros_like(q), torch.zeros_like(k)
        for lower, (q_late, q_decay), (k_early, k_decay) in _halves(grad, q, k, sums):
            half = lower.shape[-1]
            late, early = (x.unflatten(-2, (-1, 2 * half)) for x in (d_q, d_k))
            late[..., half:, :] += (lower @ k_early).mul_(q_decay)
            early[..., :half, :] += (lower.mT @ q_late).sum(0).mul_(k_decay)
        d_sums = (q * d_q).sum(0) - k * d_k  # the diagonal has no decay
        own = grad.diagonal(dim1=-2, dim2=-1)[..., None]
        return d_q.add_(own * k), d_k.add_((own * q).sum(0)), d_sums


_Decayed = tuple[Tensor, Tensor]  # rows times their decay, and the decay


def _halves(
    scores: Tensor, q: Tensor, k: Tensor, sums: Tensor
) -> Iterator[tuple[Tensor, _Decayed, _Decayed]]:
    """At each level the blocks of `scores` below the diagonal, a view `[F, n, m, half, half]`,
    with queries decayed from the middle on and keys decayed to the middle."""
    size = k.shape[-2]
    half = 1
    while half < size:
        blocks = size // (2 * half), 2 * half
        parts = scores.unflatten(-2, blocks).unflatten(-1, blocks).diagonal(dim1=-4, dim2=-2)
        lower = parts.movedim(-1, -3)[..., half:, :half]
        b = sums.unflatten(-2, blocks)
        middle = b[..., half - 1 : half, :]
        q_decay = (b[..., half:, :] - middle).exp_()
        k_decay = (middle - b[..., :half, :]).exp_()
        q_late = q.unflatten(-2, blocks)[..., half:, :] * q_decay
        k_early = k.unflatten(-2, blocks)[..., :half, :] * k_decay
        yield lower, (q_late, q_decay), (k_early, k_decay)
        half *= 2


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
