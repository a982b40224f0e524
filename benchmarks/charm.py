"""`python -m benchmarks charm`: what attention by levels of links gains over rings, and where not.

Eight ranks in two domains of four: `dual_numa`, whose ranks share one slow link, and
`dual_node`, with a slow link per rank; see `sweep` for their figures. Links are emulated and
compute is timed there, while bytes are real. Beside them:

- `unshaped`: links alike everywhere. `forced_charm_ratio`: time of charm over that of our ring: the
  price of charm where it gains nothing.
- `flat_ring_as_good_from`: the smallest c over tau at which charm gains less than 5 % on our ring.
- `packed`: documents of the 14-bucket table on `dual_node`'s links: megabytes that leave a rank
  across, and seconds.
- `time_ratio_vs_*`: real kernels on two ranks, forward and backward: time of the other over that of
  charm. At two ranks the hybrid is Ulysses.
- `real`: errors against one process in float64, and megabytes of the busiest rank's interface.
"""

import logging
from dataclasses import replace
from typing import Any

from benchmarks.cluster_spec import ClusterSpec
from benchmarks.on_cluster import run_on
from benchmarks.packed import draw_lengths
from benchmarks.real import Compared, compare
from benchmarks.sweep import RAILS, RATIOS, TAU, UNSHAPED, Setup, machine, measure, seconds_of, ways
from benchmarks.timed import Case, Measured, Way, time_ways
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.predict.predict import GAIN, choose
from hf_longctx.verify.cost_profile import setting

logger = logging.getLogger(__name__)
CASE = Case(levels=Levels((2, 4)), lengths=(2048,), head_dim=64)
LONG = 8192  # tokens that two ranks attend to with real kernels
SHORT = 512
TABLE = 8192  # tokens of the table's documents
PACKED_RATIO = 0.32
PEERS = ("torch_ring", "deepspeed", "ring", "ulysses", "hybrid")


