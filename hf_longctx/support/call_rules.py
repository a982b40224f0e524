"""Decide which attention calls are computed exactly.

Keyword arguments are allow-listed by name, so that a mask or bias that a model passes under a name
that hf_longctx does not know raises instead of being dropped. Layer: support.
"""

from collections.abc import Container, Mapping
from difflib import get_close_matches
from typing import Any

from .rules import WITH_SDPA

CALL_KEYWORDS = frozenset((
    "position_ids", "use_cache", "cache_position", "num_items_in_batch", "labels",
    "shift_labels", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "sliding_window", "output_hidden_states", "return_dict", "logits_to_keep", "is_causal",
    "output_attentions", "longctx_batch", "softcap", "s_aux",
))  # fmt: skip
# Keywords that give document boundaries, without underscores: that is where spellings differ.
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
    """Raise for an attention call that would not be computed exactly.

    Args:
        module: The attention module that calls.
        query, key, value: `[B, heads, S, D]` tensors.
        dropout (`float`): Attention dropout.
        causal (`bool`, *optional*): Whether the mask is causal; `None` for a dense one.
        arguments: The call's other keyword arguments.

    Raises:
        ValueError: Names the argument, the rule and the remedy.
    """
    # First, since its message is better than that of a name that is not on the list.
    validate_misspelt(arguments)
    for name in arguments.keys() - CALL_KEYWORDS:
        if arguments[name] is not None and arguments[name] is not False:
            raise ValueError(
                f"attention argument {name}={type(arguments[name]).__name__} is not on "
                f"hf_longctx's list of arguments that it computes exactly; {WITH_SDPA}"
            )
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: attention weights are never formed; use "
            "attn_implementation='eager' to look at them"
        )
    # The argument of the call wins over the module's attribute, as in Transformers.
    claimed = arguments.get("is_causal")
    claimed = getattr(module, "is_causal", True) if claimed is None else claimed
    if causal is not None and bool(claimed) != causal:
        mask = "a causal mask, or none" if causal else "a bidirectional mask"
        raise ValueError(
            f"{type(module).__name__} has is_causal={claimed} but {mask}; the two must agree. "
            f"Otherwise {WITH_SDPA}"
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
    """Raise for keywords that look like document boundaries but that nothing reads.

    Args:
        arguments: Keyword arguments of a model's forward, or of an attention call.
        known (`Container[str]`, *optional*): Further names that are read.

    Raises:
        ValueError: Names the keyword and the one that was probably meant.
    """
    for name, value in arguments.items():
        if value is None or name in CALL_KEYWORDS or name in known:
            continue
        meant = _probably_meant(name)
        if meant:
            raise ValueError(
                f"keyword {name}={type(value).__name__}: nothing reads it, so documents would see "
                f"each other; write {meant}"
            )


def _probably_meant(name: str) -> str:
    """Return the boundaries that an unknown keyword was probably meant to give, or ""."""
    word = name.lower().replace("_", "")
    if word.startswith("cuseq"):
        return "cu_seq_lens_k" if word.endswith(("k", "kv")) else "cu_seq_lens_q"
    others = ("documentid", "docid", "segmentid", "sequenceid")  # names in other libraries
    if word.startswith(("seqid", "seqindex", *others)):
        return "seq_idx"
    near = get_close_matches(word, _BOUNDARIES, n=1, cutoff=0.9)  # not T5's position_bias
    return _BOUNDARIES[near[0]] if near else ""
