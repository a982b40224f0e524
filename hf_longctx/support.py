"""What works under which name, and why not: one table for refusals, README and tests.

Floor: support. A rule looks at one thing (a model's config, an attention call, training arguments)
and gives the value that it refuses, or `None`. Nothing is ever downgraded in silence.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("distca", "ring")  # attention names that are built
PLANNED_NAMES = ("charm", "zeco_linear", "ulysses")

_NO_INTERFACE = [
    "bloom",
    "falcon",
    "mpt",
    "gpt_neo",
    "xglm",
    "rwkv",
    "rembert",
    "big_bird",
    "roformer",
    "fuyu",
]
_RECURRENT = [
    "mamba",
    "mamba2",
    "falcon_mamba",
    "xlstm",
    "rwkv",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_linear",
    "minimax",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "zamba",
    "zamba2",
    "recurrent_gemma",
    "olmo_hybrid",
]
_SOFTMAX_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal.

    Args:
        feature (`str`): What the README calls it.
        found (`Callable[[Any], object]`): Looks at the subject; the value it refuses, else `None`.
        rule (`str`): Why it is refused.
        remedy (`str`): What the user can do.
    """

    feature: str
    found: Callable[[Any], object]
    rule: str
    remedy: str

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
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("longrope", "dynamic"):
            return f"rope_type={kind}"
    return None


def _other_layers(config: Any) -> object:
    kinds = set(getattr(config, "layer_types", None) or ()) - _SOFTMAX_LAYERS
    return f"layer_types {sorted(kinds)}" if kinds else None


def _value_head(config: Any) -> object:
    size = getattr(config, "v_head_dim", None)
    keys = (getattr(config, "qk_nope_head_dim", 0) or 0) + (
        getattr(config, "qk_rope_head_dim", 0) or 0
    )
    return f"v_head_dim={size}, query and key heads {keys}" if size and keys != size else None


_WITH_SDPA = "train it with attn_implementation='sdpa' for now"

MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "no attention interface",
        _model_type(_NO_INTERFACE),
        "this family never calls the attention function it was given",
        "train it with its own attention",
    ),
    Rule(
        "recurrent layers",
        lambda config: _model_type(_RECURRENT)(config) or _other_layers(config),
        "linear-attention and state-space layers would leak across documents and restart at ranks",
        "wait for attn_implementation='zeco_linear' with --longctx_softmax",
    ),
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
        _WITH_SDPA,
    ),
    Rule("chunked attention", _field("attention_chunk_size"), "not built yet", _WITH_SDPA),
    Rule("softcap", _field("attn_logit_softcapping"), "not built yet", _WITH_SDPA),
    Rule(
        "attention sinks",
        _model_type(
            ["gpt_oss", "deepseek_v4", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "hy_v4"]
        ),
        "not built yet",
        _WITH_SDPA,
    ),
    Rule("value heads of another size", _value_head, "not built yet", _WITH_SDPA),
    Rule(
        "attention dropout",
        _field("attention_dropout", "attn_pdrop"),
        "a recomputed or moved task would draw another mask",
        "set it to 0.0",
    ),
    Rule(
        "MoE auxiliary loss",
        _field("output_router_logits"),
        "it is no mean over tokens, so it cannot be summed over ranks",
        "set output_router_logits=False",
    ),
)

CALL_KEYWORDS = frozenset(
    [
        "position_ids",
        "use_cache",
        "cache_position",
        "num_items_in_batch",
        "labels",
        "shift_labels",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "sliding_window",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "is_causal",
        "output_attentions",
        "longctx_batch",
    ]
)


def refuse_model(config: Any, *, name: str) -> None:
    """Refuse a model that `name` does not compute exactly.

    Args:
        config: A Transformers config; its text config is looked at where it has one.
        name (`str`): The attention name.

    Raises:
        ValueError: with every rule that applies.
    """
    get_text = getattr(config, "get_text_config", None)
    text = get_text(decoder=True) if get_text else config
    problems = [
        rule.message(value) for rule in MODEL_RULES if (value := rule.found(text)) is not None
    ]
    if name in PLANNED_NAMES:
        problems.insert(0, f"attn_implementation={name!r} is not built yet; use one of {NAMES}")
    elif name not in NAMES:
        problems.insert(0, f"attn_implementation={name!r} is not ours; use one of {NAMES}")
    if problems:
        raise ValueError(f"{name} cannot run this model exactly: " + " | ".join(problems))


