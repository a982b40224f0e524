"""What flash-linear-attention's layers give their kernels -> their recurrences, per document.

Floor: models. Sources: arXiv 2312.06635 (GLA), 2307.08621 (RetNet), 2406.06484 (DeltaNet),
2412.06464 (gated DeltaNet), 2510.26692 (KDA). Letters: B batch, S tokens of a row, T = B S rows, K
heads of queries and keys, H of values, N rows of the state, V its columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .gated_delta import DELTA, recurrence
from .running import Running

GATED, RETENTION = "gated linear attention", "retention"


def gated_linear_attention(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """GLA: `g` or `gk`, `[B, S, H, N]`, is the log of the decay of each row of the state."""
    layer.refuse(initial_state=initial_state, output_final_state=output_final_state)
    log_decay = gk if g is None else g
    assert log_decay is not None
    return recurrence(layer, GATED, q, k, v, log_decay, scale=scale)


def retention(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """RetNet: head h decays by 1 - 2 ** (-5 - h) a token."""
    layer.refuse(initial_state=initial_state, output_final_state=output_final_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    exponents = -5 - torch.arange(v.shape[2], device=q.device, dtype=wide)
    log_decay_H = torch.log1p(-torch.exp2(exponents))
    return recurrence(layer, RETENTION, q, k, v, log_decay_H.expand(v.shape[:3]), scale=scale)


def delta_rule(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """DeltaNet: the delta rule without a decay."""
    layer.refuse(initial_state=initial_state, output_final_state=output_final_state)
    stay = torch.zeros_like(beta)
    unit_rows = use_qk_l2norm_in_kernel
    return recurrence(layer, DELTA, q, k, v, stay, beta, scale=scale, unit_rows=unit_rows)


def gated_delta_rule(
    layer: Running,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Gated DeltaNet (`g` of `[B, S, H]`) and KDA (`[B, S, H, N]`): gates are formed here."""
    layer.refuse(initial_state=initial_state, output_final_state=output_final_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    log_decay, rate = g.to(wide), beta.to(wide)
    if use_gate_in_kernel:
        assert A_log is not None
        shape = (g.shape[2],) + (1,) * (g.dim() - 3)
        speed = A_log.to(wide).exp().view(shape)
        if dt_bias is not None:
            log_decay = log_decay + dt_bias.to(wide).view(g.shape[2:])
        if lower_bound is None:
            log_decay = -speed * F.softplus(log_decay)
        else:
            log_decay = lower_bound * torch.sigmoid(speed * log_decay)
    if use_beta_sigmoid_in_kernel:
        rate = rate.sigmoid() * (2 if allow_neg_eigval else 1)
    unit_rows = use_qk_l2norm_in_kernel
    return recurrence(layer, DELTA, q, k, v, log_decay, rate, scale=scale, unit_rows=unit_rows)
