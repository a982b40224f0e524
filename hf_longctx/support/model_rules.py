"""Which layers of a model carry a state from token to token, and which of those can be adapted.

Layer: support.
A model's config -> the rules that refuse it. A rule looks at one thing (a config, training arguments, what a probe saw) and gives
the value that it refuses, or `None`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
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


SOFTMAX_NAMES = ("distca", "charm", "ring", "ulysses")
NAMES = (*SOFTMAX_NAMES, "zeco_linear")
NESTED = ("charm", "ring", "ulysses")  # those whose plans look at nested domains of ranks

_NO_INTERFACE = [
    "bloom", "falcon", "mpt", "gpt_neo", "xglm", "rwkv", "rembert", "big_bird", "roformer",
]  # fmt: skip
_SELECTING = ("index_topk", "index_topk_blocks", "compress_rates", "keep_window_size")
_CHUNKED_LAYERS = {"chunked_attention"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal.

    Args:
        feature (`str`): What the README calls it.
        found (`Callable[[Any], object]`): Looks at the subject; the value it refuses, else `None`.
        rule (`str`): Why it is refused.
        remedy (`str`): What the user can do.
        names (`tuple[str, ...]`, *optional*): The attention names that it refuses; all by default.
    """

    feature: str
    found: Callable[[Any], object]
    rule: str
    remedy: str
    names: tuple[str, ...] = NAMES

    def message(self, value: object) -> str:
        """Value, rule and remedy in one line."""
        return f"{self.feature}: {value}: {self.rule}; {self.remedy}"


def _field(*names: str) -> Callable[[Any], object]:
    """The first of the config's fields that is set to something true."""

    def found(config: Any) -> object:
        for name in names:
            value = getattr(config, name, None)
            if value:
                return f"{name}={value}"
        return None

    return found


def _model_type(types: Iterable[str]) -> Callable[[Any], object]:
    known = frozenset(types)
    return lambda config: _named("model_type", config, known)


def _named(field: str, config: Any, known: frozenset[str]) -> object:
    value = getattr(config, field, None)
    return f"{field}={value}" if value in known else None


