"""Convolutions and rotary positions of flash-linear-attention's layers, per document.

Floor: models. Letters: B batch, S tokens of a row, T = B S rows, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..attention.linear import convolve
from .running import Running
from .short_conv import CONV

ROTARY = "rotary positions"


def refuse_state(initial_state: Any, output_final_state: Any) -> None:
    """Assert that a layer goes on from no state and hands none on."""
    assert initial_state is None and not output_final_state, "the door refuses caches"


def _convolve(
    layer: Running, own: nn.Module, x: Tensor, weight: Tensor, bias: Any, activation: Any
) -> Tensor:
    """`[B, S, C]` in the input's dtype; `own` is the module that has the weights."""
    x_TC = x.flatten(0, 1)
    layer.begin(CONV, x_TC)
    out = convolve(layer.batch, own, x_TC.to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(x.dtype).unflatten(0, x.shape[:2])


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
    assert residual is None and mask is None, "no layer of these gives one"
    refuse_state(cache, output_final_state)
    return _convolve(layer, own, x, own.weight.squeeze(1), own.bias, own.activation), None


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
    assert residual is None, "no layer of these gives one"
    refuse_state(initial_state, output_final_state)
    return _convolve(layer, layer.module, x, weight, bias, activation), None


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
    assert own.scale is None and not own.interleaved, "no layer of these asks for it"
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
