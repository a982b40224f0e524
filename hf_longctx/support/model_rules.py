"""Decide which models run exactly: rules about the config, a probe's findings and shared heads.

Most of what a model cannot do shows in its config. The rest shows when a few tokens run through it:
`training.probe` finds these values, and the rules here say why they are refused. Layer: support.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .rules import (
    FLA_FAMILIES,
    LAYERS_WITHOUT_MIXING,
    NESTED,
    RECURRENT_LAYERS,
    SOFTMAX_LAYERS,
    SOFTMAX_NAMES,
    WITH_SDPA,
    Rule,
    broken_rules,
    field,
    has_adapter,
    recurrent_family,
    validate_name,
    validate_rules,
)

_NO_INTERFACE = {
    "bloom", "falcon", "mpt", "gpt_neo", "xglm", "rwkv", "rembert", "big_bird", "roformer",
}  # fmt: skip
_CHUNKED_LAYERS = {"chunked_attention"}  # these have a rule of their own
_selecting_fields = field("index_topk", "index_topk_blocks", "compress_rates", "keep_window_size")
_fla_fields = field("attn", "attnres_block_size", "use_l2warp")


def _no_interface(config: Any) -> object:
    family = getattr(config, "model_type", None)
    return f"model_type={family}" if family in _NO_INTERFACE else None


def _with_adapter(config: Any) -> object:
    return recurrent_family(config) if has_adapter(config) else None


def _without_adapter(config: Any) -> object:
    return None if has_adapter(config) else recurrent_family(config)


def _not_recurrent(config: Any) -> object:
    return None if recurrent_family(config) else f"model_type={config.model_type}"


def _rope_type(config: Any) -> object:
    """Find `longrope` and `dynamic`, which choose frequencies from the longest position they see.

    The settings may be nested by layer type.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (given, *(v for v in given.values() if isinstance(v, Mapping))):
        kind = str(scaling.get("rope_type", scaling.get("type")))
        if kind == "longrope" or "dynamic" in kind:  # the test that Transformers makes
            return f"rope_type={kind}"
    return None


def _selected_keys(config: Any) -> object:
    """Find layers whose queries see chosen, compressed or pooled keys."""
    # An unknown layer type is refused: it is more likely a new way to select keys than not.
    known = SOFTMAX_LAYERS | RECURRENT_LAYERS | LAYERS_WITHOUT_MIXING | _CHUNKED_LAYERS
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - known)
    return f"layer_types {kinds}" if kinds else _selecting_fields(config)


def _fla_options(config: Any) -> object:
    """Find options of flash-linear-attention that are not computed per document.

    They are softmax layers and residual attention with kernels of their own, terms of the loss that
    are no sum over tokens, and bounds that its kernels refuse.
    """
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
    return _fla_fields(config)


FLA_RULE = Rule(
    "options of flash-linear-attention",
    _fla_options,
    "hf_longctx does not compute them per document",
    "set attn, attnres_block_size and use_l2warp to None, hidden_act to swish, attn_mode to chunk, "
    "and under safe_gate a lower_bound from -5 up to 0",
)

