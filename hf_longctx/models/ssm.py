"""The state-space layers of Mamba2 and of the hybrids that use them, per document.

Floor: models. Source: arXiv 2405.21060. Letters: B batch, S tokens of a row, T = B S rows, H heads,
P columns of a head, G groups of heads that share keys and queries, N rows of the state.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..attention.linear import recurrent
from .adapter import Adapter, Replacement
from .running import Running
from .short_conv import CONV, CONV_REPLACEMENT

SCAN = "state-space scan"


def chunk_scan(
    layer: Running,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`[B, S, H, P]`, float32 or wider and without a state, as the original without a cache.

    Args:
        layer (`Running`): The layer under way.
        hidden_states (`Tensor`): `[B, S, H, P]`.
        dt (`Tensor`): How far each token moves time, `[B, S, H]`, before `dt_bias`, softplus and
            `dt_limit`.
        A (`Tensor`): Of each head, below 0: how fast its state fades with time.
        B, C (`Tensor`): `[B, S, G, N]`: the recurrence's keys and queries.
        chunk_size (`int`): Of the original; ours cuts documents its own way.
        D (`Tensor`, *optional*): Of each head: how much of its input a token gives as it is.
        kwargs: What does not matter to the original either.
    """
    layer.refuse(z=z, initial_states=initial_states, return_final_states=return_final_states)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    x, time, keys, queries = (t.flatten(0, 1).to(wide) for t in (hidden_states, dt, B, C))
    layer.begin(SCAN, x)
    time = time_steps(time, dt_bias, softplus_first=dt_softplus).clamp(*dt_limit)
    values, log_decay = x * time[..., None], time * A.to(wide)
    out = recurrent(SCAN, layer.batch, layer.module, queries, keys, values, log_decay)
    if D is not None:
        out = out + x * D.to(wide)[:, None]
    return out.unflatten(0, hidden_states.shape[:2])


def time_steps(time_TH: Tensor, bias: Tensor | None, *, softplus_first: bool) -> Tensor:
    """How far each token moves time, `[T, H]`, of what its projection says of that."""
    if bias is not None:
        time_TH = time_TH + bias.to(time_TH.dtype)
    return softplus(time_TH) if softplus_first else time_TH


def declined(layer: Running, *args: Any, **kwargs: Any) -> None:
    """Nothing, as where no fused kernel is installed: the layer then takes its steps one by one."""


_FUNCTIONS = {
    "causal_conv1d_fn": CONV_REPLACEMENT,
    "mamba2_split_conv1d_scan_combined": Replacement(
        declined,
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit "
        "return_final_states activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias "
        "headdim ngroups norm_before_gate kwargs",
    ),
    "mamba2_chunk_scan": Replacement(
        chunk_scan,
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit "
        "return_final_states kwargs",
    ),
}
ADAPTERS = (
    Adapter(
        models=("bamba", "falcon_h1", "nemotron_h", "zamba2"),
        layer="Mixer",
        functions=_FUNCTIONS,
        steps=(CONV, SCAN),
    ),
    Adapter(
        models=("granitemoehybrid",),
        layer="MambaLayer",
        functions=_FUNCTIONS,
        steps=(CONV, SCAN),
        masked=True,
    ),
    Adapter(
        models=("mamba2",),
        layer="Mixer",
        functions=_FUNCTIONS,
        steps=(CONV, SCAN),
        carried=True,  # the language model hands no keyword arguments to its layers
    ),
)
