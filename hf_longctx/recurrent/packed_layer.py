"""Run the recurrence and the convolution of a recurrent layer per document, also across ranks.

If the first document of a rank began on ranks before, the state that enters it and the rows that
its convolution reaches back to come from there.
Layer: recurrent. Letters: T rows of this rank, H heads, K heads of queries and keys, N rows of the
state, V its columns, C channels, W taps.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ..data.batch import LongCtxBatch
from ..kernels.conv import causal_conv
from ..kernels.linear_attention import linear_attention, summarize
from ..planning.planners.state_scan import State
from ..planning.predict.scan_schedule import StateSizes
from ..planning.program.program import Program
from ..runtime.executor import Runtime
from ..runtime.state_scans import ScanCall, begin_scan, exchange_halo


@torch.autocast("cpu", enabled=False)  # it would multiply states in bf16
def run_recurrence(
    step: str,
    batch: LongCtxBatch,
    module: nn.Module,
    q_TKN: Tensor,
    k_TKN: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta_TH: Tensor | None = None,
) -> Tensor:
    """Run each document's recurrence from an empty state: `[T, H, V]`, float32 or wider.

    Args:
        step (`str`): Which recurrence of the layer this is.
        batch (`LongCtxBatch`): The documents in the rows.
        module (`nn.Module`): The layer.
        q_TKN, k_TKN, v_THV (`Tensor`): Rows of this rank; K divides H.
        log_decay (`Tensor`): `[T, H]` or `[T, H, N]`, at most 0.
        beta_TH (`Tensor`, *optional*): The delta rule's rate; `None` for no delta rule.

    Raises:
        ValueError: if no kernels are built for the rows' device, or if a batch cut over ranks has
            no channel.
    """
    _validate_device(q_TKN)
    lengths, wide = segment_lengths(batch), torch.promote_types(v_THV.dtype, torch.float32)
    attend = partial(
        linear_attention, q_TKN, k_TKN, log_decay=log_decay, lengths=lengths, beta=beta_TH
    )
    # The factor on the state travels too, and its size decides which schedule is fastest.
    decay = "matrix" if beta_TH is not None else "row" if log_decay.ndim == 3 else "head"
    _, heads, columns = v_THV.shape
    sizes = StateSizes(State(k_TKN.shape[2], decay), heads, columns, wide.itemsize)
    program = batch.scan_program(sizes)
    if program is None:
        return attend(v_THV)
    first, final = (batch.layout.of_rank(batch.rank)[end] for end in (0, -1))
    # Only a document that goes on behind this rank has a state to pass on; else no rows summarize.
    leaves = final.stop < batch.layout.lengths[final.document]
    last = slice(len(v_THV) - (lengths[-1] if leaves else 0), None)
    rate = None if beta_TH is None else beta_TH[last]
    summary = summarize(k_TKN[last], v_THV[last], log_decay=log_decay[last], beta=rate)
    exchange = _LayerExchange(batch, module, step, program)
    scan = begin_scan(summary, call=exchange.call)
    # Only a segment that does not begin its document has a state that enters it.
    continued = lengths[0] if first.start else 0
    if beta_TH is not None and continued:
        # The delta rule's values depend on the entering state, so nothing overlaps with the scan.
        return attend(v_THV, entering=exchange.keep(scan.finish()))
    out = attend(v_THV.to(wide))  # as if nothing entered, while states travel
    entering = exchange.keep(scan.finish())
    read = _read_entering(q_TKN[:continued], log_decay[:continued], entering)
    return torch.cat([out[:continued] + read, out[continued:]]).to(v_THV.dtype)


def _read_entering(q_TKN: Tensor, log_decay: Tensor, entering_HNV: Tensor) -> Tensor:
    """Return `[T, H, V]`: what a document's rows read of the state that entered before them."""
    decay = log_decay.to(entering_HNV.dtype).cumsum(0).exp()
    decay = decay if decay.ndim == 3 else decay[..., None]
    q = q_TKN.repeat_interleave(len(entering_HNV) // q_TKN.shape[1], 1)
    return torch.einsum("thn,hnv->thv", q * decay, entering_HNV)


def run_convolution(
    batch: LongCtxBatch,
    module: nn.Module,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Run the causal convolution of each document, which sees nothing before its start: `[T, C]`.

    Args:
        batch (`LongCtxBatch`): The documents in the rows.
        module (`nn.Module`): The module that has the weights.
        x_TC (`Tensor`): Rows of this rank.
        weight_CW (`Tensor`): The last tap is that of a row itself.
        bias (`Tensor`, *optional*): `[C]`.

    Raises:
        ValueError: as `run_recurrence`.
    """
    _validate_device(x_TC)
    width, halo = weight_CW.shape[1] - 1, None
    program = batch.halo_program(width)
    if program is not None:
        exchange = _LayerExchange(batch, module, "halo", program)
        halo = exchange.keep(exchange_halo(x_TC, width=width, call=exchange.call))
    return causal_conv(x_TC, weight_CW, bias, lengths=segment_lengths(batch), halo=halo)


def segment_lengths(batch: LongCtxBatch) -> list[int]:
    """Return the rows of each of this rank's segments, in row order."""
    return [segment.stop - segment.start for segment in batch.layout.of_rank(batch.rank)]


class _LayerExchange:
    """One use of a program by a layer; its result is kept for a recompute, which sends nothing.

    Args:
        batch (`LongCtxBatch`): With the runtime and what is saved.
        module (`nn.Module`): The layer; with `step` it names what is kept.
        step (`str`): Which exchange of the layer it is.
        program (`Program`): This rank's.
    """

    def __init__(self, batch: LongCtxBatch, module: nn.Module, step: str, program: Program) -> None:
        self.runtime: Runtime = batch.binding.runtime or Runtime()
        if self.runtime.channel is None:
            raise ValueError(
                f"a batch cut over {batch.layout.ranks} ranks reached a recurrent layer without a "
                "channel; train with LongCtxTrainer, which binds one to each batch"
            )
        self.saved, self.training = batch.binding.saved, module.training
        # A layer may have several exchanges, each kept under its own step.
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

    def keep(self, result: Tensor) -> Tensor:
        """Keep the exchange's result if there may be a recompute; return it."""
        if self.recompute:
            self.runtime.account.recompute_bytes += self.runtime.sent_bytes - self.before
        elif self.training or result.requires_grad:
            self.saved.keep(self.name, (result.detach(),))
        return result


def _validate_device(rows: Tensor) -> None:
    if rows.device.type != "cpu":
        raise ValueError(
            f"recurrent layers on {rows.device}: only the CPU kernels are built yet; set "
            "use_cpu=True"
        )
