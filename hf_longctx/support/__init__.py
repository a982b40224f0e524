"""What works under which name, and why not: one set of rules for refusals, README and tests.

Layer: support. Nothing is ever downgraded in silence.
"""

from .argument_rules import ARGUMENT_RULES, validate_arguments, validate_unread_flags
from .call_rules import (
    CALL_KEYWORDS,
    HEAD_RULES,
    Sharing,
    validate_call,
    validate_heads,
    validate_misspelt,
)
from .model_rules import (
    FLA_FAMILIES,
    MIXED_LAYERS,
    MODEL_RULES,
    NAMES,
    NESTED,
    RECURRENT_FAMILIES,
    RECURRENT_LAYERS,
    SOFTMAX_LAYERS,
    SOFTMAX_NAMES,
    Rule,
    model_problems,
    recurrent_family,
    validate_model,
    validate_name,
)
from .table import table
from .trainer_rules import (
    PINGPONG_RULES,
    PROBE_RULES,
    WRAPPER_RULES,
    validate_given,
    validate_pingpong,
    validate_wrappers,
)

__all__ = [
    "ARGUMENT_RULES",
    "CALL_KEYWORDS",
    "FLA_FAMILIES",
    "HEAD_RULES",
    "MIXED_LAYERS",
    "MODEL_RULES",
    "NAMES",
    "NESTED",
    "PINGPONG_RULES",
    "PROBE_RULES",
    "RECURRENT_FAMILIES",
    "RECURRENT_LAYERS",
    "SOFTMAX_LAYERS",
    "SOFTMAX_NAMES",
    "WRAPPER_RULES",
    "Rule",
    "Sharing",
    "model_problems",
    "recurrent_family",
    "validate_arguments",
    "validate_call",
    "validate_given",
    "validate_heads",
    "validate_misspelt",
    "validate_model",
    "validate_name",
    "validate_pingpong",
    "validate_unread_flags",
    "validate_wrappers",
    "table",
]
