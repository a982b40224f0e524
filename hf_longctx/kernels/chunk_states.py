"""Cut segments into chunks, and carry the state of a recurrence from chunk to chunk.

A recurrence over a run of tokens is an affine map of the state that enters, `S -> M S + E`. Within
a chunk it is computed by matrix products; between chunks a loop carries the state, batched over
segments and heads. Gradients of the loops are written out by hand: autograd would keep several
states of every step, this keeps one.

A chunk belongs to one head of one segment and begins where the segment begins; the rest of a
segment's last chunk is padding. The grid holds the first chunks of all segments, then all second
ones, and so on, longest segment first: the chunks that the loop treats in one step, and the states
that it carries over from the step before, are then slices.
Layer: kernels. Letters: T tokens, H heads, h heads of a block, K heads of queries and keys, N rows
of the state, V its columns, C tokens of a chunk, n chunks of a block, X any columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run of tokens does to the state that enters it: `S -> M S + E`.

    Args:
        state (`Tensor`): `[H, N, V]`, E: the state that leaves the run if zeros entered.
        decay (`Tensor`): M: `[H, 1, 1]` or `[H, N, 1]` (a diagonal, which multiplies) or
            `[H, N, N]` (the delta rule; latest factor leftmost).
    """

    state: Tensor
    decay: Tensor


def apply(summary: Summary, state: Tensor) -> Tensor:
    """Return the state `[H, N, V]` that leaves the run if `state` entered."""
    return decayed(summary.decay, state) + summary.state


