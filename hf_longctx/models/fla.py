"""Layers of flash-linear-attention, per document: GLA, RetNet, DeltaNet, gated DeltaNet and KDA.

Floor: models. Their kernels need a GPU; ours stand in for them also where a row is one document.
The library is not imported here: importing it changes what Transformers makes of `mamba`, `mamba2`
and `bitnet`, so that is left to those who use its models.

Sources: arXiv 2312.06635, 2307.08621, 2406.06484, 2412.06464, 2510.26692. Letters: B batch, S tokens
of a row, T = B S rows, K heads of queries and keys, H of values, N rows of the state, V its columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..attention.linear import convolve, recurrent
from .adapter import Adapter, Replacement, refuse_unknown, wrap_forward
from .fla_plain import replace_kernels
from .gated_delta import DELTA, unit
from .running import Running, layer_under_way
from .short_conv import CONV

GATED, RETENTION, ROTARY = "gated linear attention", "retention", "rotary positions"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaAdapter(Adapter):
    """How the layers of one class of flash-linear-attention run without its kernels.

    Args:
        models (`tuple[str, ...]`): Files of `fla.layers`.
    """

    plain: bool = False

    def homes(self) -> set[str]:
        """Names of the files that may define the class."""
        return {f"fla.layers.{name}" for name in self.models}

    def adapt(self, module: nn.Module, home: ModuleType) -> None:
        """Have one layer run through our functions, and through torch's where it is on a CPU."""
        Adapter.adapt(self, module, home)
        replace_kernels(module)
        for child in module.children():
            part = _PARTS.get(type(child).__name__)
            if part is not None:
                place = f"{type(child).__module__}.{type(child).__name__}.forward"
                if not hasattr(child.forward, "hf_longctx_original"):
                    refuse_unknown(place, child.forward, part.parameters)
                wrap_forward(child, partial(_part_forward, ours=part.function))

    def expected(self, module: nn.Module) -> tuple[str, ...]:
        """What one forward of the module must call; the convolutions are an option."""
        return tuple(s for s in self.steps if s != CONV or getattr(module, "use_short_conv", False))


