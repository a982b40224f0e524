"""`attn_implementation="distca"`: attention cut into tasks and balanced over the ranks of a group.

Floor: attention. Source: arXiv 2510.18121. The plan is `plan.distca`; each rank serves in place.
"""

from typing import Any

from torch import Tensor, nn

from . import hook


def distca_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, with balanced tasks."""
    return hook.run("distca", module, query, key, value, attention_mask, **kwargs)
