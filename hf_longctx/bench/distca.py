"""Two ranks, one with a long document -> how much of what balancing can gain `distca` does gain.

Floor: bench. Rank 0 holds one long document, rank 1 as many tokens in short ones, so their linear
work is equal and their attention is not. Letters: t seconds of a step (forward and backward).

- `t_static`: the same kernels without exchange; the step lasts as long as its slowest rank.
- `t_ideal`: linear time plus mean attention time: attention balanced at no cost.
- `t_ours`: balanced, with everything that the exchange costs.

A rank's seconds are the CPU seconds of its process plus those that it was blocked in exchanges:
never less than the wall seconds of a free machine (gloo's threads count in full), and other load
reaches them through waits only. A step's are those of its slowest rank, in the best round; where
ranks do not wait for each other (static, ideal) the best round is each rank's own.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..comm.processes import RankContext, RankPool
from ..data.batch import KEY, LongCtxBatch
from ..plan.cost import LayerKind
from ..plan.count import Widths, sent_in_layer
from ..plan.layout import cut
from ..plan.plans import Plan, make_plan
from ..runtime.binding import Runtime
from ..runtime.executor import Account
from .common import Shape, differentiate, gradient_error, gradients, inputs, keep_pages, setting

logger = logging.getLogger(__name__)
TOLERANCES = {"static": float("inf"), "ours": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both ranks run.

    Args:
        shape (`Shape`): The model.
        lengths (`Sequence[int]`): Tokens of each document; the layout is contiguous.
        rounds (`int`): Of each side.
    """

    shape: Shape
    lengths: Sequence[int]
    rounds: int

    def plan(self, side: str, *, ranks: int) -> Plan:
        """The plan of every layer."""
        attended = self.shape.kv_heads * self.shape.head_dim
        kind = LayerKind(
            query_width=self.shape.heads * self.shape.head_dim, key_value_width=2 * attended
        )
        layout = cut(self.lengths, ranks=ranks, layout="contiguous")
        return make_plan("distca", layout, kind=kind, tolerance=TOLERANCES[side])


@dataclass(slots=True, kw_only=True)
class Step:
    """What one rank measured in one step.

    Args:
        seconds (`float`): CPU seconds of the process, plus `waiting`.
        attending (`float`): CPU seconds of them in attention kernels.
        waiting (`float`): Seconds blocked in exchanges.
        wall (`float`): Wall seconds from the barrier until this rank was done.
        sent (`int`): Bytes sent.
    """

    seconds: float
    attending: float
    waiting: float
    wall: float
    sent: int


@dataclass(slots=True, kw_only=True)
class RankSteps:
    """One rank's steps, by side and round.

    Args:
        steps (`dict[str, list[Step]]`): Measured steps by side.
        loss_error, grad_error (`float`): Of `ours`, against `static`.
        allocator (`str`): How memory is kept.
    """

    steps: dict[str, list[Step]]
    loss_error: float
    grad_error: float
    allocator: str


def run_rank(context: RankContext, *, case: Case) -> RankSteps:
    """One rank's share of the case, sides in turn."""
    allocator = keep_pages()
    model = case.shape.model()
    model.set_attn_implementation("distca")
    layout = cut(case.lengths, ranks=context.ranks, layout="contiguous")
    given = inputs(
        case.lengths, vocabulary=case.shape.vocabulary, rows=layout.flat_rows(context.rank)
    )
    steps: dict[str, list[Step]] = {side: [] for side in TOLERANCES}
    losses: dict[str, float] = {}
    grads: dict[str, list[Tensor]] = {}
    for number in range(case.rounds):
        for side, tolerance in TOLERANCES.items():
            account = Account(clock=time.thread_time)
            runtime = Runtime(channel=context.channel, account=account)
            before = runtime.sent_bytes
            batch = LongCtxBatch(layout, context.rank, tolerance=tolerance, runtime=runtime)
            model.zero_grad()
            dist.barrier(group=context.group)
            started, wall = time.process_time(), time.perf_counter()
            losses[side] = differentiate(model, [{**given, KEY: batch}])
            step = Step(
                seconds=time.process_time() - started + account.waited,
                attending=account.attending,
                waiting=account.waited,
                wall=time.perf_counter() - wall,
                sent=runtime.sent_bytes - before,
            )
            steps[side].append(step)
            if number == 0:
                grads[side] = gradients(model)
    return RankSteps(
        steps=steps,
        loss_error=abs(losses["ours"] - losses["static"]) / losses["static"],
        grad_error=gradient_error(grads["ours"], grads["static"]),
        allocator=allocator,
    )


