"""`attn_implementation="ulysses"`: ranks exchange heads for tokens, attend, and exchange back.

Floor: attention. Source: arXiv 2309.14509. The plan is `plan.ulysses`.
"""

from typing import Any

from torch import Tensor, nn

from . import hook


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, each rank over its share of the heads."""
    return hook.run("ulysses", module, query, key, value, attention_mask, **kwargs)