def _rope_type(config: Any) -> object:
    """`longrope` and `dynamic` choose frequencies from the longest position they see."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (given, *(v for v in given.values() if isinstance(v, Mapping))):
        kind = str(scaling.get("rope_type", scaling.get("type")))
        if kind == "longrope" or "dynamic" in kind:  # as Transformers tells them apart
            return f"rope_type={kind}"
    return None


def _layer_types(config: Any, known: Callable[[str], bool]) -> object:
    kinds = sorted(kind for kind in set(getattr(config, "layer_types", None) or ()) if known(kind))
    return f"layer_types {kinds}" if kinds else None


def _selected_keys(config: Any) -> object:
    """Layers whose queries see chosen, compressed or pooled keys."""
    elsewhere = SOFTMAX_LAYERS | RECURRENT_LAYERS | LAYERS_WITHOUT_MIXING | _CHUNKED_LAYERS
    found = _layer_types(config, lambda kind: kind not in elsewhere)
    return found or _field(*_SELECTING)(config)


def _fla_parts(config: Any) -> object:
    """Softmax layers and residual attention that it computes with kernels of its own, terms of its
    loss that are no sum over tokens, and bounds that its kernels refuse."""
    if getattr(config, "model_type", None) not in FLA_FAMILIES:
        return None
    if getattr(config, "hidden_act", None) == "powlu":
        return "hidden_act=powlu"
    if config.model_type == "gla" and getattr(config, "attn_mode", "") == "fused_chunk":
        return "attn_mode=fused_chunk"
    if getattr(config, "safe_gate", False):
        bound = getattr(config, "lower_bound", None)
        if bound is None or not -5 <= bound < 0:
            return f"safe_gate=True with lower_bound={bound}"
    return _field("attn", "attnres_block_size", "use_l2warp")(config)


WITH_SDPA = "train it with attn_implementation='sdpa' for now"

FLA_PARTS = Rule(
    "options of flash-linear-attention",
    _fla_parts,
    "nothing here computes them per document",
    "set attn, attnres_block_size and use_l2warp to None, hidden_act to swish, attn_mode to chunk, "
    "and under safe_gate a lower_bound from -5 up to 0",
)

MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "no attention interface",
        _model_type(_NO_INTERFACE),
        "this family never calls the attention function it was given",
        "train it with its own attention",
    ),
    Rule(
        "recurrent layers",
        known_recurrent,
        "linear-attention and state-space layers would leak across documents and restart at ranks",
        "use attn_implementation='zeco_linear' (with --longctx_softmax for its softmax layers)",
        names=SOFTMAX_NAMES,
    ),
    Rule(
        "recurrent layers of other families",
        unknown_recurrent,
        "nothing keeps their documents apart",
        "train one document at a time, with its own attention",
    ),
    Rule(
        "softmax layers alone",
        softmax_alone,
        "the name is for recurrent layers, and this model has none",
        "use distca or charm",
        names=("zeco_linear",),
    ),
    FLA_PARTS,
    Rule(
        "RoPE longrope or dynamic",
        _rope_type,
        "its frequencies depend on the longest position of the local batch, so they differ between "
        "ranks and inside packs",
        "set rope_type to default, linear, yarn or llama3",
    ),
    Rule(
        "temperature from positions",
        _field("attn_temperature_tuning"),
        "Llama 4 scales queries by absolute position without passing position_ids on",
        WITH_SDPA,
    ),
    Rule("chunked attention", _field("attention_chunk_size"), "not built yet", WITH_SDPA),
    Rule(
        "sparse or compressed keys",
        _selected_keys,
        "an indexer chooses, compresses or pools keys of the whole document, which one rank does "
        "not hold",
        WITH_SDPA,
    ),
    Rule(
        "encoder-decoder",
        _field("is_encoder_decoder"),
        "its cross-attention reads keys that are not the batch's documents",
        "use a decoder-only model",
    ),
    Rule(
        "attention dropout",
        _field("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
        "a recomputed or moved task would draw another mask",
        "set it to 0.0",
    ),
    Rule(
        "layer dropping",
        _field("layerdrop", "decoder_layerdrop"),
        "ranks would skip different layers and wait for each other's exchanges",
        "set it to 0.0",
    ),
    Rule(
        "MoE auxiliary loss",
        _field("output_router_logits"),
        "it is no mean over tokens, so it cannot be summed over ranks",
        "set output_router_logits=False",
    ),
    Rule(
        "router noise",
        _field("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
        "each rank would draw its own, so no single process computes the same",
        "set it to 0.0",
    ),
    Rule(
        "attention weights",
        _field("output_attentions"),
        "they are never formed",
        "set output_attentions=False, or use attn_implementation='eager' to look at them",
    ),
)


def raise_if_broken(rules: Iterable[Rule], subject: Any) -> None:
    """Apply rules to what they look at.

    Raises:
        ValueError: with every rule that applies.
    """
    found = ((rule, rule.found(subject)) for rule in rules)
    problems = [rule.message(value) for rule, value in found if value is not None]
    if problems:
        raise ValueError("; ".join(problems))


def validate_name(name: str) -> None:
    """Refuse an attention name that is not ours, before anything is loaded under it.

    Raises:
        ValueError: with our names, and the one that is spelt most like it.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"attn_implementation={name!r} is no name of ours; use one of {', '.join(NAMES)}{meant}"
        )


def model_problems(config: Any, *, name: str) -> list[tuple[Rule, object]]:
    """The rules that refuse a model under a name, each with the value that it refuses.

    Args:
        config: A Transformers config; its text config is looked at where it has one.
        name (`str`): The attention name.
    """
    get_text = getattr(config, "get_text_config", None)
    text = get_text(decoder=True) if get_text else config
    found = ((rule, rule.found(text)) for rule in MODEL_RULES if name in rule.names)
    return [(rule, value) for rule, value in found if value is not None]


def validate_model(config: Any, *, name: str) -> None:
    """Refuse a model that `name` does not compute exactly.

    Args:
        config: A Transformers config; its text config is looked at where it has one.
        name (`str`): The attention name.

    Raises:
        ValueError: for a name that is not ours, or with every rule that applies.
    """
    validate_name(name)
    problems = [rule.message(value) for rule, value in model_problems(config, name=name)]
    if problems:
        raise ValueError(f"{name} cannot run this model exactly: " + " | ".join(problems))
