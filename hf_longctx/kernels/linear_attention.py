"""Run linear attention of packed documents, chunk by chunk.

The state of a head is `[N, V]`:

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t                    out_t = q_t S_t

and under the delta rule `v_t` is what the decayed state does not yet predict, times beta:
`beta_t (v_t - k_t diag(exp(log_decay_t)) S_{t-1})`. `reference.py` says the same in loops.
Layer: kernels. Letters: T tokens, H heads, h heads of a block, K heads of queries and keys, N rows
of the state, V its columns, n chunks of a block, C tokens of a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunk_states import ChunkGrid, DecayStates, DeltaRuleStates, Summary, chunk_grid
from .decay import HeadDecayScores, RowDecayScores, UnitLowerInverse, decay_sums
from .selective_scan import SelectiveScan, SelectiveSummary

_CHUNK = 64
_SCAN_CHUNK = 32
_TOGETHER = 8192  # tokens times heads that still fit the cache


def linear_attention(
    q_THN: Tensor,
    k_THN: Tensor,
    v_THV: Tensor,
    *,
    log_decay: Tensor,
    lengths: Sequence[int],
    beta: Tensor | None = None,
    entering: Tensor | None = None,
) -> Tensor:
    """Apply each token's query to the state after that token: `[T, H, V]`, in v's dtype.

    The state and all sums are float32 or wider. Segments share nothing, nor do their gradients.

    Args:
        q_THN, k_THN (`Tensor`): `[T, K, N]`, K divides H; each serves H / K consecutive heads.
        v_THV (`Tensor`): `[T, H, V]`.
        log_decay (`Tensor`): `[T, H]`, or `[T, H, N]` for a decay of each row; never above 0.
        lengths (`Sequence[int]`): Tokens of each segment, in order; they sum to T.
        beta (`Tensor`, *optional*): `[T, H]`, the delta rule's rate; `None` for no delta rule.
        entering (`Tensor`, *optional*): `[H, N, V]`, the state that the first segment begins with
            (an empty one uses none); zeros if `None`, as for all others.
    """
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    if _is_selective(v_THV, log_decay, beta):
        return _selective_scan(q_THN, k_THN, v_THV, log_decay, entering, lengths)
    grid = _grid(lengths, v_THV)
    q, k, v, decay = (_to_chunks(x, grid, wide) for x in (q_THN, k_THN, v_THV, log_decay))
    none = (None,) * len(v)
    rates = none if beta is None else _to_chunks(beta, grid, wide)
    # Heads of a block are consecutive, as chunk() cuts them.
    starts = none if entering is None else entering.to(wide).chunk(len(v))
    blocks = zip(q, k, v, decay, rates, starts, strict=True)
    outs = [_attend_block(*block, grid=grid) for block in blocks]
    return grid.to_rows(outs).to(v_THV.dtype)


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    start: Tensor | None,
    *,
    grid: ChunkGrid,
) -> Tensor:
    """Compute one block of heads: `[n, C, V]`."""
    since, until = decay_sums(decay)
    keys, factor = k * until.exp(), since[..., -1:, :].exp().mT  # as seen at the chunk's end
    if rate is None:
        (weights,) = _scores(decay, k, q)
        states = DecayStates.apply(keys.mT @ v, factor, start, grid)
    else:
        weights, overlaps = _scores(decay, k, q, k)
        given = _delta_rule(k, v, since, rate, overlaps)
        states, v = DeltaRuleStates.apply(*given, keys, factor, start, grid)
    # What the chunk's own tokens wrote, and what entered it.
    return torch.baddbmm(weights @ v, q * since.exp(), states)


def summarize(
    k_THN: Tensor, v_THV: Tensor, *, log_decay: Tensor, beta: Tensor | None = None
) -> Summary:
    """Return what one run of tokens does to the state that enters it, in float32 or wider.

    Arguments as in `linear_attention`. A run without tokens leaves the state as it is.
    """
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    tokens, heads, columns = v_THV.shape
    if _is_selective(v_THV, log_decay, beta):
        given = (x.to(wide) for x in (k_THN, v_THV[..., 0], log_decay))
        state, decay = SelectiveSummary.apply(*given)
        return Summary(state=state[..., None], decay=decay[..., None])
    grid = _grid([tokens], v_THV, closed=True)
    k, v, decay = (_to_chunks(x, grid, wide) for x in (k_THN, v_THV, log_decay))
    rates = (None,) * len(v) if beta is None else _to_chunks(beta, grid, wide)
    blocks = zip(k, v, decay, rates, strict=True)
    left = torch.cat([_leaving(*block, grid=grid) for block in blocks])
    if beta is None:
        return Summary(state=left, decay=log_decay.to(wide).sum(0).exp().reshape(heads, -1, 1))
    return Summary(state=left[..., :columns], decay=left[..., columns:])


def _leaving(
    k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, *, grid: ChunkGrid
) -> Tensor:
    """Return the state that leaves the only segment if zeros entered, `[h, N, V]`.

    Under the delta rule return `[h, N, V + N]`: beside it the factor on the state that enters.
    """
    heads = grid.widths[-1]
    since, until = decay_sums(decay)
    keys, factor = k * until.exp(), since[..., -1:, :].exp().mT
    if rate is None:
        return DecayStates.apply(keys.mT @ v, factor, None, grid)[-heads:]
    new, reads = _delta_rule(k, v, since, rate, *_scores(decay, k, k))
    rows = k.shape[-1]
    # The identity enters beside zeros, and nothing is written to its columns.
    start = torch.eye(rows, dtype=v.dtype, device=v.device).expand(heads, -1, -1)
    start = torch.cat([v.new_zeros(*start.shape[:2], v.shape[-1]), start], -1)
    new = torch.cat([new, new.new_zeros(*new.shape[:-1], rows)], -1)
    return DeltaRuleStates.apply(new, reads, keys, factor, start, grid)[0][-heads:]


def _scores(decay: Tensor, k: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
    """Return the decayed products of queries and keys, `[n, C, C]` for each of the queries."""
    kind = HeadDecayScores if decay.shape[-1] == 1 else RowDecayScores
    return kind.apply(decay, k, *queries)


def _delta_rule(
    k: Tensor, v: Tensor, since: Tensor, rate: Tensor, overlaps: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve the delta rule of a chunk: return its new values, and what they read of the state."""
    # Each token's new value takes back what the earlier ones of its chunk have put in its place: a
    # triangular system, the same for the values and for the reads of the entering state.
    solution = UnitLowerInverse.apply(overlaps * rate) * rate.mT
    return solution @ v, solution @ (k * since.exp())


