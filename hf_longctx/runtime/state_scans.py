"""Scan and halo programs on a layer's tensors -> what enters from other ranks, differentiable.

Layer: runtime. States travel while the caller computes: one autograd node has them leave, another
takes what enters, and backward runs the program's backward between the same two. What came in may
be `saved`: a recompute under activation checkpointing then sends nothing, and only its backward
does. Letters: T tokens, H heads, N rows of the state, V its columns, W taps, C channels.
"""

import threading
import time
from collections.abc import Callable
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

_Bound = dict[int, dict[str, Tensor]]  # array -> its fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCall:
    """One layer's use of a program.

    Args:
        program (`Program`): This rank's.
        channel (`Channel`): Of its group.
        account (`Account`): Where to add what was done.
        saved (`tuple[Tensor, ...]`, *optional*): What came in during the first forward, in a
            recompute.
        forget (`Callable`, *optional*): Called when backward starts: what is saved can go.
        layer (`int`, *optional*): Number of the layer in its model, where that is known.
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
        """As `run`, in a thread of its own, whose waits are not counted."""
        under_way, inference = Future[Execution](), torch.is_inference_mode_enabled()
        call = replace(self, account=Account())

        def work() -> None:
            try:
                with torch.no_grad(), torch.inference_mode(inference):
                    under_way.set_result(call.run(bound, **given))
            except Exception as error:  # for who waits
                under_way.set_exception(error)

        threading.Thread(target=work, name="longctx scan", daemon=True).start()
        return under_way

    def finish(self, under_way: Future[Execution]) -> Execution:
        """Wait for what was started, and count it. Raises what it met."""
        account, began = self.account, time.perf_counter()
        run = under_way.result()
        account.waited += time.perf_counter() - began
        account.planned_bytes += run.account.planned_bytes
        account.peak_bytes = max(account.peak_bytes, run.account.peak_bytes)
        messages = max(account.message_peak_bytes, run.account.message_peak_bytes)
        account.message_peak_bytes = messages
        return run


def scan_states(summary: Summary, *, call: ScanCall) -> Tensor:
    """The state that enters the rank's first segment.

    Args:
        summary (`Summary`): Of the rank's last segment, in float32 or wider. Where nothing leaves
            the rank it may be of no tokens: its gradient, of zeros, is what has backward run.
        call (`ScanCall`): With a program of `plan.scan`.

    Returns:
        `[H, N, V]` in the summary's dtype, zeros where nothing enters.
    """
    return begin_scan(summary, call=call).finish()


def begin_scan(summary: Summary, *, call: ScanCall) -> "UnderWay":
    """Start a scan, to be finished once, where its state is needed; arguments as in `scan_states`.

    Until then, and in backward from there back to here, nothing else may use the call's channel:
    the order of messages between two ranks is that of their posts.
    """
    states = _ScanStates(call, summary.state.shape, summary.decay.shape)
    return UnderWay(states, _Begin.apply(states, summary.state, summary.decay), summary.decay)


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A scan that has begun."""

    _states: "_ScanStates"
    _begun: Tensor
    _decay: Tensor

    def finish(self) -> Tensor:
        """Wait for the state that enters; see `scan_states`."""
        return _Finish.apply(self._states, self._begun, self._decay.detach())


def exchange_halo(x_TC: Tensor, *, width: int, call: ScanCall) -> Tensor:
    """The rows before the rank's first ones, as its document has them: `[width, C]`, else zeros.

    Args:
        x_TC (`Tensor`): The rank's rows.
        width (`int`): Taps of the convolution less one.
        call (`ScanCall`): With a program of `plan.halo` for that width.
    """
    return _Halo.apply(call, width, x_TC[max(0, len(x_TC) - width) :])


@dataclass(slots=True)
class _ScanStates:
    """A scan's call, the shapes `[H, N, V]` of states and of their decays, what is under way, and
    in backward the state that entered."""

    call: ScanCall
    shape: torch.Size
    decay: torch.Size
    under_way: Future[Execution] | None = None
    entering: Tensor | None = None

    def start(self, own: int, state: Tensor, decay: Tensor, *, back: bool) -> None:
        """Begin a direction on states by rows: where there are more pieces than heads, a head's
        columns stand as several heads."""
        heads, rows, columns = self.shape
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
        self.under_way = self.call.start(bound, widths=widths, dtype=state.dtype, back=back)

    def finish(self, result: int) -> Tensor:
        """`[H, N, V]`: what the direction ended with."""
        heads, rows, columns = self.shape
        assert self.under_way is not None, "a scan is finished once"
        state = self.call.finish(self.under_way).fields(result)["state"]
        self.under_way = None  # it holds the arrays
        return state.reshape(rows, heads, columns).transpose(0, 1).contiguous()

    def decay_grad(self, leaving: Tensor) -> Tensor | None:
        """dM: H S^T, of which a diagonal keeps its rows' sums, and a factor per head their sum."""
        entering, self.entering = self.entering, None
        if not (self.call.program.blocks[:, 3] == ScanArray.DECAY).any():
            return None  # a document starts or ends on this rank: nothing passes through
        assert entering is not None
        if self.decay[-1] > 1:
            return leaving @ entering.mT
        rows = (leaving * entering).sum(-1, keepdim=True)
        return rows if self.decay[1] > 1 else rows.sum(1, keepdim=True)


class _Begin(torch.autograd.Function):
    """Starts a scan; in backward, takes what the reverse scan brought."""

    @staticmethod
    def forward(ctx: Any, states: _ScanStates, state_HNV: Tensor, decay: Tensor) -> Tensor:
        ctx.states = states
        if states.call.saved is None:
            states.start(ScanArray.SUMMARY, state_HNV, decay, back=False)
        return state_HNV.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaving = ctx.states.finish(ScanArray.LEAVING_GRAD)
        return None, leaving, ctx.states.decay_grad(leaving)


class _Finish(torch.autograd.Function):
    """Takes the entering state; in backward, starts the reverse scan."""

    @staticmethod
    def forward(ctx: Any, states: _ScanStates, token: Tensor, decay: Tensor) -> Tensor:
        saved = states.call.saved
        entering = states.finish(ScanArray.ENTERING) if saved is None else saved[0]
        ctx.states = states
        ctx.save_for_backward(entering, decay)
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states: _ScanStates = ctx.states
        states.entering, decay = ctx.saved_tensors
        if states.call.forget is not None:
            states.call.forget()
        states.start(
            ScanArray.GRAD, grads[0], decay.mT if decay.shape[-1] > 1 else decay, back=True
        )
        return None, grads[0].new_zeros(0), None


class _Halo(torch.autograd.Function):
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
        wide = torch.promote_types(grad.dtype, torch.float32)
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
