"""Slow links -> how much of what exchanges cost each `longctx_overlap` leaves to be seen.

Two nodes of one rank; rank 0 holds two long documents, rank 1 as many tokens in short
ones, and attention is balanced. The batch can be halved, so all overlaps run the same documents.
The links' rate is chosen so that all messages, one behind the other, take half of the time that
attention does. Kernels are real, and so are bytes. Letters: t seconds of a step.

- `t`: with the exchanges; `t_nocomm`: the same, but nothing is sent, and what is due is there at
  once, as zeros. Both pack, unpack and pay for shorter kernels; `t` has the waits and the CPU
  seconds of gloo's threads besides.
- `exposed_comm_fraction`: (t - t_nocomm) / t_nocomm.
- `hidden`: 1 - that fraction over the one without overlap.
"""

import logging
from collections.abc import Sequence
from statistics import mean
from typing import Any, Literal, get_args

from benchmarks.cluster import Cluster
from benchmarks.cluster_spec import ClusterSpec
from benchmarks.common import Shape
from benchmarks.on_cluster import run_on
from benchmarks.sides import RankRun, Side, Step, run_rank, step
from hf_longctx.planning.layouts.layout import halve
from hf_longctx.verify.rank_pool import RankPool

logger = logging.getLogger(__name__)
Overlap = Literal["none", "heads", "pingpong"]
DOCUMENTS = (4096,) * 2 + (256,) * 32
SHARE = 0.5  # of attention time, that messages take


def sides(lengths: Sequence[int]) -> dict[str, Side]:
    """Each overlap with and without exchanges, on the same documents and rows."""
    halves = halve(lengths, ranks=2, layout="contiguous")
    assert halves is not None, lengths
    made = {}
    for overlap in get_args(Overlap):
        for filled in (False, True):
            made[name_of(overlap, filled=filled)] = Side(
                layout=halves.whole,
                halves=halves if overlap == "pingpong" else None,
                overlap="heads" if overlap == "heads" else "none",
                tolerance=0.05,
                filled=filled,
            )
    return made


def name_of(overlap: str, *, filled: bool) -> str:
    """The side of an overlap, with its exchanges or filled."""
    return f"{overlap}, nothing sent" if filled else overlap


def links(steps: Step, *, sent: int) -> ClusterSpec:
    """A cluster whose links carry the bytes in half the time that a step attends."""
    attending = mean(rank.attending for rank in steps.ranks)
    rate = round(8 * sent / (SHARE * attending))
    return ClusterSpec(nodes=2, ranks_per_node=1, cross=min(max(rate, 10**6), 50 * 10**9))


def check_cluster() -> None:
    """Make such a cluster, and end it. Raises `ClusterUnavailable`."""
    with Cluster(ClusterSpec(nodes=2, ranks_per_node=1, cross=10**9)):
        pass


def measure(
    pool: RankPool, *, shape: Shape, rounds: int, lengths: Sequence[int] = DOCUMENTS
) -> dict[str, Any]:
    """Choose the links' rate, then run every overlap on them, in turn.

    Args:
        pool (`RankPool`): Two ranks, on which attention is timed first.
        shape (`Shape`): The model.
        rounds (`int`): Of each side.
        lengths (`Sequence[int]`, *optional*): Documents, which must be possible to halve.

    Returns:
        Figures by name; those of one overlap under it.
    """
    cases = sides(lengths)
    alone = name_of("none", filled=True)
    logger.info("overlap: timing attention, to choose the links' rate")
    probe = pool.run(run_rank, ranks=2, shape=shape, sides={alone: cases[alone]}, rounds=2)
    sent = cases["none"].bytes_planned(shape)
    spec = links(step(probe, alone), sent=sent)
    logger.info("overlap: links of %.0f Mbit/s, %d rounds", spec.cross / 1e6, rounds)
    runs = run_on(spec, run_rank, shape=shape, sides=cases, rounds=rounds)
    return {"link_mbit": spec.cross / 1e6, **figures(runs, sent=sent, rate=spec.cross)}


def figures(runs: Sequence[RankRun], *, sent: int, rate: int) -> dict[str, Any]:
    """What the cluster's ranks measured."""
    found: dict[str, dict[str, float]] = {
        name: {}
        for name in ("t", "t_nocomm", "exposed_comm_fraction", "hidden", "wall_t", "wall_t_nocomm")
    }
    for overlap in get_args(Overlap):
        names = [name_of(overlap, filled=filled) for filled in (False, True)]
        with_it, without = (
            step(runs, names[0], alike=names[1]),
            step(runs, names[1], alike=names[0]),
        )
        found["t"][overlap], found["t_nocomm"][overlap] = with_it.seconds, without.seconds
        found["wall_t"][overlap], found["wall_t_nocomm"][overlap] = with_it.wall, without.wall
        exposed = with_it.seconds / without.seconds - 1
        found["exposed_comm_fraction"][overlap] = exposed
        if overlap != "none":
            found["hidden"][overlap] = 1 - exposed / found["exposed_comm_fraction"]["none"]
    attending = mean(r.attending for r in step(runs, name_of("none", filled=True)).ranks)
    return {
        **found,
        "attention_seconds": attending,
        "comm_over_attention": 8 * sent / rate / attending,
        "bytes_sent": {o: step(runs, o).sent for o in get_args(Overlap)},
        "loss_error": max(run.loss_error for run in runs),
        "grad_error": max(run.grad_error for run in runs),
    }