def run(
    *,
    case: Case = CASE,
    ratios: tuple[float, ...] = RATIOS,
    tau: float = TAU,
    rounds: int = 1,
    long: int = LONG,
    table: int = TABLE,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        case (`Case`, *optional*): One document on two levels.
        ratios (`tuple[float, ...]`, *optional*): Of c over tau.
        tau (`float`, *optional*, defaults to 0.25): Seconds of a chunk on a slow link.
        rounds (`int`, *optional*, defaults to 1): Of the packed documents and of ratios from 1
            on; one more of the rest.
        long (`int`, *optional*, defaults to 8192): Tokens that two ranks attend to.
        table (`int`, *optional*, defaults to 8192): Tokens of the packed documents.

    Returns:
        Figures by name.

    Raises:
        ClusterUnavailable: before anything runs, where this machine cannot make nodes.
    """
    real = {str(ranks): _real(ranks, case=case) for ranks in (2, 4, 8)}
    setups = {name: Setup(case=case, rails=rails, tau=tau) for name, rails in RAILS.items()}
    found = {name: measure(setup, ratios=ratios, rounds=rounds) for name, setup in setups.items()}
    for name, ratio in (("dual_numa", 0.7), ("dual_node", 0.32)):
        found[name] |= _at(found[name]["sweep"], ratio)
    unshaped = _unshaped(setups["dual_numa"], rounds=rounds)
    found["dual_node"].pop("allocator")
    sweeps = [found[name] for name in RAILS]
    clock = "wall seconds until the last rank is done, each direction at its best round"
    return {
        **setting(case, processes=8, allocator=found["dual_numa"].pop("allocator"), clock=clock),
        "dtype": "bfloat16, gradients and partial results float32",
        "labels": "emulated links, timed compute, real bytes; time_ratio_vs_* real compute",
        "rounds": rounds,
        **found,
        "auto_regret": max(x["auto_regret"] for x in (*sweeps, unshaped)),
        "unshaped": unshaped,
        "flat_ring_as_good_from": {name: even_from(found[name]["sweep"]) for name in RAILS},
        "packed": _packed(tau=tau, tokens=table, rounds=rounds),
        **_ratios(long, rounds=rounds + 1),
        "real": real,
    }


def _at(sweep: list[dict[str, Any]], ratio: float) -> dict[str, Any]:
    """`at_0_70` of the row at 0.7: its speedups."""
    rows = [row for row in sweep if row["c_over_tau"] == ratio]
    return {
        f"at_{ratio:.2f}".replace(".", "_"): {k: v for k, v in row.items() if "ward_speedup" in k}
        for row in rows
    }


def even_from(sweep: list[dict[str, Any]]) -> float | None:
    """The smallest ratio from which on our ring is as good; `None` where it never is."""
    even: float | None = None
    for row in reversed(sweep):
        ring = row["our_ring_forward_seconds"] + row["our_ring_backward_seconds"]
        if ring / (row["forward_seconds"] + row["backward_seconds"]) >= 1 + GAIN:
            break
        even = row["c_over_tau"]
    return even


def _unshaped(setup: Setup, *, rounds: int) -> dict[str, Any]:
    """Every algorithm where links are as fast between domains as in them."""
    ratios = (0.1, 0.5)
    spec = replace(setup.spec, cross=UNSHAPED)
    logger.info("links alike everywhere")
    points = [setup.entry_seconds(ratio) for ratio in ratios]
    names = {name: way for name, way in ways(setup.case).items() if not way.public}
    runs: list[Measured] = run_on(
        spec,
        time_ways,
        channels=setup.case.levels.channels,
        case=setup.case,
        ways=names,
        points=points,
        rounds=[rounds + 1] * len(points),
    )
    table: list[dict[str, Any]] = []
    case = setup.case
    for number, point in enumerate(points):
        found = {name: seconds_of(runs, name, number) for name in names}
        made = machine(case.levels, runs[0].rates, entry_seconds=point)
        chosen, _ = choose(case.layout(), made, kind=case.kind, widths=case.widths)
        fastest = min(seconds.layer for seconds in found.values())
        table.append(
            {
                "c_seconds": ratios[number] * setup.tau,
                **{f"{name}_seconds": seconds.layer for name, seconds in found.items()},
                "forced_charm_ratio": found["charm"].layer / found["ring"].layer,
                "auto": chosen,
                "auto_regret": found[chosen].layer / fastest,
            }
        )
    return {
        "points": table,
        "forced_charm_ratio": max(row["forced_charm_ratio"] for row in table),
        "auto_regret": max(row["auto_regret"] for row in table),
        "rates": [str(rate) for rate in runs[0].rates],
    }


def _packed(*, tau: float, tokens: int, rounds: int) -> dict[str, Any]:
    """Documents of the table: charm, our ring and a public one that knows of no domains."""
    lengths = tuple(draw_lengths(tokens=tokens))
    case = Case(levels=Levels((2, 4)), lengths=lengths, head_dim=32)
    setup = Setup(case=case, rails="per_rank", tau=tau)
    names = {
        "public_ring": Way(algorithm="ring", public=True, flat=True),
        "ring": Way(algorithm="ring", flat=True),
        "charm": Way(algorithm="charm"),
    }
    logger.info("packed documents of the table: %d", len(lengths))
    runs: list[Measured] = run_on(
        setup.spec,
        time_ways,
        channels=case.levels.channels,
        case=case,
        ways=names,
        points=[setup.entry_seconds(PACKED_RATIO)],
        rounds=[rounds],
    )
    found = {name: seconds_of(runs, name, 0).layer for name in names}
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "c_over_tau": PACKED_RATIO,
        "seconds": found,
        "speedup_vs_public_ring": found["public_ring"] / found["charm"],
        "speedup_vs_ring": found["ring"] / found["charm"],
        "cross_megabytes": {n: max(run.carried[n] for run in runs) / 1e6 for n in names},
        "bytes_sent": {n: sum(run.sent[n] for run in runs) for n in names},
        "bytes_planned": {n: sum(run.planned[n] for run in runs) for n in names},
    }


def _compared(case: Case, *, rounds: int, exact: bool) -> list[Compared]:
    nodes, ranks = case.levels.sizes
    spec = ClusterSpec(nodes=nodes, ranks_per_node=ranks, cross=UNSHAPED)
    found: list[Compared] = run_on(
        spec, compare, channels=case.levels.channels, case=case, rounds=rounds, exact=exact
    )
    return found


def _real(ranks: int, *, case: Case) -> dict[str, Any]:
    """Errors and bytes of real attention on a short document."""
    logger.info("real attention on %d ranks, ours and others'", ranks)
    small = replace(case, levels=Levels((2, ranks // 2)), lengths=(SHORT,))
    runs = _compared(small, rounds=1, exact=True)
    return {
        "cross_megabytes": {n: max(run.carried[n] for run in runs) / 1e6 for n in runs[0].carried},
        "error": {name: max(run.errors[name] for run in runs) for name in runs[0].errors},
    }


def _ratios(tokens: int, *, rounds: int) -> dict[str, float]:
    """Times of all others over that of charm, on two ranks."""
    logger.info("real attention on 2 ranks, %d tokens, %d rounds", tokens, rounds)
    case = replace(CASE, levels=Levels((2, 1)), lengths=(tokens,))
    runs = _compared(case, rounds=rounds, exact=False)
    seconds = {name: max(run.seconds[name] for run in runs) for name in runs[0].seconds}
    ratios = {f"time_ratio_vs_{name}": seconds[name] / seconds["charm"] for name in PEERS}
    return {**ratios, "charm_real_seconds": seconds["charm"]}
