"""What the programs of a run depend on: every option is compared across the ranks of a group."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from helpers import threads

from hf_longctx.comm.channels import Hub
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.planning.layouts.cost import CostTable, LayerKind
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.layouts.levels import LevelLink, Levels, Machine, NeighbourLink
from hf_longctx.planning.planners.options import Auto, PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.counts import kept_heads
from hf_longctx.planning.program.program import pack
from hf_longctx.training.groups import validate_agreement

KIND = LayerKind(query_width=8, key_value_width=8, kv_heads=4, heads=4)
TABLE = CostTable(rows=(1, 9), keys=(1, 9), per_entry=((1e-9, 2e-9), (3e-9, 4e-9)))
MACHINE = Machine(levels=Levels((2, 2)), links=(LevelLink(1e6), LevelLink(1e9)), entry_seconds=1e-9)
CHARM = PlanOptions(algorithm="charm")
# Of each field options that differ in it alone, as two ranks with other flags have them.
OTHERS: dict[str, tuple[PlanOptions, PlanOptions]] = {
    "algorithm": (PlanOptions(), PlanOptions(algorithm="ring")),
    "layout": (PlanOptions(), PlanOptions(layout="zigzag")),
    "tolerance": (PlanOptions(), PlanOptions(tolerance=0.1)),
    "costs": (PlanOptions(costs=TABLE), PlanOptions(costs=replace(TABLE, tile=2))),
    "overlap": (PlanOptions(), PlanOptions(overlap="heads")),
    "speeds": (PlanOptions(speeds=(1.0,)), PlanOptions(speeds=(0.9,))),
    "topology": (CHARM, replace(CHARM, topology=Levels((2, 2)))),
    "auto": (CHARM, replace(CHARM, auto=Auto(itemsize=4, machine=MACHINE))),
    "ulysses_size": (CHARM, replace(CHARM, ulysses_size=2)),
    "scan": (PlanOptions(), PlanOptions(scan="tree")),
    "link": (PlanOptions(), PlanOptions(link=NeighbourLink(1e-4, 1e9))),
}
FLAGS = {f.name: f.metadata["flag"] for f in fields(PlanOptions)}


def one_layout() -> Layout:
    return cut([9, 30, 1, 24], ranks=4, layout="spread")


@pytest.mark.parametrize("name", [f.name for f in fields(PlanOptions)])
def test_c09_each_option_changes_the_digest_and_is_named(name: str) -> None:
    one, other = OTHERS[name]
    assert [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)] == [name]
    assert one.digest != other.digest
    assert 0 <= one.digest < 2**63
    ours, theirs = one.fingerprints, other.fingerprints
    assert [flag for flag in ours if ours[flag] != theirs[flag]] == [FLAGS[name]]
    batches = [LongCtxBatch(one_layout(), 0, options) for options in (one, other)]
    ours, theirs = (batch.fingerprints for batch in batches)
    assert [part for part in ours if ours[part] != theirs[part]] == [FLAGS[name]]


def test_c09_flags_are_named_once_and_equal_options_hash_equally() -> None:
    assert len({*FLAGS.values()}) == len(FLAGS) == len(OTHERS)
    for name, values in OTHERS.items():
        for options in values:
            again = pickle.loads(pickle.dumps(options))
            assert (again, again.digest) == (options, options.digest), name


def test_c09_numbers_of_another_kind_hash_by_their_value() -> None:
    one, other = (PlanOptions(tolerance=kind(1)) for kind in (int, np.float32))
    assert (one, one.digest) == (other, other.digest)
    few, many = (PlanOptions(tolerance=np.float32(x)) for x in (0.01, 0.9))
    assert few.digest != many.digest
    assert PlanOptions(speeds=(1, 2)).digest == PlanOptions(speeds=(np.float64(1), 2.0)).digest


def compare(given: Callable[[int], dict[str, int]], *, ranks: int = 4) -> list[str]:
    """What each rank of a group is told where `given` differs between them."""
    channels, said = Hub(ranks).channels(), [""] * ranks

    def work(rank: int) -> None:
        try:
            validate_agreement(
                given(rank), channel=channels[rank], ranks=ranks, what="the plan of a batch"
            )
        except ValueError as error:
            said[rank] = str(error)

    threads(work, ranks=ranks)
    return said


def of_batch(rank: int, **others: Any) -> dict[str, int]:
    options = PlanOptions(**others)
    return LongCtxBatch(one_layout(), rank, options).fingerprints


def test_c09_a_rank_with_another_flag_is_named() -> None:
    assert compare(of_batch) == [""] * 4
    for name, value in (("scan", "tree"), ("tolerance", 0.5), ("link", NeighbourLink(1e-4, 1e9))):
        said = compare(
            lambda rank, n=name, v=value: of_batch(rank, **({n: v} if rank == 2 else {}))
        )
        for rank, message in enumerate(said):
            assert message.startswith(f"rank {rank}: the ranks of a group disagree on the plan of ")
            assert (
                f" a batch: different from the other ranks is {FLAGS[name]} on rank 2; give e"
                in message
            )
            assert message.endswith("give every rank the same data set, seed, flags and versions")


def of_document(rank: int) -> dict[str, int]:
    lengths = [9, 30, 1, 24] if rank else [9, 31, 0, 24]
    layout = cut([n for n in lengths if n], ranks=4, layout="spread")
    return LongCtxBatch(layout, rank, contents=lengths[1]).fingerprints


def test_documents_that_differ_are_named() -> None:
    for message in compare(of_document):
        assert "the documents on rank 0; the layout of the documents on rank 0" in message


def test_of_two_ranks_the_second_is_named() -> None:
    for values in ((1, 2), (2, 1)):
        for message in compare(lambda rank, v=values: {"--a": v[rank]}, ranks=2):
            assert "different from the other ranks is --a on rank 1; give" in message


def test_several_ranks_and_flags_are_named() -> None:
    given = [{"--a": 1, "--b": 5}, {"--a": 2, "--b": 5}, {"--a": 2, "--b": 6}, {"--a": 2, "--b": 5}]
    for message in compare(given.__getitem__):
        assert ": different from the other ranks are --a on rank 0; --b on rank 2; give" in message


def test_plans_that_differ_although_all_else_agrees_are_refused() -> None:
    channels, said = Hub(2).channels(), ["", ""]

    def work(rank: int) -> None:
        try:
            validate_agreement(
                of_batch(rank), made=rank, channel=channels[rank], ranks=2, what="the plan"
            )
        except ValueError as error:
            said[rank] = str(error)

    threads(work, ranks=2)
    assert all("disagree on the plan: " in message for message in said)


def test_what_is_made_of_a_program_goes_with_it() -> None:
    plan = make_plan(one_layout(), kind=KIND, options=PlanOptions())
    program = plan.program(0)
    assert pack(program) is pack(program) and kept_heads(program) is kept_heads(program)
    assert pickle.loads(pickle.dumps(program)).forward == program.forward
    gone = weakref.ref(program)
    del plan, program
    gc.collect()
    assert gone() is None
