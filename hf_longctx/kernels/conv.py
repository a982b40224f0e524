"""Rows of packed documents -> their short causal convolution, one filter per channel.

Floor: kernels. Letters: T tokens, C channels, W taps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None = None,
    *,
    lengths: Sequence[int],
    halo: Tensor | None = None,
) -> Tensor:
    """Each token's own row and the `W - 1` before it in its segment, weighted: `[T, C]`.

    Sums are float32 or wider; the result has x's dtype. An activation is the caller's to apply.

    Args:
        x_TC (`Tensor`): The convolution's inputs.
        weight_CW (`Tensor`): Taps of each channel, the token's own last.
        bias (`Tensor`, *optional*): `[C]`.
        lengths (`Sequence[int]`): Tokens of each segment, in order; they sum to T.
        halo (`Tensor`, *optional*): `[W - 1, C]`, the inputs before the first segment, zeros where
            its document has none (unused if that segment is empty); `None` for zeros.
    """
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    taps = weight_CW.shape[1]
    tokens = np.asarray(lengths, dtype=np.int64)
    # each segment stands behind a gap of W - 1 rows
    rows = np.arange(len(x_TC)) + (taps - 1) * np.repeat(np.arange(1, len(tokens) + 1), tokens)
    place = torch.from_numpy(rows).to(x_TC.device)
    apart = x_TC.new_zeros(len(x_TC) + (taps - 1) * len(tokens), x_TC.shape[1], dtype=wide)
    apart = apart.index_copy(0, place, x_TC.to(wide))
    if halo is not None and len(tokens):
        apart = torch.cat([halo.to(wide), apart[taps - 1 :]])
    weight = weight_CW.to(wide)
    valid = max(len(apart) - taps + 1, 0)
    out = torch.stack([apart[w : w + valid] * weight[:, w] for w in range(taps)]).sum(0)
    out = out.index_select(0, place - (taps - 1))
    return (out if bias is None else out + bias.to(wide)).to(x_TC.dtype)
