"""Queries, keys, values and decays of packed documents -> linear attention, chunk by chunk.

Layer: kernels. Letters: T tokens, H heads, K heads of queries and keys, N rows of the state, V its
columns, n chunks of a block of heads, C tokens of a chunk. The state of a head is `[N, V]`:

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t                    out_t = q_t S_t

and under the delta rule `v_t` is what the decayed state does not yet predict, times beta:
`beta_t (v_t - k_t diag(exp(log_decay_t)) S_{t-1})`. `linear_reference.py` says the same in loops.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunk_states import Carried, Corrected, Grid, Summary, grid
from .decay import PerHead, PerRow, UnitLowerInverse, sums
from .diagonal import Diagonal, Ran

_CHUNK = 64
_SCAN_CHUNK = 32
_TOGETHER = 8192  # tokens times heads


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
    """Each token's query applied to the state after that token: `[T, H, V]`, in v's dtype.

    The state and all sums are float32 or wider. Segments share nothing, nor do their gradients.

    Args:
        q_THN, k_THN (`Tensor`): `[T, K, N]`, K divides H; each serves H / K consecutive heads.
        v_THV (`Tensor`): `[T, H, V]`.
        log_decay (`Tensor`): `[T, H]`, or `[T, H, N]` for a decay of each row; never above 0.
        lengths (`Sequence[int]`): Tokens of each segment, in order; they sum to T.
        beta (`Tensor`, *optional*): `[T, H]`, the delta rule's rate; `None` for no delta rule.
        entering (`Tensor`, *optional*): `[H, N, V]`, the state that the first segment starts from
            (an empty one uses none); zeros if `None`, as for all others.
    """
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    if v_THV.shape[-1] == 1 and log_decay.ndim == 3 and beta is None:
        return _diagonal(q_THN, k_THN, v_THV, log_decay, entering, lengths)
    chunks = _grid(lengths, v_THV)
    q, k, v, decay = (_laid(x, chunks, wide) for x in (q_THN, k_THN, v_THV, log_decay))
    none = (None,) * len(v)
    rates = none if beta is None else _laid(beta, chunks, wide)
    starts = none if entering is None else entering.to(wide).chunk(len(v))
    blocks = zip(q, k, v, decay, rates, starts, strict=True)
    outs = [_attended(*block, chunks=chunks) for block in blocks]
    return chunks.pick(outs).to(v_THV.dtype)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    start: Tensor | None,
    *,
    chunks: Grid,
) -> Tensor:
    """One block of heads: `[n, C, V]`."""
    since, until = sums(decay)
    keys, whole = k * until.exp(), since[..., -1:, :].exp().mT
    if rate is None:
        (weights,) = _scores(decay, k, q)
        states = Carried.apply(keys.mT @ v, whole, start, chunks)
    else:
        weights, overlaps = _scores(decay, k, q, k)
        given = _given(k, v, since, rate, overlaps)
        states, v = Corrected.apply(*given, keys, whole, start, chunks)
    return torch.baddbmm(weights @ v, q * since.exp(), states)


def summarize(
    k_THN: Tensor, v_THV: Tensor, *, log_decay: Tensor, beta: Tensor | None = None
) -> Summary:
    """What one run of tokens does to the state that enters it; arguments as in `linear_attention`.

    Float32 or wider. A run without tokens leaves the state as it is.
    """
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    tokens, heads, columns = v_THV.shape
    if columns == 1 and log_decay.ndim == 3 and beta is None:
        state, decay = Ran.apply(*(x.to(wide) for x in (k_THN, v_THV[..., 0], log_decay)))
        return Summary(state=state[..., None], decay=decay[..., None])
    chunks = _grid([tokens], v_THV, closed=True)
    k, v, decay = (_laid(x, chunks, wide) for x in (k_THN, v_THV, log_decay))
    rates = (None,) * len(v) if beta is None else _laid(beta, chunks, wide)
    blocks = zip(k, v, decay, rates, strict=True)
    left = torch.cat([_left(*block, chunks=chunks) for block in blocks])
    if beta is None:
        return Summary(state=left, decay=log_decay.to(wide).sum(0).exp().reshape(heads, -1, 1))
    return Summary(state=left[..., :columns], decay=left[..., columns:])


def _left(k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, *, chunks: Grid) -> Tensor:
    """What leaves the only segment from zeros, `[h, N, V]` of h heads; under the delta rule
    `[h, N, V + N]`, beside it what is left of each row of the state that enters."""
    heads = chunks.widths[-1]
    since, until = sums(decay)
    keys, whole = k * until.exp(), since[..., -1:, :].exp().mT
    if rate is None:
        return Carried.apply(keys.mT @ v, whole, None, chunks)[-heads:]
    new, reads = _given(k, v, since, rate, *_scores(decay, k, k))
    rows = k.shape[-1]
    # the identity enters beside zeros, and nothing is written to its columns
    start = torch.eye(rows, dtype=v.dtype, device=v.device).expand(heads, -1, -1)
    start = torch.cat([v.new_zeros(*start.shape[:2], v.shape[-1]), start], -1)
    new = torch.cat([new, new.new_zeros(*new.shape[:-1], rows)], -1)
    return Corrected.apply(new, reads, keys, whole, start, chunks)[0][-heads:]


def _scores(decay: Tensor, k: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
    """Products of queries and keys, decayed from one token to the other, `[n, C, C]` of each."""
    per = PerHead if decay.shape[-1] == 1 else PerRow
    return per.apply(decay, k, *queries)


def _given(
    k: Tensor, v: Tensor, since: Tensor, rate: Tensor, overlaps: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule of a chunk as a whole: its new values, and what they read of the state.

    Each token's new value takes back what the earlier ones of its chunk have put in its place: a
    triangular system, the same for the values and for the reads of the entering state.
    """
    solution = UnitLowerInverse.apply(overlaps * rate) * rate.mT
    return solution @ v, solution @ (k * since.exp())


def _grid(lengths: Sequence[int], v_THV: Tensor, *, closed: bool = False) -> Grid:
    """On CPU heads are taken one by one where all together would leave the cache."""
    tokens, heads = v_THV.shape[:2]
    split = v_THV.device.type == "cpu" and tokens * heads > _TOGETHER
    return grid(lengths, chunk=_CHUNK, heads=heads, split=split, closed=closed, device=v_THV.device)


def _laid(rows: Tensor, chunks: Grid, wide: torch.dtype) -> tuple[Tensor, ...]:
    """`[T, heads]` or `[T, heads, X]` in the grid, `[n, C, X]` of each block."""
    return chunks.lay((rows[..., None] if rows.ndim == 2 else rows).to(wide))


def _diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    entering: Tensor | None,
    lengths: Sequence[int],
) -> Tensor:
    """`linear_attention` where the state is a vector of rows that all decay on their own."""
    wide = torch.promote_types(v.dtype, torch.float32)
    chunks = grid(lengths, chunk=_SCAN_CHUNK, device=v.device)
    # one "head" of all columns: tokens of a chunk in rows, as the loop takes them
    laid = [chunks.lay(x.flatten(1)[:, None].to(wide))[0] for x in (q, k, v, log_decay)]
    shapes = q.shape[1:], k.shape[1:], v.shape[1:2], log_decay.shape[1:]
    rows = [x.unflatten(-1, shape) for x, shape in zip(laid, shapes, strict=True)]
    start = None if entering is None else entering[None, ..., 0].to(wide)
    out = Diagonal.apply(*rows, start, chunks)
    return chunks.pick([out])[:, 0, :, None].to(v.dtype)
