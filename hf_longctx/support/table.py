"""The rules -> the README's support table, in Markdown.

Layer: support.
"""

from .argument_rules import ARGUMENT_RULES
from .call_rules import HEAD_RULES
from .model_rules import MODEL_RULES, NAMES, SOFTMAX_NAMES
from .trainer_rules import PINGPONG_RULES, PROBE_RULES, WRAPPER_RULES


def table() -> str:
    """The README's support table, in Markdown."""
    lines = ["| | " + " | ".join(f"`{n}`" for n in NAMES) + " | why not, and what to do |"]
    lines.append("|---|" + "---|" * len(NAMES) + "---|")
    bidirectional = "bidirectional attention of encoders and embedders, with or without a window"
    works = (
        "causal softmax attention, packed documents",
        "grouped and multi-query heads",
        "sliding window, alone or mixed with full layers",
        "softcap, attention sinks, value heads of another size",
        "activation checkpointing (re-entrant and not)",
        "DDP, native FSDP2 (`DistributedConfig(fsdp_size=N)`), DeepSpeed ZeRO 0, 1, 2",
        "padding masks, caches and `generate` (local)",
        "float32, bf16, float64 on CPU with gloo",
    )
    lines += [f"| {feature} |" + " yes |" * len(NAMES) + " |" for feature in works]
    softmax_alone = "".join(" yes |" if name in SOFTMAX_NAMES else " - |" for name in NAMES)
    lines.append(f"| {bidirectional} |{softmax_alone} |")
    rules = (*MODEL_RULES, *PROBE_RULES, *ARGUMENT_RULES, *WRAPPER_RULES)
    for rule in (*rules, *PINGPONG_RULES, *HEAD_RULES):
        cells = "".join(" refused |" if name in rule.names else " yes |" for name in NAMES)
        lines.append(f"| {rule.feature} |{cells} {rule.rule}; {rule.remedy} |")
    return "\n".join(lines)
