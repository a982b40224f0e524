"""`hf-longctx bench distca`: what balancing, overlap and servers gain, and what they cost.

Floor: bench. Two ranks, one shape for all figures. At the top level the skewed pair: rank 0 holds
one long document, rank 1 as many tokens in short ones, so their linear work is equal and their
attention is not. Letters: t seconds of a step (forward and backward), as `stretches` counts them.

- `t_static`: the same kernels without exchange; the step lasts as long as its slowest rank.
- `t_ideal`: linear time plus mean attention time: attention balanced at no cost.
- `t_ours`: balanced, with everything that the exchange costs.
- `lost`: what makes `t_ours` longer than `t_ideal`, on the rank that is done last.

Under `table`, drawn documents and other ways to cut them: see `tables`.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import mean
from typing import Any

from ..comm.processes import RankPool
from ..plan.layout import cut
from .common import Shape, setting
from .sides import RankRun, Side, gain, lost, run_rank, step
from .tables import measure as measure_table

logger = logging.getLogger(__name__)
PAIR = (8192,) + (256,) * 32
SHAPE = Shape(layers=2)


def sides(lengths: Sequence[int]) -> dict[str, Side]:
    """The sides of the skewed pair, on the same layout."""
    layout = cut(lengths, ranks=2, layout="contiguous")
    return {"static": Side(layout=layout), "ours": Side(layout=layout, tolerance=0.05)}


def run(
    *,
    shape: Shape = SHAPE,
    lengths: Sequence[int] = PAIR,
    table: int = 5,
    rounds: int = 3,
    pool: RankPool | None = None,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        shape (`Shape`, *optional*): The model.
        lengths (`Sequence[int]`, *optional*): Documents of the pair, end to end over two ranks.
        table (`int`, *optional*, defaults to 5): Seeds of the table.
        rounds (`int`, *optional*, defaults to 3): Of each side; twice as many of the pair's.
        pool (`RankPool`, *optional*): Rank processes to use; two are started by default.

    Returns:
        Figures by name.
    """
    with nullcontext(pool) if pool else RankPool(2, timeout=300) as used:
        logger.info("skewed pair: static and ours in turn, %d rounds on 2 ranks", 2 * rounds)
        pair = sides(lengths)
        runs = used.run(run_rank, ranks=2, shape=shape, sides=pair, rounds=2 * rounds)
        found = figures(runs, pair, shape=shape)
        found["table"] = measure_table(used, shape=shape, wanted=table, rounds=rounds)
    clock = "CPU seconds of a step's stretches and its exchanges, each at its best round"
    return {
        **setting(shape, processes=2, allocator=runs[0].allocator, clock=clock),
        "rounds": rounds,
        "documents": len(lengths),
        "tokens": sum(lengths),
        **found,
    }


def figures(runs: Sequence[RankRun], pair: dict[str, Side], *, shape: Shape) -> dict[str, Any]:
    """What two ranks measured -> times, speedups and balance."""
    static, ours = step(runs, "static"), step(runs, "ours")
    ideal = static.ideal_seconds
    attending = [rank.attending for rank in ours.ranks]
    plan = pair["ours"].plan(shape)
    return {
        "t_static": static.seconds,
        "t_ideal": ideal,
        "t_ours": ours.seconds,
        "lost": lost(static, ours),
        "wall_t_static": static.wall,
        "wall_t_ours": ours.wall,
        "ideal_speedup": static.seconds / ideal,
        "speedup_vs_static": static.seconds / ours.seconds,
        "gain_captured": gain(static, ours),
        "fraction_of_ideal": ideal / ours.seconds,
        "static_fraction_of_ideal": ideal / static.seconds,
        "attention_max_over_mean_static": plan.attention_max_over_mean(balanced=False),
        "attention_max_over_mean": plan.attention_max_over_mean(),
        "attention_seconds_max_over_mean": max(attending) / mean(attending),
        **{f"attention_seconds_rank{r}": seconds for r, seconds in enumerate(attending)},
        **{f"wait_seconds_rank{r}": rank.waiting for r, rank in enumerate(ours.ranks)},
        "bytes_planned": pair["ours"].bytes_planned(shape),
        "bytes_sent": ours.sent,
        "loss_error": max(r.loss_error for r in runs),
        "grad_error": max(r.grad_error for r in runs),
    }
