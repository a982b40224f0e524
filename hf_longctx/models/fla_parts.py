"""Convolutions and rotary positions of flash-linear-attention's layers, per document.

Floor: models. Letters: B batch, S tokens of a row, T = B S rows, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from .running import Running
from .short_conv import convolved

ROTARY = "rotary positions"


def short_convolution(
    layer: Running,
    own: Any,
    x: Tensor,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    cache: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`ShortConvolution.forward`: `[B, S, C]` and no state."""
    layer.refuse(residual=residual, mask=mask, cache=cache, output_final_state=output_final_state)
    return convolved(layer, own, x, own.weight.squeeze(1), own.bias, own.activation), None


def fused_convolution(
    layer: Running,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The one convolution of queries, keys and values together: `[B, S, C]` and no state."""
    layer.refuse(
        residual=residual, initial_state=initial_state, output_final_state=output_final_state
    )
    return convolved(layer, layer.module, x, weight, bias, activation), None


def rotary(
    layer: Running,
    own: Any,
    q: Tensor,
    k: Tensor,
    seqlen_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`RotaryEmbedding.forward` at each token's position in its document."""
    layer.refuse(scale=own.scale, interleaved=own.interleaved)
    layer.begin(ROTARY, q.flatten(0, 1))
    positions = torch.from_numpy(layer.batch.layout.positions(layer.batch.rank)).to(q.device)
    length = int(positions.max()) + 1 if len(positions) else 0
    own._update_cos_sin_cache(length, device=q.device, dtype=q.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    tables = (t[positions].to(wide) for t in (own._cos_cached, own._sin_cached))
    cos, sin = (t.unflatten(0, q.shape[:2])[:, :, None] for t in tables)

    def turned(x: Tensor) -> Tensor:
        first, second = x.to(wide).chunk(2, dim=-1)
        both = (first * cos - second * sin, first * sin + second * cos)
        return torch.cat(both, dim=-1).to(x.dtype)

    return turned(q), turned(k)
