"""Split a batch into two halves of whole documents and equal tokens, each over all ranks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import documents, whole

from hf_longctx.data.batch import KEY, LongCtxBatch, halved
from hf_longctx.data.collator import LongCtxCollator
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, SMALLEST, cut, halve
from hf_longctx.planning.planners.options import PlanOptions

LENGTHS = [9, 1, 30, 2, 17, 4]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    ranks=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
)
def test_each_half_holds_whole_documents_and_each_rank_its_share(lengths, ranks, layout):
    halves = halve(lengths, ranks=ranks, layout=layout)
    if halves is None:
        return
    held = [[int(part.lengths.sum()) for part in halves.parts]]
    held += [[part.rows(rank) for part in halves.parts] for rank in range(ranks)]
    assert min(held[0]) >= max(ranks, SMALLEST * sum(lengths))
    assert abs(held[0][0] - held[0][1]) <= max(lengths)
    for counts in zip(*held[1:], strict=True):
        assert max(counts) - min(counts) <= 1
    together = [sum(counts) for counts in held[1:]]
    assert together == [halves.whole.rows(rank) for rank in range(ranks)]
    assert max(together) - min(together) <= 1
    both = np.sort(np.concatenate([part.lengths for part in halves.parts]))
    assert both.tolist() == sorted(lengths)  # documents stay whole


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=12), ranks=st.integers(2, 4))
def test_a_ranks_rows_are_those_of_the_first_half_then_those_of_the_second(lengths, ranks):
    halves = halve(lengths, ranks=ranks, layout="spread")
    if halves is None:
        return
    rows = np.concatenate([halves.whole.flat_rows(rank) for rank in range(ranks)])
    assert np.sort(rows).tolist() == [*range(sum(lengths))]  # every token once
    for rank in range(ranks):
        parts = [part.positions(rank) for part in halves.parts]
        assert halves.whole.positions(rank).tolist() == np.concatenate(parts).tolist()
        sizes = [part.lengths[[s.document for s in part.of_rank(rank)]] for part in halves.parts]
        ours = halves.whole.lengths[[s.document for s in halves.whole.of_rank(rank)]]
        assert ours.tolist() == np.concatenate(sizes).tolist()


@pytest.mark.parametrize(
    ("lengths", "ranks", "split"),
    [
        ([40], 2, False),
        ([40, 40], 1, True),
        ([31, 9], 2, False),
        ([30, 10], 2, True),  # a quarter
        ([4, 1, 1, 1], 4, False),  # a half of three tokens over four ranks
        ([1, 1, 1, 1], 2, True),
    ],
)
def test_which_batches_have_halves(lengths, ranks, split):
    assert (halve(lengths, ranks=ranks, layout="spread") is not None) is split


def test_the_collator_orders_rows_by_halves():
    rows = documents(LENGTHS)
    for rank in range(2):
        options = PlanOptions(layout="spread", tolerance=0.0)
        given = dict(rank=rank, ranks=2, options=options, budget=64)
        item = [(whole(rows), rows)]
        inputs = LongCtxCollator(**given, halves=True)(item)
        batch = inputs[KEY]
        start = 0
        for half in batch.halves:
            stop = start + half.layout.rows(rank)
            positions = inputs["position_ids"][0, start:stop].tolist()
            assert positions == half.layout.positions(rank).tolist()
            start = stop
        assert start == inputs["input_ids"].shape[1]
        for at, (row, position) in enumerate(batch.places().tolist()):
            assert inputs["input_ids"][0, at] == rows[row]["input_ids"][position]
        assert LongCtxCollator(**given)(item)[KEY].halves == ()


def batch_of(lengths: list[int]) -> LongCtxBatch:
    halves = halve(lengths, ranks=2, layout="contiguous")
    assert halves is not None
    return LongCtxBatch(
        halves.whole, 0, halves=halved(halves, 0, options=PlanOptions(tolerance=0.0))
    )


def test_halves_travel_with_their_batch_and_are_tied_to_what_it_is_tied_to():
    batch = batch_of(LENGTHS)
    runtime, options = object(), PlanOptions(tolerance=0.0, speeds=(0.5,))
    batch.bind(runtime, options=options)
    for half in batch.parts:
        assert (half.binding.runtime, half.options) == (runtime, options)
    again = pickle.loads(pickle.dumps(batch))
    assert [half.half for half in again.parts] == [0, 1]
    assert [half.binding.runtime for half in again.parts] == [None, None]
    for ours, theirs in zip(again.parts, batch.parts, strict=True):
        assert ours.layout.segments == theirs.layout.segments


def test_b48_a_digest_sees_both_halves():
    kind = LayerKind()
    equal, other = batch_of([8, 8]), batch_of([8, 8])
    assert equal.digest("distca", [kind]) == other.digest("distca", [kind])
    for half in range(2):
        other = batch_of([8, 8])
        other.halves[half].layout = cut([5, 3], ranks=2, layout="contiguous")
        assert other.digest("distca", [kind]) != equal.digest("distca", [kind])
    both = batch_of([8, 8])
    for half in both.halves:  # the same in both, which must not cancel out
        half.layout = cut([5, 3], ranks=2, layout="contiguous")
    assert both.digest("distca", [kind]) != equal.digest("distca", [kind])
