"""Run the layers of flash-linear-attention per document: GLA, RetNet, (gated) DeltaNet and KDA.

Each function here stands in for one that a layer calls, with the same arguments and the same result
as without a cache. The library's kernels need a GPU; ours stand in for them also where a row is one
document. The library is not imported here: importing it changes what Transformers makes of `mamba`,
`mamba2` and `bitnet`, so that is left to those who use its models.
Layer: recurrent. Letters: B batch, S tokens of a row, C channels, H heads of values, N rows of the
state.
Sources: GLA arXiv 2312.06635, RetNet 2307.08621, DeltaNet 2406.06484, gated DeltaNet 2412.06464,
KDA 2510.26692.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adapter import Adapter, Replacement, validate_parameters, wrap_packed_forward
from .context import ActiveLayer, active_layer
from .fla_cpu import replace_kernels
from .transformers_layers import CONV, DELTA, convolve, recur

GATED, RETENTION = "gated linear attention", "retention"
ROTARY = "rotary positions"


def short_convolution(
    layer: ActiveLayer,
    own: Any,
    x: Tensor,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    cache: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for `ShortConvolution.forward`: `[B, S, C]` and no state."""
    layer.validate_unset(
        residual=residual, mask=mask, cache=cache, output_final_state=output_final_state
    )
    # The weights of a depthwise convolution are [C, 1, W].
    return convolve(layer, own, x, own.weight.squeeze(1), own.bias, own.activation), None


def fused_convolution(
    layer: ActiveLayer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for the one convolution of queries, keys and values together: `[B, S, C]`."""
    layer.validate_unset(
        residual=residual, initial_state=initial_state, output_final_state=output_final_state
    )
    return convolve(layer, layer.module, x, weight, bias, activation), None


def rotary(
    layer: ActiveLayer,
    own: Any,
    q: Tensor,
    k: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Stand in for `RotaryEmbedding.forward`, at each token's position in its document."""
    layer.validate_unset(scale=own.scale, interleaved=own.interleaved)
    layer.begin(ROTARY, q.flatten(0, 1))
    # Offsets in the arguments are not used: the batch knows where documents begin, also when
    # that was on an earlier rank.
    positions = torch.from_numpy(layer.batch.layout.positions(layer.batch.rank)).to(q.device)
    length = int(positions.max()) + 1 if len(positions) else 0
    # The library's own tables, so that angles are those of its kernel to the last bit.
    own._update_cos_sin_cache(length, device=q.device, dtype=q.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    tables = (t[positions].to(wide) for t in (own._cos_cached, own._sin_cached))
    cos, sin = (t.unflatten(0, q.shape[:2])[:, :, None] for t in tables)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.to(wide).chunk(2, dim=-1)
        both = (first * cos - second * sin, first * sin + second * cos)
        return torch.cat(both, dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def gated_linear_attention(
    layer: ActiveLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run GLA: `g` or `gk`, `[B, S, H, N]`, is the log of the decay of each row of the state."""
    log_decay = gk if g is None else g
    assert log_decay is not None
    return recur(layer, GATED, q, k, v, log_decay, scale=scale, others=kwargs)


def retention(
    layer: ActiveLayer, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run RetNet: head h decays by 1 - 2 ** (-5 - h) a token."""
    wide = torch.promote_types(q.dtype, torch.float32)
    exponents = -5 - torch.arange(v.shape[2], device=q.device, dtype=wide)
    log_decay_H = torch.log1p(-torch.exp2(exponents))  # log1p: these decays are close to 1
    log_decay = log_decay_H.expand(v.shape[:3])
    return recur(layer, RETENTION, q, k, v, log_decay, scale=scale, others=kwargs)


def delta_rule(
    layer: ActiveLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run DeltaNet: the delta rule without a decay."""
    no_decay = torch.zeros_like(beta)
    return recur(layer, DELTA, q, k, v, no_decay, beta, scale=scale, others=kwargs)


def gated_delta_rule(
    layer: ActiveLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run gated DeltaNet (`g` of `[B, S, H]`) or KDA (`[B, S, H, N]`); gates are formed here."""
    wide = torch.promote_types(q.dtype, torch.float32)
    log_decay, rate = g.to(wide), beta.to(wide)
    if use_gate_in_kernel:
        # The library's kernel forms the gate from a raw projection; A_log is of each head, and g
        # may be of each row of the state.
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
        # A rate up to 2 lets the factor on the state have negative eigenvalues.
        rate = rate.sigmoid() * (2 if allow_neg_eigval else 1)
    return recur(layer, DELTA, q, k, v, log_decay, rate, scale=scale, others=kwargs)


# Modules within a layer, by class: their forward is wrapped, as the layer calls them.
_PARTS = {
    "ShortConvolution": Replacement(
        short_convolution,
        "x residual mask cache output_final_state cu_seqlens chunk_indices kwargs",
    ),
    "RotaryEmbedding": Replacement(rotary, "q k seqlen_offset cu_seqlens max_seqlen chunk_indices"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaAdapter(Adapter):
    """How the layers of one class of flash-linear-attention run without its kernels.

    Args:
        models (`tuple[str, ...]`): Files of `fla.layers`.
    """

    needs_gpu: bool = True

    def homes(self) -> set[str]:
        """Return the names of the files that may define the class."""
        return {f"fla.layers.{name}" for name in self.models}

    def adapt(self, module: nn.Module, home: ModuleType) -> None:
        """Make one layer run our functions, and PyTorch's for the rest of it on a CPU."""
        # Our functions first: nothing is replaced in a library whose parameters are unknown.
        Adapter.adapt(self, module, home)  # slots: super() without arguments finds another class
        replace_kernels(module)
        for child in module.children():
            part = _PARTS.get(type(child).__name__)
            if part is not None:
                place = f"{type(child).__module__}.{type(child).__name__}.forward"
                validate_parameters(place, child.forward, part.parameters)
                wrap_packed_forward(child, partial(_part_forward, ours=part.function))

    def expected(self, module: nn.Module) -> tuple[str, ...]:
        """Return what one forward of the module must call; the convolutions are an option."""
        # use_short_conv=False leaves out all of a layer's convolutions.
        return tuple(s for s in self.steps if s != CONV or getattr(module, "use_short_conv", False))


def _part_forward(original: Callable[..., Any], *, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Run our function instead of a part's forward while the layer that holds it is active."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = active_layer()
        if layer is None:
            return original(self, *args, **kwargs)
        return ours(layer, self, *args, **kwargs)

    return forward


_STATE = "scale initial_state output_final_state"
# A layer takes its chunked or its fused recurrent kernel by the length of the rows, so both are
# replaced.
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
