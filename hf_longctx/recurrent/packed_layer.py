"""Rows of a recurrent layer on this rank -> its convolution and its recurrence, per document.

Layer: recurrent. Where the first document of a rank comes from ranks before, so do the state that
enters it and the rows that its convolution reaches back to. Letters: T rows of this rank, H heads,
N rows of the state, V its columns, C channels, W taps.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ..data.batch import LongCtxBatch
from ..kernels.conv import causal_conv
from ..kernels.linear_attention import linear_attention, summarize
from ..planning.planners.state_scan import State
from ..planning.predict.scan_schedule import Sizes
from ..planning.program.program import Program
from ..runtime.executor import Runtime
from ..runtime.state_scans import ScanCall, begin_scan, exchange_halo


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
    _reject(q_THN)
    lengths, wide = segment_lengths(batch), torch.promote_types(v_THV.dtype, torch.float32)
    attend = partial(
        linear_attention, q_THN, k_THN, log_decay=log_decay, lengths=lengths, beta=beta
    )
    decay = "matrix" if beta is not None else "row" if log_decay.ndim == 3 else "head"
    _, heads, columns = v_THV.shape
    sizes = Sizes(State(k_THN.shape[2], decay), heads, columns, wide.itemsize)
    program = batch.scan_program(sizes)
    if program is None:
        return attend(v_THV)
    first, final = (batch.layout.of_rank(batch.rank)[end] for end in (0, -1))
    leaves = final.stop < batch.layout.lengths[final.document]
    last = slice(len(v_THV) - (lengths[-1] if leaves else 0), None)
    rate = None if beta is None else beta[last]
    summary = summarize(k_THN[last], v_THV[last], log_decay=log_decay[last], beta=rate)
    exchange = _RankExchange(batch, module, step, program)
    under_way = begin_scan(summary, call=exchange.call)
    reached = lengths[0] if first.start else 0
    if beta is not None and reached:
        return attend(v_THV, entering=exchange.kept(under_way.finish()))
    out = attend(v_THV.to(wide))  # as if nothing entered, while states travel
    entering = exchange.kept(under_way.finish())
    read = _read(q_THN[:reached], log_decay[:reached], entering)
    return torch.cat([out[:reached] + read, out[reached:]]).to(v_THV.dtype)


def _read(q_THN: Tensor, log_decay: Tensor, entering_HNV: Tensor) -> Tensor:
    """`[T, H, V]`: what a document's first rows read of the state that entered before them."""
    decay = log_decay.to(entering_HNV.dtype).cumsum(0).exp()
    decay = decay if decay.ndim == 3 else decay[..., None]
    q = q_THN.repeat_interleave(len(entering_HNV) // q_THN.shape[1], 1)
    return torch.einsum("thn,hnv->thv", q * decay, entering_HNV)


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
    _reject(x_TC)
    width, halo = weight_CW.shape[1] - 1, None
    program = batch.halo_program(width)
    if program is not None:
        exchange = _RankExchange(batch, module, "halo", program)
        halo = exchange.kept(exchange_halo(x_TC, width=width, call=exchange.call))
    return causal_conv(x_TC, weight_CW, bias, lengths=segment_lengths(batch), halo=halo)


def segment_lengths(batch: LongCtxBatch) -> list[int]:
    """Rows of each of this rank's segments, in row order."""
    return [segment.stop - segment.start for segment in batch.layout.of_rank(batch.rank)]


class _RankExchange:
    """One use of a program by a layer; what comes is kept for a recompute, which sends nothing."""

    def __init__(self, batch: LongCtxBatch, module: nn.Module, step: str, program: Program) -> None:
        self.runtime: Runtime = batch.binding.runtime or Runtime()
        if self.runtime.channel is None:
            raise ValueError(
                f"a batch cut over {batch.layout.ranks} ranks reached a recurrent layer without a "
                "channel; train with LongCtxTrainer, which binds one to each batch"
            )
        self.saved, self.training = batch.binding.saved, module.training
        self.name = getattr(module, "layer_idx", id(module)), step
        self.recompute = torch._C._current_graph_task_id() != -1  # inside a backward pass
        self.before = self.runtime.sent_bytes
        self.call = ScanCall(
            program=program,
            channel=self.runtime.channel,
            account=self.runtime.account,
            saved=self.saved.take(self.name) if self.recompute else None,
            forget=None if self.recompute else partial(self.saved.drop, self.name),
            layer=getattr(module, "layer_idx", None),
        )

    def kept(self, came: Tensor) -> Tensor:
        """What came, once it has."""
        if self.recompute:
            self.runtime.account.recompute_bytes += self.runtime.sent_bytes - self.before
        elif self.training or came.requires_grad:
            self.saved.keep(self.name, (came.detach(),))
        return came


def _reject(rows: Tensor) -> None:
    if rows.device.type != "cpu":
        raise ValueError(
            f"recurrent layers on {rows.device}: only the CPU kernels are built yet; set "
            "use_cpu=True"
        )
