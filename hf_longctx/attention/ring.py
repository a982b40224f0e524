"""`attn_implementation="ring"`: keys and values travel once around the ranks of a group.

Floor: attention. Source: arXiv 2310.01889. The plan is `plan.ring`; queries stay at home.
"""

from typing import Any

from torch import Tensor, nn

from . import hook


def ring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, in ring order."""
    return hook.run("ring", module, query, key, value, attention_mask, **kwargs)