def _part_forward(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a part of a layer, which is ours while the layer is under way."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = layer_under_way()
        if layer is None:
            return original(self, *args, **kwargs)
        return ours(layer, self, *args, **kwargs)

    return forward


def _refuse_state(initial_state: Any, output_final_state: Any) -> None:
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
    _refuse_state(cache, output_final_state)
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
    _refuse_state(initial_state, output_final_state)
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


_PARTS = {
    "ShortConvolution": Replacement(
        short_convolution, "x residual mask cache output_final_state cu_seqlens chunk_indices kwargs"
    ),
    "RotaryEmbedding": Replacement(
        rotary, "q k seqlen_offset cu_seqlens max_seqlen chunk_indices"
    ),
}


def _run(
    layer: Running,
    step: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    unit_rows: bool = False,
) -> tuple[Tensor, None]:
    """`[B, S, H, V]` in the query's dtype and no state.

    Args:
        layer (`Running`): The layer under way.
        step (`str`): Which recurrence it is.
        q, k (`Tensor`): `[B, S, K, N]`; each head serves H / K heads of values.
        v (`Tensor`): `[B, S, H, V]`.
        log_decay (`Tensor`): `[B, S, H]` or `[B, S, H, N]`.
        beta (`Tensor`, *optional*): `[B, S, H]`.
        scale (`float`, *optional*): Of the queries; N ** -0.5 by default.
        unit_rows (`bool`, *optional*): Scale queries and keys to length 1 first.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q_TKN, k_TKN, v_THV, decay = (x.flatten(0, 1).to(wide) for x in (q, k, v, log_decay))
    layer.begin(step, q_TKN)
    if unit_rows:
        q_TKN, k_TKN = unit(q_TKN), unit(k_TKN)
    q_TKN = q_TKN * (q.shape[-1] ** -0.5 if scale is None else scale)
    shared = v.shape[2] // q.shape[2]
    q_THN, k_THN = (x.repeat_interleave(shared, dim=1) for x in (q_TKN, k_TKN))
    beta_TH = None if beta is None else beta.flatten(0, 1).to(wide)
    out = recurrent(step, layer.batch, layer.module, q_THN, k_THN, v_THV, decay, beta_TH)
    return out.to(q.dtype).unflatten(0, q.shape[:2]), None


def gated_linear_attention(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """GLA: `g` or `gk`, `[B, S, H, N]`, is the log of the decay of each row of the state."""
    _refuse_state(initial_state, output_final_state)
    log_decay = gk if g is None else g
    assert log_decay is not None
    return _run(layer, GATED, q, k, v, log_decay, scale=scale)


def retention(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """RetNet: head h decays by 1 - 2 ** (-5 - h) a token."""
    _refuse_state(initial_state, output_final_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    exponents = -5 - torch.arange(v.shape[2], device=q.device, dtype=wide)
    log_decay_H = torch.log1p(-torch.exp2(exponents))
    return _run(layer, RETENTION, q, k, v, log_decay_H.expand(v.shape[:3]), scale=scale)


def delta_rule(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """DeltaNet: the delta rule without a decay."""
    _refuse_state(initial_state, output_final_state)
    stay = torch.zeros_like(beta)
    unit_rows = use_qk_l2norm_in_kernel
    return _run(layer, DELTA, q, k, v, stay, beta, scale=scale, unit_rows=unit_rows)


def gated_delta_rule(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Gated DeltaNet (`g` of `[B, S, H]`) and KDA (`[B, S, H, N]`): gates are formed here."""
    _refuse_state(initial_state, output_final_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    log_decay, rate = g.to(wide), beta.to(wide)
    if use_gate_in_kernel:
        assert A_log is not None
        shape = (g.shape[2],) + (1,) * (g.dim() - 3)
        speed = A_log.to(wide).exp().view(shape)
        if dt_bias is not None:
            log_decay = log_decay + dt_bias.to(wide).view(g.shape[2:])
        if lower_bound is None:
            log_decay = -speed * F.softplus(log_decay)
        else:
            log_decay = lower_bound * torch.sigmoid(speed * log_decay)
    if use_beta_sigmoid_in_kernel:
        rate = rate.sigmoid() * (2 if allow_neg_eigval else 1)
    unit_rows = use_qk_l2norm_in_kernel
    return _run(layer, DELTA, q, k, v, log_decay, rate, scale=scale, unit_rows=unit_rows)


_STATE = "scale initial_state output_final_state"
ADAPTERS = (
    FlaAdapter(
        models=("gla",),
        layer="GatedLinearAttention",
        functions={
            "chunk_gla": Replacement(
                gated_linear_attention, f"q k v g {_STATE} state_v_first cu_seqlens cu_seqlens_cpu"
            ),
            "fused_recurrent_gla": Replacement(
                gated_linear_attention,
                f"q k v gk gv {_STATE} reverse state_v_first cu_seqlens kwargs",
            ),
        },
        steps=(CONV, CONV, CONV, GATED),
    ),
    FlaAdapter(
        models=("multiscale_retention",),
        layer="MultiScaleRetention",
        functions={
            "chunk_retention": Replacement(retention, f"q k v {_STATE} cu_seqlens kwargs"),
            "fused_chunk_retention": Replacement(retention, f"q k v {_STATE} cu_seqlens"),
            "parallel_retention": Replacement(
                retention, "q k v scale output_attentions cu_seqlens"
            ),
            "fused_recurrent_retention": Replacement(
                retention, f"q k v {_STATE} reverse state_v_first cu_seqlens kwargs"
            ),
        },
        steps=(CONV, CONV, CONV, ROTARY, RETENTION),
    ),
    FlaAdapter(
        models=("delta_net",),
        layer="DeltaNet",
        functions={
            "chunk_delta_rule": Replacement(
                delta_rule,
                f"q k v beta {_STATE} use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu kwargs",
            ),
            "fused_recurrent_delta_rule": Replacement(
                delta_rule, f"q k v beta {_STATE} use_qk_l2norm_in_kernel cu_seqlens"
            ),
        },
        steps=(CONV, CONV, CONV, DELTA),
    ),
    FlaAdapter(
        models=("gated_deltanet",),
        layer="GatedDeltaNet",
        functions={
            "causal_conv1d": Replacement(
                fused_convolution,
                "x weight bias residual initial_state output_final_state activation backend "
                "cu_seqlens cu_seqlens_cpu chunk_indices cp_context kwargs",
            ),
            "chunk_gated_delta_rule": Replacement(
                gated_delta_rule,
                f"q k v g beta {_STATE} use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
                "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context "
                "kwargs",
            ),
            "fused_recurrent_gated_delta_rule": Replacement(
                gated_delta_rule,
                f"q k v g gk gv beta {_STATE} use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
                "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens "
                "kwargs",
            ),
        },
        steps=(CONV, DELTA),
    ),
    FlaAdapter(
        models=("kda",),
        layer="KimiDeltaAttention",
        functions={
            "chunk_kda": Replacement(
                gated_delta_rule,
                f"q k v g beta {_STATE} use_qk_l2norm_in_kernel use_gate_in_kernel "
                "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound "
                "disable_recompute return_intermediate_states state_v_first cu_seqlens "
                "cu_seqlens_cpu cp_context use_graph max_num_seqs kwargs",
            ),
            "fused_recurrent_kda": Replacement(
                gated_delta_rule,
                f"q k v g beta A_log dt_bias {_STATE} use_qk_l2norm_in_kernel use_gate_in_kernel "
                "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens "
                "kwargs",
            ),
        },
        steps=(CONV, CONV, CONV, DELTA),
    ),
)
