"""`causal_conv1d_fn` of the modeling files -> a convolution that stops at document starts.

Floor: models. Also the adapter of LFM2, whose recurrent layers are such a convolution alone.
Letters: B batch, S tokens of a row, T = B S rows, C channels, W taps.
"""

from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from ..attention.linear import convolve
from .adapter import Adapter, Replacement
from .running import Running

CONV = "convolution"


def causal_conv1d(
    layer: Running,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """`[B, C, S]` in the input's dtype, as the original; `kwargs` do not matter to it either."""
    x_TC = hidden_states.transpose(1, 2).flatten(0, 1)
    layer.begin(CONV, x_TC)
    out = convolve(layer.batch, layer.module, x_TC.to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    by_row = out.to(hidden_states.dtype).unflatten(0, hidden_states.shape[::2])
    return by_row.transpose(1, 2)


CONV_REPLACEMENT = Replacement(causal_conv1d, "hidden_states weight bias activation kwargs")

ADAPTERS = (
    Adapter(
        models=("lfm2",),
        layer="ShortConv",
        functions={"causal_conv1d_fn": CONV_REPLACEMENT},
        steps=(CONV,),
    ),
)
