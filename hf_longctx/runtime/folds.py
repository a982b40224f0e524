"""Parts of a block -> the block: copied, summed, merged or formed anew.

Floor: runtime. A block is the list of its fields' tensors, in the order of its kind.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, linalg

from ..kernels.merge import merge
from ..kernels.summary import decayed

_Views = Sequence[Tensor]


def fold(how: str, target: _Views, parts: Sequence[_Views]) -> None:
    """Combine parts into the target, in their order; see `plan.program.Fold`."""
    if how == "cat":
        for i, view in enumerate(target):
            view.copy_(torch.cat([part[i] for part in parts]) if len(parts) > 1 else parts[0][i])
    elif how == "sum":
        for part in parts:
            for view, value in zip(target, part, strict=True):
                view.add_(value)
    elif how == "affine":
        (offset,), (decay,), (entering,) = parts
        target[0].copy_(offset + _decayed(decay, entering))
    elif how == "product":
        (later,), (earlier,) = parts
        target[0].copy_(_decayed(later, earlier))
    elif how == "delta":
        grad_out, out, lse = parts[0]
        wide = lse.dtype
        target[0].copy_(grad_out)
        target[1].copy_(linalg.vecdot(grad_out.to(wide), out.to(wide))[..., None])
        target[2].copy_(lse)
    else:
        (out, lse), same = parts[0], target[0].dtype == parts[0][0].dtype
        lse = lse[..., 0]
        for other_out, other_lse in parts[1:]:
            last = other_out is parts[-1][0]  # then all parts are read, whatever the target is
            into = target[0] if same and last else None
            out, lse = merge(out, lse, other_out, other_lse[..., 0], into=into)
        if out is not target[0]:
            target[0].copy_(out)
        target[1].copy_(lse[..., None])


def _decayed(decay: Tensor, state_NHV: Tensor) -> Tensor:
    """M S of arrays by rows: M is `[1, H, 1]`, `[N, H, 1]` or `[N, H, N]`."""
    return decayed(decay.transpose(0, 1), state_NHV.transpose(0, 1)).transpose(0, 1)