def run(
    *,
    shape: Shape | None = None,
    lengths: Sequence[int] = (8192,) + (256,) * 32,
    rounds: int = 3,
    pool: RankPool | None = None,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        shape (`Shape`, *optional*): The model; that of every published figure by default.
        lengths (`Sequence[int]`, *optional*): Documents, end to end over two ranks.
        rounds (`int`, *optional*, defaults to 3): Of each side; the first one warms up.
        pool (`RankPool`, *optional*): Rank processes to use; two are started by default.

    Returns:
        Figures by name.
    """
    case = Case(shape=shape or Shape(), lengths=tuple(lengths), rounds=rounds)
    logger.info("%s in turn, %d rounds on 2 ranks", " and ".join(TOLERANCES), rounds)
    own = pool or RankPool(2)
    try:
        results = own.run(run_rank, ranks=2, case=case)
    finally:
        if pool is None:
            own.close()
    clock = "CPU seconds of the slowest rank's process, and its waits"
    return {
        **setting(case.shape, processes=2, allocator=results[0].allocator, clock=clock),
        "rounds": rounds,
        "documents": len(case.lengths),
        "tokens": sum(case.lengths),
        **figures(case, results),
    }


def figures(case: Case, results: Sequence[RankSteps]) -> dict[str, Any]:
    """What two ranks measured -> times, speedups and balance."""
    static = [r.steps["static"] for r in results]
    linear = [min(s.seconds - s.attending for s in steps) for steps in static]
    attention = [min(s.attending for s in steps) for steps in static]
    t_static = max(min(s.seconds for s in steps) for steps in static)
    t_ideal = max(linear) + mean(attention)
    rounds = list(zip(*(r.steps["ours"] for r in results), strict=True))
    best = min(rounds, key=lambda ranks: max(s.seconds for s in ranks))
    t_ours = max(s.seconds for s in best)
    attending = [s.attending for s in best]
    plan = case.plan("ours", ranks=2)
    widths = Widths(
        heads=case.shape.heads,
        kv_heads=case.shape.kv_heads,
        head_dim=case.shape.head_dim,
        value_dim=case.shape.head_dim,
    )
    planned = case.shape.layers * sum(sent_in_layer(plan.program(r), widths) for r in range(2))
    return {
        "t_static": t_static,
        "t_ideal": t_ideal,
        "t_ours": t_ours,
        **{f"wall_t_{side}": min(map(max, walls(results, side))) for side in TOLERANCES},
        "ideal_speedup": t_static / t_ideal,
        "speedup_vs_static": t_static / t_ours,
        "gain_captured": (t_static - t_ours) / (t_static - t_ideal),
        "fraction_of_ideal": t_ideal / t_ours,
        "static_fraction_of_ideal": t_ideal / t_static,
        "attention_max_over_mean_static": plan.attention_max_over_mean(balanced=False),
        "attention_max_over_mean": plan.attention_max_over_mean(),
        "attention_seconds_max_over_mean": max(attending) / mean(attending),
        **{f"attention_seconds_rank{r}": seconds for r, seconds in enumerate(attending)},
        **{f"wait_seconds_rank{r}": s.waiting for r, s in enumerate(best)},
        "bytes_planned": planned,
        "bytes_sent": sum(s.sent for s in best),
        "loss_error": max(r.loss_error for r in results),
        "grad_error": max(r.grad_error for r in results),
    }


def walls(results: Sequence[RankSteps], side: str) -> list[tuple[float, ...]]:
    """Wall seconds of all ranks, by round."""
    return list(zip(*([s.wall for s in r.steps[side]] for r in results), strict=True))
