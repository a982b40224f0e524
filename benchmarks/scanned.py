"""Schedules of a scan -> its seconds and bytes on these ranks, alone and inside a layer.

Messages are real, and so are the states and what composes them; the layer's own work
sleeps, since eight ranks do not compute at once on a few cores. A layer forms its summary, begins
the scan, forms the outputs that need no state of others, waits, and adds what the state gives; its
backward is the mirror. Letters: H heads, N rows of a state, V its columns, P ranks.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.timed import carried_bytes
from hf_longctx.kernels.chunk_states import Summary, apply
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners import state_scan
from hf_longctx.planning.predict.scan_schedule import StateSizes
from hf_longctx.planning.program.counts import Widths
from hf_longctx.planning.program.counts import sent as planned_bytes
from hf_longctx.planning.program.program import Program
from hf_longctx.runtime.executor import Account
from hf_longctx.runtime.state_scans import ScanCall, begin_scan
from hf_longctx.verify.cost_profile import keep_pages
from hf_longctx.verify.rank_pool import RankContext

GLOO = "gloo"
# Of a layer's products: summary, outputs without the state of others, outputs with it. Each takes
# N V multiplications a token and head, if chunks have N / 2 tokens and N = V.
SHARES = (1 / 3, 1 / 3, 1 / 3)
BACKWARD = 2.0  # times the work of forward: two products for each
Seconds = tuple[float, float]  # forward, backward
Both = tuple[int, int]


class Way(NamedTuple):
    """One of `scan.SCHEDULES`, or `GLOO`'s all-gather; and the pieces of a chain."""

    schedule: str
    pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One document over all ranks, and the state of a layer with one decay a head, in float32.

    Args:
        heads, rows, columns (`int`): H, N, V.
    """

    heads: int = 16
    rows: int = 128
    columns: int = 128

    @property
    def sizes(self) -> StateSizes:
        """As the cost model takes it."""
        return StateSizes(state_scan.State(self.rows, "head"), self.heads, self.columns)

    def program(self, way: Way, *, rank: int, ranks: int) -> Program:
        """One rank's program."""
        layout = cut([ranks], ranks=ranks, layout="contiguous")
        made = state_scan.scan_program(
            layout,
            rank=rank,
            state=self.sizes.state,
            schedule=way.schedule,
            pieces=way.pieces,
        )
        assert made is not None
        return made

    def planned(self, program: Program) -> Both:
        """Bytes that a program sends, forward and backward."""
        groups = max(self.heads, int(program.head_groups[0]))
        widths = Widths(
            heads=groups,
            kv_heads=self.heads,
            head_dim=1,
            value_dim=self.columns * self.heads // groups,
            state=self.rows,
        )
        forward, backward = (
            sum(planned_bytes(program, widths, backward=back).values()) for back in (False, True)
        )
        return forward, backward

    def given(self, rank: int) -> tuple[Summary, Tensor]:
        """A rank's summary, and the gradient of its entering state from its own outputs."""
        noise = torch.Generator().manual_seed(rank)
        shape = self.heads, self.rows, self.columns
        state, grad = (torch.randn(shape, generator=noise) for _ in range(2))
        decay = torch.rand((self.heads, 1, 1), generator=noise)
        return Summary(state=state.requires_grad_(), decay=decay.requires_grad_()), grad

    def expected(self, rank: int, *, ranks: int) -> tuple[Tensor, Tensor]:
        """The state that enters a rank, and the gradient of the one that leaves it."""
        everyone = [self.given(each) for each in range(ranks)]
        state, grad = torch.zeros_like(everyone[0][1]), torch.zeros_like(everyone[0][1])
        with torch.no_grad():
            for summary, _ in everyone[:rank]:
                state = apply(summary, state)
            for summary, own in everyone[:rank:-1]:
                grad = apply(Summary(state=own, decay=summary.decay), grad)
        return state, grad


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one rank saw, by the names of ways.

    Args:
        seconds (`dict[str, list[Seconds]]`): Of each round.
        layers (`list[dict[str, list[Seconds]]]`): The same of layers that compute for so long, with
            the scan (`scan`) and without (`none`).
        sent, planned, carried (`dict[str, Both]`): Bytes that left, forward and backward: by the
            channel's count, the program's, and that of the interface, headers and all.
        errors (`dict[str, float]`): Of the entering state and the leaving gradient, against one
            process: the largest difference over the largest entry.
    """

    seconds: dict[str, list[Seconds]] = field(default_factory=dict)
    layers: list[dict[str, list[Seconds]]] = field(default_factory=list)
    sent: dict[str, Both] = field(default_factory=dict)
    planned: dict[str, Both] = field(default_factory=dict)
    carried: dict[str, Both] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    allocator: str = ""


class _Gather(torch.autograd.Function):
    """What LASP-2 does, by gloo's all-gather; decays are kept for backward."""

    @staticmethod
    def forward(ctx: Any, group: Any, state_HNV: Tensor, decay: Tensor) -> Tensor:
        size = state_HNV.numel()
        pairs = _gather(torch.cat([state_HNV.flatten(), decay.flatten()]), group)
        everyone = [
            Summary(state=p[:size].view_as(state_HNV), decay=p[size:].view_as(decay)) for p in pairs
        ]
        ctx.group, ctx.everyone = group, everyone
        state = torch.zeros_like(state_HNV)
        for summary in everyone[: group.rank()]:
            state = apply(summary, state)
        return state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, own = torch.zeros_like(grads[0]), _gather(grads[0], ctx.group)
        for other in range(ctx.group.size() - 1, ctx.group.rank(), -1):
            grad = apply(Summary(state=own[other], decay=ctx.everyone[other].decay), grad)
        return None, grad, None