def decayed(decay: Tensor, state: Tensor) -> Tensor:
    """Return `M S`."""
    # If N is 1, a matrix and a diagonal are the same.
    return decay @ state if decay.shape[-1] > 1 else decay * state


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGrid:
    """Where the rows of some segments are in a grid of chunks.

    Args:
        heads (`int`): H.
        split (`bool`): Each head is a block; else all heads are one.
        widths (`tuple[int, ...]`): The chunks of each step, never more than in the step before.
        first (`slice`): The chunks in which the first segment begins, one of each of the block's
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
        """Yield for each step its chunks, those of them that go on, and what continues those."""
        start = 0
        for width, following in zip(self.widths, (*self.widths[1:], 0), strict=False):
            stop = start + width
            # The longest segments come first, so those that go on are the first of the step.
            yield slice(start, stop), slice(start, start + following), slice(stop, stop + following)
            start = stop

    def to_chunks(self, rows_TKX: Tensor) -> tuple[Tensor, ...]:
        """Move rows into the grid, `[n, C, X]` of each block; padding is zero.

        Rows of fewer heads than H serve consecutive heads.
        """
        laid = _ToChunks.apply(rows_TKX, self)
        return laid.unbind(1) if self.split else (laid.flatten(0, 1),)

    def to_rows(self, blocks: list[Tensor]) -> Tensor:
        """Move the blocks of the grid back into rows: `[T, H, X]`."""
        laid = torch.stack(blocks, 1) if self.split else blocks[0]
        return _ToRows.apply(laid.reshape(-1, laid.shape[-1]), self)

    def gather_chunks(self, rows_TKX: Tensor) -> Tensor:
        """Compute `to_chunks` without gradient, `[chunks of a head, H, C, X]`."""
        shape = *self.token.shape, rows_TKX.shape[2]
        if not len(self.place):  # nothing but padding
            return rows_TKX.new_zeros(shape)
        keys = rows_TKX.shape[1]
        taken = self.token * keys + self.head // (self.heads // keys)
        laid = rows_TKX.flatten(0, 1).index_select(0, taken.flatten())
        return (laid.index_fill_(0, self.padding, 0) if len(self.padding) else laid).view(shape)

    def gather_rows(self, laid: Tensor) -> Tensor:
        """Compute `to_rows` without gradient, from `[places, X]`."""
        return laid.index_select(0, self.place).unflatten(0, (-1, self.heads))


def chunk_grid(
    lengths: Sequence[int],
    *,
    chunk: int,
    heads: int = 1,
    split: bool = False,
    closed: bool = False,
    device: torch.device | str = "cpu",
) -> ChunkGrid:
    """Lay segments of these lengths, in row order, into a grid; empty ones have no chunk.

    Args:
        lengths (`Sequence[int]`): Rows of each segment.
        chunk (`int`): C.
        heads (`int`, *optional*, defaults to 1): H.
        split (`bool`, *optional*, defaults to `False`): Each head is a block of its own.
        closed (`bool`, *optional*, defaults to `False`): Each segment gets one more chunk, an empty
            one: what enters that chunk is what leaves the segment.
        device (*optional*): Of the rows.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    counts = -(-tokens // chunk) + closed
    order = np.argsort(-counts, kind="stable")  # the longest first
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
    return ChunkGrid(
        heads=heads,
        split=split,
        widths=tuple((np.bincount(step) * together).tolist()),
        first=slice(first * together, (first + 1) * together) if first >= 0 else slice(0, 0),
        **{name: torch.from_numpy(x).to(device) for name, x in columns.items()},
    )


class _ToChunks(torch.autograd.Function):
    """Move rows into the grid."""

    # Each way's gradient is the other way: two gathers. That of an index would scatter, slowly.
    @staticmethod
    def forward(ctx: Any, rows: Tensor, grid: ChunkGrid) -> Tensor:
        ctx.grid, ctx.keys = grid, rows.shape[1]
        return grid.gather_chunks(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows = ctx.grid.gather_rows(grad.flatten(0, 2))
        alike = rows.shape[1] == ctx.keys
        return (rows if alike else rows.unflatten(1, (ctx.keys, -1)).sum(2)), None


class _ToRows(torch.autograd.Function):
    """Move the grid back into rows."""

    @staticmethod
    def forward(ctx: Any, laid: Tensor, grid: ChunkGrid) -> Tensor:
        ctx.grid = grid
        return grid.gather_rows(laid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.grid.gather_chunks(grad).flatten(0, 2), None


class DecayStates(torch.autograd.Function):
    """Carry states without the delta rule: chunk i turns S into `decay_i * S + write_i`.

    `DecayStates.apply(write [n, N, V], decay [n, N or 1, 1], entering [h, N, V] or None, grid)`
    returns the states that enter the chunks, `[n, N, V]`.
    """

    @staticmethod
    def forward(
        ctx: Any, write: Tensor, decay: Tensor, entering: Tensor | None, grid: ChunkGrid
    ) -> Tensor:
        states = carry(write, decay, fill_first(torch.empty_like(write), entering, grid), grid)
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


class DeltaRuleStates(torch.autograd.Function):
    """Carry states under the delta rule: `decay_i * S + keys_i^T (new_i - reads_i S)`.

    `DeltaRuleStates.apply(new [n, C, V], reads [n, C, N], keys [n, C, N], decay, entering, grid)`
    returns the states that enter the chunks and the corrected values `new_i - reads_i S_i`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        new: Tensor,
        reads: Tensor,
        keys: Tensor,
        decay: Tensor,
        entering: Tensor | None,
        grid: ChunkGrid,
    ) -> tuple[Tensor, Tensor]:
        shape = len(new), keys.shape[-1], new.shape[-1]
        states = fill_first(new.new_empty(shape), entering, grid)
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
            # First what comes by the state that leaves a chunk, then what the chunk read itself.
            d_new[kept].baddbmm_(keys[kept], total[later])
            torch.bmm(corrected[kept], total[later].mT, out=d_keys[kept])
            d_decay[kept] = (states[kept] * total[later]).sum_to_size(decay[kept].shape)
            total[kept].addcmul_(decay[kept], total[later])
            total[now].baddbmm_(reads[now].mT, d_new[now], alpha=-1)
            torch.bmm(d_new[now], states[now].mT, out=d_reads[now])
        d_reads.neg_()
        d_entering = entering_grad(total, ctx.grid, ctx.entering)
        return d_new, d_reads, d_keys, d_decay, d_entering, None


def carry(write: Tensor, decay: Tensor, states: Tensor, grid: ChunkGrid) -> Tensor:
    """Fill `states [n, ...]`, what enters each chunk, from what enters the first step's chunks."""
    for _, kept, later in grid.steps():
        torch.addcmul(write[kept], states[kept], decay[kept], out=states[later])
    return states


def carry_back(total: Tensor, decay: Tensor, grid: ChunkGrid) -> Tensor:
    """Carry gradients of states back through the loop of `carry`.

    Args:
        total (`Tensor`): The gradient of what enters each chunk; the part that comes by what leaves
            the chunk is added to it.
        decay (`Tensor`): As in `carry`.
        grid (`ChunkGrid`): As in `carry`.

    Returns:
        The gradient of what leaves each chunk, zero if nothing continues it.
    """
    leaving = torch.zeros_like(total)
    for _, kept, later in reversed(list(grid.steps())):
        leaving[kept] = total[later]
        total[kept].addcmul_(decay[kept], total[later])
    return leaving


def fill_first(states: Tensor, entering: Tensor | None, grid: ChunkGrid) -> Tensor:
    """Fill in, of uninitialised `states [n, ...]`, what enters the chunks of the first step."""
    states[: grid.widths[0] if grid.widths else 0] = 0
    if entering is not None and grid.first.stop:
        states[grid.first] = entering
    return states


def entering_grad(total: Tensor, grid: ChunkGrid, shape: torch.Size | None) -> Tensor | None:
    """Return the gradient of the state that entered the first segment.

    Args:
        total (`Tensor`): The gradient of what enters each chunk.
        grid (`ChunkGrid`): Of the chunks.
        shape (`torch.Size`, *optional*): Of that state; `None` if there was none.
    """
    if shape is None:  # autograd wants None for an argument that was None
        return None
    return total[grid.first] if grid.first.stop else total.new_zeros(shape)  # the segment is empty