def refuse_call(
    module: Any, *, query: Any, key: Any, value: Any, dropout: float, arguments: Mapping[str, Any]
) -> None:
    """Refuse an attention call that would not be computed exactly.

    Args:
        module: The attention module that calls.
        query, key, value: `[B, heads, S, D]` tensors.
        dropout (`float`): Attention dropout.
        arguments: The call's other keyword arguments.

    Raises:
        ValueError: naming the argument, the rule and the remedy.
    """
    for name in arguments.keys() - CALL_KEYWORDS:
        if arguments[name] is not None:
            raise ValueError(
                f"attention argument {name}={type(arguments[name]).__name__} is not on "
                f"hf_longctx's list of arguments it computes exactly; {_WITH_SDPA}"
            )
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: attention weights are never formed; use "
            "attn_implementation='eager' to look at them"
        )
    causal = arguments.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise ValueError(
            f"{type(module).__name__} is bidirectional (is_causal=False), which is not built yet; "
            f"{_WITH_SDPA}"
        )
    if dropout:
        raise ValueError(f"attention dropout={dropout} is refused; set attention_dropout=0.0")
    if query.device.type != "cpu":
        raise ValueError(
            f"attention on {query.device}: only the CPU kernels are built yet; set use_cpu=True"
        )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"value heads of {value.shape[-1]} and query heads of {query.shape[-1]} elements: "
            f"different sizes are not built yet; {_WITH_SDPA}"
        )
    if query.dtype != key.dtype or key.dtype != value.dtype:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; "
            "cast them to one"
        )


def table() -> str:
    """The README's support table, in Markdown."""
    lines = ["| | " + " | ".join(f"`{n}`" for n in NAMES) + " | why not, and what to do |"]
    lines.append("|---|" + "---|" * len(NAMES) + "---|")
    works = (
        "causal softmax attention, packed documents",
        "grouped and multi-query heads",
        "sliding window, alone or mixed with full layers",
        "activation checkpointing (re-entrant and not)",
        "padding masks, caches and `generate` (local)",
        "float32, bf16, float64 on CPU with gloo",
    )
    lines += [f"| {feature} |" + " yes |" * len(NAMES) + " |" for feature in works]
    for rule in (*MODEL_RULES, *ARGUMENT_RULES):
        why = f"{rule.rule}; {rule.remedy}"
        lines.append(f"| {rule.feature} |" + " refused |" * len(NAMES) + f" {why} |")
    return "\n".join(lines)


def _unless(field: str, *allowed: object) -> Callable[[Any], object]:
    """The field's value, unless it is one of those allowed."""

    def found(arguments: Any) -> object:
        value = getattr(arguments, field, allowed[0])
        return None if value in allowed else f"{field}={value}"

    return found


def _accelerator_flag(name: str) -> Callable[[Any], object]:
    def found(arguments: Any) -> object:
        config = getattr(arguments, "accelerator_config", None)
        return f"accelerator_config.{name}=True" if getattr(config, name, False) else None

    return found


def _batch_size(arguments: Any) -> object:
    for field in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        value = getattr(arguments, field, 1)
        if value != 1:
            return f"{field}={value}"
    return None


def _too_many_devices(arguments: Any) -> object:
    devices = getattr(arguments, "n_gpu", 0)
    return f"{devices} devices in one process" if devices > 1 else None


ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule(
        "label smoothing",
        _unless("label_smoothing_factor", 0, 0.0),
        "Trainer's smoother shifts labels again inside a rank's share",
        "set it to 0.0",
    ),
    Rule(
        "per-device batch sizes",
        _batch_size,
        "a batch is one pack per group, sized by --longctx_max_tokens_per_rank",
        "leave both at 1",
    ),
    Rule(
        "loss not averaged over devices",
        _unless("average_tokens_across_devices", True),
        "the loss is the mean over all trainers' tokens",
        "leave it at True",
    ),
    Rule(
        "DataParallel",
        _too_many_devices,
        "one process must drive one device",
        "start one process per device with accelerate launch",
    ),
    Rule(
        "automatic batch size",
        _unless("auto_find_batch_size", False),
        "a restart would change the steps of some ranks only",
        "set --longctx_max_tokens_per_rank to what fits",
    ),
    Rule(
        "split batches",
        _accelerator_flag("split_batches"),
        "batches are cut by the layout",
        "leave it at False",
    ),
    Rule(
        "other sampling strategies",
        _unless("train_sampling_strategy", "random", "sequential"),
        "packs are chosen by hf_longctx",
        "use random or sequential",
    ),
    Rule(
        "DeepSpeed",
        _unless("deepspeed", None),
        "not tested yet, and its backward may step on its own",
        "use DDP",
    ),
)


def refuse_arguments(arguments: Any) -> None:
    """Refuse training arguments under which numbers would be wrong.

    Raises:
        ValueError: with every rule that applies.
    """
    found = ((rule, rule.found(arguments)) for rule in ARGUMENT_RULES)
    problems = [rule.message(value) for rule, value in found if value is not None]
    if problems:
        raise ValueError("; ".join(problems))
