"""MiniMax's lightning attention, per document: linear attention with a fixed decay of each head.

Floor: models. Source: arXiv 2401.04658. Letters: B batch, S tokens of a row, T = B S rows, H heads,
D head size.
"""

from typing import Any

import torch
from torch import Tensor

from ..attention.linear import recurrent
from .adapter import Adapter, Replacement
from .running import Running

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


ADAPTERS = (
    Adapter(
        models=("minimax",),
        layer="LightningAttention",
        forward=Replacement(
            lightning_forward, "hidden_states position_embeddings attention_mask cache kwargs"
        ),
        steps=(LIGHTNING,),
    ),
)
