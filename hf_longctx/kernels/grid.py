"""Segments laid end to end -> a grid of chunks, and rows moved into it and back.

Floor: kernels. Letters: T tokens, H heads, n chunks, C tokens of a chunk, X any columns. Chunks
start where their segment starts, so no chunk holds two segments; the rest of a segment's last chunk
is padded. The first chunks of all segments stand first, then all second ones, and so on, longest
segment first: the chunks that a recurrence treats in one step, and the states it carries over from
the step before, are slices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where the rows of some segments stand in a grid of chunks.

    Args:
        starts (`np.ndarray`): `[n]`, the first row of each chunk.
        sizes (`np.ndarray`): `[n]`, its rows, at most C.
        chunk (`int`): C.
        widths (`tuple[int, ...]`): The chunks of each step, never more than in the step before.
        first (`int | None`): The chunk in which the first segment starts; `None` if it is empty.
    """

    starts: np.ndarray
    sizes: np.ndarray
    chunk: int
    widths: tuple[int, ...]
    first: int | None

    def steps(self) -> Iterator[tuple[slice, slice, slice]]:
        """For each step its chunks, those of them that go on, and what continues those."""
        start = 0
        for width, following in zip(self.widths, (*self.widths[1:], 0), strict=False):
            stop = start + width
            yield slice(start, stop), slice(start, start + following), slice(stop, stop + following)
            start = stop

    def lay(self, rows_THX: Tensor) -> Tensor:
        """Rows into the grid: `[n, H, C, X]`, contiguous; padding is zero."""
        heads = rows_THX.shape[1]
        laid = _Move.apply(rows_THX.flatten(0, 1), *self._indices(heads, rows_THX), True)
        return laid.unflatten(0, (len(self.starts), heads, self.chunk))

    def pick(self, laid: Tensor) -> Tensor:
        """`[n, H, C, X]` of the grid back into rows: `[T, H, X]`."""
        heads = laid.shape[1]
        rows = _Move.apply(laid.flatten(0, 2), *self._indices(heads, laid), False)
        return rows.unflatten(0, (-1, heads))

    def _indices(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The row (of `[T * H]`) in each place of `[n, H, C]`, the place of each row, and the
        places of the padding."""
        token = np.arange(self.chunk)
        shape = len(self.starts), heads, self.chunk
        padded = np.broadcast_to(token >= self.sizes[:, None, None], shape)
        row = (self.starts[:, None, None] + token) * heads + np.arange(heads)[:, None]
        taken = np.where(padded, 0, row).ravel()
        filled = np.flatnonzero(~padded)
        back = np.empty_like(filled)
        back[taken[filled]] = filled
        found = taken, back, np.flatnonzero(padded)
        return tuple(torch.from_numpy(x).to(like.device) for x in found)  # type: ignore[return-value]


def grid(lengths: Sequence[int], *, chunk: int, closed: bool = False) -> Grid:
    """The grid of segments of these lengths, in row order; empty ones have no chunk.

    Args:
        lengths (`Sequence[int]`): Rows of each segment.
        chunk (`int`): C.
        closed (`bool`, *optional*, defaults to `False`): Each segment gets one more chunk, an empty
            one: what enters that is what leaves the segment.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    counts = -(-tokens // chunk) + closed
    order = np.argsort(-counts, kind="stable")
    step, rank = np.nonzero(np.arange(counts.max(initial=0))[:, None] < counts[order])
    segment = order[rank]
    within = step * chunk
    return Grid(
        starts=(np.cumsum(tokens) - tokens)[segment] + within,
        sizes=np.minimum(tokens[segment] - within, chunk),
        chunk=chunk,
        widths=tuple(np.bincount(step).tolist()),
        first=int(np.flatnonzero(order == 0)[0]) if len(tokens) and counts[0] else None,
    )


class _Move(torch.autograd.Function):
    """Rows to places, or places to rows: each way is the other one's gradient.

    An index on each side makes both a gather; the gradient of an index alone would scatter.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taken: Tensor, back: Tensor, padded: Tensor, into: bool
    ) -> Tensor:
        ctx.save_for_backward(taken, back, padded)
        ctx.into = into
        return _into(x, taken, padded) if into else x.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        taken, back, padded = ctx.saved_tensors
        moved = grad.index_select(0, back) if ctx.into else _into(grad, taken, padded)
        return moved, None, None, None, None


def _into(x: Tensor, taken: Tensor, padded: Tensor) -> Tensor:
    if not len(x):  # a grid of nothing but padding
        return x.new_zeros(len(taken), x.shape[1])
    laid = x.index_select(0, taken)
    return laid.index_fill_(0, padded, 0) if len(padded) else laid
