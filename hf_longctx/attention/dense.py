"""Local attention under a dense mask: padded batches, caches, and masks of the user's own.

Floor: attention. Plain scores go to PyTorch; softcap and sinks, which it lacks, are written out.
Letters: B batch, S query rows, H query heads, V value head size.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.softmax import Scoring


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """`[B, S, H, V]` in the query's dtype.

    Args:
        query, key, value (`Tensor`): `[B, heads, rows, size]`.
        mask (`Tensor`): `[B, 1, S, keys]`, bool (True: seen) or additive; it holds any window.
        scoring (`Scoring`): Scale and softcap.
        sinks (`Tensor`, *optional*): `[H]`.
    """
    group = query.shape[1] // key.shape[1]
    if not scoring.softcap and sinks is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2).contiguous()
    k, v = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = (query @ k.transpose(-1, -2)) * scoring.scale
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()
