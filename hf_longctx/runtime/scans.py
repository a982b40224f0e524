"""Scan and halo programs on a layer's tensors -> what enters from other ranks, differentiable.

Floor: runtime. One autograd node each: backward runs the program's backward. What came in may be
`saved`: a recompute under activation checkpointing then sends nothing, and only its backward does.
Letters: T tokens, H heads, N rows of the state, V its columns, W taps, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One layer's use of a program.

    Args:
        program (`Program`): This rank's.
        channel (`Channel`): Of its group.
        account (`Account`): Where to add what was done.
        saved (`tuple[Tensor, ...]`, *optional*): What came in during the first forward, in a
            recompute.
        forget (`Callable`, *optional*): Called when backward starts: what is saved can go.
    """

    program: Program
    channel: Channel
    account: Account
    saved: tuple[Tensor, ...] | None = None
    forget: Callable[[], None] | None = None

    def run(
        self, bound: dict[int, dict[str, Tensor]], *, widths: Widths, dtype: torch.dtype, back: bool
    ) -> Execution:
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
        if back and self.forget is not None:
            self.forget()
        return run


def scan_states(summary: Summary, *, call: Call) -> Tensor:
    """The state that enters the rank's first segment.

    Args:
        summary (`Summary`): Of the rank's last segment, in float32 or wider. Where nothing leaves
            the rank its values are not used, but its gradient, of zeros, is what has backward run.
        call (`Call`): With a program of `plan.scan`.

    Returns:
        `[H, N, V]` in the summary's dtype, zeros where nothing enters.
    """
    return _Scan.apply(call, summary.state, summary.decay)


def exchange_halo(x_TC: Tensor, *, width: int, call: Call) -> Tensor:
    """The rows before the rank's first ones, as its document has them: `[width, C]`, else zeros.

    Args:
        x_TC (`Tensor`): The rank's rows.
        width (`int`): Taps of the convolution less one.
        call (`Call`): With a program of `plan.halo` for that width.
    """
    return _Halo.apply(call, width, x_TC[max(0, len(x_TC) - width) :])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, state_HNV: Tensor, decay: Tensor) -> Tensor:
        ctx.call = call
        if call.saved is None:
            run = _states(call, scan.SUMMARY, state_HNV, decay, back=False)
            entering = _by_heads(run.fields(scan.ENTERING)["state"], like=state_HNV)
        else:
            (entering,) = call.saved
        ctx.save_for_backward(decay, entering)
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        decay, entering = ctx.saved_tensors
        turned = decay.mT if decay.shape[-1] > 1 else decay
        run = _states(ctx.call, scan.GRAD, grads[0], turned, back=True)
        leaving = _by_heads(run.fields(scan.LEAVING_GRAD)["state"], like=entering)
        return None, leaving, _decay_grad(ctx.call.program, leaving, entering, decay)


def _decay_grad(
    program: Program, leaving: Tensor, entering: Tensor, decay: Tensor
) -> Tensor | None:
    """dM: H S^T, of which a diagonal keeps its rows' sums, and one factor for a head their sum."""
    if not (program.blocks[:, 3] == scan.DECAY).any():
        return None  # a document starts or ends on this rank: nothing passes through
    if decay.shape[-1] > 1:
        return leaving @ entering.mT
    rows = (leaving * entering).sum(-1, keepdim=True)
    return rows if decay.shape[1] > 1 else rows.sum(1, keepdim=True)


def _states(call: Call, own: int, state: Tensor, decay: Tensor, *, back: bool) -> Execution:
    """Run one direction of a scan on `[H, N, V]`, or on heads of fewer columns where it has more
    pieces than heads."""
    heads, rows, columns = state.shape
    parts = max(1, int(call.program.head_groups[0]) // heads)
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
    return call.run(bound, widths=widths, dtype=state.dtype, back=back)


def _by_heads(state: Tensor, *, like: Tensor) -> Tensor:
    """`[H, N, V]` of a program's state, whose rows come first."""
    heads, rows, columns = like.shape
    return state.reshape(rows, heads, columns).transpose(0, 1).contiguous()


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
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        bound = {halo.HALO_GRAD: {"dx": grad.to(wide)[:, None]}}
        run = ctx.call.run(bound, widths=_channels(grad), dtype=grad.dtype, back=True)
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
