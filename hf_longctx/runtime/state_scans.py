"""Run scan and halo programs on a layer's tensors: what enters from other ranks, differentiable.

States travel while the caller computes: one autograd node has them leave, another takes what
enters, and backward runs the program's backward between the same two. What came in may be `saved`:
a recompute under activation checkpointing then sends nothing, and only its backward does.
Layer: runtime. Letters: T tokens, H heads, N rows of the state, V its columns, W taps, C channels.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.channels import Channel
from ..kernels.chunk_states import Summary
from ..planning.planners.state_scan import HaloArray
from ..planning.program.counts import Widths, sent
from ..planning.program.program import Program, ScanArray
from .executor import Account, Execution, drive

_Bound = Mapping[Any, dict[str, Tensor]]  # array -> its fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCall:
    """One layer's use of a program.

    Args:
        program (`Program`): This rank's.
        channel (`Channel`): Of its group.
        account (`Account`): Where to add what was done.
        saved (`tuple[Tensor, ...]`, *optional*): In a recompute, what came in during the first
            forward.
        forget (`Callable`, *optional*): Called when backward begins: what is saved can go.
        layer (`int`, *optional*): Number of the layer in its model, if known.
    """

    program: Program
    channel: Channel
    account: Account
    saved: tuple[Tensor, ...] | None = None
    forget: Callable[[], None] | None = None
    layer: int | None = None

    def run(self, bound: _Bound, *, widths: Widths, dtype: torch.dtype, back: bool) -> Execution:
        """Run one direction to its end on arrays that are given."""
        run = Execution(
            self.program,
            widths=widths,
            dtype=dtype,
            backward=back,
            channel=self.channel,
            account=self.account,
            layer=self.layer,
        )
        for array, fields in bound.items():
            run.bind(array, **fields)
        self.account.planned_bytes += sum(sent(self.program, widths, backward=back).values())
        for number in range(len(self.program.backward if back else self.program.forward)):
            drive(run.phase(number), self.account)
        return run

    def start(self, bound: _Bound, **given: Any) -> Future[Execution]:
        """Run as `run` does, in a thread of its own, whose waits are not counted."""
        running, inference = Future[Execution](), torch.is_inference_mode_enabled()
        # An account of its own: the caller's is written by the caller's thread meanwhile.
        call = replace(self, account=Account())

        def work() -> None:
            try:
                # Grad mode and inference mode belong to a thread, so a new one has the defaults.
                with torch.no_grad(), torch.inference_mode(inference):
                    running.set_result(call.run(bound, **given))
            except Exception as error:  # for whoever waits
                running.set_exception(error)

        threading.Thread(target=work, name="longctx scan", daemon=True).start()
        return running

    def finish(self, running: Future[Execution]) -> Execution:
        """Wait for what was started, and count it. Raises what it raised."""
        account, began = self.account, time.perf_counter()
        run = running.result()
        account.waited += time.perf_counter() - began
        account.planned_bytes += run.account.planned_bytes
        account.peak_bytes = max(account.peak_bytes, run.account.peak_bytes)
        messages = max(account.message_peak_bytes, run.account.message_peak_bytes)
        account.message_peak_bytes = messages
        return run


def begin_scan(summary: Summary, *, call: ScanCall) -> "PendingScan":
    """Start a scan, to be finished once, where the state that enters is needed.

    Until then, and in backward from there back to here, nothing else may use the call's channel:
    the order of messages between two ranks is that of their posts.

    Args:
        summary (`Summary`): Of the rank's last segment, in float32 or wider. If nothing leaves the
            rank it may be of no tokens: its gradient, of zeros, is what makes backward run.
        call (`ScanCall`): With a program of `planners.state_scan.scan_program`.
    """
    scan = _TwoWayScan(call, summary.state.shape, summary.decay.shape)
    return PendingScan(scan, _Begin.apply(scan, summary.state, summary.decay), summary.decay)


@dataclass(frozen=True, slots=True)
class PendingScan:
    """A scan that has begun."""

    _scan: "_TwoWayScan"
    _begun: Tensor
    _decay: Tensor

    def finish(self) -> Tensor:
        """Wait for the state that enters the rank's first segment.

        Returns:
            `[H, N, V]` in the summary's dtype, zeros if nothing enters.
        """
        return _Finish.apply(self._scan, self._begun, self._decay.detach())


def exchange_halo(x_TC: Tensor, *, width: int, call: ScanCall) -> Tensor:
    """Fetch the rows of the same document before the rank's first one: `[width, C]`, else zeros.

    Args:
        x_TC (`Tensor`): The rank's rows.
        width (`int`): Taps of the convolution less one.
        call (`ScanCall`): With a program of `planners.state_scan.halo_program` for that width.
    """
    return _Halo.apply(call, width, x_TC[max(0, len(x_TC) - width) :])


@dataclass(slots=True)
class _TwoWayScan:
    """One scan in both directions.

    Args:
        call (`ScanCall`): What runs it.
        shape, decay (`torch.Size`): `[H, N, V]` of states, and the shape of their decays.
        running (`Future`, *optional*): The direction under way.
        entering (`Tensor`, *optional*): In backward, the state that entered.
    """

    call: ScanCall
    shape: torch.Size
    decay: torch.Size
    running: Future[Execution] | None = None
    entering: Tensor | None = None

    def start(self, own: int, state: Tensor, decay: Tensor, *, back: bool) -> None:
        """Begin a direction, with states by rows."""
        heads, rows, columns = self.shape
        # A chain may cut a state into more pieces than it has heads; then a head's columns count as
        # several heads.
        parts = max(1, int(self.call.program.head_groups[0]) // heads)
        size = state.element_size()
        widths = Widths(
            heads=heads * parts,
            kv_heads=heads,
            head_dim=1,
            value_dim=columns // parts,
            state=rows,
            itemsize=size,
            wide_itemsize=size,
        )
        by_rows = state.transpose(0, 1).reshape(rows, heads * parts, columns // parts)
        bound = {own: {"state": by_rows}, own + 1: {"decay": decay.transpose(0, 1)}}
        self.running = self.call.start(bound, widths=widths, dtype=state.dtype, back=back)

    def finish(self, result: int) -> Tensor:
        """Return what the direction left in the array `result`: `[H, N, V]`."""
        heads, rows, columns = self.shape
        assert self.running is not None, "a scan is finished once"
        state = self.call.finish(self.running).fields(result)["state"]
        self.running = None  # it holds the arrays
        return state.reshape(rows, heads, columns).transpose(0, 1).contiguous()

    def decay_grad(self, leaving: Tensor) -> Tensor | None:
        """Return dM from the gradient of the state that leaves."""
        entering, self.entering = self.entering, None
        if not (self.call.program.blocks[:, 3] == ScanArray.DECAY).any():
            return None  # a document starts or ends on this rank: nothing passes through
        assert entering is not None
        # For a matrix dS S^T; a diagonal has the diagonal of that, and a factor per head its sum.
        if self.decay[-1] > 1:
            return leaving @ entering.mT
        rows = (leaving * entering).sum(-1, keepdim=True)
        return rows if self.decay[1] > 1 else rows.sum(1, keepdim=True)


class _Begin(torch.autograd.Function):
    """Start a scan; in backward, take what the reverse scan brought."""

    @staticmethod
    def forward(ctx: Any, scan: _TwoWayScan, state_HNV: Tensor, decay: Tensor) -> Tensor:
        ctx.scan = scan
        if scan.call.saved is None:
            scan.start(ScanArray.SUMMARY, state_HNV, decay, back=False)
        return state_HNV.new_empty(0)  # a token that orders the two nodes in backward

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaving = ctx.scan.finish(ScanArray.LEAVING_GRAD)
        return None, leaving, ctx.scan.decay_grad(leaving)


class _Finish(torch.autograd.Function):
    """Take the entering state; in backward, start the reverse scan."""

    @staticmethod
    def forward(ctx: Any, scan: _TwoWayScan, token: Tensor, decay: Tensor) -> Tensor:
        saved = scan.call.saved
        entering = scan.finish(ScanArray.ENTERING) if saved is None else saved[0]
        ctx.scan = scan
        ctx.save_for_backward(entering, decay)
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scan: _TwoWayScan = ctx.scan
        scan.entering, decay = ctx.saved_tensors
        if scan.call.forget is not None:
            scan.call.forget()
        # Gradients pass through the transposed factor.
        decay = decay.mT if decay.shape[-1] > 1 else decay
        scan.start(ScanArray.GRAD, grads[0], decay, back=True)
        return None, grads[0].new_zeros(0), None


class _Halo(torch.autograd.Function):
    """Exchange rows behind a rank's end; in backward, their gradients."""

    @staticmethod
    def forward(ctx: Any, call: ScanCall, width: int, tail_TC: Tensor) -> Tensor:
        ctx.call = call
        if call.saved is not None:
            return call.saved[0]
        before = tail_TC.new_zeros(width, 1, tail_TC.shape[1])
        bound: _Bound = {HaloArray.TAIL: {"x": tail_TC[:, None]}, HaloArray.HALO: {"x": before}}
        call.run(bound, widths=_channels(tail_TC), dtype=tail_TC.dtype, back=False)
        return before[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (grad,) = ctx.call, grads
        if call.forget is not None:
            call.forget()
        wide = torch.promote_types(grad.dtype, torch.float32)  # a row may be in several halos
        bound: _Bound = {HaloArray.HALO_GRAD: {"dx": grad.to(wide)[:, None]}}
        run = call.run(bound, widths=_channels(grad), dtype=grad.dtype, back=True)
        return None, None, run.fields(HaloArray.TAIL_GRAD)["dx"][:, 0].to(grad.dtype)


def _channels(rows_TC: Tensor) -> Widths:
    channels, size = rows_TC.shape[1], rows_TC.element_size()
    return Widths(
        heads=1,
        kv_heads=1,
        head_dim=channels,
        value_dim=1,
        itemsize=size,
        wide_itemsize=max(4, size),
    )
