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


def recurrence(
    layer: Running,
    step: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    unit_rows: bool = False,
) -> tuple[Tensor, None]:
    """`[B, S, H, V]` in the query's dtype and no state, also of recurrences without the rule.

    Args:
        layer (`Running`): The layer under way.
        step (`str`): Which recurrence it is.
        q, k (`Tensor`): `[B, S, K, N]`; each head serves H / K consecutive ones of values.
        v (`Tensor`): `[B, S, H, V]`.
        log_decay (`Tensor`): `[B, S, H]`, or `[B, S, H, N]` for one per row of the state.
        beta (`Tensor`, *optional*): `[B, S, H]`, the delta rule's rate.
        scale (`float`, *optional*): Of the queries; N ** -0.5 by default.
        unit_rows (`bool`, *optional*): Scale queries and keys to length 1 first.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q_TKN, k_TKN, v_THV, decay = (x.flatten(0, 1).to(wide) for x in (q, k, v, log_decay))
    layer.begin(step, q_TKN)
    if unit_rows:
        q_TKN, k_TKN = _unit(q_TKN), _unit(k_TKN)
    q_TKN = q_TKN * (q.shape[-1] ** -0.5 if scale is None else scale)
    beta_TH = None if beta is None else beta.flatten(0, 1).to(wide)
    out = recurrent(step, layer.batch, layer.module, q_TKN, k_TKN, v_THV, decay, beta_TH)
    return out.to(q.dtype).unflatten(0, q.shape[:2]), None


def _unit(rows: Tensor) -> Tensor:
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
    """The recurrence as the original without a cache; `g` is the log of the decay.

    `kwargs` are `chunk_size`, and what does not matter to the original either.
    """
    layer.refuse(initial_state=initial_state, output_final_state=output_final_state)
    unit_rows = use_qk_l2norm_in_kernel
    return recurrence(layer, DELTA, query, key, value, g, beta, unit_rows=unit_rows)


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
