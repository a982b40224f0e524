"""Define what a rule is, and the words that rules speak of: attention names and kinds of layers.

A rule looks at one thing (a model's config, training arguments, a trainer, what a probe saw) and
gives the value that it refuses. The same rules raise errors and write the support table, so the
documentation cannot promise what the code refuses. Layer: support.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

SOFTMAX_NAMES = ("distca", "charm", "ring", "ulysses")
NAMES = (*SOFTMAX_NAMES, "zeco_linear")
NESTED = ("charm", "ring", "ulysses")  # their plans use nested domains of ranks

# Families whose recurrent layers have an adapter in `recurrent/`, by the model_type of their text
# config: those of flash-linear-attention, and those of Transformers.
FLA_FAMILIES = ("gla", "retnet", "delta_net", "gated_deltanet", "kda")
RECURRENT_FAMILIES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "minimax",
    "lfm2", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "mamba",
    "falcon_mamba", "jamba",
)  # fmt: skip
_WITHOUT_ADAPTER = (  # recurrent families whose `layer_types`, if any, do not show it
    "xlstm", "rwkv", "lfm2_moe", "zamba", "recurrent_gemma",
    # of flash-linear-attention:
    "abc", "comba", "gated_deltaproduct", "gsa", "hgrn", "hgrn2", "lightnet", "linear_attn",
    "log_linear_mamba2", "mamba3", "mesa_net", "mom", "precond_gated_deltanet", "precond_kda",
    "raven", "rodimus", "rwkv6", "rwkv7", "samba", "yoco",
)  # fmt: skip

# Values of `layer_types` in configs.
SOFTMAX_LAYERS = {"full_attention", "sliding_attention"}
MIXED_LAYERS = {"hybrid", "hybrid_sliding"}  # a softmax and a recurrent part side by side
RECURRENT_LAYERS = {"linear_attention", "mamba", "recurrent", "conv"} | MIXED_LAYERS
LAYERS_WITHOUT_MIXING = {"mlp", "moe"}  # each token by itself

WITH_SDPA = "train it with attn_implementation='sdpa' for now"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is refused, with the reason and the remedy.

    Args:
        feature (`str`): Its row in the support table.
        find (`Callable[[Any], object]`): Returns the value that is refused in a subject, or `None`.
        rule (`str`): Why it is refused.
        remedy (`str`): What the user can do.
        names (`tuple[str, ...]`, *optional*): The attention names that refuse it; all by default.
    """

    feature: str
    find: Callable[[Any], object]
    rule: str
    remedy: str
    names: tuple[str, ...] = NAMES

    def message(self, value: object) -> str:
        """Return feature, value, rule and remedy in one line."""
        return f"{self.feature}: {value}: {self.rule}; {self.remedy}"


def broken_rules(rules: Iterable[Rule], subject: Any) -> Iterator[tuple[Rule, object]]:
    """Yield the rules that a subject breaks, each with the value that it refuses."""
    for rule in rules:
        value = rule.find(subject)
        if value is not None:
            yield rule, value


def validate_rules(rules: Iterable[Rule], subject: Any) -> None:
    """Raise if a subject breaks any of some rules.

    Raises:
        ValueError: With the message of every rule that is broken, so that one run shows them all.
    """
    problems = [rule.message(value) for rule, value in broken_rules(rules, subject)]
    if problems:
        raise ValueError("; ".join(problems))


def field(*names: str) -> Callable[[Any], object]:
    """Make a finder that returns the first of a subject's fields that is set to something true."""

    def find(subject: Any) -> object:
        found = ((name, getattr(subject, name, None)) for name in names)
        return next((f"{name}={value}" for name, value in found if value), None)

    return find


def field_except(name: str, *allowed: object) -> Callable[[Any], object]:
    """Make a finder that returns a field whose value is not one of those allowed."""

    def find(subject: Any) -> object:
        value = getattr(subject, name, allowed[0])
        return None if value in allowed else f"{name}={value}"

    return find


def validate_name(name: str) -> None:
    """Raise for an attention name that is not ours, before anything is loaded under it.

    Raises:
        ValueError: With our names, and the one that is spelt most like it.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"attn_implementation={name!r} is not a name of hf_longctx; use one of "
            f"{', '.join(NAMES)}{meant}"
        )


def has_adapter(config: Any) -> bool:
    """Return whether the recurrent layers of a text config's family have an adapter."""
    return getattr(config, "model_type", None) in (*RECURRENT_FAMILIES, *FLA_FAMILIES)


def recurrent_family(config: Any) -> str | None:
    """Return what shows that a text config has recurrent layers; `None` if it has none."""
    family, listed = (getattr(config, name, None) for name in ("model_type", "layer_types"))
    kinds = sorted(RECURRENT_LAYERS & {*(listed or ())})
    if listed and not kinds:  # classes of Granite and LFM2 serve models without them, too
        return None
    if has_adapter(config) or family in _WITHOUT_ADAPTER:
        return f"model_type={family}"
    return f"layer_types {kinds}" if kinds else None
