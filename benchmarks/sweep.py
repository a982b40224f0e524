"""Two domains with slow links between them -> what every algorithm takes there, beside its bound.

Emulated links, timed compute: eight ranks, one causal document, a sweep over how long
a rank computes on one chunk of keys, `c`, against how long the chunk takes on the slow link, `tau`.

- `ring_*`: ring attention as public implementations run it (`PublicRing`), which the closed form of
  a flat ring describes; `our_ring_*`: our `ring`, which sends less; `charm` without prefix.
- `model_*_speedup`: the closed form of the ring over that of charm.
- `*_fraction_of_bound`: the closed form over what was measured, of the slower direction. `failures`
  are the ratios at which one is under 0.85; c = 0 is not judged.
- `fraction_of_lower_bound`: of each algorithm the larger of two times that no schedule can beat,
  its busiest rank's compute and the bytes on its busiest link, over what was measured.
- `auto_regret`: the time of what `auto` picks, given what the start-up probe measures, over that of
  the fastest.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster_spec import ClusterSpec, Rails
from benchmarks.on_cluster import run_on
from benchmarks.timed import Case, Measured, Way, time_ways
from hf_longctx.comm.topology import LinkRate, Topology
from hf_longctx.planning.layouts.levels import Levels, Machine
from hf_longctx.planning.planners.charm import PIECES
from hf_longctx.planning.predict.predict import BACKWARD, Seconds, choose
from hf_longctx.planning.predict.timeline import entries
from hf_longctx.planning.program.counts import sent_by_level

logger = logging.getLogger(__name__)
RATIOS = (0.0, 0.25, 0.32, 0.5, 0.7, 1.0, 2.0)
# Seconds: long against what eight ranks on few cores take to pack, unpack, merge and sum.
TAU = 0.25
UNSHAPED = 50 * 10**9
REACHED = 0.85  # of its closed form: a point below is a failure
FRACTIONS = ("ring_fraction_of_bound", "charm_fraction_of_bound", "speedup_over_model")
RAILS: dict[str, Rails] = {"dual_numa": "shared", "dual_node": "per_rank"}


def ring_seconds(*, ranks: int, c: float, tau: float, rho: float = 2.0) -> Seconds:
    """The closed form of a flat ring, fully overlapped, whose gradients need a hop home.

    Args:
        ranks (`int`): R.
        c (`float`): Forward seconds of a rank against one chunk.
        tau (`float`): Seconds of a chunk's keys and values on the slow link.
        rho (`float`, *optional*, defaults to 2): Bytes of a chunk's gradient over those of its keys
            and values: 2 for float32 beside bf16.
    """
    c_b = BACKWARD * c
    return Seconds(
        forward=c + (ranks - 1) * max(c, tau),
        backward=c_b + (ranks - 1) * max(c_b, (1 + rho) * tau) + rho * tau,
    )


def charm_seconds(
    *,
    domains: int,
    ranks: int,
    c: float,
    tau: float,
    lanes: float = 1.0,
    rho: float = 2.0,
    pieces: int = 8,
    fast: float = 0.0,
) -> Seconds:
    """The closed form of charm over two levels.

    Args:
        domains (`int`): N.
        ranks (`int`): G, ranks of one domain.
        c, tau, rho (`float`): As for the ring.
        lanes (`float`): Slow links of a domain that work at once, in units of the ring's one.
        pieces (`int`): M.
        fast (`float`): Seconds of a chunk's keys and values on the fast link.
    """
    everyone, c_b = domains * ranks, BACKWARD * c
    crossing = (everyone - ranks) * tau / lanes
    inside = (everyone - 1) * fast
    return Seconds(
        forward=max(everyone * c, crossing + ranks * c / pieces, c + inside),
        backward=max(
            everyone * c_b,
            crossing * (1 + rho) + ranks * c_b / pieces,
            c_b + inside * (1 + rho),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster and what is attended to on it.

    Args:
        case (`Case`): One document, on two levels.
        rails (`Rails`): Whether the ranks of a domain share its slow link.
        tau (`float`): Seconds of a chunk on it.
    """

    case: Case
    rails: Rails
    tau: float = TAU

    @property
    def spec(self) -> ClusterSpec:
        """The cluster."""
        nodes, ranks = self.case.levels.sizes
        rate = round(8 * self.case.chunk_bytes / self.tau)
        return ClusterSpec(nodes=nodes, ranks_per_node=ranks, cross=rate, rails=self.rails)

    @property
    def lanes(self) -> int:
        """Slow links of a domain."""
        return 1 if self.rails == "shared" else self.case.levels.sizes[1]

    def entry_seconds(self, ratio: float) -> float:
        """Seconds of a score entry, of which a rank has half a square with each chunk."""
        rows = sum(self.case.lengths) / self.case.levels.ranks
        return ratio * self.tau / (rows**2 / 2)

    def closed_forms(self, ratio: float) -> dict[str, Seconds]:
        """What the formulae say of a flat ring and of charm; inside a domain links cost nothing."""
        domains, ranks = self.case.levels.sizes
        c, tau = ratio * self.tau, self.tau
        ring = ring_seconds(ranks=domains * ranks, c=c, tau=tau)
        charm = charm_seconds(
            domains=domains, ranks=ranks, c=c, tau=tau, lanes=self.lanes, pieces=PIECES
        )
        return {"ring": ring, "charm": charm}


