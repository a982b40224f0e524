"""Sides of one case -> what every rank did in each round of them, in turn.

A side is a way to train on the case's documents: which rank holds what, under which
attention name, and what is moved. All sides compute the same loss and gradients, which is checked
once; one that sends nothing ("filled") computes neither and is not.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Shape, differentiate, gradient_error, gradients, inputs
from benchmarks.stretches import Recorder, Rounds, Seconds, Stretch, assemble
from hf_longctx.data.batch import KEY, LongCtxBatch, halved
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import Halves, Layout
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.counts import Widths, sent_in_layer
from hf_longctx.runtime.executor import Account, Runtime
from hf_longctx.runtime.pingpong import enable_pingpong
from hf_longctx.verify.cost_profile import keep_pages
from hf_longctx.verify.rank_pool import RankContext

STATIC = float("inf")  # a tolerance that moves nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How the documents are trained on.

    Args:
        layout (`Layout`): Which rank holds what.
        attention (`str`, *optional*, defaults to `"distca"`): The attention name.
        tolerance (`float`, *optional*): What is moved; by default nothing but keys that a rank
            lacks.
        overlap (`str`, *optional*, defaults to `"none"`): Of the plans: `none` or `heads`.
        halves (`Halves`, *optional*): Run the batch as these halves in turns; `layout` is their
            whole.
        speeds (`tuple[float, ...]`, *optional*): Of extra servers, beside a rank's 1.
        filled (`bool`, *optional*): Send nothing; what is due arrives at once, as zeros.
    """

    layout: Layout
    attention: str = "distca"
    tolerance: float = STATIC
    overlap: str = "none"
    halves: Halves | None = None
    speeds: tuple[float, ...] = ()
    filled: bool = False

    def plan(self, shape: Shape, *, layout: Layout | None = None) -> Plan:
        """The plan of every layer, for all documents or for those of another layout."""
        keys = shape.kv_heads * shape.head_dim
        kind = LayerKind(
            query_width=shape.heads * shape.head_dim,
            key_value_width=2 * keys,
            kv_heads=shape.kv_heads,
        )
        return make_plan(layout or self.layout, kind=kind, options=self.options)

    @property
    def options(self) -> PlanOptions:
        """What its plans depend on."""
        return PlanOptions(
            algorithm=self.attention,
            tolerance=self.tolerance,
            speeds=self.speeds,
            overlap=self.overlap,
        )

    def batch(self, rank: int, *, runtime: Runtime) -> LongCtxBatch:
        """What the model is given."""
        halves = halved(self.halves, rank, options=self.options) if self.halves else ()
        batch = LongCtxBatch(self.layout, rank, self.options, halves=halves)
        batch.bind(runtime)
        return batch

    def bytes_planned(self, shape: Shape) -> int:
        """Bytes that all ranks send in one step."""
        layouts = self.halves.parts if self.halves else (self.layout,)
        plans = [self.plan(shape, layout=layout) for layout in layouts]
        widths = Widths(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.head_dim,
        )
        return shape.layers * sum(
            sent_in_layer(plan.program(rank), widths)
            for plan in plans
            for rank in range(self.layout.ranks)
        )


@dataclass(slots=True)
class RankRun:
    """What one rank did.

    Args:
        rounds (`dict[str, list[list[Stretch]]]`): Each side's rounds.
        wall (`dict[str, list[float]]`): Wall seconds of them, from when all ranks began.
        loss_error, grad_error (`float`): Of the worst side, against the first.
        allocator (`str`): How memory is kept.
    """

    rounds: dict[str, list[list[Stretch]]]
    wall: dict[str, list[float]] = field(default_factory=dict)
    loss_error: float = 0.0
    grad_error: float = 0.0
    allocator: str = ""


def run_rank(
    context: RankContext, *, shape: Shape, sides: Mapping[str, Side], rounds: int
) -> RankRun:
    """One rank's share of all sides, in turn; memory is touched first in the first round."""
    run = RankRun({name: [] for name in sides}, {name: [] for name in sides})
    run.allocator = keep_pages()
    model = shape.model()
    enable_pingpong(model)
    right: tuple[float, list[Tensor]] | None = None
    for number in range(rounds):
        for name, side in sides.items():
            model.set_attn_implementation(side.attention)
            model.zero_grad()
            recorder = Recorder(context.channel, filled=side.filled)
            runtime = Runtime(channel=recorder, account=Account(clock=recorder.clock))
            batch = side.batch(context.rank, runtime=runtime)
            rows = side.layout.flat_rows(context.rank)
            given = inputs(side.layout.lengths.tolist(), vocabulary=shape.vocabulary, rows=rows)
            dist.barrier(group=context.group)
            started = time.perf_counter()
            recorder.restart()
            loss = differentiate(model, [{**given, KEY: batch}])
            recorder.note("end")
            run.wall[name].append(time.perf_counter() - started)
            run.rounds[name].append(recorder.stretches)
            if number == 0 and not side.filled:
                total = _of_all_ranks(loss, model, context)
                right = right or total
                run.loss_error = max(run.loss_error, abs(total[0] - right[0]) / right[0])
                run.grad_error = max(run.grad_error, gradient_error(total[1], right[1]))
    return run


def _of_all_ranks(loss: float, model: Any, context: RankContext) -> tuple[float, list[Tensor]]:
    """Loss and gradients, summed over the ranks."""
    found = [torch.tensor(loss, dtype=torch.float64), *gradients(model)]
    for tensor in found:
        dist.all_reduce(tensor, group=context.group)
    return float(found[0]), found[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One side's step, put together from its rounds.

    Args:
        ranks (`list[Seconds]`): Each rank's seconds.
        wall (`float`): Wall seconds until the last rank was done, in the best round.
        sent (`int`): Bytes that all ranks sent.
    """

    ranks: list[Seconds]
    wall: float
    sent: int

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max(rank.total for rank in self.ranks)

    @property
    def slowest(self) -> Seconds:
        """The rank that is done last."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def ideal_seconds(self) -> float:
        """Where nothing is exchanged: the seconds if attention were spread evenly at no cost."""
        attending = mean(rank.attending for rank in self.ranks)
        return max(rank.working for rank in self.ranks) + attending

    @property
    def ideal_speedup(self) -> float:
        """What attention balanced at no cost would gain."""
        return self.seconds / self.ideal_seconds


def step(runs: Sequence[RankRun], name: str, *, alike: str | None = None) -> Step:
    """A side's step, from all ranks' runs; `alike` is a side whose threads do the same work."""
    ranks: list[Rounds] = [run.rounds[name] for run in runs]
    return Step(
        ranks=assemble(ranks, alike=[run.rounds[alike] for run in runs] if alike else ()),
        wall=min(map(max, zip(*(run.wall[name] for run in runs), strict=True))),
        sent=sum(s.sent for rounds in ranks for s in rounds[0]),
    )


def gain(static: Step, ours: Step) -> float:
    """The fraction of what balancing can gain over `static` that `ours` gains."""
    return (static.seconds - ours.seconds) / (static.seconds - static.ideal_seconds)


def lost(static: Step, ours: Step) -> dict[str, float]:
    """What makes `ours` longer than the ideal, in seconds, on the rank that is done last.

    Its attention above the mean, its work above the linear layers' (packing), and its waits.
    """
    last = ours.slowest
    return {
        "attention": last.attending - mean(rank.attending for rank in static.ranks),
        "packing": last.working - max(rank.working for rank in static.ranks),
        "waiting": last.waiting,
    }
