"""Ranks that exchange heads, and a layer's heads -> a refusal of sizes that cannot share them.

Layer: support. Key/value heads go whole to ranks, in shares that differ by at most one; more ranks
than key/value heads share out query heads evenly, and have key/value heads in common.

One attention call -> a refusal of whatever in it would not be computed exactly. Keyword arguments are allow-listed by name, so a mask or bias that a model passes
under a name we do not know is never dropped.
"""

from collections.abc import Container, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from .model_rules import NESTED, WITH_SDPA, Rule, raise_if_broken


class Sharing(NamedTuple):
    """Domains of `size` out of `ranks` ranks exchange `heads` query and `kv_heads` key/value
    heads."""

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
        """The sizes that divide the ranks and can share the heads."""
        given = (self._replace(size=size) for size in range(1, self.ranks + 1))
        return tuple(x.size for x in given if self.ranks % x.size == 0 and x.exact)


def _does_not_divide(sharing: Sharing) -> object:
    if sharing.ranks % sharing.size == 0:
        return None
    return f"longctx_ulysses_size={sharing.size} of {sharing.ranks} ranks; use {_listed(sharing)}"


def _too_few(sharing: Sharing) -> object:
    if sharing.exact:
        return None
    have = f"{sharing.size} ranks, {sharing.heads} query heads, {sharing.kv_heads} key/value heads"
    return f"{have}; of {sharing.ranks} ranks use {_listed(sharing)}"


def _listed(sharing: Sharing) -> str:
    """Sizes that can, but for 1: under `ulysses` that stands for all ranks."""
    sizes = [str(size) for size in sharing.sizes if size > 1]
    return " or ".join([*sizes, "ring or charm without it"])


HEAD_RULES = (
    Rule(
        "domains that do not divide the ranks",
        _does_not_divide,
        "each rank belongs to one domain, and all are of one size",
        "set --longctx_ulysses_size to one of those",
        names=NESTED,
    ),
    Rule(
        "heads that the ranks of a domain cannot share",
        _too_few,
        "it takes as many key/value heads as ranks, or query heads that the ranks divide",
        "set --longctx_ulysses_size to one of those, or change --longctx_group_size",
        names=NESTED,
    ),
)


def validate_heads(sharing: Sharing) -> None:
    """Refuse a size of domains that cannot share a layer's heads.

    Raises:
        ValueError: with the size, the rule and the sizes that can.
    """
    raise_if_broken(HEAD_RULES, sharing)


CALL_KEYWORDS = frozenset((
    "position_ids", "use_cache", "cache_position", "num_items_in_batch", "labels",
    "shift_labels", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "sliding_window", "output_hidden_states", "return_dict", "logits_to_keep", "is_causal",
    "output_attentions", "longctx_batch", "softcap", "s_aux",
))  # fmt: skip
# What tells documents apart, without underscores: that is where spellings differ.
_BOUNDARIES = {
    name.replace("_", ""): name
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "seq_idx", "longctx_batch")
}


def validate_call(
    module: Any,
    *,
    query: Any,
    key: Any,
    value: Any,
    dropout: float,
    causal: bool | None,
    arguments: Mapping[str, Any],
) -> None:
    """Refuse an attention call that would not be computed exactly.

    Args:
        module: The attention module that calls.
        query, key, value: `[B, heads, S, D]` tensors.
        dropout (`float`): Attention dropout.
        causal (`bool`, *optional*): Whether the mask is causal; `None` for a dense one.
        arguments: The call's other keyword arguments.

    Raises:
        ValueError: naming the argument, the rule and the remedy.
    """
    validate_misspelt(arguments)
    for name in arguments.keys() - CALL_KEYWORDS:
        if arguments[name] is not None and arguments[name] is not False:
            raise ValueError(
                f"attention argument {name}={type(arguments[name]).__name__} is not on "
                f"hf_longctx's list of arguments it computes exactly; {WITH_SDPA}"
            )
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: attention weights are never formed; use "
            "attn_implementation='eager' to look at them"
        )
    claimed = arguments.get("is_causal")
    claimed = getattr(module, "is_causal", True) if claimed is None else claimed
    if causal is not None and bool(claimed) != causal:
        mask = "a causal mask, or none" if causal else "a bidirectional mask"
        raise ValueError(
            f"{type(module).__name__} has is_causal={claimed} but {mask}; hf_longctx needs both to "
            f"agree, so {WITH_SDPA}"
        )
    if dropout:
        raise ValueError(f"attention dropout={dropout} is refused; set attention_dropout=0.0")
    if query.device.type != "cpu":
        raise ValueError(
            f"attention on {query.device}: only the CPU kernels are built yet; set use_cpu=True"
        )
    if query.dtype != key.dtype or key.dtype != value.dtype:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; "
            "cast them to one"
        )


def validate_misspelt(arguments: Mapping[str, Any], *, known: Container[str] = ()) -> None:
    """Refuse keywords that look as if they told documents apart, and that nothing reads.

    Args:
        arguments: Keyword arguments of a model's forward, or of an attention call.
        known (`Container[str]`, *optional*): Further names that are read.

    Raises:
        ValueError: naming the keyword and the one that was probably meant.
    """
    for name, value in arguments.items():
        if value is None or name in CALL_KEYWORDS or name in known:
            continue
        meant = _meant(name)
        if meant:
            raise ValueError(
                f"keyword {name}={type(value).__name__}: nothing reads it, so documents would see "
                f"each other; write {meant}"
            )


def _meant(name: str) -> str:
    """The boundaries that an unknown keyword was probably meant to give; empty for others."""
    word = name.lower().replace("_", "")
    if word.startswith("cuseq"):
        return "cu_seq_lens_k" if word.endswith(("k", "kv")) else "cu_seq_lens_q"
    others = ("documentid", "docid", "segmentid", "sequenceid")  # as other libraries number them
    if word.startswith(("seqid", "seqindex", *others)):
        return "seq_idx"
    near = get_close_matches(word, _BOUNDARIES, n=1, cutoff=0.9)  # T5's position_bias is none
    return _BOUNDARIES[near[0]] if near else ""
