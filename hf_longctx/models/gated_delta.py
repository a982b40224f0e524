"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo hybrid, per document.

Floor: models. Source: arXiv 2412.06464. Letters: B batch, S tokens of a row, T = B S rows, K heads
of queries and keys, H of values, N rows of the state, V its columns.
"""

from typing import Any

import torch
from torch import Tensor

from ..attention.linear import recurrent
from .adapter import Adapter, Replacement
from .running import Running
from .short_conv import CONV, CONV_REPLACEMENT

DELTA = "gated delta rule"


def unit(rows: Tensor) -> Tensor:
    """Rows scaled to length 1, as flash-linear-attention does it."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    layer: Running,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[B, S, H, V]` in the query's dtype and no state, as the original without a cache.

    Args:
        layer (`Running`): The layer under way.
        query, key (`Tensor`): `[B, S, K, N]`.
        value (`Tensor`): `[B, S, H, V]`.
        g (`Tensor`): Log of the decay, `[B, S, H]`, or `[B, S, H, N]` for one per row of the state.
        beta (`Tensor`): `[B, S, H]`.
        kwargs: `chunk_size`, and what does not matter to the original either.
    """
    assert initial_state is None and not output_final_state, "documents are packed: no cache"
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, log_decay, rate = (x.flatten(0, 1).to(wide) for x in (query, key, value, g, beta))
    layer.begin(DELTA, q)
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    q = q * q.shape[-1] ** -0.5
    out = recurrent(DELTA, layer.batch, layer.module, q, k, v, log_decay, rate)
    return out.to(query.dtype).unflatten(0, query.shape[:2]), None


ADAPTERS = (
    Adapter(
        models=("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
        layer="GatedDeltaNet",
        functions={
            "causal_conv1d_fn": CONV_REPLACEMENT,
            "torch_chunk_gated_delta_rule": Replacement(
                delta_rule,
                "query key value g beta chunk_size initial_state output_final_state "
                "use_qk_l2norm_in_kernel kwargs",
            ),
        },
        steps=(CONV, DELTA),
    ),
)
