"""Layers of flash-linear-attention, per document: GLA, RetNet, DeltaNet, gated DeltaNet and KDA.

Floor: models. Their kernels need a GPU; ours stand in for them also where a row is one document.
The library is not imported here: importing it changes what Transformers makes of `mamba`, `mamba2`
and `bitnet`, so that is left to those who use its models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from .adapter import Adapter, Replacement, refuse_unknown, wrap_forward
from .fla_parts import ROTARY, fused_convolution, rotary, short_convolution
from .fla_plain import replace_kernels
from .fla_recurrences import (
    GATED,
    RETENTION,
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    retention,
)
from .gated_delta import DELTA
from .running import layer_under_way
from .short_conv import CONV

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
