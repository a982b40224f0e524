"""Rows of a recurrent layer on this rank -> its convolution and its recurrence, per document.

Floor: attention. Letters: T rows of this rank, H heads, N rows of the state, V its columns, C
channels, W taps.
"""

import torch
from torch import Tensor, nn

from ..data.batch import LongCtxBatch
from ..kernels.conv import causal_conv
from ..kernels.linear import linear_attention


@torch.autocast("cpu", enabled=False)  # it would multiply states in bf16
def recurrent(
    step: str,
    batch: LongCtxBatch,
    module: nn.Module,
    q_THN: Tensor,
    k_THN: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
) -> Tensor:
    """`[T, H, V]`, float32 or wider: each document's recurrence from an empty state.

    Args:
        step (`str`): Which recurrence of the layer this is.
        batch (`LongCtxBatch`): The documents in the rows.
        module (`nn.Module`): The layer.
        q_THN, k_THN, v_THV (`Tensor`): Rows of this rank.
        log_decay (`Tensor`): `[T, H]` or `[T, H, N]`, at most 0.
        beta (`Tensor`, *optional*): `[T, H]`, of the delta rule.

    Raises:
        ValueError: where the kernels are not built for the rows.
    """
    _refuse(batch, q_THN)
    return linear_attention(
        q_THN, k_THN, v_THV, log_decay=log_decay, lengths=segment_lengths(batch), beta=beta
    )


def convolve(
    batch: LongCtxBatch,
    module: nn.Module,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`[T, C]`: the causal convolution of each document, which sees nothing before its start.

    Args:
        batch (`LongCtxBatch`): The documents in the rows.
        module (`nn.Module`): The layer.
        x_TC (`Tensor`): Rows of this rank.
        weight_CW (`Tensor`): The last tap is that of a row itself.
        bias (`Tensor`, *optional*): `[C]`.

    Raises:
        ValueError: where the kernels are not built for the rows.
    """
    _refuse(batch, x_TC)
    return causal_conv(x_TC, weight_CW, bias, lengths=segment_lengths(batch))


def segment_lengths(batch: LongCtxBatch) -> list[int]:
    """Rows of each of this rank's segments, in row order."""
    return [segment.stop - segment.start for segment in batch.layout.of_rank(batch.rank)]


def _refuse(batch: LongCtxBatch, rows: Tensor) -> None:
    if batch.layout.ranks > 1:
        raise ValueError(
            f"recurrent layers over {batch.layout.ranks} ranks are not built yet; set "
            "--longctx_group_size 1"
        )
    if rows.device.type != "cpu":
        raise ValueError(
            f"recurrent layers on {rows.device}: only the CPU kernels are built yet; set "
            "use_cpu=True"
        )
