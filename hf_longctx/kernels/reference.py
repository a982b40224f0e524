"""Define attention, recurrences and convolution naively: the meaning of every fast path.

Written to be read, one document and one token at a time. Differentiable, in any floating dtype;
tests and `hf-longctx verify` run it in float64.
Layer: kernels. Letters: T tokens, H heads, K heads of queries and keys (in softmax attention, of
keys and values), D head size, N rows of the state, V its columns, C channels, W taps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunk_states import Summary


def visible(
    positions_q: Tensor, positions_k: Tensor, *, window: int = 0, causal: bool = True
) -> Tensor:
    """Return bool `[q, k]`: which keys of one document each query row sees, itself included.

    Args:
        positions_q, positions_k (`Tensor`): Positions in the document, 1-D.
        window (`int`, *optional*, defaults to 0): Keys a row sees on one side; 0 for all.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key.
    """
    distance = positions_q[:, None] - positions_k[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance.abs() < window) if window else seen


def partial(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention under a mask: `out [T, H, D]` and `lse [T, H]` (natural log).

    A row without keys is `(0, -inf)`. `sinks [H]` take part in the softmax and have no value.
    """
    group = q_THD.shape[1] // k_TKD.shape[1]  # consecutive query heads share a key/value head
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("qhd,khd->qhk", q_THD, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # After the cap, which would turn -inf into -softcap.
    scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        # A sink adds to the normalizer alone.
        lse = torch.logaddexp(lse, sinks)
    # -inf - -inf would be NaN in rows without keys, whose weights are 0.
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    return torch.einsum("qhk,khd->qhd", weights, v), lse


def attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    lengths: Sequence[int],
    scale: float,
    window: int = 0,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of packed documents, one at a time: `[T, H, D]`.

    Args:
        q_THD, k_TKD, v_TKD (`Tensor`): Rows of the documents, end to end.
        lengths (`Sequence[int]`): Tokens of each document; they sum to T.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*, defaults to 0): Keys a row sees on one side, itself included;
            0 for all.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key; if not, they
            see as far forwards as backwards.
        softcap (`float`, *optional*, defaults to 0.0): Bound of the scores; 0 for none.
        sinks (`Tensor`, *optional*): `[H]`, for each head a score without a value.
    """
    outs, start = [], 0
    for n in lengths:
        rows = slice(start, start + n)
        positions = torch.arange(n, device=q_THD.device)
        mask = visible(positions, positions, window=window, causal=causal)
        qkv = q_THD[rows], k_TKD[rows], v_TKD[rows]
        outs.append(partial(*qkv, mask=mask, scale=scale, softcap=softcap, sinks=sinks)[0])
        start += n
    return torch.cat(outs)


def recurrence_step(
    state: Tensor, k_HN: Tensor, v_HV: Tensor, log_decay: Tensor, beta_H: Tensor
) -> Tensor:
    """Return the state `[H, N, V]` after one token: decayed, then written to.

    Without the delta rule a token adds `k^T v`. With it (a `beta_H` that is not empty) it adds
    `k^T beta (v - k S)`, the part that the decayed state does not already predict.
    """
    state = state * log_decay.exp().reshape(len(state), -1, 1)
    if len(beta_H):
        v_HV = beta_H[:, None] * (v_HV - torch.einsum("hn,hnv->hv", k_HN, state))
    return state + k_HN[:, :, None] * v_HV[:, None, :]


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
    """Apply each token's query to the state after that token: `[T, H, V]`.

    Arguments as in `kernels.linear_attention.linear_attention`.
    """
    q, k = (x.repeat_interleave(v_THV.shape[1] // x.shape[1], dim=1) for x in (q_THN, k_THN))
    betas = k.new_empty(len(k), 0) if beta is None else beta
    outs, start = [v_THV[:0]], 0
    for i, n in enumerate(lengths):
        state = k.new_zeros(*k.shape[1:], v_THV.shape[2])
        if i == 0 and entering is not None:
            state = entering
        for t in range(start, start + n):
            state = recurrence_step(state, k[t], v_THV[t], log_decay[t], betas[t])
            outs.append(torch.einsum("hn,hnv->hv", q[t], state)[None])
        start += n
    return torch.cat(outs)


def summarize(
    k_THN: Tensor, v_THV: Tensor, *, log_decay: Tensor, beta: Tensor | None = None
) -> Summary:
    """Return what a run of tokens does to the state that enters it.

    Arguments as in `kernels.linear_attention.summarize`.
    """
    k = k_THN.repeat_interleave(v_THV.shape[1] // k_THN.shape[1], dim=1)
    betas = k.new_empty(len(k), 0) if beta is None else beta
    heads, rows = k.shape[1:]
    state = k.new_zeros(heads, rows, v_THV.shape[2])
    decay = torch.eye(rows, dtype=k.dtype, device=k.device).expand(heads, -1, -1)
    # The same step on an identity matrix, with nothing to write, gives the factor on the state.
    for t in range(len(k)):
        state = recurrence_step(state, k[t], v_THV[t], log_decay[t], betas[t])
        decay = recurrence_step(decay, k[t], k.new_zeros(heads, rows), log_decay[t], betas[t])
    if beta is None:  # a diagonal matrix: one factor for all rows, or one for each
        decay = log_decay.sum(0).exp().reshape(heads, -1, 1)
    return Summary(state=state, decay=decay)


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None = None,
    *,
    lengths: Sequence[int],
    halo: Tensor | None = None,
) -> Tensor:
    """Weight each token's own row and the `W - 1` before it in its segment: `[T, C]`.

    Arguments as in `kernels.conv.causal_conv`.
    """
    taps = weight_CW.shape[1]
    outs, start = [x_TC[:0]], 0  # torch.cat needs one tensor, also without tokens
    for i, n in enumerate(lengths):
        before = x_TC.new_zeros(taps - 1, x_TC.shape[1])
        # Only the first segment can have begun on an earlier rank.
        if i == 0 and halo is not None:
            before = halo
        rows = torch.cat([before, x_TC[start : start + n]])
        outs += [(rows[t : t + taps] * weight_CW.T).sum(0)[None] for t in range(n)]
        start += n
    out = torch.cat(outs)
    return out if bias is None else out + bias
