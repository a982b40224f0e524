"""Scan and halo programs on a layer's tensors -> what enters from other ranks, differentiable.

Floor: runtime. States travel while the caller computes: one autograd node has them leave, another
takes what enters, and backward runs the program's backward between the same two. What came in may
be `saved`: a recompute under activation checkpointing then sends nothing, and only its backward
does. Letters: T tokens, H heads, N rows of the state, V its columns, W taps, C channels.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.channels import Channel
from ..kernels.summary import Summary
from ..plan import halo, scan
from ..plan.count import Widths, sent
from ..plan.program import Program
from .executor import Account, Execution, drive

_Bound = dict[int, dict[str, Tensor]]  # array -> its fields


@dataclass(slots=True, kw_only=True)
class Call:
    """One layer's use of a program.

    Args:
        program (`Program`): This rank's.
        channel (`Channel`): Of its group.
        account (`Account`): Where to add what was done.
        saved (`tuple[Tensor, ...]`, *optional*): What came in during the first forward, in a
            recompute.
        forget (`Callable`, *optional*): Called when backward starts: what is saved can go.
        under_way (`Future`, *optional*): The direction that a thread sees through.
    """

    program: Program
    channel: Channel
    account: Account
    saved: tuple[Tensor, ...] | None = None
    forget: Callable[[], None] | None = None
    under_way: Future[Execution] | None = None

    def run(self, bound: _Bound, *, widths: Widths, dtype: torch.dtype, back: bool) -> Execution:
        """Run one direction to its end on arrays that are given."""
        run = Execution(
            self.program,
            widths=widths,
            dtype=dtype,
            backward=back,
            channel=self.channel,
            account=self.account,
        )
        for array, fields in bound.items():
            run.bind(array, **fields)
        self.account.planned_bytes += sum(sent(self.program, widths, backward=back).values())
        for number in range(len(self.program.backward if back else self.program.forward)):
            drive(run.phase(number), self.account)
        return run

    def start(self, bound: _Bound, **given: Any) -> None:
        """As `run`, in a thread of its own.

        Until it is finished the caller must exchange nothing over the channel: the order of
        messages between two ranks is that of their posts.
        """
        inference = torch.is_inference_mode_enabled()

        def work() -> Execution:
            with torch.no_grad(), torch.inference_mode(inference):
                return self.run(bound, **given)

        thread = ThreadPoolExecutor(1, thread_name_prefix="longctx scan")
        self.under_way = thread.submit(work)
        thread.shutdown(wait=False)  # once it has ended

    def finish(self) -> Execution:
        """Wait for what was started. Raises what it met."""
        assert self.under_way is not None, "a scan is started before it is finished"
        run, self.under_way = self.under_way.result(), None
        return run


def start_scan(summary: Summary, *, call: Call) -> Callable[[], Tensor]:
    """Have a rank's summary leave.

    Args:
        summary (`Summary`): Of the rank's last segment, in float32 or wider. Where nothing leaves
            the rank its values are not used, but its gradient, of zeros, is what has backward run.
        call (`Call`): With a program of `plan.scan`.

    Returns:
        What waits for the state that enters the rank's first segment: `[H, N, V]` in the summary's
        dtype, zeros where nothing enters. Call it once, and compute before what needs no state.
    """
    states = _States(call, summary.state.shape, summary.decay.shape)
    token = _Leave.apply(states, summary.state, summary.decay)
    return partial(_Enter.apply, states, token, summary.decay.detach())


def exchange_halo(x_TC: Tensor, *, width: int, call: Call) -> Tensor:
    """The rows before the rank's first ones, as its document has them: `[width, C]`, else zeros.

    Args:
        x_TC (`Tensor`): The rank's rows.
        width (`int`): Taps of the convolution less one.
        call (`Call`): With a program of `plan.halo` for that width.
    """
    return _Halo.apply(call, width, x_TC[max(0, len(x_TC) - width) :])


@dataclass(slots=True)
class _States:
    """A scan's call, the shapes `[H, N, V]` of states and of their decays, and in backward the
    state that entered."""

    call: Call
    shape: torch.Size
    decay: torch.Size
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
        self.call.start(bound, widths=widths, dtype=state.dtype, back=back)

    def finish(self, result: int) -> Tensor:
        """`[H, N, V]`: what the direction ended with."""
        heads, rows, columns = self.shape
        state = self.call.finish().fields(result)["state"]
        return state.reshape(rows, heads, columns).transpose(0, 1).contiguous()

    def decay_grad(self, leaving: Tensor) -> Tensor | None:
        """dM: H S^T, of which a diagonal keeps its rows' sums, and a factor per head their sum."""
        entering, self.entering = self.entering, None
        if not (self.call.program.blocks[:, 3] == scan.DECAY).any():
            return None  # a document starts or ends on this rank: nothing passes through
        assert entering is not None
        if self.decay[-1] > 1:
            return leaving @ entering.mT
        rows = (leaving * entering).sum(-1, keepdim=True)
        return rows if self.decay[1] > 1 else rows.sum(1, keepdim=True)


class _Leave(torch.autograd.Function):
    """Starts a scan; in backward, takes what the reverse scan brought."""

    @staticmethod
    def forward(ctx: Any, states: _States, state_HNV: Tensor, decay: Tensor) -> Tensor:
        ctx.states = states
        if states.call.saved is None:
            states.start(scan.SUMMARY, state_HNV, decay, back=False)
        return state_HNV.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaving = ctx.states.finish(scan.LEAVING_GRAD)
        return None, leaving, ctx.states.decay_grad(leaving)


class _Enter(torch.autograd.Function):
    """Takes the entering state; in backward, starts the reverse scan."""

    @staticmethod
    def forward(ctx: Any, states: _States, token: Tensor, decay: Tensor) -> Tensor:
        saved = states.call.saved
        entering = states.finish(scan.ENTERING) if saved is None else saved[0]
        ctx.states = states
        ctx.save_for_backward(entering, decay)
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states: _States = ctx.states
        states.entering, decay = ctx.saved_tensors
        if states.call.forget is not None:
            states.call.forget()
        states.start(scan.GRAD, grads[0], decay.mT if decay.shape[-1] > 1 else decay, back=True)
        return None, grads[0].new_zeros(0), None


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, width: int, tail_TC: Tensor) -> Tensor:
        ctx.call = call
        if call.saved is not None:
            return call.saved[0]
        before = tail_TC.new_zeros(width, 1, tail_TC.shape[1])
        bound = {halo.TAIL: {"x": tail_TC[:, None]}, halo.HALO: {"x": before}}
        call.run(bound, widths=_channels(tail_TC), dtype=tail_TC.dtype, back=False)
        return before[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (grad,) = ctx.call, grads
        if call.forget is not None:
            call.forget()
        wide = torch.promote_types(grad.dtype, torch.float32)
        bound = {halo.HALO_GRAD: {"dx": grad.to(wide)[:, None]}}
        run = call.run(bound, widths=_channels(grad), dtype=grad.dtype, back=True)
        return None, None, run.fields(halo.TAIL_GRAD)["dx"][:, 0].to(grad.dtype)


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
