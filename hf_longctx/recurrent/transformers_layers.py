"""Run the recurrent layers of Transformers per document, and list which classes can be adapted.

Each function here stands in for one that a modeling file calls by name, with the same arguments and
the same result as without a cache, and hands the rows to `packed_layer`.
Layer: recurrent. Letters: B batch, S tokens of a row, T = B S rows, H heads, K heads of queries and
keys (G groups in state-space layers), N rows of the state, V its columns (P in state-space layers),
C channels, W taps, D head size.
Sources: gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) arXiv 2412.06464; Kimi delta
attention, with a decay for each row of the state, 2510.26692; lightning attention (MiniMax), with a
fixed decay of each head, 2401.04658; state-space layers (Mamba2 and hybrids) 2405.21060; selective
scan (Mamba, Falcon Mamba, Jamba) 2312.00752. LFM2's recurrent layers are a convolution alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from .adapter import Adapter, Replacement
from .context import ActiveLayer
from .packed_layer import run_convolution, run_recurrence

# The steps of a layer, as errors name them.
CONV = "convolution"
DELTA = "gated delta rule"
LIGHTNING = "lightning attention"
SCAN = "state-space scan"


def convolve(
    layer: ActiveLayer, own: nn.Module, x: Tensor, weight: Tensor, bias: Any, activation: Any
) -> Tensor:
    """Convolve `x [B, S, C]` per document: `[B, S, C]` in its dtype.

    Args:
        layer (`ActiveLayer`): The layer.
        own (`nn.Module`): The module that has the weights.
        x, weight, bias (`Tensor`): Inputs, `[C, W]`, and `[C]` or `None`.
        activation (`str` or `None`): Name of the activation that follows.
    """
    x_TC = x.flatten(0, 1)
    layer.begin(CONV, x_TC)
    # Under autocast the rows may be narrower than the weights.
    out = run_convolution(layer.batch, own, x_TC.to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(x.dtype).unflatten(0, x.shape[:2])


def recur(
    layer: ActiveLayer,
    step: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    others: Mapping[str, Any],
) -> tuple[Tensor, None]:
    """Run a recurrence per document: `[B, S, H, V]` in the query's dtype, and no state.

    Args:
        layer (`ActiveLayer`): The layer.
        step (`str`): Which recurrence of the layer it is.
        q, k (`Tensor`): `[B, S, K, N]`; each head serves H / K consecutive ones of values.
        v (`Tensor`): `[B, S, H, V]`.
        log_decay (`Tensor`): `[B, S, H]`, or `[B, S, H, N]` for one per row of the state.
        beta (`Tensor`, *optional*): `[B, S, H]`, the delta rule's rate; `None` for no delta rule.
        scale (`float`, *optional*, defaults to `N ** -0.5`): Factor on the queries.
        others (`Mapping`): The original's other arguments. `use_qk_l2norm_in_kernel` scales queries
            and keys to length 1; `initial_state` and `output_final_state` must not be set; the rest
            does not change the original's result.
    """
    states = ("initial_state", "output_final_state")
    layer.validate_unset(**{name: others.get(name) for name in states})
    wide = torch.promote_types(q.dtype, torch.float32)
    # A state sums over a whole document: float32 at least. Rows of a batch become one run.
    q_TKN, k_TKN, v_THV, decay = (x.flatten(0, 1).to(wide) for x in (q, k, v, log_decay))
    layer.begin(step, q_TKN)
    if others.get("use_qk_l2norm_in_kernel"):
        q_TKN, k_TKN = _unit(q_TKN), _unit(k_TKN)
    q_TKN = q_TKN * (q.shape[-1] ** -0.5 if scale is None else scale)
    beta_TH = None if beta is None else beta.flatten(0, 1).to(wide)
    out = run_recurrence(step, layer.batch, layer.module, q_TKN, k_TKN, v_THV, decay, beta_TH)
    return out.to(q.dtype).unflatten(0, q.shape[:2]), None


def _unit(rows: Tensor) -> Tensor:
    # The constant of flash-linear-attention: another one would change the outputs.
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv1d(
    layer: ActiveLayer,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Stand in for `causal_conv1d_fn`: `[B, C, S]`; `kwargs` do not change its result either."""
    rows = hidden_states.transpose(1, 2)
    return convolve(layer, layer.module, rows, weight, bias, activation).transpose(1, 2)