def _grid(lengths: Sequence[int], v_THV: Tensor, *, closed: bool = False) -> ChunkGrid:
    tokens, heads = v_THV.shape[:2]
    # On CPU heads go one by one if all together would leave the cache.
    split = v_THV.device.type == "cpu" and tokens * heads > _TOGETHER
    return chunk_grid(
        lengths, chunk=_CHUNK, heads=heads, split=split, closed=closed, device=v_THV.device
    )


def _to_chunks(rows: Tensor, grid: ChunkGrid, wide: torch.dtype) -> tuple[Tensor, ...]:
    """Move `[T, heads]` or `[T, heads, X]` into the grid, `[n, C, X]` of each block."""
    return grid.to_chunks((rows[..., None] if rows.ndim == 2 else rows).to(wide))


def _is_selective(v_THV: Tensor, log_decay: Tensor, beta: Tensor | None) -> bool:
    """Return whether the state is a vector whose rows all decay on their own."""
    return v_THV.shape[-1] == 1 and log_decay.ndim == 3 and beta is None


def _selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    entering: Tensor | None,
    lengths: Sequence[int],
) -> Tensor:
    """Run `linear_attention` where `_is_selective`."""
    wide = torch.promote_types(v.dtype, torch.float32)
    grid = chunk_grid(lengths, chunk=_SCAN_CHUNK, device=v.device)
    # As one "head" of all columns: tokens of a chunk become rows, as the loops take them.
    laid = [grid.to_chunks(x.flatten(1)[:, None].to(wide))[0] for x in (q, k, v, log_decay)]
    shapes = q.shape[1:], k.shape[1:], v.shape[1:2], log_decay.shape[1:]
    rows = [x.unflatten(-1, shape) for x, shape in zip(laid, shapes, strict=True)]
    start = None if entering is None else entering[None, ..., 0].to(wide)
    out = SelectiveScan.apply(*rows, start, grid)
    return grid.to_rows([out])[:, 0, :, None].to(v.dtype)
