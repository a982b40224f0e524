"""A model's config -> the layer kinds to plan for, and the sizes of their rows.

Layer: attention.
"""

import logging
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..planning.layouts.cost import LayerKind
from ..planning.program.counts import Widths
from ..support import (
    MIXED_LAYERS,
    NESTED,
    SOFTMAX_LAYERS,
    Sharing,
    recurrent_family,
    validate_heads,
)

logger = logging.getLogger(__name__)


def layer_kinds(config: Any) -> list[LayerKind]:
    """The kind of each softmax layer, in order.

    Args:
        config: A Transformers config; its text config is looked at where it has one.
    """
    config = _text(config)
    configs = layer_configs(config)
    if not configs:
        return []
    widths = [layer_widths(layer, dtype=torch.float32) for layer in configs]
    overlaid = getattr(config, "use_bidirectional_attention", None) is True
    causal = not overlaid and _causal(config)
    further = 0 if causal or overlaid else 1  # see `masks.Bidirectional`
    windows: list[int | None] = [getattr(config, "sliding_window", None)] * len(configs)
    names = _softmax_layers(config)
    if names:
        windows = [config.sliding_window if n == "sliding_attention" else 0 for n in names]
    elif not getattr(config, "use_sliding_window", True):
        windows = [0] * len(windows)
    return [
        LayerKind(
            window=window + further if window else 0,
            causal=causal,
            query_width=own.heads * own.head_dim,
            key_value_width=own.kv_heads * (own.head_dim + own.value_dim),
            kv_heads=own.kv_heads,
            heads=own.heads,
        )
        for window, own in zip(windows, widths, strict=True)
    ]


def log_whole_exchanges(config: Any, *, overlap: str) -> None:
    """Log where an overlap of head groups has nothing to cut."""
    if overlap == "heads" and any(kind.kv_heads == 1 for kind in layer_kinds(config)):
        logger.warning(
            "longctx_overlap=heads: layers with one key/value head have no groups to cut their "
            "exchanges into; theirs run as with none"
        )


def validate_layer_heads(config: Any, *, name: str, ranks: int, size: int) -> None:
    """Refuse ranks that cannot share the heads of every attention layer.

    Args:
        config: A Transformers config; its text config is looked at where it has one.
        name (`str`): The attention name.
        ranks (`int`): Ranks that share one batch.
        size (`int`): Ranks of a domain that exchange heads; 1 is all of them under `ulysses`.

    Raises:
        ValueError: with the size, the rule and the sizes that can.
    """
    if name in NESTED:
        size = ranks if name == "ulysses" and size == 1 else size
        for kind in layer_kinds(config):
            validate_heads(Sharing(ranks, size, kind.heads, kind.kv_heads))


def layer_configs(config: Any) -> list[Any]:
    """The config of each softmax layer, in order: one and the same but where sizes differ."""
    config = _text(config)
    if recurrent_family(config) is not None:
        return [config] * len(_softmax_layers(config))
    if getattr(config, "is_heterogeneous", False):  # Gemma 4: larger heads in its full layers
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def _softmax_layers(config: Any) -> list[str]:
    """What `layer_types` calls each layer that has a softmax part; none where there is no list."""
    kinds = SOFTMAX_LAYERS | MIXED_LAYERS
    return [kind for kind in getattr(config, "layer_types", None) or () if kind in kinds]


def _causal(config: Any) -> bool:
    """Whether rows see no later key: so in all but encoders, which configs do not mark as such."""
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return getattr(config, "is_decoder", False)
    return getattr(config, "is_causal", True)


def layer_widths(config: Any, *, dtype: torch.dtype) -> Widths:
    """Sizes of the rows that attention layers of a config exchange, for a model of `dtype`."""
    config = _text(config)
    heads = config.num_attention_heads
    rotated = getattr(config, "qk_rope_head_dim", None)
    if rotated:  # multi-head latent attention: keys of all heads, values of their own size
        head_dim = config.qk_nope_head_dim + rotated
        kv_heads, value_dim = heads, config.v_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        value_dim = head_dim
    return Widths(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        itemsize=dtype.itemsize,
        wide_itemsize=max(4, dtype.itemsize),
    )


def _text(config: Any) -> Any:
    get_text = getattr(config, "get_text_config", None)
    return get_text(decoder=True) if get_text else config
