"""The selective scan of Mamba, Falcon Mamba and Jamba, per document.

Floor: models. Source: arXiv 2312.00752. Letters: B batch, S tokens of a row, T = B S rows, H
channels, each a head with one column, N rows of the state.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..attention.linear import recurrent
from .adapter import Adapter, Replacement
from .running import Running
from .short_conv import CONV, CONV_REPLACEMENT
from .ssm import SCAN, declined, time_steps


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


_FUNCTIONS = {
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
ADAPTERS = (
    Adapter(
        models=("mamba", "falcon_mamba"),
        layer="Mixer",
        functions=_FUNCTIONS | _FUSED,
        steps=(CONV, SCAN),
        carried=True,
    ),
    Adapter(
        models=("jamba",),
        layer="MambaMixer",
        functions=_FUNCTIONS,
        steps=(CONV, SCAN),
        carried=True,
    ),
)