def delta_rule(
    layer: ActiveLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for the chunked gated delta rule; `g` is the log of the decay."""
    return recur(layer, DELTA, query, key, value, g, beta, others=kwargs)


def lightning_forward(
    layer: ActiveLayer,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for the forward of MiniMax's layer, whose recurrence is inline: `[B, S, hidden]`."""
    layer.validate_unset(
        attention_mask=attention_mask, cache=cache, past_key_values=past_key_values
    )
    own: Any = layer.module
    qkv = own.act_fn(own.qkv_proj(hidden_states))
    # Query, key and value of a head are neighbours in the projection.
    qkv_THD = qkv.flatten(0, 1).unflatten(-1, (own.num_attention_heads, 3 * own.head_dim))
    layer.begin(LIGHTNING, qkv_THD)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv_THD.to(wide).split(own.head_dim, dim=-1)
    # The slope of a head is fixed, so every token decays alike.
    log_decay_TH = -own.slope_rate.to(wide).flatten().expand(len(q), -1)
    out = run_recurrence(LIGHTNING, layer.batch, own, q, k, v, log_decay_TH)
    out = own.norm(out.flatten(1).to(qkv.dtype).unflatten(0, hidden_states.shape[:2]))
    return own.out_proj(torch.sigmoid(own.output_gate(hidden_states)) * out), None


def chunk_scan(
    layer: ActiveLayer,
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
    """Stand in for `mamba2_chunk_scan`: `[B, S, H, P]`, float32 or wider.

    Args:
        layer (`ActiveLayer`): The layer.
        hidden_states (`Tensor`): `[B, S, H, P]`.
        dt (`Tensor`): How far each token moves time, `[B, S, H]`, before `dt_bias`, softplus and
            `dt_limit`.
        A (`Tensor`): Of each head, below 0: how fast its state fades with time.
        B, C (`Tensor`): `[B, S, G, N]`: the recurrence's keys and queries.
        chunk_size (`int`): Of the original; ours has chunks of its own.
        D (`Tensor`, *optional*): Of each head: the factor on its input that is added to the output.
        kwargs: What does not change the original's result either.
    """
    layer.validate_unset(
        z=z, initial_states=initial_states, return_final_states=return_final_states
    )
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    x, time, keys, queries = (t.flatten(0, 1).to(wide) for t in (hidden_states, dt, B, C))
    layer.begin(SCAN, x)
    # In the order of the original: bias, softplus, limits.
    time = _time_steps(time, dt_bias, use_softplus=dt_softplus).clamp(*dt_limit)
    # A token moves time by dt: it decays the state by exp(dt A) and writes dt x.
    values, log_decay = x * time[..., None], time * A.to(wide)
    out = run_recurrence(SCAN, layer.batch, layer.module, queries, keys, values, log_decay)
    if D is not None:
        out = out + x * D.to(wide)[:, None]
    return out.unflatten(0, hidden_states.shape[:2])


def selective_scan(
    layer: ActiveLayer,
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
    """Stand in for `mamba_selective_scan`, whose H channels are heads of one column: `[B, H, S]`.

    Args:
        layer (`ActiveLayer`): The layer.
        hidden_states (`Tensor`): `[B, H, S]`.
        dt (`Tensor`): How far each token moves time, `[B, H, S]`, before `delta_bias` and softplus.
        A (`Tensor`): `[H, N]`, below 0: how fast each row of the state fades with time.
        B, C (`Tensor`): `[B, N, S]`: the recurrence's keys and queries, for all channels.
        D (`Tensor`, *optional*): Of each channel: the factor on its input that is added.
        z (`Tensor`, *optional*): `[B, H, S]`, a gate.
        kwargs: Ways to compute the original, and what does not change its result either.

    Returns:
        Float32 or wider.
    """
    layer.validate_unset(return_last_state=return_last_state)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    # Arrays come by channel, and ours go by token.
    given = (hidden_states, dt, B, C)
    x, time, keys, queries = (t.transpose(1, 2).flatten(0, 1).to(wide) for t in given)
    layer.begin(SCAN, x)
    time = _time_steps(time, delta_bias, use_softplus=delta_softplus)
    values, log_decay = (x * time)[..., None], time[..., None] * A.to(wide)
    # All channels share one head of queries and keys.
    shared = queries[:, None], keys[:, None]
    out = run_recurrence(SCAN, layer.batch, layer.module, *shared, values, log_decay)[..., 0]
    if D is not None:
        out = out + x * D.to(wide)
    by_row = out.unflatten(0, hidden_states.shape[::2]).transpose(1, 2)
    return by_row if z is None else by_row * silu(z)


def _time_steps(time_TH: Tensor, bias: Tensor | None, *, use_softplus: bool) -> Tensor:
    """Return how far each token moves time, `[T, H]`, from its projection."""
    if bias is not None:
        time_TH = time_TH + bias.to(time_TH.dtype)
    return softplus(time_TH) if use_softplus else time_TH


def declined(layer: ActiveLayer, *args: Any, **kwargs: Any) -> None:
    """Stand in for a fused kernel as if it were not installed: the layer then runs step by step."""


# Parameter lists are those of the known version: a library that changes one is noticed at once.
_CONV = {
    "causal_conv1d_fn": Replacement(causal_conv1d, "hidden_states weight bias activation kwargs")
}
_DELTA = Replacement(
    delta_rule,
    "query key value g beta chunk_size initial_state output_final_state use_qk_l2norm_in_kernel "
    "kwargs",
)
_GATED_DELTA = Adapter(
    models=("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
    layer="GatedDeltaNet",
    functions=_CONV | {"torch_chunk_gated_delta_rule": _DELTA},
    steps=(CONV, DELTA),
)
# Its recurrence is no function of its own that could be replaced, so the whole forward is.
_LIGHTNING = Adapter(
    models=("minimax",),
    layer="LightningAttention",
    forward=Replacement(
        lightning_forward, "hidden_states position_embeddings attention_mask cache kwargs"
    ),
    steps=(LIGHTNING,),
)
_STATE_SPACE = Adapter(
    models=("bamba", "falcon_h1", "nemotron_h", "zamba2"),
    layer="Mixer",
    functions=_CONV
    | {
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
    },
    steps=(CONV, SCAN),
)
_SELECTIVE = Adapter(
    models=("jamba",),
    layer="MambaMixer",
    functions=_CONV
    | {
        "mamba_selective_scan": Replacement(
            selective_scan,
            "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy "
            "use_associative_scan kwargs",
        ),
    },
    steps=(CONV, SCAN),
    drops_kwargs=True,
)
# A kernel for the whole mixer, convolution and scan, which would not see documents.
_FUSED = {
    "mamba_inner_fn": Replacement(
        declined,
        "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight "
        "out_proj_bias A B C D delta_bias delta_softplus b_rms_weight c_rms_weight dt_rms_weight "
        "b_c_dt_rms_eps kwargs",
    )
}
ADAPTERS = (
    Adapter(
        models=("lfm2",),
        layer="ShortConv",
        functions=_CONV,
        steps=(CONV,),
        drops_kwargs=True,  # before Transformers 5.24
    ),
    _GATED_DELTA,
    replace(
        _GATED_DELTA,
        models=("kimi_linear",),
        layer="DeltaAttention",
        functions=_CONV | {"chunk_kimi_delta_attention": _DELTA},
    ),
    _LIGHTNING,
    _STATE_SPACE,
    # Its causal masks are made without positions, so eager attention would join documents.
    replace(
        _STATE_SPACE, models=("granitemoehybrid",), layer="MambaLayer", masks_lack_positions=True
    ),
    # The decoder layers of these hand no keyword arguments on.
    replace(_STATE_SPACE, models=("mamba2",), drops_kwargs=True),
    _SELECTIVE,
    replace(
        _SELECTIVE,
        models=("mamba", "falcon_mamba"),
        layer="Mixer",
        functions={**_SELECTIVE.functions, **_FUSED},
    ),
)
