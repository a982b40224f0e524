"""A layout and what is known of links and speed -> the plan that `auto` runs, and why.

Floor: plan. Under `charm` with a topology that was found, not given, a batch's plan is charm's
where that is predicted to gain 5 % over the flat ring or more, and else the ring's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .cost import LayerKind
from .count import Widths
from .layout import Layout
from .levels import Levels
from .plans import Plan, make_plan
from .predict import GAIN, Machine, Seconds, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """What choices go by, the same on every rank of a group.

    Args:
        itemsize (`int`): Bytes of an element of the rows that travel.
        machine (`Machine`, *optional*): Links and speed; `None` where no link was measured, as
            all ranks share one place.
    """

    itemsize: int
    machine: Machine | None = None


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
        name = self.plan.algorithm
        if not self.seconds:
            return f"{name}, as all ranks share one place, where no link was measured"
        ring, ours = (self.seconds[algorithm].layer for algorithm in ("ring", "charm"))
        gain = ring / ours - 1 if ours else 0.0
        return (
            f"{name}, as charm is predicted to gain {gain:.0%} over the flat ring ({GAIN:.0%} are "
            f"asked for): {1e3 * ours:.3g} against {1e3 * ring:.3g} ms a layer"
        )


def chosen(
    layout: Layout, auto: Auto, *, kind: LayerKind, levels: Levels, ulysses_size: int = 1
) -> Choice:
    """The plan of a batch.

    Args:
        layout (`Layout`): Where the tokens lie.
        auto (`Auto`): What the choice goes by.
        kind (`LayerKind`): The layers.
        levels (`Levels`): The nested domains.
        ulysses_size (`int`, *optional*, defaults to 1): Ranks of a domain that exchange heads, with
            either plan.
    """
    names = ("ring", "charm") if auto.machine else ("ring",)
    plans = {
        name: make_plan(name, layout, kind=kind, topology=levels, ulysses_size=ulysses_size)
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
        heads_move=ulysses_size > 1,
    )
    return Choice(plan=plans[name], seconds=seconds)
