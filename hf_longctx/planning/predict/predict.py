"""Predict the seconds of programs on a described machine, and choose the plan that `auto` runs.

One rank's program is played against a clock, as if its peers were in step: work takes the time of
its score entries, a message that of its bytes on the link of its level, after those that were
posted there before. Under `charm` with a topology that was found, not given, a batch's plan is
charm's where that is predicted to gain 5 % over the flat ring or more, and else the ring's.
Layer: planning.
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
from .timeline import Clock, Event, ExpectedMessage, events

GAIN = 0.05  # below it the flat ring is taken: predictions are no more accurate
BACKWARD = 2.5  # times the work of forward, by score entry
_AS_BUSY = 0.99  # of the most score entries: a domain with so many counts as one of the busiest
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
    """Predict the seconds of one rank's program.

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
    """Put the messages of a post on their links: now, or once what they relay has arrived."""
    begins = max(clock.now, clock.arrives.get(event.after, 0.0))
    clock.arrives[event.tag] = max(begins, clock.arrives.get(event.tag, 0.0))
    for way, peer, size in event.messages:
        level = machine.levels.crosses(rank, peer)
        link = machine.links[level]
        senders = machine.levels.below(level) if at_once else 1
        sharing = max(1.0, senders / link.lanes)
        due = ExpectedMessage(event.tag, (level, way), begins, size * sharing / link.rate)
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
    """Choose between the flat ring and charm, and return what was predicted of each.

    It is the flat ring, unless charm is predicted to gain 5 % over it or more. Both programs are
    built for a few ranks only; see `_representative_ranks`.

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
    ranks = _representative_ranks(layout, machine.levels, kind)
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


def _representative_ranks(layout: Layout, levels: Levels, kind: LayerKind) -> list[int]:
    """Return the ranks whose programs are played: first ranks of the busiest domains.

    In a ring the first rank of a domain receives across the outermost link.
    """
    size = levels.below(0)
    if levels.sizes[0] == 2:  # both: their parts differ most
        return [0, size]
    rank, _, document, start, stop = layout.columns.T
    entries = kind.entries(start, stop, length=layout.lengths[document])
    work = np.bincount(rank // size, weights=entries, minlength=levels.sizes[0])
    # The second of equally busy domains: there the gradients of most chunks pass.
    most = np.flatnonzero(work >= _AS_BUSY * work.max())
    return [int(most[min(1, len(most) - 1)]) * size]


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
