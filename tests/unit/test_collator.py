"""Collate packs into the rows of each rank, alone and under Accelerate's data loader."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset as Rows
from hypothesis import given
from hypothesis import strategies as st
from tiny import documents, whole
from torch.utils.data import DataLoader

from hf_longctx.data.batch import KEY
from hf_longctx.data.collator import LongCtxCollator, PackDataset
from hf_longctx.data.packing import FILLER, GroupBatchSampler, Pack, Piece, fit
from hf_longctx.planning.layouts.layout import LAYOUTS
from hf_longctx.planning.planners.options import PlanOptions

COLUMNS = ("input_ids", "labels", "shift_labels", "position_ids")


def collate(
    rows: Any,
    pack: Pack | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    layout: str = "contiguous",
) -> dict[str, Any]:
    """One rank's inputs of a pack; of all rows when left out."""
    collator = LongCtxCollator(
        rank=rank, ranks=ranks, options=PlanOptions(layout=layout, tolerance=0.05), budget=64
    )
    (item,) = [PackDataset(rows)[whole(rows) if pack is None else pack]]
    return collator([item])


def of_ranks(rows: Any, pack: Pack | None = None, **given: Any) -> list[dict[str, Any]]:
    ranks = given.setdefault("ranks", 2)
    return [collate(rows, pack, rank=rank, **given) for rank in range(ranks)]


