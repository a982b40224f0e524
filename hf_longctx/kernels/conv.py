"""Convolve rows of packed documents with one short causal filter per channel.

Layer: kernels. Letters: T tokens, C channels, W taps.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK = 2**17  # numbers in a block of rows: small enough to stay in the cache between taps


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None = None,
    *,
    lengths: Sequence[int],
    halo: Tensor | None = None,
) -> Tensor:
    """Weight each token's own row and the `W - 1` before it in its segment: `[T, C]`.

    Sums are float32 or wider; the result has x's dtype. The caller applies any activation.

    Args:
        x_TC (`Tensor`): The convolution's inputs.
        weight_CW (`Tensor`): Taps of each channel, the token's own last.
        bias (`Tensor`, *optional*): `[C]`.
        lengths (`Sequence[int]`): Tokens of each segment, in order; they sum to T.
        halo (`Tensor`, *optional*): `[W - 1, C]`, the inputs before the first segment, zero where
            its document has none (not used if that segment is empty); `None` for zeros.
    """
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    if halo is None:
        halo = x_TC.new_zeros(weight_CW.shape[1] - 1, x_TC.shape[1])
    given = (x.to(wide) for x in (x_TC, halo, weight_CW.T))
    out = _Conv.apply(*given, tuple(lengths))
    return (out if bias is None else out + bias.to(wide)).to(x_TC.dtype)


class _Term(NamedTuple):
    """Rows of the output, and the earlier rows of the input, or of the halo, added to them."""

    halo: bool
    to: slice
    rows: slice
    tap: int


def _terms(lengths: Sequence[int], taps: int, block: int) -> Iterator[_Term]:
    """Yield all terms but each row's own, block by block of rows."""
    start = 0
    for i, length in enumerate(lengths):
        stop = start + length
        for shift in range(1, taps):
            tap, reached = taps - 1 - shift, min(shift, length)
            if i == 0 and reached:
                yield _Term(True, slice(0, reached), slice(tap, tap + reached), tap)
        for first in range(start, stop, block):
            last = min(first + block, stop)
            for shift in range(1, taps):
                to = slice(max(first, start + shift), last)
                if to.start < last:
                    yield _Term(False, to, slice(to.start - shift, last - shift), taps - 1 - shift)
        start = stop


class _Conv(torch.autograd.Function):
    """Convolve `x [T, C]` after `halo [W - 1, C]` with `weight [W, C]`: `[T, C]`."""

    # Written out by hand: autograd would keep a copy of the rows for each tap.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, halo: Tensor, weight: Tensor, lengths: tuple[int, ...]
    ) -> Tensor:
        weight = weight.contiguous()
        ctx.save_for_backward(x, halo, weight)
        ctx.given = lengths, len(weight), max(1, _BLOCK // x.shape[1])
        # The last tap is the token's own; earlier rows are added tap by tap.
        out = x * weight[-1]
        for term in _terms(*ctx.given):
            rows = (halo if term.halo else x)[term.rows]
            out[term.to].addcmul_(rows, weight[term.tap])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, halo, weight = ctx.saved_tensors
        d_x, d_halo, d_weight = grad * weight[-1], torch.zeros_like(halo), torch.zeros_like(weight)
        d_weight[-1] = (grad * x).sum(0)
        for term in _terms(*ctx.given):
            d_rows, rows = (d_halo, halo) if term.halo else (d_x, x)
            d_rows[term.rows].addcmul_(grad[term.to], weight[term.tap])
            d_weight[term.tap] += (grad[term.to] * rows[term.rows]).sum(0)
        return d_x, d_halo, d_weight, None
