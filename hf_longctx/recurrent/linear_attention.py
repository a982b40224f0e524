"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo hybrid, per document.

Layer: recurrent. Source: arXiv 2412.06464. Letters: B batch, S tokens of a row, T = B S rows, K heads
of queries and keys, H of values, N rows of the state, V its columns.

Kimi delta attention, per document: the gated delta rule with a decay for each row of the state. Source: arXiv 2510.26692.

MiniMax's lightning attention, per document: linear attention with a fixed decay of each head. Source: arXiv 2401.04658. Letters: B batch, S tokens of a row, T = B S rows, H heads,
D head size.
"""

from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter, Replacement
from .packed_layer import recurrent
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


DELTA_ADAPTERS = (
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


KIMI_ADAPTERS = (
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


LIGHTNING = "lightning attention"


def lightning_forward(
    layer: Running,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[B, S, hidden]` and no state: the layer's forward, whose recurrence is inline there."""
    layer.refuse(attention_mask=attention_mask, cache=cache)
    own: Any = layer.module
    qkv = own.act_fn(own.qkv_proj(hidden_states))
    qkv_THD = qkv.flatten(0, 1).unflatten(-1, (own.num_attention_heads, 3 * own.head_dim))
    layer.begin(LIGHTNING, qkv_THD)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv_THD.to(wide).split(own.head_dim, dim=-1)
    log_decay_TH = -own.slope_rate.to(wide).flatten().expand(len(q), -1)
    out = recurrent(LIGHTNING, layer.batch, own, q, k, v, log_decay_TH)
    out = own.norm(out.flatten(1).to(qkv.dtype).unflatten(0, hidden_states.shape[:2]))
    return own.out_proj(torch.sigmoid(own.output_gate(hidden_states)) * out), None


LIGHTNING_ADAPTERS = (
    Adapter(
        models=("minimax",),
        layer="LightningAttention",
        forward=Replacement(
            lightning_forward, "hidden_states position_embeddings attention_mask cache kwargs"
        ),
        steps=(LIGHTNING,),
    ),
)
