"""Predict seconds: closed forms, programs against a clock, and what auto picks."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.sweep import charm_seconds, ring_seconds
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.layouts.levels import LevelLink, Levels, Machine
from hf_longctx.planning.planners import charm, ring
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.predict.predict import (
    Seconds,
    choose,
    predict,
)
from hf_longctx.planning.predict.timeline import events
from hf_longctx.planning.program.counts import Widths, sent
from hf_longctx.planning.program.program import Program

KIND = LayerKind(query_width=128, key_value_width=256, kv_heads=8)
WIDTHS = Widths(heads=8, kv_heads=8, head_dim=16, value_dim=16, itemsize=2)
ROWS = 256  # of a rank


def setting(
    sizes: tuple[int, int], *, c: float, lanes: float, fast: float = 20.0
) -> tuple[Layout, Machine]:
    """One causal document, and links on which a chunk takes a second, or 1 / `fast`."""
    levels = Levels(sizes)
    chunk = ROWS * WIDTHS.row("kv")
    held = cut([ROWS * levels.ranks], ranks=levels.ranks, layout="zigzag")
    links = (LevelLink(float(chunk), lanes), LevelLink(fast * chunk, sizes[1]))
    return held, Machine(levels=levels, links=links, entry_seconds=c / (ROWS**2 / 2))


@pytest.mark.parametrize(
    ("lanes", "ratio", "forward", "backward"),
    [  # 8 ranks, M = 8: bounds of the notes, dual NUMA at 0.70 and dual node at 0.32
        (1, 0.70, 1.38, 1.77),
        (4, 0.32, 2.86, 3.72),
    ],
)
def test_closed_forms_give_the_figures_of_the_notes(
    lanes: int, ratio: float, forward: float, backward: float
) -> None:
    flat = ring_seconds(ranks=8, c=ratio, tau=1.0)
    ours = charm_seconds(domains=2, ranks=4, c=ratio, tau=1.0, lanes=lanes)
    assert flat.forward / ours.forward == pytest.approx(forward, abs=0.006)
    assert flat.backward / ours.backward == pytest.approx(backward, abs=0.006)


def of_program(made: Layout, machine: Machine, *, name: str, rank: int) -> Seconds:
    if name == "ring":
        program = ring.program(made, rank=rank, kind=KIND)
    else:
        program = charm.program(made, rank=rank, kind=KIND, levels=machine.levels, pieces=8)
    return predict(program, machine, rank=rank, kind=KIND, widths=WIDTHS, at_once=name == "charm")


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.7, 1.0, 2.0])
@pytest.mark.parametrize(("sizes", "lanes"), [((2, 4), 1), ((2, 4), 4), ((4, 4), 1), ((2, 8), 2)])
def test_programs_reach_the_closed_forms(sizes: tuple[int, int], lanes: int, ratio: float) -> None:
    # Forward to 3 %. Backward may be faster, as no gradient travels that is still zero, but not
    # slower by more than 7 %.
    made, machine = setting(sizes, c=ratio, lanes=lanes)
    ranks = machine.levels.ranks
    forms = {
        "ring": ring_seconds(ranks=ranks, c=ratio, tau=1.0),
        "charm": charm_seconds(
            domains=sizes[0], ranks=sizes[1], c=ratio, tau=1.0, lanes=lanes, fast=1 / 20
        ),
    }
    for name, form in forms.items():
        each = [of_program(made, machine, name=name, rank=r) for r in (0, ranks // 2)]
        assert max(s.forward for s in each) == pytest.approx(form.forward, rel=0.03)
        assert max(s.backward for s in each) <= 1.07 * form.backward


def test_auto_takes_charm_on_slow_links_and_the_ring_elsewhere() -> None:
    name, seconds = choose(*setting((2, 4), c=0.32, lanes=4), kind=KIND, widths=WIDTHS)
    assert name == "charm" and seconds["ring"].layer > 2 * seconds["charm"].layer
    bound_by_compute = setting((2, 4), c=2.0, lanes=1)
    assert choose(*bound_by_compute, kind=KIND, widths=WIDTHS)[0] == "ring"
    even_links = setting((2, 4), c=1.5, lanes=4, fast=1.0)
    assert choose(*even_links, kind=KIND, widths=WIDTHS)[0] == "ring"


def test_one_link_per_level_is_asked_for() -> None:
    with pytest.raises(ValueError, match="1 links for the levels 2x4: describe one per level"):
        Machine(levels=Levels((2, 4)), links=(LevelLink(1.0),), entry_seconds=1.0)


@pytest.mark.parametrize(
    ("lengths", "rank"),
    [([64 * 512], 8), ([64 * 8] * 60 + [64 * 8 * 4], 488)],
    ids=["all alike", "the last four do more"],
)
def test_many_ranks_are_chosen_for_by_one(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], rank: int
) -> None:
    built: list[int] = []
    make = ring.program

    def counted(layout: Layout, *, rank: int, kind: LayerKind) -> Program:
        built.append(rank)
        return make(layout, rank=rank, kind=kind)

    monkeypatch.setattr(ring, "program", counted)
    levels = Levels((64, 8))
    machine = Machine(levels=levels, links=(LevelLink(1e9), LevelLink(1e10)), entry_seconds=1e-9)
    held = cut(lengths, ranks=512, layout="zigzag", levels=levels)
    name, _ = choose(held, machine, kind=KIND, widths=WIDTHS)
    assert name == "charm" and len(built) == 1
    assert built[0] == rank


@pytest.mark.parametrize("name", ["ring", "charm", "distca", "ulysses"])
def test_events_hold_all_bytes_and_score_entries(name: str) -> None:
    levels, lengths = Levels((2, 2)), [150, 31, 1, 60]
    held = cut(lengths, ranks=4, layout="zigzag")
    kind = LayerKind(query_width=128, key_value_width=128, kv_heads=4, heads=8)
    widths = Widths(heads=8, kv_heads=4, head_dim=16, value_dim=16, itemsize=2)
    given = {} if name == "distca" else {"topology": levels, "ulysses_size": 2}
    plan = make_plan(held, kind=kind, options=PlanOptions(algorithm=name, **given))
    entries = {backward: 0.0 for backward in (False, True)}
    for rank in range(4):
        program = plan.program(rank)
        for backward in entries:
            found, left = events(program, kind=kind, widths=widths, backward=backward)
            entries[backward] += sum(event.work for event in found) + left
            counted: Counter[int] = Counter()
            for event in found:
                counted.update({peer: size for way, peer, size in event.messages if way == 0})
            assert +counted == sent(program, widths, backward=backward)
            posts = [event.tag for event in found if event.posted]
            assert sorted(posts) == sorted(event.tag for event in found if not event.posted)
    assert set(entries.values()) == {float(sum(n * (n + 1) // 2 for n in lengths))}


def test_ranks_that_share_a_link_inside_a_domain_wait_in_a_ring_too() -> None:
    held, machine = setting((2, 4), c=0.1, lanes=4)
    slowed = replace(machine, links=(machine.links[0], replace(machine.links[1], lanes=0.05)))
    flat = [of_program(held, m, name="ring", rank=1).forward for m in (machine, slowed)]
    assert flat[1] > 5 * flat[0]
