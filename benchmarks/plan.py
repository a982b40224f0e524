"""Length tables and rank counts -> how even a `distca` plan is, what it moves and how long it took.

Nothing runs but the planner. A batch holds `TOKENS` tokens a rank, in documents of at
most a quarter of the batch: one document of full length would hide every other effect. A layer has
the widths of Llama-3-8B. Layout `spread`, tolerance 0.05. Letters: R ranks, T tokens of a rank.

Two more rows of each kind are drawn from the buckets: `contiguous`, by ranks, says what that layout
costs; `servers`, by ranks + extra servers as fast as a rank, what a pool of them moves. `domains`,
by algorithm, times the planners that look at nested domains, on documents of pretrain, layout
`zigzag`; `ulysses` exchanges heads in the innermost ones, and runs a ring across.

- `attention_max_over_mean`: score entries of the busiest rank over the mean; worst seed.
- `max_exchange_vs_allgather`: the forward's largest send or receive of a rank (queries, keys,
  values, results) over what all-gather context parallelism receives, (R - 1) T keys and values;
  median seed, and beside it the worst one, and that of the mean rank.
- `plan_ms`: CPU milliseconds from lengths to the tasks of all ranks; median seed.
- `program_ms`: the same from tasks to one rank's program, which each rank builds for itself.
- `short_shards`: tasks under 128 rows that touch neither end of a document that has as many;
  worst seed.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.traffic import traffic
from hf_longctx.planning.layouts.cost import GRANULE, LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.support import NESTED
from hf_longctx.verify.cost_profile import BUCKETS, draw, setting

logger = logging.getLogger(__name__)
TOKENS = 131072
KIND = LayerKind(heads=32, kv_heads=8, query_width=32 * 128, key_value_width=2 * 8 * 128)
# Documents by length, as in `packed.BUCKETS`: the length statistics of DistCA's two data sets.
TABLES: dict[str, Mapping[int, float]] = {
    "pretrain": {1024: 16.0, 2048: 15.8, 4096: 32.0, 8192: 33.9, 16384: 1.0, 32768: 0.45,
                 65536: 0.35, 131072: 0.53},
    "prolong": {1024: 14.9, 2048: 38.4, 4096: 27.0, 8192: 14.4, 16384: 4.3, 32768: 0.78,
                65536: 0.15, 131072: 0.04, 340149: 0.02},
    "buckets": BUCKETS,
}  # fmt: skip
RANKS = (8, 32, 128, 512)
CONTIGUOUS = (8, 32)
SERVERS = ((2, 1), (8, 8), (64, 64))  # ranks, extra servers
COUNTED = {8: 400, 512: 4096}  # documents of pretrain, at these ranks, for planning times alone
DOMAINS = Levels((64, 8)), 4096  # and in these domains


def figures(
    lengths: Sequence[int], *, ranks: int, layout: str = "spread", servers: int = 0
) -> dict[str, float]:
    """Plan one batch and describe the plan.

    Args:
        lengths (`Sequence[int]`): Tokens of each document.
        ranks (`int`): Ranks of the group.
        layout (`str`, *optional*, defaults to `"spread"`): See `layouts.layout.cut`.
        servers (`int`, *optional*, defaults to 0): Extra servers, as fast as a rank.
    """
    started = time.process_time()
    held = cut(lengths, ranks=ranks, layout=layout)
    plan = make_plan(held, kind=KIND, options=PlanOptions(tolerance=0.05, speeds=(1.0,) * servers))
    planned = time.process_time()
    plan.program(ranks - 1)
    built = time.process_time()
    moved = traffic(
        held, plan.tasks, kind=KIND, splits=plan.splits, processes=plan.processes
    ).elements(KIND)
    gathered = sum(lengths) * (ranks - 1) / ranks * KIND.key_value_width
    document, start, stop = plan.tasks[:, :3].T
    length = held.lengths[document]
    inside = (start > 0) & (stop < length) & (length >= GRANULE)
    return {
        "attention_max_over_mean": plan.attention_max_over_mean(),
        "layout_max_over_mean": plan.attention_max_over_mean(balanced=False),
        "max_exchange_vs_allgather": float(moved.max()) / gathered,
        "mean_exchange_vs_allgather": float(moved.mean()) / gathered,
        "plan_ms": 1e3 * (planned - started),
        "program_ms": 1e3 * (built - planned),
        "short_shards": int((inside & (stop - start < GRANULE)).sum()),
        "documents": len(lengths),
    }


def of_domains(lengths: Sequence[int], *, algorithm: str, levels: Levels) -> dict[str, float]:
    """Plan one batch over nested domains.

    Args:
        lengths (`Sequence[int]`): Tokens of each document.
        algorithm (`str`): One that looks at domains.
        levels (`Levels`): The domains.
    """
    size = levels.sizes[-1] if algorithm == "ulysses" else 1
    started = time.process_time()
    held = cut(lengths, ranks=levels.ranks, layout="zigzag", levels=levels)
    plan = make_plan(
        held,
        kind=KIND,
        options=PlanOptions(algorithm=algorithm, topology=levels, ulysses_size=size),
    )
    planned = time.process_time()
    program = plan.program(levels.ranks - 1)
    built = time.process_time()
    return {
        "attention_max_over_mean": plan.attention_max_over_mean(),
        "plan_ms": 1e3 * (planned - started),
        "program_ms": 1e3 * (built - planned),
        "operations": len(program.ops),
        "documents": len(lengths),
    }


def summary(seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of several seeds -> one row; see the module's docstring."""
    columns = {name: [seed[name] for seed in seeds] for name in seeds[0]}
    worst = ("attention_max_over_mean", "layout_max_over_mean", "short_shards")
    row = {name: (max if name in worst else median)(column) for name, column in columns.items()}
    if "max_exchange_vs_allgather" in columns:
        row["worst_exchange_vs_allgather"] = max(columns["max_exchange_vs_allgather"])
    return row