def ways(case: Case) -> dict[str, Way]:
    """What is timed."""
    return {
        "public_ring": Way(algorithm="ring", public=True),
        "ring": Way(algorithm="ring"),
        "charm": Way(algorithm="charm"),
        "ulysses": Way(algorithm="ulysses"),
        "hybrid": Way(algorithm="ring", ulysses_size=case.levels.sizes[1]),
    }


def machine(levels: Levels, rates: tuple[LinkRate, ...], *, entry_seconds: float) -> Machine:
    """What a probe measured, as predictions take it."""
    links = Topology(levels=levels, why="measured", rates=rates).links
    return Machine(levels=levels, links=links, entry_seconds=entry_seconds)


def seconds_of(runs: Sequence[Measured], name: str, point: int) -> Seconds:
    """Until the last rank was done, each direction at its best round."""
    rounds = zip(*(run.seconds[name][point] for run in runs), strict=True)
    last = [(max(f for f, _ in ranks), max(b for _, b in ranks)) for ranks in rounds]
    return Seconds(forward=min(f for f, _ in last), backward=min(b for _, b in last))


def measure(setup: Setup, *, ratios: Sequence[float] = RATIOS, rounds: int) -> dict[str, Any]:
    """Run the sweep on a cluster.

    Args:
        setup (`Setup`): Links and documents.
        ratios (`Sequence[float]`, *optional*): Of c over tau.
        rounds (`int`): Of each algorithm; one more at ratios under 1, where compute does not hide
            what ranks that share cores do to each other.

    Returns:
        Figures by name.

    Raises:
        ClusterUnavailable: where this machine cannot make the cluster.
    """
    case = setup.case
    logger.info(
        "%s links of %.1f Mbit/s, %d ratios", setup.rails, setup.spec.cross / 1e6, len(ratios)
    )
    runs = run_on(
        setup.spec,
        time_ways,
        channels=case.levels.channels,
        case=case,
        ways=ways(case),
        points=[setup.entry_seconds(ratio) for ratio in ratios],
        rounds=[rounds + (ratio < 1) for ratio in ratios],
    )
    return figures(setup, runs, ratios=ratios)


