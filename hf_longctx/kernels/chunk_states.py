"""A run of tokens -> the affine map `S -> M S + E` it applies to the state.

Layer: kernels. Letters: H heads, N rows of the state, V its columns.

Segments laid end to end -> a grid of chunks, and rows moved into it and back. Letters: T tokens, H heads, K heads of queries and keys, C tokens of a chunk, n
chunks of a block of heads, X any columns. A chunk belongs to one head of one segment and starts
where that starts; the rest of a segment's last chunk is padded. The first chunks of all segments
stand first, then all second ones, and so on, longest segment first: the chunks that a recurrence
treats in one step, and the states it carries over from the step before, are slices.

Per chunk what it writes and how it decays -> the state that enters each chunk. Letters: n chunks, h heads, C tokens of a chunk, N rows of the state, V its columns.
The loops run over the steps of the grid, batched over segments and heads. Gradients are written out
by hand: autograd would keep several states of every step, this keeps one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run of tokens does to the state that enters it.

    Args:
        state (`Tensor`): `[H, N, V]`, E: the state that leaves the run if zeros entered.
        decay (`Tensor`): M: `[H, 1, 1]` or `[H, N, 1]` (a diagonal, which multiplies) or
            `[H, N, N]` (the delta rule; latest factor leftmost).
    """

    state: Tensor
    decay: Tensor


def apply(summary: Summary, state: Tensor) -> Tensor:
    """The state `[H, N, V]` that leaves the run if `state` entered: `M S + E`."""
    return decayed(summary.decay, state) + summary.state


def decayed(decay: Tensor, state: Tensor) -> Tensor:
    """`M S`; where N is 1, a matrix and a diagonal are the same."""
    return decay @ state if decay.shape[-1] > 1 else decay * state


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
