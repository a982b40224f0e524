"""`python -m benchmarks distca`: what balancing, overlap and servers gain, and what they cost.

One shape for all figures, two ranks. At the top level the skewed pair: rank 0 holds
one long document, rank 1 as many tokens in short ones, so their linear work is equal and their
attention is not. Letters: t seconds of a step (forward and backward), as `stretches` counts them.

- `t_static`: the same kernels without exchange; the step lasts as long as its slowest rank.
- `t_ideal`: linear time plus mean attention time: attention balanced at no cost.
- `t_ours`: balanced, with everything that the exchange costs.
- `lost`: what makes `t_ours` longer than `t_ideal`, on the rank that is done last.

`table`, `wlb_ratio` and `repack_ratio` come from `tables`, `exposed_comm_fraction` and `hidden`
from `exposed`, `server_ratio` from `served`: what they mean stands there.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import mean
from typing import Any

from benchmarks import exposed, served, tables
from benchmarks.common import Shape
from benchmarks.sides import RankRun, Side, gain, lost, run_rank, step
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.verify.cost_profile import setting
from hf_longctx.verify.rank_pool import RankPool

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
    pair: Sequence[int] = PAIR,
    tokens: int = tables.TOKENS,
    seeds: int = 5,
    halvable: Sequence[int] = exposed.DOCUMENTS,
    rounds: int = 3,
    pool: RankPool | None = None,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        shape (`Shape`, *optional*): The model.
        pair (`Sequence[int]`, *optional*): Documents of the pair, end to end over two ranks.
        tokens (`int`, *optional*, defaults to 8192): Of each rank, of the table's documents.
        seeds (`int`, *optional*, defaults to 5): Of the table.
        halvable (`Sequence[int]`, *optional*): Documents that overlap is measured on.
        rounds (`int`, *optional*, defaults to 3): Of each side; twice as many of the pair's.
        pool (`RankPool`, *optional*): Three processes or more; they are started by default.

    Returns:
        Figures by name.

    Raises:
        ClusterUnavailable: before anything runs, where this machine cannot make nodes.
    """
    exposed.check_cluster()
    with nullcontext(pool) if pool else RankPool(3, timeout=300) as used:
        logger.info("skewed pair: static and ours in turn, %d rounds", 2 * rounds)
        cases = sides(pair)
        runs = used.run(run_rank, ranks=2, shape=shape, sides=cases, rounds=2 * rounds)
        table = tables.measure(used, shape=shape, wanted=seeds, rounds=rounds, tokens=tokens)
        overlap = exposed.measure(used, shape=shape, rounds=rounds, lengths=halvable)
        server = served.measure(
            used, shape=shape, in_place=cases["ours"], work=step(runs, "static"), rounds=rounds
        )
    clock = "CPU seconds of a step's stretches, and its exchanges, each at its best round"
    return {
        **setting(shape, processes=2, allocator=runs[0].allocator, clock=clock),
        "rounds": rounds,
        "documents": len(pair),
        "tokens": sum(pair),
        **figures(runs, cases, shape=shape),
        **{name: table.pop(name) for name in ("wlb_ratio", "repack_ratio") if name in table},
        "table": table,
        **{name: overlap.pop(name) for name in ("exposed_comm_fraction", "hidden")},
        "overlap": overlap,
        "server_ratio": server.pop("server_ratio"),
        "server": server,
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
        "ideal_speedup": static.ideal_speedup,
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
