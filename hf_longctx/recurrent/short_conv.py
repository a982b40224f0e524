"""`causal_conv1d_fn` of the modeling files -> a convolution that stops at document starts.

Layer: recurrent. Also the adapter of LFM2, whose recurrent layers are such a convolution alone.
Letters: B batch, S tokens of a row, T = B S rows, C channels, W taps.
"""

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .adapter import Adapter, Replacement
from .packed_layer import convolve
from .running import Running

CONV = "convolution"


def convolved(
    layer: Running, own: nn.Module, x: Tensor, weight: Tensor, bias: Any, activation: Any
) -> Tensor:
    """`[B, S, C]` in the input's dtype; `own` is the module that has the weights `[C, W]`."""
    x_TC = x.flatten(0, 1)
    layer.begin(CONV, x_TC)
    out = convolve(layer.batch, own, x_TC.to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(x.dtype).unflatten(0, x.shape[:2])


def causal_conv1d(
    layer: Running,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """`[B, C, S]` in the input's dtype, as the original; `kwargs` do not matter to it either."""
    rows = hidden_states.transpose(1, 2)
    return convolved(layer, layer.module, rows, weight, bias, activation).transpose(1, 2)


CONV_REPLACEMENT = Replacement(causal_conv1d, "hidden_states weight bias activation kwargs")

ADAPTERS = (
    Adapter(
        models=("lfm2",),
        layer="ShortConv",
        functions={"causal_conv1d_fn": CONV_REPLACEMENT},
        steps=(CONV,),
    ),
)
