"""Queries, keys, values and decays of packed documents -> linear attention, chunk by chunk.

Floor: kernels. Letters: T tokens, H heads, K heads of queries and keys, N rows of the state, V its
columns, n chunks, C tokens of a chunk. The state of a head is `[N, V]`:

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t                    out_t = q_t S_t

and under the delta rule `v_t` is what the decayed state does not yet predict, times beta:
`beta_t (v_t - k_t diag(exp(log_decay_t)) S_{t-1})`. `linear_reference.py` says the same in loops.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .decay import PerHead, PerRow, spread
from .diagonal import Diagonal
from .grid import Grid, grid
from .recurrence import Carried, Corrected
from .summary import Summary, apply, compose

__all__ = ["Summary", "apply", "compose", "linear_attention", "summarize"]

_CHUNK = 64
_SCAN_CHUNK = 32


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
    chunks = grid(lengths, chunk=_CHUNK)
    q, k, v, decay, rate = _laid(chunks, (q_THN, k_THN, v_THV, log_decay, beta), wide)
    sums = decay.cumsum(-2)
    start = None if entering is None else entering.to(wide)
    reads = spread(q, sums.exp(), dim=1)
    if rate is None:
        scores = _scores(q[None], k, sums)[0]
        states = Carried.apply(*_written(k, v, sums), start, chunks)
        out = reads @ states + scores @ v
    else:
        scores, overlaps = _scores(torch.stack([q, k]), k, sums)
        states, new = Corrected.apply(*_corrections(k, v, sums, rate, overlaps), start, chunks)
        out = reads @ states + scores @ new
    return chunks.pick(out).to(v_THV.dtype)


def summarize(
    k_THN: Tensor, v_THV: Tensor, *, log_decay: Tensor, beta: Tensor | None = None
) -> Summary:
    """What one run of tokens does to the state that enters it; arguments as in `linear_attention`.

    Float32 or wider. A run without tokens leaves the state as it is.
    """
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    chunks = grid([len(k_THN)], chunk=_CHUNK, closed=True)
    k, v, decay, rate = _laid(chunks, (k_THN, v_THV, log_decay, beta), wide)
    sums = decay.cumsum(-2)
    if rate is None:
        state = Carried.apply(*_written(k, v, sums), None, chunks)[-1]
        total = log_decay.to(wide).sum(0).exp()
        return Summary(state=state, decay=total.reshape(len(total), -1, 1))
    heads, rows, columns = v.shape[1], k.shape[-1], v.shape[-1]
    # zero values from the identity: what is left of each row of the state
    identity = torch.eye(rows, dtype=wide, device=v.device).expand(heads, -1, -1)
    start = torch.cat([v.new_zeros(heads, rows, columns), identity], -1)
    overlaps = _scores(k[None], k, sums)[0]
    new, *others = _corrections(k, v, sums, rate, overlaps)
    new = torch.cat([new, new.new_zeros(*new.shape[:-1], rows)], -1)
    left = Corrected.apply(new, *others, start, chunks)[0][-1]
    return Summary(state=left[..., :columns], decay=left[..., columns:])


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
    chunks = grid(lengths, chunk=_SCAN_CHUNK)
    # one "head" of all columns: tokens of a chunk in rows, as the loop takes them
    laid = [chunks.lay(x.flatten(1)[:, None].to(wide))[:, 0] for x in (q, k, v, log_decay)]
    shapes = q.shape[1:], k.shape[1:], v.shape[1:2], log_decay.shape[1:]
    rows = [x.unflatten(-1, shape) for x, shape in zip(laid, shapes, strict=True)]
    start = None if entering is None else entering[..., 0].to(wide)
    out = Diagonal.apply(*rows, start, chunks)
    return chunks.pick(out[:, None])[:, 0, :, None].to(v.dtype)


def _laid(chunks: Grid, rows: Sequence[Tensor | None], wide: torch.dtype) -> list[Tensor]:
    """Rows in the grid, each `[n, heads, C, X]`; what is `None` stays so."""
    return [
        None if x is None else chunks.lay((x[..., None] if x.ndim == 2 else x).to(wide))  # type: ignore[misc]
        for x in rows
    ]


def _scores(q: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """Decayed products `[F, n, H, C, C]` of `q [F, n, K, C, N]` with `k [n, K, C, N]`."""
    if sums.shape[-1] == 1:
        return PerHead.apply(q, k, sums)
    repeats = sums.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 1)
    return PerRow.apply(q, k, sums)


def _written(k: Tensor, v: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """What each chunk adds to the state, `[n, H, N, V]`, and what it leaves of it."""
    keys, decay = _kept(k, sums)
    return keys.mT @ v, decay


def _kept(k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Keys decayed to their chunk's end, and the decay of the whole chunk, `[n, H, N or 1, 1]`."""
    last = sums[..., -1:, :]
    return spread(k, (last - sums).exp(), dim=1), last.exp().mT


def _corrections(
    k: Tensor, v: Tensor, sums: Tensor, rate: Tensor, overlaps: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The delta rule of a chunk as a whole: new values, what they read, keys, decay.

    Each token's new value takes back what the earlier ones of its chunk have put in its place; a
    triangular system, solved for the values and for the reads of the entering state at once.
    """
    columns = v.shape[-1]
    given = torch.cat([v, spread(k, sums.exp(), dim=1)], -1) * rate
    solved = torch.linalg.solve_triangular(overlaps * rate, given, upper=False, unitriangular=True)
    return solved[..., :columns].contiguous(), solved[..., columns:].contiguous(), *_kept(k, sums)