def targets(inputs: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [of_rank["shift_labels"][0].tolist() for of_rank in inputs]


def test_b01_the_last_token_of_a_rank_keeps_its_target():
    row = {"input_ids": [11, 12, 13, 14, 15, 16, 17, 18], "labels": [1, 2, 3, 4, 5, 6, 7, 8]}
    first, second = of_ranks([row])
    assert targets([first, second]) == [[2, 3, 4, 5], [6, 7, 8, -100]]
    assert first["labels"].tolist() == [[1, 2, 3, 4]]
    assert second["input_ids"].tolist() == [[15, 16, 17, 18]]
    assert second["position_ids"].tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b03_a_document_does_not_predict_the_next(layout):
    rows = [{"input_ids": [10, 11, 12]}, {"input_ids": [20, 21, 22]}]
    alone = collate(rows, layout=layout)
    assert targets([alone]) == [[11, 12, -100, 21, 22, -100]]
    assert alone["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    shared = of_ranks(rows, layout=layout)
    cut = [[11, -100, 21], [12, 22, -100]]  # zigzag puts both on both ranks
    assert targets(shared) == (cut if layout == "zigzag" else [[11, 12, -100], [21, 22, -100]])
    cut_inside = [{"input_ids": [10, 11]}, {"input_ids": [20, 21, 22, 23]}]
    assert targets(of_ranks(cut_inside)) == [[11, -100, 21], [22, 23, -100]]


def test_labels_that_are_no_targets_stay_none():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}
    assert targets(of_ranks([row])) == [[-100, 3], [4, -100]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    ranks=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
)
def test_ranks_share_every_token_with_its_own_target_and_position(lengths, ranks, layout):
    rows = documents(lengths)
    inputs = of_ranks(rows, ranks=ranks, layout=layout)
    shapes = {key: [x[key].shape for x in inputs] for key in COLUMNS}
    assert shapes["input_ids"] == shapes["labels"] == shapes["shift_labels"]
    sizes = [x["input_ids"].shape[1] for x in inputs]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert all(x[key].dtype == torch.int64 for x in inputs for key in COLUMNS)
    order = torch.from_numpy(inputs[0][KEY].layout.inverse())
    found = {key: torch.cat([x[key][0] for x in inputs])[order].tolist() for key in COLUMNS}
    filler = max(0, ranks - sum(lengths))
    ids = [row["input_ids"] for row in rows]
    unpredicted = [-100] * filler
    assert found["input_ids"] == [i for d in ids for i in d] + [0] * filler
    assert found["labels"] == [i for d in ids for i in d] + unpredicted
    assert found["shift_labels"] == [i for d in ids for i in (*d[1:], -100)] + unpredicted
    documents_and_filler = [*lengths, filler]
    assert found["position_ids"] == [i for n in documents_and_filler for i in range(n)]
    assert {x[KEY].filler for x in inputs} == {filler}
    assert {x[KEY].rank for x in inputs} == set(range(ranks))
    assert len({x[KEY].contents for x in inputs}) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_without_documents_is_filler_without_targets(layout):
    inputs = of_ranks(documents([3]), FILLER, ranks=3, layout=layout)
    assert [x["input_ids"].shape for x in inputs] == [(1, 1)] * 3
    assert targets(inputs) == [[-100]] * 3
    assert inputs[0][KEY].layout.lengths.tolist() == [3]
    assert {x[KEY].filler for x in inputs} == {3}


def test_fragments_keep_the_target_of_their_last_token():
    rows = [{"input_ids": list(range(10, 20))}]
    pieces, _ = fit([10], capacity=4, overflow="split")
    found = [collate(rows, (piece,)) for piece in pieces]
    assert targets(found) == [[11, 12, 13, 14], [15, 16, 17, 18], [19, -100]]
    assert [x["position_ids"][0].tolist() for x in found] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    both = of_ranks(rows, (pieces[1], pieces[2]))
    assert targets(both) == [[15, 16, 17], [18, 19, -100]]
    truncated, _ = fit([10], capacity=4, overflow="truncate")
    assert targets([collate(rows, truncated)]) == [[11, 12, 13, 14]]


def test_other_documents_of_the_same_lengths_are_told_apart():
    rows = documents([4, 4, 8])
    packs = [
        (Piece(document=0, start=0, stop=4),),
        (Piece(document=1, start=0, stop=4),),
        (Piece(document=2, start=0, stop=4),),
        (Piece(document=2, start=4, stop=8),),
    ]
    assert len({collate(rows, pack)[KEY].contents for pack in packs}) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_are_rows_and_positions_of_the_data_set(layout):
    pack = (Piece(document=1, start=4, stop=8), Piece(document=0, start=0, stop=3))
    inputs = of_ranks(documents([4, 9]), pack, ranks=3, layout=layout)
    places = [pickle.loads(pickle.dumps(x[KEY])).places() for x in inputs]  # as from a worker
    found = np.concatenate(places)[inputs[0][KEY].layout.inverse()]
    assert found.tolist() == [[1, 4], [1, 5], [1, 6], [1, 7], [0, 0], [0, 1], [0, 2]]
    filled = of_ranks(documents([4]), (Piece(document=0, start=2, stop=3),), ranks=3, layout=layout)
    rows = np.concatenate([x[KEY].places() for x in filled])
    assert sorted(rows[:, 0].tolist()) == [-1, -1, 0] and [0, 2] in rows.tolist()


class Reader(list):  # type: ignore[type-arg]
    """Documents that note which of them are read."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_the_documents_it_holds_tokens_of_once(layout):
    rows = Reader(documents([4, 4, 4, 600]))
    pack = tuple(Piece(document=d, start=0, stop=n) for d, n in enumerate([4, 4, 4, 600]))
    for rank in range(4):
        inputs = collate(rows, pack, ranks=4, rank=rank, layout=layout)
        held = {segment.document for segment in inputs[KEY].layout.of_rank(rank)}
        assert sorted(rows.read) == sorted(held)
        rows.read.clear()


def test_rows_of_datasets_in_any_format():
    rows = documents([5, 3])
    plain = Rows.from_list(rows)
    right = collate(rows, layout="spread")
    for given_rows in (plain, plain.with_format("numpy"), plain.with_format("torch")):
        found = collate(given_rows, whole(rows), layout="spread")
        assert all(torch.equal(found[key], right[key]) for key in COLUMNS)


def test_a_collator_pickles():
    collator = LongCtxCollator(
        rank=1, ranks=2, options=PlanOptions(layout="spread", tolerance=0.05), budget=8
    )
    assert pickle.loads(pickle.dumps(collator)) == collator


def loader_of(rows: Any, *, rank: int, ranks: int, groups: int = 1, group: int = 0) -> Any:
    """A data loader as the trainer makes it."""
    sampler = GroupBatchSampler(
        [len(row["input_ids"]) for row in rows],
        capacity=8 * ranks,
        overflow="split",
        balance="tokens",
        groups=groups,
        group=group,
        seed=0,
        shuffle=True,
    )
    collator = LongCtxCollator(
        rank=rank,
        ranks=ranks,
        options=PlanOptions(layout="spread", tolerance=0.05),
        budget=8 * ranks,
    )
    return prepare_data_loader(
        DataLoader(PackDataset(rows), batch_sampler=sampler, collate_fn=collator),
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )


def test_a_prepared_loader_gives_each_rank_its_rows_of_the_same_packs():
    rows = documents([7, 5, 30, 9, 1, 2, 8])
    loaders = [loader_of(rows, rank=rank, ranks=2) for rank in range(2)]
    assert {len(loader) for loader in loaders} == {4}  # 62 tokens in packs of 16
    for _epoch in range(2):
        seen = []
        for first, second in zip(*loaders, strict=True):
            layouts = [x[KEY].layout for x in (first, second)]
            assert np.array_equal(layouts[0].columns, layouts[1].columns)
            assert (first[KEY].rank, second[KEY].rank) == (0, 1)
            seen += [*first["input_ids"][0].tolist(), *second["input_ids"][0].tolist()]
        assert sorted(seen) == sorted(i for row in rows for i in row["input_ids"])


def test_b59_groups_load_equally_many_batches_and_filler_has_no_targets():
    rows = documents([8, 8, 8, 8, 8])
    first, second = ([*loader_of(rows, rank=0, ranks=1, groups=2, group=g)] for g in range(2))
    assert len(first) == len(second) == 3
    assert [x[KEY].filler for x in (*first, *second)] == [0, 0, 0, 0, 0, 1]
    assert second[-1]["shift_labels"].tolist() == [[-100]]
    counted = sum(int(x["shift_labels"].ne(-100).sum()) for x in (*first, *second))
    assert counted == 5 * 7