MODEL_RULES: tuple[Rule, ...] = (
    Rule("no attention interface", _no_interface,
         "this family never calls the attention function that it is given",
         "train it with its own attention"),
    Rule("recurrent layers", _with_adapter,
         "they would leak across documents, and restart on each rank",
         "use attn_implementation='zeco_linear' (with --longctx_softmax for its softmax layers)",
         names=SOFTMAX_NAMES),
    Rule("recurrent layers without an adapter", _without_adapter,
         "nothing keeps their documents apart",
         "train one document at a time, with its own attention"),
    Rule("no recurrent layers", _not_recurrent,
         "zeco_linear needs linear-attention or state-space layers",
         "use distca or charm",
         names=("zeco_linear",)),
    FLA_RULE,
    Rule("RoPE longrope or dynamic", _rope_type,
         "its frequencies depend on the longest position of the local batch, so they would differ "
         "between ranks and between packs",
         "set rope_type to default, linear, yarn or llama3"),
    Rule("temperature from positions", field("attn_temperature_tuning"),
         "Llama 4 scales queries by absolute position and does not pass position_ids on",
         WITH_SDPA),
    Rule("chunked attention", field("attention_chunk_size"),
         "it is not built yet",
         WITH_SDPA),
    Rule("sparse or compressed keys", _selected_keys,
         "an indexer chooses, compresses or pools keys of the whole document, but no rank holds "
         "all of them",
         WITH_SDPA),
    Rule("encoder-decoder", field("is_encoder_decoder"),
         "its cross-attention reads keys that do not belong to the batch's documents",
         "use a decoder-only model"),
    Rule("attention dropout",
         field("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
         "a task that is recomputed or moved to another rank would draw another mask",
         "set it to 0.0"),
    Rule("layer dropping", field("layerdrop", "decoder_layerdrop"),
         "ranks would skip different layers and wait for each other's exchanges",
         "set it to 0.0"),
    Rule("MoE auxiliary loss", field("output_router_logits"),
         "it is not a mean over tokens, so it cannot be summed over ranks",
         "set output_router_logits=False"),
    Rule("router noise", field("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
         "each rank would draw its own, so no single process computes the same",
         "set it to 0.0"),
    Rule("attention weights", field("output_attentions"),
         "they are never formed",
         "set output_attentions=False, or use attn_implementation='eager' to look at them"),
)  # fmt: skip


def model_problems(config: Any, *, name: str) -> list[tuple[Rule, object]]:
    """Return the rules that refuse a model under a name, each with the value that it refuses.

    Args:
        config: A Transformers config; its text config is looked at if it has one.
        name (`str`): The attention name.
    """
    get_text = getattr(config, "get_text_config", None)
    text = get_text(decoder=True) if get_text else config
    return [*broken_rules((rule for rule in MODEL_RULES if name in rule.names), text)]


def validate_model(config: Any, *, name: str) -> None:
    """Raise for a model that `name` does not compute exactly.

    Args:
        config: A Transformers config; its text config is looked at if it has one.
        name (`str`): The attention name.

    Raises:
        ValueError: For a name that is not ours, or with every rule that the model breaks.
    """
    validate_name(name)
    problems = [rule.message(value) for rule, value in model_problems(config, name=name)]
    if problems:
        raise ValueError(f"{name} cannot run this model exactly: " + " | ".join(problems))


class Sharing(NamedTuple):
    """How many heads meet how many ranks when domains of ranks exchange heads (all-to-all).

    Of `ranks` ranks, every `size` form a domain that exchanges `heads` query heads and `kv_heads`
    key/value heads. Key/value heads go whole to ranks, whose shares differ by at most one. If there
    are more ranks than key/value heads, query heads are divided evenly instead, and several ranks
    get the same key/value head.
    """

    ranks: int
    size: int
    heads: int
    kv_heads: int

    @property
    def exact(self) -> bool:
        """Whether every rank of a domain gets heads."""
        return self.size <= self.kv_heads or self.heads % self.size == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The domain sizes that divide the ranks and can share the heads."""
        candidates = (self._replace(size=size) for size in range(1, self.ranks + 1))
        return tuple(x.size for x in candidates if self.ranks % x.size == 0 and x.exact)

    def remedy(self) -> str:
        """Return the sizes to use instead."""
        # 1 is left out: under `ulysses` it stands for all ranks
        sizes = [str(size) for size in self.sizes if size > 1]
        return " or ".join([*sizes, "ring or charm without it"])


def _does_not_divide(sharing: Sharing) -> object:
    if sharing.ranks % sharing.size == 0:
        return None
    given = f"longctx_ulysses_size={sharing.size} of {sharing.ranks} ranks"
    return f"{given}; use {sharing.remedy()}"


def _too_few_heads(sharing: Sharing) -> object:
    if sharing.exact:
        return None
    have = f"{sharing.size} ranks, {sharing.heads} query heads, {sharing.kv_heads} key/value heads"
    return f"{have}; of {sharing.ranks} ranks use {sharing.remedy()}"


HEAD_RULES = (
    Rule("domains that do not divide the ranks", _does_not_divide,
         "each rank belongs to one domain, and all domains have the same size",
         "set --longctx_ulysses_size to one of those",
         names=NESTED),
    Rule("heads that the ranks of a domain cannot share", _too_few_heads,
         "a domain needs as many key/value heads as ranks, or a number of query heads that its "
         "ranks divide",
         "set --longctx_ulysses_size to one of those, or change --longctx_group_size",
         names=NESTED),
)  # fmt: skip


def validate_heads(sharing: Sharing) -> None:
    """Raise for a size of domains that cannot share a layer's heads.

    Raises:
        ValueError: With the size, the rule and the sizes that work.
    """
    validate_rules(HEAD_RULES, sharing)


def _probed(feature: str, rule: str, remedy: str, **names: tuple[str, ...]) -> Rule:
    """Make a rule whose subject is the value that the probe found, or `None`."""
    return Rule(feature, lambda value: value, rule, remedy, **names)


NO_KEYWORDS = _probed(
    "forward without **kwargs",
    "the documents' boundaries cannot reach its attention",
    "use a model class whose forward passes keyword arguments on",
)
TENSOR_PARALLEL = _probed(
    "tensor parallel size over 1",
    "ranks that share weights would be taken for ranks that share documents",
    "load it without a tensor parallel plan",
)
BYPASSED = _probed(
    "attention outside the interface",
    "some attention bypasses the interface or drops keyword arguments",
    "train it with its own attention",
)
REPEATED = _probed(
    "several attention calls in a layer",
    "a layer's result is kept once for activation checkpointing, so its second call would get the "
    "result of the first",
    WITH_SDPA,
)
IGNORES_TARGETS = _probed(
    "loss that ignores shift_labels",
    "targets that lie on the next rank would be lost",
    "use a model whose loss takes shift_labels",
)
OTHER_LOSS = _probed(
    "loss that is no sum over targets",
    "ranks' losses would not add up to the mean over all trainers' targets",
    "use a model whose loss is its cross entropy over num_items_in_batch",
)
IGNORES_POSITIONS = _probed(
    "positions that are not read",
    "each rank would number its part of a document from 0",
    "use a model that takes position_ids",
    names=SOFTMAX_NAMES,  # recurrent layers know the order of tokens without positions
)
OTHER_POSITIONS = _probed(
    "positions of its own",
    "hf_longctx numbers a document's tokens 0, 1, 2, ..., but the model was trained otherwise",
    "use a model that numbers tokens so by itself",
    names=SOFTMAX_NAMES,
)
NEIGHBOURS = _probed(
    "terms from neighbours in the batch",
    "something beside attention crosses documents or counts from the start of the batch",
    WITH_SDPA,
)

PROBE_RULES = (
    NO_KEYWORDS, TENSOR_PARALLEL, BYPASSED, REPEATED, IGNORES_TARGETS, OTHER_LOSS,
    IGNORES_POSITIONS, OTHER_POSITIONS, NEIGHBOURS,
)  # fmt: skip
