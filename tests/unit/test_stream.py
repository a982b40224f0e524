"""Stream packs of a look-ahead window: equally many for all groups, rows checked as they come."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCABULARY, documents, fill, tiny
from torch.utils.data import IterableDataset
from train_cases import UNEVEN, Case, arguments

from hf_longctx import LongCtxTrainer
from hf_longctx.data.batch import KEY
from hf_longctx.data.collator import LongCtxCollator
from hf_longctx.data.packing import FILLER, GroupBatchSampler
from hf_longctx.data.stream import PackStream
from hf_longctx.planning.planners.options import PlanOptions


class Listed(IterableDataset):
    """Rows of a list, in another order each epoch."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        shift = self.epoch % max(1, len(self.rows))
        return iter(self.rows[shift:] + self.rows[:shift])


def make(rows: Any, **changes: Any) -> PackStream:
    options = {
        "capacity": 10,
        "overflow": "split",
        "balance": "tokens",
        "groups": 1,
        "group": 0,
        "lookahead": 4,
        "vocab_size": VOCABULARY,
        "ignore_id": None,
        "description": "train_dataset",
        "endless": False,
        "log": True,
    }
    return PackStream(rows, **options | changes)


def tokens(stream: PackStream) -> list[tuple[int, ...]]:
    """The tokens of each piece, in the order of the packs."""
    return [
        tuple(documents[p.document]["input_ids"][p.start : p.stop].tolist())
        for pack, documents in stream
        for p in pack
    ]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    groups=st.integers(1, 4),
    lookahead=st.integers(1, 40),
    balance=st.sampled_from(["none", "tokens"]),
)
def test_b59_stream_groups_take_equally_many_steps_and_every_token_once(
    lengths, groups, lookahead, balance
):
    rows = documents(lengths)
    streams = [
        make(rows, groups=groups, group=group, lookahead=lookahead, balance=balance)
        for group in range(groups)
    ]
    batches = [[pack for pack, _ in stream] for stream in streams]
    assert len({len(run) for run in batches}) == 1
    dealt = [pack for step in zip(*batches, strict=True) for pack in step]
    packs = [pack for pack in dealt if pack != FILLER]
    assert all(pack == FILLER for pack in dealt[len(packs) :]) and len(dealt) - len(packs) < groups
    assert all(0 < sum(piece.length for piece in pack) <= 10 for pack in packs)
    held = sorted((p.document, at) for pack in packs for p in pack for at in range(p.start, p.stop))
    assert held == [(row, at) for row, size in enumerate(lengths) for at in range(size)]
    pieces = sorted(piece for stream in streams for piece in tokens(stream))
    cuts = [
        row["input_ids"][at : at + 10] for row in rows for at in range(0, len(row["input_ids"]), 10)
    ]
    assert pieces == sorted(map(tuple, cuts))


def test_stream_in_order_packs_as_the_sampler_does():
    lengths = [7, 5, 25, 5, 9, 1, 2, 8]
    options = {"capacity": 10, "overflow": "split", "balance": "none", "groups": 1, "group": 0}
    sampler = GroupBatchSampler(lengths, seed=0, shuffle=False, **options)
    found = [pack for pack, _ in make(documents(lengths), balance="none", lookahead=3)]
    assert tuple(found) == sampler.packs


def test_stream_window_fills_batches_as_the_whole_data_set_would():
    lengths = np.random.default_rng(0).integers(1, 10, 400).tolist()
    found = {}
    for lookahead in (1, 8, 100):
        packs = [pack for pack, _ in make(documents(lengths), lookahead=lookahead)]
        found[lookahead] = fill(packs, capacity=10)
    whole = {"capacity": 10, "overflow": "error", "balance": "tokens", "groups": 1, "group": 0}
    sampler = GroupBatchSampler(lengths, seed=0, shuffle=True, **whole)
    assert found[1] < found[8] < found[100]
    assert found[100] > fill(sampler.packs, capacity=10) - 0.005


def test_stream_reads_no_further_than_its_window():
    taken = []

    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            for at in itertools.count():
                taken.append(at)
                yield {"input_ids": [at % VOCABULARY] * 5}

    packs = list(itertools.islice(make(Endless(), lookahead=7), 20))
    assert len(taken) == 2 * len(packs) + 7  # two a pack, and what waits


def test_stream_of_packed_rows_and_masks():
    rows = [{"input_ids": [1, 2, 3, 4], "seq_lengths": [3, 1], "completion_mask": [0, 1, 0, 1]}]
    ((pack, found),) = make(rows)
    assert sorted((p.document, p.start, p.stop) for p in pack) == [(0, 0, 3), (1, 0, 1)]
    assert [found[at]["labels"].tolist() for at in range(2)] == [[-100, 2, -100], [4]]


def test_stream_passes_follow_each_other_in_their_own_order(caplog):
    caplog.set_level("INFO")
    rows = Listed(documents([10, 10, 25]))
    batches = list(itertools.islice(make(rows, endless=True, overflow="truncate", lookahead=1), 7))
    first = [int(found[pack[0].document]["input_ids"][0]) for pack, found in batches]
    heads = [row["input_ids"][0] for row in rows.rows]
    assert first == [*heads, *heads[1:], *heads[:1], heads[2]]
    lines = [line for line in caplog.messages if "documents" in line]
    cut = "3 documents, 45 tokens: 1 truncated, 15 tokens (33.3%) dropped"
    assert lines[:2] == [f"train_dataset, pass {number}: {cut}" for number in range(2)]
    assert lines[2].startswith("train_dataset, pass 2 so far: ")  # the run stopped within it


