"""What flash-linear-attention's layers give their kernels -> their recurrences, per document.

Floor: models. Sources: arXiv 2312.06635 (GLA), 2307.08621 (RetNet), 2406.06484 (DeltaNet),
2412.06464 (gated DeltaNet), 2510.26692 (KDA). Letters: B batch, S tokens of a row, T = B S rows, K
heads of queries and keys, H of values, N rows of the state, V its columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.linear import recurrent
from .fla_parts import refuse_state
from .gated_delta import DELTA, unit
from .running import Running

GATED, RETENTION = "gated linear attention", "retention"


def _run(
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
    """`[B, S, H, V]` in the query's dtype and no state.

    Args:
        layer (`Running`): The layer under way.
        step (`str`): Which recurrence it is.
        q, k (`Tensor`): `[B, S, K, N]`; each head serves H / K consecutive ones of values.
        v (`Tensor`): `[B, S, H, V]`.
        log_decay (`Tensor`): `[B, S, H]` or `[B, S, H, N]`.
        beta (`Tensor`, *optional*): `[B, S, H]`.
        scale (`float`, *optional*): Of the queries; N ** -0.5 by default.
        unit_rows (`bool`, *optional*): Scale queries and keys to length 1 first.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q_TKN, k_TKN, v_THV, decay = (x.flatten(0, 1).to(wide) for x in (q, k, v, log_decay))
    layer.begin(step, q_TKN)
    if unit_rows:
        q_TKN, k_TKN = unit(q_TKN), unit(k_TKN)
    q_TKN = q_TKN * (q.shape[-1] ** -0.5 if scale is None else scale)
    beta_TH = None if beta is None else beta.flatten(0, 1).to(wide)
    out = recurrent(step, layer.batch, layer.module, q_TKN, k_TKN, v_THV, decay, beta_TH)
    return out.to(q.dtype).unflatten(0, q.shape[:2]), None


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
    refuse_state(initial_state, output_final_state)
    log_decay = gk if g is None else g
    assert log_decay is not None
    return _run(layer, GATED, q, k, v, log_decay, scale=scale)


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
    refuse_state(initial_state, output_final_state)
    wide = torch.promote_types(q.dtype, torch.float32)
    exponents = -5 - torch.arange(v.shape[2], device=q.device, dtype=wide)
    log_decay_H = torch.log1p(-torch.exp2(exponents))
    return _run(layer, RETENTION, q, k, v, log_decay_H.expand(v.shape[:3]), scale=scale)


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
    refuse_state(initial_state, output_final_state)
    stay = torch.zeros_like(beta)
    unit_rows = use_qk_l2norm_in_kernel
    return _run(layer, DELTA, q, k, v, stay, beta, scale=scale, unit_rows=unit_rows)


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
    refuse_state(initial_state, output_final_state)
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
    return _run(layer, DELTA, q, k, v, log_decay, rate, scale=scale, unit_rows=unit_rows)
