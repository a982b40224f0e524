"""`attn_implementation="charm"`: keys and values cross each slow link once and spread behind it.

Floor: attention. Source: our own design; of CHARM+, arXiv 2611.05906, only the abstract is public.
The plan is `plan.charm`; queries stay at home.
"""

from typing import Any

from torch import Tensor, nn

from . import hook


def charm_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, level by level."""
    return hook.run("charm", module, query, key, value, attention_mask, **kwargs)
