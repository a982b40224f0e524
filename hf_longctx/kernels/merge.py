"""Partials of one query row over different keys -> the softmax over all of them.

Floor: kernels. Partials are float32 or wider; lse is the natural log; a row without keys is
(0, -inf).
"""

import torch
from torch import Tensor


def merge(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, *, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two partials `(out [..., D], lse [...])`, the output `into` a tensor if one is given.

    Only exponents of non-positive numbers are taken, so nothing overflows, and two rows without
    keys merge to a row without keys.
    """
    top = torch.maximum(lse, other_lse)
    safe = torch.where(top.isneginf(), torch.zeros_like(top), top)
    weight, other_weight = torch.exp(lse - safe), torch.exp(other_lse - safe)
    total = weight + other_weight
    share = torch.where(total > 0, weight / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
    merged = torch.lerp(other_out, out, share[..., None], out=into)  # one pass over the rows
    return merged, safe + torch.log(total)