def test_b48_stream_batches_of_other_documents_have_another_digest():
    collator = LongCtxCollator(
        rank=0, ranks=2, options=PlanOptions(layout="contiguous", tolerance=0.0), budget=10
    )
    numbers = set()
    for rows in (documents([5, 5]), documents([5, 5], seed=1), documents([5, 5])[::-1]):
        ((pack, found),) = make(rows)
        numbers.add(collator([(pack, found)])[KEY].contents)
    assert len(numbers) == 3


def read_so_far(rows: Any, *, group: int, lookahead: int) -> list[int]:
    """The fingerprints that one of two groups carries through two passes, step by step."""
    options = {"groups": 2, "group": group, "lookahead": lookahead}
    steps = 2 * len(list(make(rows, **options)))
    stream = make(rows, endless=True, **options)
    return [found.stream for _, found in itertools.islice(stream, steps)]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=30),
    lookahead=st.integers(1, 40),
    at=st.integers(0, 29),
)
def test_stream_groups_that_read_other_rows_carry_other_fingerprints(lengths, lookahead, at):
    rows = [row | {"labels": row["input_ids"]} for row in documents(lengths)]
    mine = read_so_far(rows, group=0, lookahead=lookahead)
    assert mine == read_so_far(rows, group=1, lookahead=lookahead)
    at %= len(rows)
    changed = rows[at] | {"labels": [-100] * lengths[at]}
    for others in ([*rows[:at], changed, *rows[at + 1 :]], rows[:-1]):
        theirs = read_so_far(others, group=1, lookahead=lookahead)
        of_one_pass = min(len(mine), len(theirs)) // 2
        assert mine[of_one_pass - 1] != theirs[of_one_pass - 1]


BAD = {
    "id": ([*documents([3, 4]), {"input_ids": [64]}], "row 2, input_ids[0] is 64; ids are in"),
    "columns": (
        [*documents([3]), {"input_ids": [1], "labels": [1]}],
        "row 1 has ['input_ids', 'lab",
    ),
    "no ids": ([{"text": "a"}], "row 0 holds ['text'], but packing needs a column input_ids"),
    "empty": ([], "train_dataset gave no rows in pass 0"),
    "no tokens": ([*documents([3]), {"input_ids": []}], "documents are empty (row 1)"),
    "boundary": (
        [{"input_ids": [1, 2], "seq_lengths": [1]}],
        "row 0 has 2 input_ids, but its seq_lengths [1] add up to 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_stream_refuses_bad_rows(name):
    rows, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        list(make(rows))


def test_stream_names_the_document_that_is_too_long():
    with pytest.raises(ValueError, match=re.escape("row 2 has 11 tokens, but one batch holds 10")):
        list(make(documents([3, 9, 11]), overflow="error"))


# Under the trainer


def trainer(folder: Path, rows: Any, **options: Any) -> LongCtxTrainer:
    given = {"max_steps": 2, "longctx_lookahead": 4, **options}
    return LongCtxTrainer(
        model=tiny("distca", dtype=torch.float32),
        args=arguments(Case(lengths=UNEVEN), folder, **given),
        train_dataset=rows,
    )


def rows_of(*lengths: int) -> Any:
    return Dataset.from_list(documents(lengths)).to_iterable_dataset()


class Once(IterableDataset):
    """Starts where the last iteration stopped."""

    def __init__(self) -> None:
        self.rows = iter(documents([3] * 40))

    def __iter__(self) -> Any:
        return self.rows


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (rows_of(9), {"max_steps": -1}, "max_steps has to be specified"),
        (rows_of(9), {"dataloader_num_workers": 2}, "dataloader_num_workers=2 would each read all"),
        (split_dataset_by_node(rows_of(9, 9), 0, 2), {}, "train_dataset is split by node"),
        (rows_of(9), {"save_strategy": "epoch"}, "save_strategy=epoch with a stream"),
        (Once(), {}, "train_dataset reads differently each time"),
        (Listed([]), {}, "train_dataset gave no rows in pass 0"),
        (Listed([{"input_ids": [64]}]), {}, "row 0, input_ids[0] is 64"),
        (iter(documents([9])), {"max_steps": 2}, "without a length; pass a data set with one, or"),
    ],
)
def test_stream_refusals_before_the_first_step(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(tmp_path, rows, **options)


def test_stream_evaluation_is_that_of_the_same_documents(tmp_path):
    ours = trainer(tmp_path, rows_of(*UNEVEN))
    whole = ours.evaluate(Dataset.from_list(documents(UNEVEN)))["eval_loss"]
    assert abs(ours.evaluate(rows_of(*UNEVEN))["eval_loss"] / whole - 1) < 1e-6


def test_resume_on_another_stream_is_refused(tmp_path):
    trainer(tmp_path, rows_of(*UNEVEN), save_strategy="steps", save_steps=1).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    message = "train_dataset is not that of the checkpoint: its first rows are others; start with"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, rows_of(*UNEVEN[::-1])).train(resume_from_checkpoint=checkpoint)
    trainer(tmp_path, rows_of(*UNEVEN)).train(resume_from_checkpoint=checkpoint)
