"""Describe what each softmax layer of a model computes, from its config and from a call's tensors.

Plans are made and compared across the ranks from the config, before any layer runs; the hook sees
the tensors. Both make an `AttentionSpec`, and a call whose spec the config does not describe is
refused, since its plan was never compared. Layer: attention. Letters: H query heads, K key/value
heads, D head size, V value head size.
"""

import logging
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..kernels.softmax import Scoring
from ..planning.layouts.cost import LayerKind
from ..planning.planners.options import PlanOptions
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What one layer's attention computes.

    Args:
        heads, kv_heads (`int`): H and K.
        head_dim, value_dim (`int`): D, of queries and keys, and V.
        window (`int`, *optional*, defaults to 0): Keys a row sees on one side, itself included; 0
            without a window.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key. `False`: as far
            forwards as backwards.
        softcap (`float`, *optional*, defaults to 0.0): Bound of the scores; 0 for none.
        sinks (`bool`, *optional*, defaults to `False`): Each head has a learned score that takes
            weight and gives no value. A parameter of the layer, of which configs do not tell.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    causal: bool = True
    softcap: float = 0.0
    sinks: bool = False

    @property
    def kind(self) -> LayerKind:
        """What planners must know of the layer."""
        return LayerKind(
            window=self.window,
            causal=self.causal,
            query_width=self.heads * self.head_dim,
            key_value_width=self.kv_heads * (self.head_dim + self.value_dim),
            kv_heads=self.kv_heads,
            heads=self.heads,
        )

    def widths(self, dtype: torch.dtype) -> Widths:
        """Sizes of the rows that the layer exchanges in a model of `dtype`."""
        return Widths(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            itemsize=dtype.itemsize,
            wide_itemsize=max(4, dtype.itemsize),
        )

    def scoring(self, scale: float) -> Scoring:
        """How kernels form the layer's scores, with `scale` times each dot product."""
        return Scoring(scale=scale, window=self.window, causal=self.causal, softcap=self.softcap)


def layer_specs(config: Any) -> list[AttentionSpec]:
    """What a config says of each softmax layer, in order; none of recurrent layers.

    Args:
        config: A Transformers config; its text config where it has one.
    """
    config = _text(config)
    named = _softmax_layers(config)
    if recurrent_family(config) is not None:  # only some of its layers are softmax layers
        configs = [config] * len(named)
    elif getattr(config, "is_heterogeneous", False):  # Gemma 4: larger heads in its full layers
        configs = list(config.per_layer_config)
    else:
        configs = [config] * config.num_hidden_layers
    # as `masks.attention_mask` tells such models
    overlaid = getattr(config, "use_bidirectional_attention", None) is True
    causal = not overlaid and _causal(config)
    # Transformers allows a distance of `sliding_window` on either side in these; see `masks`.
    further = 0 if causal or overlaid else 1
    windows: list[int | None] = [getattr(config, "sliding_window", None)] * len(configs)
    if named and configs:
        windows = [config.sliding_window if n == "sliding_attention" else 0 for n in named]
    elif not getattr(config, "use_sliding_window", True):
        windows = [0] * len(configs)
    return [
        _spec(own, window=window + further if window else 0, causal=causal)
        for own, window in zip(configs, windows, strict=True)
    ]


def _spec(config: Any, *, window: int, causal: bool) -> AttentionSpec:
    heads = config.num_attention_heads
    rotated = getattr(config, "qk_rope_head_dim", None)
    if rotated:  # multi-head latent attention: keys of all heads, values of their own size
        head_dim = config.qk_nope_head_dim + rotated
        kv_heads, value_dim = heads, config.v_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        value_dim = head_dim
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=window,
        causal=causal,
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
    )


def _softmax_layers(config: Any) -> list[str]:
    """What `layer_types` calls each layer with a softmax part; empty without such a list."""
    kinds = SOFTMAX_LAYERS | MIXED_LAYERS
    return [kind for kind in getattr(config, "layer_types", None) or () if kind in kinds]


def _causal(config: Any) -> bool:
    """Whether rows see no later key: so in all but encoders, which configs do not mark as such."""
    # models of masked language modelling are encoders, unless they are told to decode
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return getattr(config, "is_decoder", False)
    return getattr(config, "is_causal", True)


def _text(config: Any) -> Any:
    # the decoder's: attention of encoders (images, audio) never sees a batch object
    get_text = getattr(config, "get_text_config", None)
    return get_text(decoder=True) if get_text else config


def validate_spec(spec: AttentionSpec, config: Any, *, layer: object) -> None:
    """Refuse a call that attends otherwise than the model's config says.

    Args:
        spec (`AttentionSpec`): Of the call's tensors and arguments.
        config: The layer's config.
        layer: Its number or name, for the error.

    Raises:
        ValueError: with what differs from the nearest layer of the config.
    """
    # sinks are parameters, of which no config tells; what they add needs no plan of its own
    described = [replace(each, sinks=spec.sinks) for each in layer_specs(config)]
    if spec in described:
        return
    names = [f.name for f in fields(spec)]
    differences = [
        [name for name in names if getattr(spec, name) != getattr(each, name)] for each in described
    ]
    found, says = "softmax", "no softmax layer"
    if described:
        changed = min(differences, key=len)
        nearest = described[differences.index(changed)]
        found, says = (
            ", ".join(f"{name}={getattr(of, name)}" for name in changed) for of in (spec, nearest)
        )
    raise ValueError(
        f"layer {layer} attends with {found}, but the model's config describes {says}; ranks "
        "compare plans of what the config describes, so correct the config, or load the model with "
        "attn_implementation='sdpa'"
    )


def log_whole_exchanges(config: Any, *, overlap: str) -> None:
    """Log where an overlap of head groups has nothing to cut."""
    if overlap == "heads" and any(spec.kv_heads == 1 for spec in layer_specs(config)):
        logger.warning(
            "longctx_overlap=heads: layers with one key/value head have no groups to cut their "
            "exchanges into; theirs run as with none"
        )


def validate_layer_heads(config: Any, *, name: str, ranks: int, size: int) -> None:
    """Refuse ranks that cannot share the heads of every attention layer.

    Args:
        config: A Transformers config; its text config where it has one.
        name (`str`): Planner of the layers.
        ranks (`int`): Ranks that share one batch.
        size (`int`): Ranks of a domain that exchange heads; 1 means all of them under `ulysses`.

    Raises:
        ValueError: with the size, the rule and the sizes that can.
    """
    if name in NESTED:
        size = PlanOptions(algorithm=name, ulysses_size=size).heads_over(ranks)
        for spec in layer_specs(config):
            validate_heads(Sharing(ranks, size, spec.heads, spec.kv_heads))
