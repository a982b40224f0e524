"""Which layers of a model carry a state from token to token, and which of those can be adapted.

Floor: support.
"""

from typing import Any

# Families whose recurrent layers `models` adapts, by the model_type of their text config: those of
# flash-linear-attention, and those of Transformers.
FLA_FAMILIES = ("gla", "retnet", "delta_net", "gated_deltanet", "kda")
RECURRENT_FAMILIES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "minimax",
    "lfm2", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "mamba",
    "falcon_mamba", "jamba",
)  # fmt: skip
_OTHERS = (  # families without `layer_types`, or with such alone as look like others
    "xlstm", "rwkv", "lfm2_moe", "zamba", "recurrent_gemma",
    # those of flash-linear-attention that have no adapter
    "abc", "comba", "gated_deltaproduct", "gsa", "hgrn", "hgrn2", "lightnet", "linear_attn",
    "log_linear_mamba2", "mamba3", "mesa_net", "mom", "precond_gated_deltanet", "precond_kda",
    "raven", "rodimus", "rwkv6", "rwkv7", "samba", "yoco",
)  # fmt: skip
SOFTMAX_LAYERS = {"full_attention", "sliding_attention"}
MIXED_LAYERS = {"hybrid", "hybrid_sliding"}  # a softmax and a recurrent part in one layer
RECURRENT_LAYERS = {"linear_attention", "mamba", "recurrent", "conv"} | MIXED_LAYERS
LAYERS_WITHOUT_MIXING = {"mlp", "moe"}


def recurrent_family(config: Any) -> object:
    """What in a text config shows recurrent layers; `None` where it has none."""
    family, listed = (getattr(config, name, None) for name in ("model_type", "layer_types"))
    kinds = sorted(RECURRENT_LAYERS & {*(listed or ())})
    if listed and not kinds:  # Granite's and LFM2's classes serve softmax models too
        return None
    if _known(config) or family in _OTHERS:
        return f"model_type={family}"
    return f"layer_types {kinds}" if kinds else None


def known_recurrent(config: Any) -> object:
    """What shows recurrent layers of a family that has adapters."""
    return recurrent_family(config) if _known(config) else None


def unknown_recurrent(config: Any) -> object:
    """What shows recurrent layers of a family that has none."""
    return None if _known(config) else recurrent_family(config)


def _known(config: Any) -> bool:
    return getattr(config, "model_type", None) in (*RECURRENT_FAMILIES, *FLA_FAMILIES)


def softmax_alone(config: Any) -> object:
    """The family of a text config without recurrent layers."""
    return None if recurrent_family(config) else f"model_type={config.model_type}"
