"""Segments laid end to end -> a grid of chunks, and rows moved into it and back.

Floor: kernels. Letters: T tokens, H heads, K heads of queries and keys, C tokens of a chunk, n
chunks of a block of heads, X any columns. A chunk belongs to one head of one segment and starts
where that starts; the rest of a segment's last chunk is padded. The first chunks of all segments
stand first, then all second ones, and so on, longest segment first: the chunks that a recurrence
treats in one step, and the states it carries over from the step before, are slices.
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
        heads (`int`): H.
        split (`bool`): Each head is a block; else all are one.
        widths (`tuple[int, ...]`): The chunks of each step, never more than in the step before.
        first (`slice`): The chunks in which the first segment starts, one of each of the block's
            heads; empty if the segment is.
        token, head (`Tensor`): `[chunks of a head, H, C]`, of each place; both 0 for padding.
        place (`Tensor`): Of each of the `T * H` rows.
        padding (`Tensor`): The places without a row.
    """

    heads: int
    split: bool
    widths: tuple[int, ...]
    first: slice
    token: Tensor
    head: Tensor
    place: Tensor
    padding: Tensor

    def steps(self) -> Iterator[tuple[slice, slice, slice]]:
        """For each step its chunks, those of them that go on, and what continues those."""
        start = 0
        for width, following in zip(self.widths, (*self.widths[1:], 0), strict=False):
            stop = start + width
            yield slice(start, stop), slice(start, start + following), slice(stop, stop + following)
            start = stop

    def lay(self, rows_TKX: Tensor) -> tuple[Tensor, ...]:
        """Rows into the grid, `[n, C, X]` of each block; padding is zero.

        Rows of fewer heads than H serve consecutive ones.
        """
        laid = _Lay.apply(rows_TKX, self)
        return laid.unbind(1) if self.split else (laid.flatten(0, 1),)

    def pick(self, blocks: list[Tensor]) -> Tensor:
        """What stands in the blocks of the grid back into rows: `[T, H, X]`."""
        laid = torch.stack(blocks, 1) if self.split else blocks[0]
        return _Pick.apply(laid.reshape(-1, laid.shape[-1]), self)

    def filled(self, rows_TKX: Tensor) -> Tensor:
        """`lay` without gradient, `[chunks of a head, H, C, X]`."""
        shape = *self.token.shape, rows_TKX.shape[2]
        if not len(self.place):  # nothing but padding
            return rows_TKX.new_zeros(shape)
        keys = rows_TKX.shape[1]
        taken = self.token * keys + self.head // (self.heads // keys)
        laid = rows_TKX.flatten(0, 1).index_select(0, taken.flatten())
        return (laid.index_fill_(0, self.padding, 0) if len(self.padding) else laid).view(shape)

    def emptied(self, laid: Tensor) -> Tensor:
        """`pick` without gradient, of `[places, X]`."""
        return laid.index_select(0, self.place).unflatten(0, (-1, self.heads))


def grid(
    lengths: Sequence[int],
    *,
    chunk: int,
    heads: int = 1,
    split: bool = False,
    closed: bool = False,
    device: torch.device | str = "cpu",
) -> Grid:
    """The grid of segments of these lengths, in row order; empty ones have no chunk.

    Args:
        lengths (`Sequence[int]`): Rows of each segment.
        chunk (`int`): C.
        heads (`int`, *optional*, defaults to 1): H.
        split (`bool`, *optional*, defaults to `False`): Each head is a block of its own.
        closed (`bool`, *optional*, defaults to `False`): Each segment gets one more chunk, an empty
            one: what enters that is what leaves the segment.
        device (*optional*): Of the rows.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    counts = -(-tokens // chunk) + closed
    order = np.argsort(-counts, kind="stable")
    step, rank = np.nonzero(np.arange(counts.max(initial=0))[:, None] < counts[order])
    segment = order[rank]
    shape = len(step), heads, chunk
    within = step[:, None] * chunk + np.arange(chunk)
    real = np.broadcast_to((within < tokens[segment][:, None])[:, None], shape)
    row = (np.cumsum(tokens) - tokens)[segment][:, None] + within
    token = np.where(real, row[:, None], 0)
    head = np.where(real, np.arange(heads)[:, None], 0)
    used = np.flatnonzero(real)
    place = np.empty_like(used)
    place[(token * heads + head).ravel()[used]] = used
    columns = {"token": token, "head": head, "place": place, "padding": np.flatnonzero(~real)}
    together = 1 if split else heads  # heads of a block
    first = int(np.flatnonzero(order == 0)[0]) if len(tokens) and counts[0] else -1
    return Grid(
        heads=heads,
        split=split,
        widths=tuple((np.bincount(step) * together).tolist()),
        first=slice(first * together, (first + 1) * together) if first >= 0 else slice(0, 0),
        **{name: torch.from_numpy(x).to(device) for name, x in columns.items()},
    )


class _Lay(torch.autograd.Function):
    """Each way's gradient is the other way: two gathers, where that of an index would scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, grid: Grid) -> Tensor:
        ctx.grid, ctx.keys = grid, rows.shape[1]
        return grid.filled(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows = ctx.grid.emptied(grad.flatten(0, 2))
        alike = rows.shape[1] == ctx.keys
        return (rows if alike else rows.unflatten(1, (ctx.keys, -1)).sum(2)), None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, laid: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return grid.emptied(laid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.grid.filled(grad).flatten(0, 2), None