def run(
    *,
    ranks: Sequence[int] = RANKS,
    tokens: int = TOKENS,
    seeds: int = 10,
    counted: Mapping[int, int] = COUNTED,
    contiguous: Sequence[int] = CONTIGUOUS,
    servers: Sequence[tuple[int, int]] = SERVERS,
    domains: tuple[Levels, int] = DOMAINS,
) -> dict[str, dict[str, dict[str, float]]]:
    """Run the bench.

    Args:
        ranks (`Sequence[int]`, *optional*): Group sizes.
        tokens (`int`, *optional*, defaults to 131072): Of each rank.
        seeds (`int`, *optional*, defaults to 10): Batches of each table and group size.
        counted (`Mapping[int, int]`, *optional*): Documents of the rows under `counted`, by ranks.
        contiguous (`Sequence[int]`, *optional*): Group sizes of that layout.
        servers (`Sequence[tuple[int, int]]`, *optional*): Ranks and extra servers.
        domains (`tuple[Levels, int]`, *optional*): Nested domains, and documents of a batch there.

    Returns:
        `{table: {ranks: figures}}`; the table `counted` has batches of so many documents, of
        whatever tokens.
    """
    clock = "CPU seconds of the process"
    shape = f"Llama-3-8B layer, {tokens} tokens a rank, {seeds} seeds from 0"
    where = setting(shape, processes=1, allocator="default", clock=clock)
    logger.info(", ".join(f"{key} {where[key]}" for key in ("shape", "clock", "cpu", "cores")))
    report: dict[str, dict[str, dict[str, Any]]] = {}
    figures(draw(TABLES["pretrain"], seed=0, tokens=1 << 16), ranks=2)  # imports, first touches
    cases = [(name, r, None) for name in TABLES for r in ranks]
    for name, r, documents in [*cases, *(("counted", *case) for case in counted.items())]:
        logger.info("%s, %d ranks", name, r)
        table = TABLES.get(name, TABLES["pretrain"])
        batches = (
            draw(table, seed=seed, tokens=r * tokens, documents=documents) for seed in range(seeds)
        )
        row = summary([figures(lengths, ranks=r) for lengths in batches])
        report.setdefault(name, {})[str(r)] = row
    others: list[tuple[str, str, dict[str, Any]]] = [
        *(("contiguous", str(r), {"ranks": r, "layout": "contiguous"}) for r in contiguous),
        *(("servers", f"{r}+{s}", {"ranks": r, "servers": s}) for r, s in servers),
    ]
    for name, label, given in others:
        logger.info("%s, %s", name, label)
        total = given["ranks"] * tokens
        drawn = (draw(BUCKETS, seed=seed, tokens=total) for seed in range(seeds))
        report.setdefault(name, {})[label] = summary([figures(b, **given) for b in drawn])
    levels, documents = domains
    for algorithm in NESTED:
        logger.info("%s, %s ranks", algorithm, levels)
        total = levels.ranks * tokens
        batches = (
            draw(TABLES["pretrain"], seed=seed, tokens=total, documents=documents)
            for seed in range(seeds)
        )
        rows = [of_domains(lengths, algorithm=algorithm, levels=levels) for lengths in batches]
        report.setdefault("domains", {})[algorithm] = summary(rows)
    return report
