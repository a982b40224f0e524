"""Write the support table: what works under which attention name, and why the rest is refused.

Its rows are the rules themselves, so the table cannot differ from what the code does.
Layer: support.
"""

from .argument_rules import ARGUMENT_RULES
from .model_rules import HEAD_RULES, MODEL_RULES, PROBE_RULES
from .rules import NAMES, SOFTMAX_NAMES, Rule
from .trainer_rules import COLLATOR, PINGPONG_RULES, WRAPPER_RULES

WORKS: dict[str, tuple[str, ...]] = {  # feature -> attention names
    "causal softmax attention, packed documents": NAMES,
    "grouped and multi-query heads": NAMES,
    "sliding window, alone or mixed with full layers": NAMES,
    "softcap, attention sinks, value heads of another size": NAMES,
    "activation checkpointing (re-entrant and not)": NAMES,
    "DDP, native FSDP2 (`DistributedConfig(fsdp_size=N)`), DeepSpeed ZeRO 0, 1, 2": NAMES,
    "padding masks, caches and `generate` (local)": NAMES,
    "float32, bf16, float64 on CPU with gloo": NAMES,
    "bidirectional attention of encoders and embedders, with or without a window": SOFTMAX_NAMES,
}
RULES: dict[str, tuple[Rule, ...]] = {  # what they look at -> the rules, in the table's order
    "a model's config": MODEL_RULES,
    "a model, on a few tokens": PROBE_RULES,
    "a data collator": (COLLATOR,),
    "training arguments": ARGUMENT_RULES,
    "a trainer": WRAPPER_RULES,
    "a trainer with overlap `pingpong`": PINGPONG_RULES,
    "heads and ranks that exchange them": HEAD_RULES,
}


def table() -> str:
    """Return the support table in Markdown."""
    lines = ["| | " + " | ".join(f"`{n}`" for n in NAMES) + " | why not, and what to do |"]
    lines.append("|---|" + "---|" * len(NAMES) + "---|")
    for feature, names in WORKS.items():
        cells = "".join(" yes |" if name in names else " - |" for name in NAMES)
        lines.append(f"| {feature} |{cells} |")
    for rule in (rule for rules in RULES.values() for rule in rules):
        cells = "".join(" refused |" if name in rule.names else " yes |" for name in NAMES)
        lines.append(f"| {rule.feature} |{cells} {rule.rule}; {rule.remedy} |")
    return "\n".join(lines)
