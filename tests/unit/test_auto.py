"""Choose alike on every rank by measured links and a timed kernel (`--longctx_topology auto`)."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import threads
from tiny import keep_table, tiny

from hf_longctx.comm.channels import Hub
from hf_longctx.comm.topology import LinkRate, Topology
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.planning.layouts.cost import CostTable, LayerKind
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.layouts.levels import LevelLink, Levels, Machine
from hf_longctx.planning.planners.options import Auto, PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.predict.predict import Choice, choose_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.training import measurements as training
from hf_longctx.training.measurements import find_auto, log_choices

LEVELS = Levels((2, 4))
KIND = LayerKind(query_width=128, key_value_width=256, kv_heads=8, heads=8)
WINDOWED = LayerKind(window=8, query_width=128, key_value_width=256, kv_heads=8, heads=8)


def one_document(rows: int = 256) -> Layout:
    return cut([rows * LEVELS.ranks], ranks=LEVELS.ranks, layout="zigzag", levels=LEVELS)


def auto(*, across: float, entry_seconds: float = 1e-9) -> Auto:
    links = (LevelLink(across, 4.0), LevelLink(1e9, 1.0))
    machine = Machine(levels=LEVELS, links=links, entry_seconds=entry_seconds)
    return Auto(itemsize=2, machine=machine)


def chosen(
    layout: Layout,
    given: Auto,
    *,
    kind: LayerKind = KIND,
    topology: Levels = LEVELS,
    ulysses_size: int = 1,
) -> Choice:
    options = PlanOptions(
        algorithm="charm", auto=given, topology=topology, ulysses_size=ulysses_size
    )
    return choose_plan(layout, kind=kind, options=options)


SLOW, FAST = auto(across=1e6), auto(across=1e9, entry_seconds=1e-6)


@pytest.mark.parametrize(("given", "name"), [(SLOW, "charm"), (FAST, "ring")])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_chosen_plan_is_the_one_that_its_name_makes(given: Auto, name: str, size: int) -> None:
    held = one_document(64)
    choice = chosen(held, given, ulysses_size=size)
    forced = make_plan(
        held, kind=KIND, options=PlanOptions(algorithm=name, topology=LEVELS, ulysses_size=size)
    )
    assert (choice.plan.options.algorithm, choice.plan.digest) == (name, forced.digest)
    check(choice.plan)
    assert set(choice.seconds) == {"ring", "charm"}
    assert str(choice).startswith(f"{name}, as charm is predicted to gain ")


def test_programs_that_were_built_to_predict_are_kept() -> None:
    plan = chosen(one_document(), SLOW).plan
    assert list(plan._programs) == [0, 4]  # the first rank of each domain
    assert plan.program(4) is plan._programs[4]


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_a_peer_sends_last_are_waited_for(size: int) -> None:
    """Of two domains of one chunk each, a ring's gradients go home when all work is done: played
    over all ranks, 12.6 s against charm's 10.6."""
    levels, kind = (
        Levels((2, size)),
        LayerKind(query_width=512, key_value_width=1024, kv_heads=8, heads=8),
    )
    held = cut([1024 * levels.ranks], ranks=levels.ranks, layout="zigzag", levels=levels)
    links = (LevelLink(1e6, float(size)), LevelLink(1e9, 1.0))
    machine = Machine(levels=levels, links=links, entry_seconds=1e-12)
    given = Auto(itemsize=4, machine=machine)
    choice = chosen(held, given, kind=kind, topology=levels, ulysses_size=size)
    assert choice.plan.options.algorithm == "charm"
    assert choice.seconds["ring"].layer == pytest.approx(12.6, rel=0.01)


def test_without_measured_links_the_flat_ring_runs() -> None:
    choice = chosen(one_document(), Auto(itemsize=2), topology=Levels((8,)))
    assert choice.plan.options.algorithm == "ring" and not choice.seconds
    assert str(choice) == "ring, as all ranks share one place, where no link was measured"


def batch(given: Auto | None, layout: Layout | None = None) -> LongCtxBatch:
    options = PlanOptions(algorithm="charm", topology=LEVELS, auto=given)
    return LongCtxBatch(layout or one_document(), 0, options)


def test_a_batch_plans_by_prediction_only_under_charm_and_auto() -> None:
    by_prediction = batch(FAST)
    assert by_prediction.plan("charm", KIND).options.algorithm == "ring"
    assert by_prediction.plan("charm", KIND) is by_prediction.plan("charm", KIND)
    assert by_prediction.plan("ulysses", KIND).options.algorithm == "ulysses"
    assert batch(None).plan("charm", KIND).options.algorithm == "charm"  # a topology that was given
    found = [batch(given) for given in (FAST, SLOW, None)]
    assert len({each.plan("charm", KIND).options for each in found}) == 2
    assert len({tuple(each.fingerprints.values()) for each in found}) == 3  # what they go by, too
    sent = pickle.loads(pickle.dumps(by_prediction))
    assert sent.options.auto == FAST and not sent.binding.choices


def test_a_choice_is_logged_once_until_it_changes(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    said: tuple[str, ...] = ()
    for given in (FAST, FAST, SLOW, None):
        planned = batch(given)
        for kind in (KIND, WINDOWED):
            planned.plan("charm", kind)
        said = log_choices(planned, before=said)
    full, windowed, again, _ = caplog.messages
    assert full.startswith("longctx_topology=auto, layers without window: ring, as charm is pred")
    assert "ms a layer" in full and ", layers of window 8: ring, " in windowed
    assert ", layers without window: charm, as charm is predicted to gain " in again


@pytest.mark.parametrize("table", [False, True])
def test_all_ranks_go_by_the_slowest_one(tmp_path: Any, monkeypatch: Any, table: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny("charm", dtype=torch.float32)
    if table:  # seconds of both directions, forward 1 of 3.5
        keep_table(model, CostTable(rows=(512,), keys=(16, 512), per_entry=((9e-8, 7e-8),)))
    timed = iter([3e-8, 5e-8, 4e-8, 2e-8])
    monkeypatch.setattr(training, "_timed", lambda *given: next(timed))
    channels, found = Hub(4).channels(), dict[int, Auto]()
    rates = (LinkRate(together=1e8, alone=4e8), LinkRate(together=2e9, alone=2e9))
    topology = Topology(levels=Levels((2, 2)), why="for a test", rates=rates)
    arguments = SimpleNamespace(bf16=False, device=torch.device("cpu"))

    def work(rank: int) -> None:
        found[rank] = find_auto(topology, channels[rank], model=model, arguments=arguments)

    threads(work, ranks=4)
    assert {found[rank] for rank in range(4)} == {found[0]}
    machine = found[0].machine
    assert machine is not None and found[0].itemsize == 4
    assert machine.entry_seconds == pytest.approx(2e-8 if table else 5e-8)
    assert machine.links == (LevelLink(4e8, 0.5), LevelLink(2e9, 1.0))
    assert machine.levels == Levels((2, 2))


def test_a_kernel_is_timed_on_rows_of_the_layer() -> None:
    model = tiny("charm", dtype=torch.float32)
    arguments = SimpleNamespace(bf16=True, device=torch.device("cpu"))
    flat = Topology(levels=Levels((1,)), why="for a test")
    assert find_auto(flat, None, model=model, arguments=arguments) == Auto(itemsize=2)
    widths = training.layer_specs(model.config)[0].widths(torch.float32)
    seconds = training._timed(widths, torch.float32, torch.device("cpu"))
    assert 0 < seconds < 1e-4
