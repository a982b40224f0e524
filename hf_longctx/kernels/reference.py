"""Naive attention, written to be read: the meaning of every fast path.

Layer: kernels. Letters: T tokens, H query heads, K key/value heads, D head size. Differentiable, in
any floating dtype; tests and `hf-longctx verify` run it in float64.

Naive recurrences and convolution, token by token: the meaning of `linear.py` and `conv.py`. Letters: T tokens, H heads, K heads of queries and keys, N rows of the state, V its
columns, C channels, W taps. Differentiable, in any floating dtype; tests and `hf-longctx verify`
run it in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunk_states import Summary


def visible(
    positions_q: Tensor, positions_k: Tensor, *, window: int = 0, causal: bool = True
) -> Tensor:
    """bool `[q, k]`: which keys of one document each query row sees, itself included."""
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
    """Softmax attention under a mask: `out [T, H, D]` and `lse [T, H]` (natural log).

    A row without keys is `(0, -inf)`. `sinks [H]` take part in the softmax and give no value.
    """
    group = q_THD.shape[1] // k_TKD.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("qhd,khd->qhk", q_THD, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
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
    """Attention of packed documents, one at a time: `[T, H, D]`.

    Args:
        q_THD, k_TKD, v_TKD (`Tensor`): Rows of the documents laid end to end.
        lengths (`Sequence[int]`): Tokens of each document; they sum to T.
        scale (`float`): Factor on the scores.
        window (`int`, *optional*, defaults to 0): Keys a row sees on one side, itself included;
            0 for all.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key; `False`: as far
            forwards as backwards.
        softcap (`float`, *optional*, defaults to 0.0): Bound of the scores; 0 for none.
        sinks (`Tensor`, *optional*): `[H]`, a score of each head without a value.
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
    """The state `[H, N, V]` after one token: decayed, then written to.

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
    """`out [T, H, V]`: each token's query applied to the state after that token.

    Arguments as in `linear.linear_attention`.
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
    """What a run of tokens does to the state that enters it; arguments as in `linear.summarize`."""
    k = k_THN.repeat_interleave(v_THV.shape[1] // k_THN.shape[1], dim=1)
    betas = k.new_empty(len(k), 0) if beta is None else beta
    heads, rows = k.shape[1:]
    state = k.new_zeros(heads, rows, v_THV.shape[2])
    decay = torch.eye(rows, dtype=k.dtype, device=k.device).expand(heads, -1, -1)
    for t in range(len(k)):
        state = recurrence_step(state, k[t], v_THV[t], log_decay[t], betas[t])
        decay = recurrence_step(decay, k[t], k.new_zeros(heads, rows), log_decay[t], betas[t])
    if beta is None:  # a diagonal: all rows alike, or each its own
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
    """`out [T, C]`: each token's own and the `W - 1` rows before it in its segment, weighted.

    Arguments as in `conv.causal_conv`.
    """
    taps = weight_CW.shape[1]
    outs, start = [x_TC[:0]], 0
    for i, n in enumerate(lengths):
        before = x_TC.new_zeros(taps - 1, x_TC.shape[1])
        if i == 0 and halo is not None:
            before = halo
        rows = torch.cat([before, x_TC[start : start + n]])
        outs += [(rows[t : t + taps] * weight_CW.T).sum(0)[None] for t in range(n)]
        start += n
    out = torch.cat(outs)
    return out if bias is None else out + bias
