"""Programs and described links -> predicted seconds, and the plan that `auto` picks.

Layer: planning. One rank's program is played against a clock, as if its peers were in step: work takes
its score entries' time, a message its bytes' time on the link of its level, after those that were
posted there before. `ring_seconds` and `charm_seconds` are the closed forms of the same for one
causal document in zigzag. Letters: R ranks, N domains of G ranks, M pieces.

A layout and what is known of links and speed -> the plan that `auto` runs, and why. Under `charm` with a topology that was found, not given, a batch's plan is charm's
where that is predicted to gain 5 % over the flat ring or more, and else the ring's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.layout import Layout
from ..layouts.levels import Levels, Machine
from ..planners import charm, ring
from ..planners.options import PlanOptions
from ..planners.plan import Plan, make_plan
from ..program.counts import Widths
from ..program.program import Program
from .timeline import Clock, Due, Event, events

GAIN = 0.05  # below it the flat ring is taken: predictions are no better
BACKWARD = 2.5  # times the work of forward, by score entry
_AS_BUSY = 0.99  # of the most score entries
Make = Callable[[str, int], Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Predicted times of one layer's attention."""

    forward: float
    backward: float

    @property
    def layer(self) -> float:
        """Both directions."""
        return self.forward + self.backward


def predict(
    program: Program, machine: Machine, *, rank: int, kind: LayerKind, widths: Widths, at_once: bool
) -> Seconds:
    """Seconds of one rank's program.

    Args:
        program (`Program`): The rank's program; choose a rank that waits for slow links.
        machine (`Machine`): Links and speed.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): What a row sees.
        widths (`Widths`): Bytes of a row.
        at_once (`bool`): All ranks of a domain send across together, as `charm`'s do, so that they
            share its link; of a ring one rank per domain does.
    """
    times = []
    for backward in (False, True):
        each = machine.entry_seconds * (BACKWARD if backward else 1.0)
        played, left = events(program, kind=kind, widths=widths, backward=backward)
        clock = Clock()
        for event in played:
            clock.now += event.work * each
            if event.posted:
                _post(event, clock, machine, rank, at_once)
            else:
                clock.wait(event.tag)
        times.append(clock.now + left * each)
    return Seconds(forward=times[0], backward=times[1])


def _post(event: Event, clock: Clock, machine: Machine, rank: int, at_once: bool) -> None:
    """Sends leave now, or with what they relay."""
    begins = max(clock.now, clock.arrives.get(event.after, 0.0))
    clock.arrives[event.tag] = max(begins, clock.arrives.get(event.tag, 0.0))
    for way, peer, size in event.messages:
        level = machine.levels.crosses(rank, peer)
        link = machine.links[level]
        senders = machine.levels.below(level) if at_once else 1
        sharing = max(1.0, senders / link.lanes)
        due = Due(event.tag, (level, way), begins, size * sharing / link.rate)
        if way:
            clock.expect((rank - peer) % machine.levels.ranks, due)
        else:
            clock.take(due, begins)
            clock.send((peer - rank) % machine.levels.ranks, begins)


def choose(
    layout: Layout,
    machine: Machine,
    *,
    kind: LayerKind,
    widths: Widths,
    pieces: int = charm.PIECES,
    make: Make | None = None,
    heads_move: bool = False,
) -> tuple[str, Mapping[str, Seconds]]:
    """The algorithm that `auto` runs, and what was predicted of each.

    The flat ring, unless charm is predicted to gain 5 % over it or more. Builds both programs of
    one rank: the first of the domain with most to do, which in a ring receives across the outermost
    link. Of domains with as much it is the second, where the gradients of most chunks pass; of two
    domains both are played.

    Args:
        layout (`Layout`): Where the tokens lie.
        machine (`Machine`): Links and speed.
        kind (`LayerKind`): The layers.
        widths (`Widths`): Bytes of a row.
        pieces (`int`, *optional*, defaults to 4): Of charm's crossings.
        make (`Callable`, *optional*): The program of an algorithm and a rank, where it is not built
            as these arguments say.
        heads_move (`bool`, *optional*, defaults to `False`): Ranks exchange heads in a ring's
            program, too, so that those of a domain send across together.
    """
    ranks = _telling(layout, machine.levels, kind)
    made: Make = make or partial(_made, layout, kind=kind, levels=machine.levels, pieces=pieces)
    found = {}
    for name in ("ring", "charm"):
        at_once = heads_move or name == "charm"
        each = [
            predict(made(name, rank), machine, rank=rank, kind=kind, widths=widths, at_once=at_once)
            for rank in ranks
        ]
        found[name] = Seconds(
            forward=max(s.forward for s in each), backward=max(s.backward for s in each)
        )
    gain = found["ring"].layer / found["charm"].layer - 1 if found["charm"].layer else 0.0
    return ("charm" if gain >= GAIN else "ring"), found