def figures(setup: Setup, runs: Sequence[Measured], *, ratios: Sequence[float]) -> dict[str, Any]:
    """What the ranks measured -> the sweep and its worst points; those at c = 0 set none."""
    case = setup.case
    names = list(ways(case))
    ours = {name: loads(setup, way) for name, way in ways(case).items() if not way.public}
    table: list[dict[str, Any]] = []
    of_lower: dict[str, list[float]] = {name: [] for name in ours}
    errors: list[float] = []
    for point, ratio in enumerate(ratios):
        each = setup.entry_seconds(ratio)
        found = {name: seconds_of(runs, name, point) for name in names}
        made = machine(case.levels, runs[0].rates, entry_seconds=each)
        chosen, predicted = choose(case.layout(), made, kind=case.kind, widths=case.widths)
        fastest = min(found[name].layer for name in ours)
        auto = {"auto": chosen, "auto_regret": found[chosen].layer / fastest}
        table.append({**_row(ratio, found, setup.closed_forms(ratio)), **auto})
        if ratio:
            errors += [abs(1 / q - 1) for n in predicted for q in of(found[n], predicted[n])]
            for name, counted in ours.items():
                of_lower[name].append(min(of(counted.bound(each), found[name])))
    rows = [row for row in table if row["c_over_tau"]]
    worst = {name: min(row[name] for row in rows) for name in FRACTIONS}
    return {
        "link_mbit": setup.spec.cross / 1e6,
        "tau_seconds": setup.tau,
        "sweep": table,
        **{name: {"min": least} for name, least in worst.items()},
        "failures": [r["c_over_tau"] for r in rows if min(r[n] for n in FRACTIONS[:2]) < REACHED],
        "fraction_of_lower_bound": {name: min(found) for name, found in of_lower.items()},
        "prediction_error": {"max": float(max(errors))},
        "auto_regret": max(row["auto_regret"] for row in table),
        "allocator": runs[0].allocator,
        "rates": [str(rate) for rate in runs[0].rates],
        "cross_megabytes": {n: max(run.carried[n] for run in runs) / 1e6 for n in names},
        "bytes_sent": {n: sum(run.sent[n] for run in runs) for n in names},
        "bytes_planned": {n: sum(run.planned[n] for run in runs) for n in names},
    }


def of(one: Seconds, other: Seconds) -> tuple[float, float]:
    """One over the other, forward and backward."""
    return one.forward / other.forward, one.backward / other.backward


def _row(ratio: float, found: dict[str, Seconds], forms: dict[str, Seconds]) -> dict[str, Any]:
    """The times of one ratio, and their quotients."""
    charm, ring, ours = found["charm"], found["public_ring"], found["ring"]
    row: dict[str, Any] = {"c_over_tau": ratio}
    shown = {"": charm, "ring_": ring, "our_ring_": ours}
    shown |= {f"{name}_": found[name] for name in ("ulysses", "hybrid")}
    for prefix, seconds in shown.items():
        row[f"{prefix}forward_seconds"] = seconds.forward
        row[f"{prefix}backward_seconds"] = seconds.backward
    gained, modelled = of(ring, charm), of(forms["ring"], forms["charm"])
    row["forward_speedup"], row["backward_speedup"] = gained
    row["model_forward_speedup"], row["model_backward_speedup"] = modelled
    over_ours = of(ours, charm)
    row["forward_speedup_over_our_ring"], row["backward_speedup_over_our_ring"] = over_ours
    row["speedup_over_model"] = min(g / m for g, m in zip(gained, modelled, strict=True))
    row["ring_fraction_of_bound"] = min(of(forms["ring"], ring))
    row["charm_fraction_of_bound"] = min(of(forms["charm"], charm))
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What an algorithm puts on the busiest rank and link, forward and backward.

    Args:
        crossing (`tuple[float, float]`): Seconds of bytes on one slow link, one way.
        work (`tuple[float, float]`): Score entries, those of backward as many times as they take.
    """

    crossing: tuple[float, float]
    work: tuple[float, float]

    def bound(self, entry_seconds: float) -> Seconds:
        """Seconds that no schedule can beat."""
        forward, backward = (
            max(seconds, entry_seconds * work)
            for seconds, work in zip(self.crossing, self.work, strict=True)
        )
        return Seconds(forward=forward, backward=backward)


def loads(setup: Setup, way: Way) -> Loads:
    """Count what the programs of all ranks send across and attend to."""
    case, plan = setup.case, setup.case.plan(way)
    programs = [plan.program(rank) for rank in range(case.levels.ranks)]
    inside = case.levels.below(0)
    crossing, work = [], []
    for backward in (False, True):
        sent = [
            sent_by_level(p, case.widths, rank=r, levels=case.levels, backward=backward)[0]
            for r, p in enumerate(programs)
        ]
        if setup.rails == "shared":
            sent = [sum(sent[i : i + inside]) for i in range(0, len(sent), inside)]
        crossing.append(8 * max(sent) / setup.spec.cross)
        tasks = [entries(p, kind=case.kind, backward=backward).sum() for p in programs]
        work.append(float(max(tasks)) * (BACKWARD if backward else 1.0))
    return Loads(crossing=(crossing[0], crossing[1]), work=(work[0], work[1]))
