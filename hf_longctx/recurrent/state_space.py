"""The state-space layers of Mamba2 and of the hybrids that use them, per document.

Layer: recurrent. Source: arXiv 2405.21060. Letters: B batch, S tokens of a row, T = B S rows, H heads,
P columns of a head, G groups of heads that share keys and queries, N rows of the state.

The selective scan of Mamba, Falcon Mamba and Jamba, per document. Source: arXiv 2312.00752. Letters: B batch, S tokens of a row, T = B S rows, H
channels, each a head with one column, N rows of the state.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from .adapter import Adapter, Replacement
from .packed_layer import recurrent
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


_SSM_FUNCTIONS = {
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
SSM_ADAPTERS = (
    Adapter(
        models=("bamba", "falcon_h1", "nemotron_h", "zamba2"),
        layer="Mixer",
        functions=_SSM_FUNCTIONS,
        steps=(CONV, SCAN),
    ),
    Adapter(
        models=("granitemoehybrid",),
        layer="MambaLayer",
        functions=_SSM_FUNCTIONS,
        steps=(CONV, SCAN),
        masked=True,
    ),
    Adapter(
        models=("mamba2",),
        layer="Mixer",
        functions=_SSM_FUNCTIONS,
        steps=(CONV, SCAN),
        carried=True,  # the language model hands no keyword arguments to its layers
    ),
)


def selective_scan(
    layer: Running,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`[B, H, S]`, float32 or wider and without a state, as the original without a cache.

    Args:
        layer (`Running`): The layer under way.
        hidden_states (`Tensor`): `[B, H, S]`.
        dt (`Tensor`): How far each token moves time, `[B, H, S]`, before `delta_bias` and softplus.
        A (`Tensor`): `[H, N]`, below 0: how fast each row of the state fades with time.
        B, C (`Tensor`): `[B, N, S]`: the recurrence's keys and queries, for all channels.
        D (`Tensor`, *optional*): Of each channel: how much of its input a token gives as it is.
        z (`Tensor`, *optional*): `[B, H, S]`, a gate.
        kwargs: Ways to compute the original, and what does not matter to it either.
    """
    layer.refuse(return_last_state=return_last_state)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    given = (hidden_states, dt, B, C)
    x, time, keys, queries = (t.transpose(1, 2).flatten(0, 1).to(wide) for t in given)
    layer.begin(SCAN, x)
    time = time_steps(time, delta_bias, softplus_first=delta_softplus)
    values, log_decay = (x * time)[..., None], time[..., None] * A.to(wide)
    shared = queries[:, None], keys[:, None]
    out = recurrent(SCAN, layer.batch, layer.module, *shared, values, log_decay)[..., 0]
    if D is not None:
        out = out + x * D.to(wide)
    by_row = out.unflatten(0, hidden_states.shape[::2]).transpose(1, 2)
    return by_row if z is None else by_row * silu(z)


_SELECTIVE_FUNCTIONS = {
    "causal_conv1d_fn": CONV_REPLACEMENT,
    "mamba_selective_scan": Replacement(
        selective_scan,
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy "
        "use_associative_scan kwargs",
    ),
}
_FUSED = {
    "mamba_inner_fn": Replacement(
        declined,
        "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight "
        "out_proj_bias A B C D delta_bias delta_softplus b_rms_weight c_rms_weight dt_rms_weight "
        "b_c_dt_rms_eps kwargs",
    )
}
# Their decoder layers hand no keyword arguments on.
SELECTIVE_ADAPTERS = (
    Adapter(
        models=("mamba", "falcon_mamba"),
        layer="Mixer",
        functions=_SELECTIVE_FUNCTIONS | _FUSED,
        steps=(CONV, SCAN),
        carried=True,
    ),
    Adapter(
        models=("jamba",),
        layer="MambaMixer",
        functions=_SELECTIVE_FUNCTIONS,
        steps=(CONV, SCAN),
        carried=True,
    ),
)
