"""Load data in the trainer: every trainer must hold the same documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import documents, tiny
from torch import Tensor

from hf_longctx import LongCtxTrainer, LongCtxTrainingArguments
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.training.groups import Group
from hf_longctx.training.loaders import Loaders
from hf_longctx.training.report import StepReport


class OneOfTwo:
    """An accelerator whose other trainer scanned `other`."""

    device = torch.device("cpu")

    def __init__(self, other: Tensor | None = None) -> None:
        self.other, self.seen = other, torch.zeros(1, 2, dtype=torch.int64)

    def gather(self, mine: Tensor) -> Tensor:
        self.seen = mine
        return torch.cat([mine, mine if self.other is None else self.other])


def scan(rows: Any, accelerator: OneOfTwo, folder: Any) -> None:
    arguments = LongCtxTrainingArguments(output_dir=str(folder), use_cpu=True)
    group = Group(trainers=2, size=2, index=0, rank=0)
    loaders = Loaders(arguments, group, accelerator=accelerator, vocab_size=64)
    assert len(loaders.source(rows, training=True).packs) == 1


def test_equal_documents_pass(tmp_path):
    scan(documents([5, 9]), OneOfTwo(), tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        documents([5, 9], seed=1),  # other tokens of the same lengths
        documents([5, 9])[::-1],  # another order
        documents([5, 9, 3]),
        [row | {"labels": [-100] * len(row["input_ids"])} for row in documents([5, 9])],
    ],
)
def test_other_documents_on_another_trainer_are_refused(tmp_path, other):
    elsewhere = OneOfTwo()
    scan(other, elsewhere, tmp_path)
    with pytest.raises(ValueError, match="train_dataset differs between the trainers"):
        scan(documents([5, 9]), OneOfTwo(elsewhere.seen), tmp_path)


def test_what_was_cut_is_logged_for_every_data_set(tmp_path, caplog):
    caplog.set_level("INFO", logger="hf_longctx")
    arguments = LongCtxTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        longctx_max_tokens_per_rank=16,
        longctx_overflow="truncate",
    )
    sets = {"long": documents([20, 4]), "short": documents([3])}
    LongCtxTrainer(
        model=tiny("distca", dtype=torch.float32),
        args=arguments,
        train_dataset=documents([17, 9, 40]),
        eval_dataset=sets,
    )
    assert [record.getMessage() for record in caplog.records if "documents" in record.message] == [
        "train_dataset: 3 documents, 66 tokens: 2 truncated, 25 tokens (37.9%) dropped",
        "eval_dataset['long']: 2 documents, 24 tokens: 1 truncated, 4 tokens (16.7%) dropped",
        "eval_dataset['short']: 1 documents, 3 tokens: all kept whole",
    ]


def test_ids_that_are_no_targets_reach_the_batches(tmp_path):
    arguments = LongCtxTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    group = Group(trainers=1, size=1, index=0, rank=0)
    rows = Dataset.from_list([{"input_ids": [5, 6, 0, 0, 7]}])
    for given in (rows, rows.to_iterable_dataset()):
        loaders = Loaders(arguments, group, accelerator=OneOfTwo(), vocab_size=64, ignore_id=0)
        batch = next(
            iter(loaders.loader(given, training=True, options=PlanOptions(layout="spread")))
        )
        assert batch["shift_labels"].tolist() == [[6, -100, -100, 7, -100]]


def test_an_overridden_loss_is_refused(tmp_path):
    class Shifts(LongCtxTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    arguments = LongCtxTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    model = tiny("distca", dtype=torch.float32)
    with pytest.raises(ValueError, match="Shifts.compute_loss is overridden"):
        Shifts(model=model, args=arguments, train_dataset=documents([5, 9]))


def test_rows_that_read_differently_each_time_are_refused(tmp_path):
    class Random(list):
        def __getitem__(self, row: Any) -> Any:
            return {"input_ids": torch.randint(0, 64, (9,)).tolist()}

    with pytest.raises(ValueError, match="row 0 reads differently than when it was scanned"):
        scan(Random([0, 0]), OneOfTwo(), tmp_path)


def test_ids_cut_otherwise_are_told_apart(tmp_path):
    elsewhere = OneOfTwo()
    scan([{"input_ids": [1, 2]}, {"input_ids": [3]}], elsewhere, tmp_path)
    with pytest.raises(ValueError, match="differs between the trainers"):
        scan([{"input_ids": [1]}, {"input_ids": [2, 3]}], OneOfTwo(elsewhere.seen), tmp_path)


def test_uneven_batches_do_not_even_out_in_the_report():
    kind, report = LayerKind(), StepReport()
    for lengths in ([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 9]):
        layout = cut(lengths, ranks=2, layout="contiguous")
        report.add(LongCtxBatch(layout, 0), algorithm="ring", kinds=[kind, kind])
    assert report.logs()["longctx_attention_before"] == round(45 / 27, 4)  # each batch by itself
