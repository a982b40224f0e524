"""Rules for what is refused and why: one set for errors, the support table and the tests."""

from .argument_rules import (
    validate_arguments,
    validate_extension_lock,
    validate_unread_flags,
)
from .call_rules import validate_call, validate_misspelt
from .model_rules import Sharing, model_problems, validate_heads, validate_model
from .rules import (
    FLA_FAMILIES,
    MIXED_LAYERS,
    NAMES,
    NESTED,
    RECURRENT_FAMILIES,
    RECURRENT_LAYERS,
    SOFTMAX_LAYERS,
    SOFTMAX_NAMES,
    recurrent_family,
    validate_name,
)
from .table import RULES, table
from .trainer_rules import validate_given, validate_pingpong, validate_wrappers

__all__ = [
    "FLA_FAMILIES", "MIXED_LAYERS", "NAMES", "NESTED", "RECURRENT_FAMILIES", "RECURRENT_LAYERS",
    "RULES", "SOFTMAX_LAYERS", "SOFTMAX_NAMES", "Sharing", "model_problems", "recurrent_family",
    "table", "validate_arguments", "validate_call", "validate_extension_lock", "validate_given",
    "validate_heads", "validate_misspelt", "validate_model", "validate_name", "validate_pingpong",
    "validate_unread_flags", "validate_wrappers",
]  # fmt: skip
