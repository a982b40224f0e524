"""Naive attention, written to be read: the meaning of every fast path.

Floor: kernels. Letters: T tokens, H query heads, K key/value heads, D head size. Differentiable, in
any floating dtype; tests and `hf-longctx verify` run it in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