def _gather(mine: Tensor, group: Any) -> list[Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine.contiguous(), group=group)
    return everyone


class _Work(torch.autograd.Function):
    """Takes so many seconds, and more in backward."""

    @staticmethod
    def forward(ctx: Any, seconds: float, rows: Tensor) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        time.sleep(BACKWARD * ctx.seconds)
        return None, grads[0]


def _scan(summary: Summary, *, call: ScanCall) -> Tensor:
    return begin_scan(summary, call=call).finish()


def layer(summary: Summary, *, seconds: float, call: ScanCall | None) -> Tensor:
    """The outputs of a layer whose forward computes so long; without a call, no scan runs."""
    form, beside, add = (share * seconds for share in SHARES)
    formed = Summary(state=_Work.apply(form, summary.state), decay=summary.decay)
    scanning = None if call is None else begin_scan(formed, call=call)
    own = _Work.apply(beside, torch.zeros_like(summary.state).requires_grad_())
    return _Work.apply(add, own + (formed.state if scanning is None else scanning.finish()))


def time_scans(
    context: RankContext,
    *,
    case: Case,
    ways: Mapping[str, Way],
    rounds: int,
    layers: Sequence[float] = (),
) -> Measured:
    """Run every way, alone and then the first one inside layers, in turn; the job of one rank.

    Args:
        context (`RankContext`): Its channel.
        case (`Case`): The state.
        ways (`Mapping[str, Way]`): By name.
        rounds (`int`): Of each, after one that is not timed.
        layers (`Sequence[float]`, *optional*): Seconds that forwards compute.
    """
    found, (summary, grad) = Measured(allocator=keep_pages()), case.given(context.rank)
    calls: dict[str, ScanCall] = {}
    sides: dict[str, Callable[[], Tensor]] = {}
    for name, way in ways.items():
        if way.schedule == GLOO:
            sides[name] = partial(_Gather.apply, context.group, summary.state, summary.decay)
            continue
        program = case.program(way, rank=context.rank, ranks=context.ranks)
        calls[name] = ScanCall(program=program, channel=context.channel, account=Account())
        sides[name] = partial(_scan, summary, call=calls[name])
        found.planned[name] = case.planned(program)
    expected = case.expected(context.rank, ranks=context.ranks)
    for name, side in sides.items():
        found.sent[name], found.carried[name], came = _count(context, side, grad)
        gained, summary.state.grad = summary.state.grad, None
        assert gained is not None
        found.errors[name] = max(map(_error, (came, gained), expected))
    gc.disable()
    for _ in range(rounds):
        for name, side in sides.items():
            found.seconds.setdefault(name, []).append(_time(context, side, grad))
            gc.collect(0)
    for seconds in layers:
        taken: dict[str, list[Seconds]] = {"none": [], "scan": []}
        for _ in range(rounds):
            for name, call in (("none", None), ("scan", calls[next(iter(ways))])):
                side = partial(layer, summary, seconds=seconds, call=call)
                taken[name].append(_time(context, side, grad))
                gc.collect(0)
        found.layers.append(taken)
    gc.enable()
    return found


def _time(context: RankContext, side: Callable[[], Tensor], grad: Tensor) -> Seconds:
    """Seconds of both directions, each from when all ranks were ready."""
    context.channel.agree(0, what="that all are ready")
    started = time.perf_counter()
    came = side()
    forward = time.perf_counter() - started
    context.channel.agree(0, what="that all are ready")
    started = time.perf_counter()
    came.backward(grad)  # type: ignore[no-untyped-call]
    return forward, time.perf_counter() - started


def _count(
    context: RankContext, side: Callable[[], Tensor], grad: Tensor
) -> tuple[Both, Both, Tensor]:
    """Run a way once, untimed: bytes by both counts, and the state that entered."""
    channel, counts = context.channel, list[tuple[int, int]]()

    def count() -> None:
        channel.agree(0, what="that all are done")
        counts.append((channel.sent.total(), carried_bytes()))

    count()
    came = side()
    count()
    came.backward(grad)  # type: ignore[no-untyped-call]
    count()
    sent, carried = ((one[1] - one[0], one[2] - one[1]) for one in zip(*counts, strict=True))
    return sent, carried, came.detach()


def _error(found: Tensor, right: Tensor) -> float:
    """The largest difference; states are of the size of 1."""
    return float((found - right).abs().max() / max(1.0, float(right.abs().max())))
