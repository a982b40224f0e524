"""Kimi delta attention, per document: the gated delta rule with a decay for each row of the state.

Floor: models. Source: arXiv 2510.26692.
"""

from .adapter import Adapter, Replacement
from .gated_delta import DELTA, delta_rule
from .short_conv import CONV, CONV_REPLACEMENT

ADAPTERS = (
    Adapter(
        models=("kimi_linear",),
        layer="DeltaAttention",
        functions={
            "causal_conv1d_fn": CONV_REPLACEMENT,
            "chunk_kimi_delta_attention": Replacement(
                delta_rule,
                "query key value g beta chunk_size initial_state output_final_state "
                "use_qk_l2norm_in_kernel kwargs",
            ),
        },
        steps=(CONV, DELTA),
    ),
)
