"""Rows of a recurrent layer on this rank -> its convolution and its recurrence, per document.

Floor: attention. Where the first document of a rank comes from ranks before, so do the state that
enters it and the rows that its convolution reaches back to. Letters: T rows of this rank, H heads,
N rows of the state, V its columns, C channels, W taps.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..data.batch import LongCtxBatch
from ..kernels.conv import causal_conv
from ..kernels.linear import linear_attention, summarize
from ..plan.program import Program
from ..plan.scan import State
from ..plan.schedule import Sizes
from ..runtime.binding import Runtime
from ..runtime.scans import Call, exchange_halo, scan_states


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
    _refuse(q_THN)
    lengths, entering = segment_lengths(batch), None
    rows, (heads, columns) = k_THN.shape[2], v_THV.shape[1:]
    decay = "matrix" if beta is not None else "row" if log_decay.ndim == 3 else "head"
    wide = torch.promote_types(v_THV.dtype, torch.float32)
    program = batch.scan_program(Sizes(State(rows, decay), heads, columns, wide.itemsize))
    if program is not None:
        last = slice(len(v_THV) - lengths[-1], None)
        rate = None if beta is None else beta[last]
        summary = summarize(k_THN[last], v_THV[last], log_decay=log_decay[last], beta=rate)
        fetch = partial(scan_states, summary)
        entering = _from_others(fetch, batch, module, step, program)
    return linear_attention(
        q_THN, k_THN, v_THV, log_decay=log_decay, lengths=lengths, beta=beta, entering=entering
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
    _refuse(x_TC)
    width, halo = weight_CW.shape[1] - 1, None
    program = batch.halo_program(width)
    if program is not None:
        fetch = partial(exchange_halo, x_TC, width=width)
        halo = _from_others(fetch, batch, module, "halo", program)
    return causal_conv(x_TC, weight_CW, bias, lengths=segment_lengths(batch), halo=halo)


def segment_lengths(batch: LongCtxBatch) -> list[int]:
    """Rows of each of this rank's segments, in row order."""
    return [segment.stop - segment.start for segment in batch.layout.of_rank(batch.rank)]


def _from_others(
    fetch: Callable[..., Tensor],
    batch: LongCtxBatch,
    module: nn.Module,
    step: str,
    program: Program,
) -> Tensor:
    """What comes from other ranks; in a recompute, what came in the first forward."""
    runtime: Runtime = batch.runtime or Runtime()
    if runtime.channel is None:
        raise ValueError(
            f"a batch cut over {batch.layout.ranks} ranks reached a recurrent layer without a "
            "channel; train with LongCtxTrainer, which binds one to each batch"
        )
    account, name = runtime.account, (getattr(module, "layer_idx", id(module)), step)
    recompute = torch._C._current_graph_task_id() != -1  # inside a backward pass
    call = Call(
        program=program,
        channel=runtime.channel,
        account=account,
        saved=batch.saved.take(name) if recompute else None,
        forget=None if recompute else partial(batch.saved.drop, name),
    )
    before = runtime.sent_bytes
    came = fetch(call=call)
    if recompute:
        account.recompute_bytes += runtime.sent_bytes - before
    elif module.training or came.requires_grad:
        batch.saved.keep(name, (came.detach(),))
    return came


def _refuse(rows: Tensor) -> None:
    if rows.device.type != "cpu":
        raise ValueError(
            f"recurrent layers on {rows.device}: only the CPU kernels are built yet; set "
            "use_cpu=True"
        )