def _made(
    layout: Layout, name: str, rank: int, *, kind: LayerKind, levels: Levels, pieces: int
) -> Program:
    if name == "ring":
        return ring.program(layout, rank=rank, kind=kind)
    return charm.program(layout, rank=rank, kind=kind, levels=levels, pieces=pieces)


def _telling(layout: Layout, levels: Levels, kind: LayerKind) -> list[int]:
    """The first ranks of the domains that are played: both of two, whose parts differ most."""
    size = levels.below(0)
    if levels.sizes[0] == 2:
        return [0, size]
    rank, _, document, start, stop = layout.columns.T
    entries = kind.entries(start, stop, length=layout.lengths[document])
    work = np.bincount(rank // size, weights=entries, minlength=levels.sizes[0])
    most = np.flatnonzero(work >= _AS_BUSY * work.max())
    return [int(most[min(1, len(most) - 1)]) * size]


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


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen for one batch and one layer kind.

    Args:
        plan (`Plan`): It keeps the programs that were built to predict.
        seconds (`Mapping[str, Seconds]`): Of a layer, by algorithm; empty without a machine.
    """

    plan: Plan
    seconds: Mapping[str, Seconds] = field(default_factory=dict)

    def __str__(self) -> str:
        name = self.plan.options.algorithm
        if not self.seconds:
            return f"{name}, as all ranks share one place, where no link was measured"
        ring, ours = (self.seconds[algorithm].layer for algorithm in ("ring", "charm"))
        gain = ring / ours - 1 if ours else 0.0
        return (
            f"{name}, as charm is predicted to gain {gain:.0%} over the flat ring ({GAIN:.0%} are "
            f"asked for): {1e3 * ours:.3g} against {1e3 * ring:.3g} ms a layer"
        )


def choose_plan(layout: Layout, *, kind: LayerKind, options: PlanOptions) -> Choice:
    """Plan a batch by charm or by the flat ring, whichever is predicted to be faster.

    Args:
        layout (`Layout`): Which rank holds which tokens.
        kind (`LayerKind`): The layers.
        options (`PlanOptions`): With `auto`, which the choice goes by.
    """
    auto = options.auto
    assert auto is not None
    names = ("ring", "charm") if auto.machine else ("ring",)
    plans = {
        name: make_plan(layout, kind=kind, options=replace(options, algorithm=name, auto=None))
        for name in names
    }
    if auto.machine is None:
        return Choice(plan=plans["ring"])
    head_dim = kind.query_width // kind.heads
    widths = Widths(
        heads=kind.heads,
        kv_heads=kind.kv_heads,
        head_dim=head_dim,
        value_dim=kind.key_value_width // kind.kv_heads - head_dim,
        itemsize=auto.itemsize,
        wide_itemsize=max(4, auto.itemsize),
    )
    name, seconds = choose(
        layout,
        auto.machine,
        kind=kind,
        widths=widths,
        make=lambda algorithm, rank: plans[algorithm].program(rank),
        heads_move=options.ulysses_size > 1,
    )
    return Choice(plan=plans[name], seconds=seconds)
