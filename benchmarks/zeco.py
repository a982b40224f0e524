"""`python -m benchmarks zeco`: what a chain gains over an all-gather of states, and what it costs.

Eight nodes of one rank, a slow link each (see `cluster_spec`). Links are emulated and
a layer's work is timed; messages, states and what composes them are real (see `scanned`). A state
of 16 heads of 128 x 128 in float32 is 1 MiB, D, which takes `tau` on a link. One decay a head: an
all-gather of the delta rule's matrices would send twice as much.

- `chain`: All-Scan in K pieces, at best (P - 2 + K) tau / K; `allgather`: LASP-2, ours, at best
  (P - 1) tau; `gloo`: the same by gloo's all-gather; `serial`: LASP-1, (P - 1) tau; `tree`:
  ceil(log2 P) tau. `*_fraction_of_bound`: that over what was measured, of the slower direction. An
  idle link lets a packet pass at once, which is taken off first (`bounds`).
- `allscan_speedup_vs_allgather`: of the faster all-gather, against the chain.
- `overhead_vs_no_comm`: a layer with its scan over one without, forward and backward, by how long
  its forward computes over tau. `overhead_model`: what it forms, then the longer of the scan and
  of what needs no state of others, then what does.
- `bytes_per_rank`: the most that a rank sends in a pass of the chain; `wire_bytes_per_rank`: that
  its interface counted, headers and the starting signals of both directions included.
- `predicted`: the cost model at the sizes of the table in the ZeCO paper (arXiv 2507.01004).

Letters: P ranks, K pieces.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cluster_spec import ClusterSpec
from benchmarks.on_cluster import run_on
from benchmarks.scanned import BACKWARD, GLOO, SHARES, Case, Measured, Seconds, Way, time_scans
from hf_longctx.planning.layouts.levels import NeighbourLink
from hf_longctx.planning.planners.state_scan import State
from hf_longctx.planning.predict.scan_schedule import StateSizes, choose_schedule, cuts
from hf_longctx.verify.cost_profile import setting

logger = logging.getLogger(__name__)
RANKS = 8
# Seconds of a state on a link. A piece of it then takes 25 ms, long against HOP, the time in which
# eight processes on two cores take one in, compose it and send it on, and which sets the pieces.
TAU = 0.8
HOP = 1e-3
BURST = 10_000  # bytes that an idle link lets pass at once: the least, a packet
RATIOS = (0.5, 1.0, 2.0, 4.0)
# Milliseconds of the collective in the ZeCO paper, H100, state of 32 heads: all-gather, All-Scan.
PAPER = {8: (0.375, 0.226), 64: (2.543, 0.739), 256: (8.514, 2.165)}
PAPER_SIZES = StateSizes(State(128, "row"), 32, 128)


def run(
    *,
    case: Case | None = None,
    tau: float = TAU,
    ratios: Sequence[float] = RATIOS,
    rounds: int = 2,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        case (`Case`, *optional*): The state; that of every published figure by default.
        tau (`float`, *optional*, defaults to 0.8): Seconds of a state on a link.
        ratios (`Sequence[float]`, *optional*): Of a layer's computing over tau.
        rounds (`int`, *optional*, defaults to 2): Of each side; the best one counts.

    Returns:
        Figures by name.

    Raises:
        ClusterUnavailable: before anything runs, where this machine cannot make nodes.
    """
    case = case or Case()
    link = NeighbourLink(hop=HOP, rate=case.sizes.state_bytes / tau)
    pieces = choose_schedule(case.sizes, ranks=RANKS, link=link, flag="chain").pieces
    ways = {"chain": Way("chain", pieces)}
    counted = {
        ranks: _on_links(ranks, link, case=case, ways=ways, rounds=0) for ranks in (2, RANKS // 2)
    }
    ways |= {name: Way(name) for name in ("allgather", GLOO, "serial", "tree")}
    layers = [ratio * tau for ratio in ratios]
    runs = _on_links(RANKS, link, case=case, ways=ways, rounds=rounds, layers=layers)
    counted[RANKS] = runs
    limits = bounds(RANKS, tau=tau, pieces=pieces, saved=BURST / link.rate)
    clock = "wall seconds until the last rank is done, each direction at its best round"
    return {
        **setting(case, processes=RANKS, allocator=runs[0].allocator, clock=clock),
        "labels": "emulated links, timed compute of layers, real bytes",
        "rounds": rounds,
        "link_mbit": 8e-6 * link.rate,
        "tau_seconds": tau,
        "state_bytes": case.sizes.state_bytes,
        "pieces": pieces,
        **scans(runs, limits),
        **overheads(runs, chain=limits["chain"], tau=tau, ratios=ratios),
        **_bytes(counted),
        "predicted_here_seconds": {
            name: choose_schedule(case.sizes, ranks=RANKS, link=link, flag=name).seconds
            for name in ("chain", "allgather", "tree")
        },
        "predicted": predicted(),
    }


def _on_links(ranks: int, link: NeighbourLink, **given: Any) -> list[Measured]:
    logger.info("%d nodes with links of %.1f Mbit/s", ranks, 8e-6 * link.rate)
    spec = ClusterSpec(nodes=ranks, ranks_per_node=1, cross=round(8 * link.rate), burst=BURST)
    runs: list[Measured] = run_on(spec, time_scans, **given)
    return runs


def bounds(ranks: int, *, tau: float, pieces: int, saved: float = 0.0) -> dict[str, float]:
    """Seconds of one direction that no run of a schedule on such links can beat.

    Args:
        ranks (`int`): P.
        tau (`float`): Seconds of a state.
        pieces (`int`): K.
        saved (`float`, *optional*, defaults to 0.0): Seconds that an idle link saves at first.
    """
    hops, steps = ranks - 1, (ranks - 1).bit_length()
    return {
        "chain": (hops - 1 + pieces) * tau / pieces - hops * saved,
        "allgather": hops * tau - saved,
        GLOO: hops * tau - saved,
        "serial": hops * (tau - saved),
        "tree": steps * (tau - saved),
    }


def best(rounds: Sequence[Sequence[Seconds]]) -> Seconds:
    """Until the last rank was done, each direction at its best round; given by rank."""
    last = [tuple(map(max, zip(*ranks, strict=True))) for ranks in zip(*rounds, strict=True)]
    forward, backward = map(min, zip(*last, strict=True))
    return forward, backward


def scans(runs: Sequence[Measured], limits: Mapping[str, float]) -> dict[str, Any]:
    """What the ranks measured of scans alone, and their bounds -> figures."""
    found = {name: best([run.seconds[name] for run in runs]) for name in runs[0].seconds}
    of_bound = {name: limits[name] / max(seconds) for name, seconds in found.items()}
    gather = min((found[name] for name in ("allgather", GLOO)), key=sum)
    over = [slow / fast for slow, fast in zip(gather, found["chain"], strict=True)]
    return {
        "scans": {
            name: {"forward_seconds": f, "backward_seconds": b} for name, (f, b) in found.items()
        },
        "allscan_speedup_vs_allgather": sum(gather) / sum(found["chain"]),
        "allscan_speedup_forward": over[0],
        "allscan_speedup_backward": over[1],
        "model_speedup": limits["allgather"] / limits["chain"],
        "allscan_speedup_vs_serial": sum(found["serial"]) / sum(found["chain"]),
        "allscan_fraction_of_bound": of_bound["chain"],
        **{f"{name}_fraction_of_bound": of_bound[name] for name in found if name != "chain"},
        "error": {name: max(run.errors[name] for run in runs) for name in found},
    }


def overheads(
    runs: Sequence[Measured], *, chain: float, tau: float, ratios: Sequence[float]
) -> dict[str, Any]:
    """What they measured of layers -> how much longer these take than without a scan."""
    found: dict[str, dict[str, float]] = {}
    for number, ratio in enumerate(ratios):
        took = {n: best([run.layers[number][n] for run in runs]) for n in ("scan", "none")}
        model = [_modelled(ratio * tau * times, chain) for times in (1.0, BACKWARD)]
        computed = [ratio * tau * times for times in (1.0, BACKWARD)]
        each = [s / n for s, n in zip(took["scan"], took["none"], strict=True)]
        found[f"{ratio:g}"] = {
            "overhead": sum(took["scan"]) / sum(took["none"]),
            "model": sum(model) / sum(computed),
            "forward": each[0],
            "forward_model": model[0] / computed[0],
            "backward": each[1],
            "backward_model": model[1] / computed[1],
        }
    over = [
        point[name] / point[model]
        for point in found.values()
        for name, model in (("forward", "forward_model"), ("backward", "backward_model"))
    ]
    return {
        "overhead_vs_no_comm": {ratio: point["overhead"] for ratio, point in found.items()},
        "overhead_model": {ratio: point["model"] for ratio, point in found.items()},
        "overhead_by_direction": found,
        "overhead_over_model": {"max": max(over)},
    }


def _modelled(computed: float, chain: float) -> float:
    """Seconds of one direction of a layer that computes so long."""
    form, beside, add = (share * computed for share in SHARES)
    return form + max(beside, chain) + add


def _bytes(counted: Mapping[int, Sequence[Measured]]) -> dict[str, Any]:
    """Of the chain, by the number of ranks; of all ways at the most ranks."""
    most = {
        name: {str(ranks): max(max(getattr(run, of)["chain"]) for run in runs)
               for ranks, runs in counted.items()}
        for name, of in (("bytes_per_rank", "sent"), ("wire_bytes_per_rank", "carried"))
    }  # fmt: skip
    runs = counted[max(counted)]
    return {
        **most,
        "megabytes_of_busiest_rank": {
            name: max(max(run.carried[name]) for run in runs) / 1e6 for name in runs[0].carried
        },
        "bytes_sent": {n: sum(sum(run.sent[n]) for run in runs) for n in runs[0].planned},
        "bytes_planned": {n: sum(sum(run.planned[n]) for run in runs) for n in runs[0].planned},
    }


def predicted() -> dict[str, dict[str, Any]]:
    """The cost model on links like the paper's, beside its table; seconds of one direction.

    The table says neither rate nor hop: here they are what one more rank cost its all-gather and
    its All-Scan, the latter in as many pieces as we cut at most.
    """
    few, many = min(PAPER), max(PAPER)
    gather, scan = (
        1e-3 * (more - less) / (many - few)
        for less, more in zip(PAPER[few], PAPER[many], strict=True)
    )
    most = max(cuts(PAPER_SIZES.heads, PAPER_SIZES.columns))
    link = NeighbourLink(hop=scan - gather / most, rate=PAPER_SIZES.state_bytes / gather)
    figures: dict[str, dict[str, Any]] = {}
    for ranks, (paper_gather, paper_scan) in PAPER.items():
        auto = choose_schedule(PAPER_SIZES, ranks=ranks, link=link)
        of = {
            name: choose_schedule(PAPER_SIZES, ranks=ranks, link=link, flag=name)
            for name in ("chain", "tree", "allgather")
        }
        figures[str(ranks)] = {
            "auto": auto.name,
            **{f"{name}_seconds": schedule.seconds for name, schedule in of.items()},
            "chain_pieces": of["chain"].pieces,
            "paper_allscan_seconds": 1e-3 * paper_scan,
            "paper_allgather_seconds": 1e-3 * paper_gather,
        }
    return {**figures, "link": {"hop_seconds": link.hop, "gigabytes_per_second": link.rate / 1e9}}
