"""What works under which name, and why not: one set of rules for refusals, README and tests.

Floor: support. Nothing is ever downgraded in silence.
"""

from .calls import CALL_KEYWORDS, refuse_call, refuse_misspelt
from .families import (
    FLA_FAMILIES,
    MIXED_LAYERS,
    RECURRENT_FAMILIES,
    RECURRENT_LAYERS,
    SOFTMAX_LAYERS,
    recurrent_family,
)
from .flags import refuse_unread_flags
from .given import refuse_given
from .heads import HEAD_RULES, Sharing, refuse_heads
from .overlap import PINGPONG_RULES, refuse_pingpong
from .probed import PROBE_RULES
from .rules import (
    MODEL_RULES,
    NAMES,
    NESTED,
    SOFTMAX_NAMES,
    Rule,
    model_problems,
    refuse_model,
    refuse_name,
)
from .table import table
from .training import ARGUMENT_RULES, refuse_arguments
from .wrappers import WRAPPER_RULES, refuse_wrappers

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
    "refuse_arguments",
    "refuse_call",
    "refuse_given",
    "refuse_heads",
    "refuse_misspelt",
    "refuse_model",
    "refuse_name",
    "refuse_pingpong",
    "refuse_unread_flags",
    "refuse_wrappers",
    "table",
]
