"""Recurrences over ranks: outputs and gradients of one process, in bytes and memory as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import examples, nan_memory
from hypothesis import given
from hypothesis import strategies as st
from late_cases import LateHub
from scan_cases import (
    FAMILIES,
    Case,
    Inputs,
    contiguous,
    error,
    gather,
    reference,
    run_gloo,
    run_threads,
    run_threads_together,
)
from test_scan import uneven

SCHEDULES = ("chain", "tree", "allgather")
# One document over all ranks; cuts inside shards, on edges and a token beside them; short ones.
DOCUMENTS = ([48], [7, 37, 4], [24, 24], [23, 1, 24], [25, 23], [1, 1, 44, 2], [6] * 8, [3, 2])
every_family = pytest.mark.parametrize("family", FAMILIES)
every_schedule = pytest.mark.parametrize("scan", SCHEDULES)


def case(lengths: list[int], *, ranks: int, family: str, **options: Any) -> Case:
    columns = options.pop("columns", 4)
    given = Inputs.random(sum(lengths), family=family, columns=columns)
    return Case(layout=contiguous(lengths, ranks=ranks), given=given, **options)


@every_family
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8], ids="ranks{}".format)
def test_ranks_compute_what_one_process_does(family: str, ranks: int) -> None:
    for number, lengths in enumerate(DOCUMENTS):
        what = case(lengths, ranks=ranks, family=family, scan=SCHEDULES[(number + ranks) % 3])
        with nan_memory():
            ran = run_threads(what)
        assert error(gather(what, ran), reference(what.given, lengths)) < 1e-11, lengths
        assert [each.sent for each in ran] == [each.account.planned_bytes for each in ran]
        assert not any(each.kept for each in ran)


@every_family
@every_schedule
@pytest.mark.parametrize(
    ("lengths", "edges"),
    [
        ([48], [0, 40, 41, 48]),  # a halo of three rows reaches over the shard of one
        ([48], [0, 2, 5, 7, 48]),
        ([3, 43, 2], [0, 1, 4, 6, 48]),
        ([20, 28], [0, 30, 30, 32, 48]),  # a rank without a row
        ([48], [0, 20, 20, 48]),
    ],
    ids=str,
)
def test_shards_of_very_different_lengths(
    family: str, scan: str, lengths: list[int], edges: list[int]
) -> None:
    given = Inputs.random(48, family=family)
    what = Case(layout=uneven(lengths, edges), given=given, scan=scan)
    with nan_memory():
        ran = run_threads(what)
    assert error(gather(what, ran), reference(given, lengths)) < 1e-11
    assert [each.sent for each in ran] == [each.account.planned_bytes for each in ran]


@pytest.mark.parametrize("family", ["row", "delta"])
def test_bf16_over_ranks_is_bf16_of_one_process(family: str) -> None:
    """States travel in float32 and a halo as it is; its gradient is rounded once more."""
    lengths = [7, 37, 4]
    given = Inputs.random(48, family=family)
    right = reference(given, lengths)
    low = replace(given, **{name: getattr(given, name).bfloat16() for name in given.__slots__})
    one, three = (
        gather(what, run_threads(what))
        for what in (Case(layout=contiguous(lengths, ranks=n), given=low) for n in (1, 3))
    )
    assert torch.equal(three["mixed"], one["mixed"]) and three["mixed"].dtype == torch.bfloat16
    assert not torch.equal(three["d_x"], one["d_x"])  # it is added up in another order
    for name, value in right.items():
        plain, found = (error({name: each[name]}, {name: value}) for each in (one, three))
        assert found <= 2 * max(plain, 2**-9), (name, found, plain)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    ranks=st.integers(2, 5),
    family=st.sampled_from(FAMILIES),
    scan=st.sampled_from(("auto", *SCHEDULES)),
    seed=st.integers(0, 1000),
)
@examples(12)
def test_late_messages_change_no_bit(
    lengths: list[int], ranks: int, family: str, scan: str, seed: int
) -> None:
    what = case(lengths, ranks=ranks, family=family, scan=scan)
    plain = gather(what, run_threads(what))
    late = gather(what, run_threads(what, channels=LateHub(ranks, seed=seed).channels()))
    assert error(plain, reference(what.given, lengths)) < 1e-11
    assert all(torch.equal(late[name], plain[name]) for name in plain)


@pytest.mark.parametrize("ranks", [2, 3, 4], ids="ranks{}".format)
def test_processes_compute_what_one_does(ranks: int, rank_pool: Any) -> None:
    cases = [
        case(lengths, ranks=ranks, family=family, scan=scan)
        for family in FAMILIES
        for lengths, scan in zip(DOCUMENTS[:3], SCHEDULES, strict=True)
    ]
    ran = rank_pool.run(run_gloo, ranks=ranks, cases=cases)
    for what, parts in zip(cases, zip(*ran, strict=True), strict=True):
        lengths = what.layout.lengths.tolist()
        assert error(gather(what, parts), reference(what.given, lengths)) < 1e-11
        assert [each.sent for each in parts] == [each.account.planned_bytes for each in parts]


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@every_schedule
def test_recompute_sends_nothing(scan: str, checkpointing: str) -> None:
    lengths = [30, 18]
    for family in ("row", "delta"):
        plain = case(lengths, ranks=3, family=family, scan=scan)
        again = case(lengths, ranks=3, family=family, scan=scan, checkpointing=checkpointing)
        once, twice = run_threads(plain), run_threads(again)
        assert error(gather(again, twice), gather(plain, once)) == 0
        assert [each.sent for each in twice] == [each.sent for each in once]
        assert not any(each.kept or each.account.recompute_bytes for each in twice)


def test_short_documents_send_nothing() -> None:
    for lengths in ([6] * 8, [6, 3, 3, 6, 6], [5, 1, 6, 6, 6]):
        what = case(lengths, ranks=sum(lengths) // 6, family="delta rows")
        ran = run_threads(what)
        assert error(gather(what, ran), reference(what.given, lengths)) < 1e-11
        assert not any(each.sent or each.account.message_peak_bytes for each in ran)


@pytest.mark.parametrize("family", ["row", "delta"])
def test_a_chain_sends_and_holds_one_state_whatever_the_ranks(family: str) -> None:
    sent, peaks = set(), set()
    for ranks in (3, 8):
        ran = run_threads(case([4 * ranks], ranks=ranks, family=family, scan="chain"))
        for each in ran[1:-1]:
            sent.add(each.sent)
            peaks.add((each.account.peak_bytes, each.account.message_peak_bytes))
    state, halo = 2 * 3 * 4 * 8, 3 * 5 * 8
    assert sent == {2 * (state + halo)}
    assert peaks == {(state, 2 * halo)}  # what has come is taken before anything leaves


@pytest.mark.parametrize("family", ["row", "delta"])
@pytest.mark.parametrize("pieces", [2, 4, 16])
def test_pieces_of_a_chain_are_heads_or_columns(family: str, pieces: int) -> None:
    whole, cut = (
        case([24], ranks=4, family=family, columns=8, pieces=count) for count in (1, pieces)
    )
    once, ran = run_threads(whole), run_threads(cut)
    assert error(gather(cut, ran), reference(cut.given, [24])) < 1e-11
    assert [each.sent for each in ran] == [each.sent for each in once]
    assert [each.account.peak_bytes for each in ran] == [each.account.peak_bytes for each in once]


@every_family
def test_b42_documents_neither_leak_nor_restart_at_a_rank_edge(family: str) -> None:
    lengths = [37, 51, 40]
    what = case(lengths, ranks=2, family=family)
    right = reference(what.given, lengths)
    assert error(gather(what, run_threads(what)), right) < 1e-11
    for wrong in ([128], [37, 27, 24, 40]):  # runs on into the next, or restarts at token 64
        other = case(wrong, ranks=2, family=family)
        assert error(gather(other, run_threads(other)), right) > 0.1


@every_family
def test_b44_the_gradient_of_a_state_returns_to_the_first_shard(family: str) -> None:
    what = case([8], ranks=2, family=family)
    what.given.grad_out[:4] = 0.0
    ours = gather(what, run_threads(what))
    assert error(ours, reference(what.given, [8])) < 1e-11
    assert ours["d_q"][:4].abs().max() == 0
    assert min(ours[name][:4].abs().max() for name in ("d_k", "d_v")) > 0.1


def test_b46_a_halo_reaches_over_shards_that_are_shorter() -> None:
    what = case([1, 7], ranks=4, family="head")
    assert error(gather(what, run_threads(what)), reference(what.given, [1, 7])) < 1e-11


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_b48_two_batches_in_flight_keep_their_own_states(checkpointing: str) -> None:
    pair = [
        case(lengths, ranks=2, family="delta", checkpointing=checkpointing)
        for lengths in ([6, 2], [3, 5])
    ]
    ran = run_threads_together(pair)
    for what, parts in zip(pair, ran, strict=True):
        lengths = what.layout.lengths.tolist()
        assert error(gather(what, parts), reference(what.given, lengths)) < 1e-11
