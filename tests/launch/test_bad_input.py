"""Reject wrong input before the first step, and end all ranks soon after one is lost."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny import Document, documents, tiny
from train_cases import Case, arguments, launch
from transformers import Trainer, TrainingArguments
from transformers.data import data_collator as stock

from hf_longctx import LongCtxTrainer
from hf_longctx.data.batch import KEY
from hf_longctx.support import NAMES, validate_given
from hf_longctx.training.trainer import LongCtxTrainerMixin

SMALL = Case(lengths=(20, 9))


def trainer(folder: Path, rows: Any, *, model: Any = None, **options: Any) -> LongCtxTrainer:
    """A trainer of some rows; batches of 48 tokens."""
    return LongCtxTrainer(
        model=model or tiny("distca", dtype=torch.float32),
        args=arguments(SMALL, folder, longctx_overflow="error", max_steps=2),
        train_dataset=rows,
        **options,
    )


def row(*ids: int, **more: Any) -> Document:
    return {"input_ids": [*ids], **more}


# Documents


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([row(1, 2), row()], "1 of 2 documents are empty (row 1), but a document has at least 1"),
        ([row(1, 2), row(5, 64, 7)], "row 1, input_ids[1] is 64; ids are in [0, 64)"),
        ([row(-1)], "row 0, input_ids[0] is -1"),
        (
            [row(1, labels=[64])],
            "row 0, labels[0] is 64; labels are -100 (no target) or in [0, 64)",
        ),
        ([row(1, 2, labels=[1])], "row 0 has 1 labels for 2 input_ids"),
        (
            [row(1, 2, 0, attention_mask=[1, 1, 0])],
            "attention_mask[2] is 0; packing takes documents without padding; tokenise with "
            "padding=False",
        ),
        (documents([9, 49]), "row 1 has 49 tokens, but one batch holds 48"),
        (documents([9, 49]), "--longctx_overflow split"),
        ([{"text": "a"}], "packing needs a column input_ids"),
        ([row(1), {"input_ids": [[1, 2]]}], "a document is a flat list of integers"),
        ([{"input_ids": [0.5]}], "a document is a flat list of integers"),
    ],
)
def test_documents_are_refused_at_construction(tmp_path, rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(tmp_path, rows)


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_rows_of_datasets_are_refused_at_construction(tmp_path, column):
    rows = Dataset.from_list([row(1, 2, labels=[1, 2])] * 300)
    trainer(tmp_path, rows)
    bad = rows.to_list()
    bad[200][column][1] = 64
    with pytest.raises(ValueError, match=re.escape(f"row 200, {column}[1] is 64")):
        trainer(tmp_path, Dataset.from_list(bad))


def test_evaluation_documents_are_refused_at_construction(tmp_path):
    good = documents([9])
    for given in ([row(64)], {"good": good, "bad": [row(64)]}):
        with pytest.raises(ValueError, match=re.escape("input_ids[0] is 64")):
            trainer(tmp_path, good, eval_dataset=given)


def test_missing_data_sets_are_refused(tmp_path):
    without = trainer(tmp_path, None)
    with pytest.raises(ValueError, match="training needs a train_dataset"):
        without.train()
    with pytest.raises(ValueError, match="evaluation needs an eval_dataset"):
        without.evaluate()


# Models and what is given to the trainer


def test_a_model_that_bypasses_the_hook_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model_type=bloom: this family never calls"):
        trainer(tmp_path, documents([9]), model=tiny("distca", family="bloom"))


def test_a_model_whose_attention_is_not_ours_is_refused_before_the_first_step(tmp_path):
    stock = trainer(tmp_path, documents([9]), model=tiny("sdpa", dtype=torch.float32))
    with pytest.raises(ValueError, match=re.escape(f"load it with one of {NAMES}")):
        stock.train()
    assert stock.state.global_step == 0


@pytest.mark.parametrize("name", ["distac", "zeco", "distca2"])
def test_misspelt_and_unbuilt_names_are_refused_when_the_model_is_made(name):
    with pytest.raises(ValueError, match=name):
        tiny(name)


def halves(rows: Any) -> Any:
    """A collator that cuts."""
    return [row["input_ids"][::2] for row in rows]


def test_hooks_that_cut_or_shift_are_refused(tmp_path):
    rows = documents([9])
    with pytest.raises(ValueError, match="data_collator=halves: it would build or cut batches"):
        trainer(tmp_path, rows, data_collator=halves)
    with pytest.raises(ValueError, match="compute_loss_func would see one rank's labels"):
        trainer(tmp_path, rows, compute_loss_func=lambda *given, **more: None)
    model, given = tiny("distca", dtype=torch.float32), arguments(SMALL, tmp_path)
    with pytest.raises(ValueError, match="data_collator=halves"):
        LongCtxTrainer(model, given, halves, rows)
    with pytest.raises(ValueError, match="compute_loss_func"):
        LongCtxTrainer(model, given, None, rows, None, None, None, lambda *x, **more: None)


class OneMore(stock.DataCollatorWithPadding):
    """Nobody knows what it does beside padding."""


@pytest.mark.parametrize(
    ("collator", "said"),
    [(stock.default_data_collator, 0), (stock.DataCollatorWithFlattening(), 1)],
)
def test_collators_that_only_pad_are_left_out(tmp_path, collator, said, caplog):
    with caplog.at_level("INFO", logger="hf_longctx"):
        trainer(tmp_path, documents([9]), data_collator=collator)
    assert caplog.text.count("is left out: documents are packed without padding") == said


def test_a_language_modelling_collator_leaves_pad_out_of_the_loss(tmp_path, caplog):
    tokenizer = SimpleNamespace(pad_token_id=2, mask_token="m")
    collator = stock.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with caplog.at_level("INFO", logger="hf_longctx"):
        made = trainer(tmp_path, [row(1, 2, 3)], data_collator=collator)
    assert "id 2 (pad) is no target" in caplog.text
    (batch,) = made.get_train_dataloader()
    assert batch["shift_labels"].tolist() == [[-100, 3, -100]]
    with pytest.raises(ValueError, match="whatever .'labels'. say; drop those columns"):
        trainer(tmp_path, [row(1, 2, labels=[1, 2])], data_collator=collator)
    for other in (
        stock.DataCollatorForLanguageModeling(tokenizer, mlm=True),
        OneMore(tokenizer),
    ):
        with pytest.raises(ValueError, match="leave it out and pass documents"):
            trainer(tmp_path, [row(1, 2)], data_collator=other)


def test_a_collator_set_elsewhere_is_refused_too(tmp_path):
    class Sets(LongCtxTrainerMixin, Trainer):
        pass

    class Theirs(Trainer):
        def __init__(self, **given: Any) -> None:
            super().__init__(data_collator=halves, **given)

    class Both(LongCtxTrainerMixin, Theirs):
        pass

    given = {"args": arguments(SMALL, tmp_path), "train_dataset": documents([9])}
    given["model"] = tiny("distca", dtype=torch.float32)
    with pytest.raises(ValueError, match="data_collator=halves"):
        Both(**given)
    later = Sets(**given)
    later.data_collator = halves
    with pytest.raises(ValueError, match="data_collator=halves"):
        later.get_train_dataloader()


def own_loss(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


def masked_inputs(self: Any, inputs: Any) -> Any:
    inputs["labels"][0, 0] = -100
    return inputs


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"training_step": own_loss}, "Theirs has a step of its own that does not call compute_l"),
        ({"_prepare_inputs": masked_inputs}, "Theirs changed labels of a batch"),
        (
            {"get_batch_samples": lambda self, batches, number, device: ([next(batches)], None)},
            "Theirs gave its loss no num_items_in_batch",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_b07_steps_with_another_loss_are_refused(tmp_path, method, message):
    theirs = type("Theirs", (LongCtxTrainerMixin, type("Base", (Trainer,), method)), {})
    given = {"args": arguments(SMALL, tmp_path), "train_dataset": documents([9])}
    made = theirs(model=tiny("distca", dtype=torch.float32), **given)
    with pytest.raises(ValueError, match=message):
        made.train()
    assert made.state.global_step == 0


def test_an_evaluation_step_with_another_loss_is_refused(tmp_path):
    def own_step(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        return model(**inputs).loss.detach(), None, None

    base = type("Base", (Trainer,), {"prediction_step": own_step})
    theirs = type("Theirs", (LongCtxTrainerMixin, base), {})
    given = {"args": arguments(SMALL, tmp_path), "eval_dataset": documents([9])}
    made = theirs(model=tiny("distca", dtype=torch.float32), **given)
    with pytest.raises(ValueError, match="does not call compute_loss"):
        made.evaluate()


@pytest.mark.parametrize("name", ["get_train_dataloader", "_get_train_sampler"])
def test_loaders_that_would_never_be_called_are_refused(tmp_path, name):
    base = type("Base", (Trainer,), {name: lambda self, *args: None})
    theirs = type("Theirs", (LongCtxTrainerMixin, base), {})
    given = {"args": arguments(SMALL, tmp_path), "train_dataset": documents([9])}
    with pytest.raises(
        ValueError, match=rf"Base.{name} is overridden, but hf_longctx packs batches"
    ):
        theirs(model=tiny("distca", dtype=torch.float32), **given)


def test_arguments_without_our_fields_are_refused(tmp_path):
    stock = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=1
    )
    with pytest.raises(ValueError, match="use LongCtxTrainingArguments"):
        LongCtxTrainer(model=tiny("distca"), args=stock, train_dataset=documents([9]))


def test_batches_of_other_loaders_are_refused(tmp_path):
    ours = trainer(tmp_path, documents([9]))
    ids = torch.tensor([[1, 2, 3]])
    for step in (ours.training_step, lambda *x: ours.prediction_step(*x, True)):
        with pytest.raises(ValueError, match=f"a batch without '{KEY}' reached the model"):
            step(ours.model, {"input_ids": ids, "labels": ids})


class Plain(torch.nn.Module):
    """No Transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda model: Plain(), "model is a Plain, but only a Transformers PreTrainedModel looks"),
        (torch.nn.DataParallel, "model is wrapped in DataParallel, but the trainer wraps it"),
    ],
)
def test_modules_that_are_no_models_are_refused(tmp_path, wrap, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(tmp_path, documents([9]), model=wrap(tiny("distca", dtype=torch.float32)))


def wrap_in_ddp(context: Any) -> str:
    """On each rank: a model in DistributedDataParallel -> its refusal."""
    wrapped = torch.nn.parallel.DistributedDataParallel(tiny("distca", dtype=torch.float32))
    with pytest.raises(ValueError) as refusal:
        validate_given(wrapped, train_dataset=None)
    return str(refusal.value)


def test_a_model_in_ddp_is_refused(rank_pool):
    message, *_ = rank_pool.run(wrap_in_ddp, ranks=4)
    assert message.startswith("model is wrapped in DistributedDataParallel")
    assert message.endswith("pass model.module")


def test_several_splits_are_refused(tmp_path):
    rows = Dataset.from_list(documents([9]))
    for splits in (DatasetDict(train=rows, test=rows), {"train": rows, "test": rows}):
        message = f"train_dataset is a {type(splits).__name__} of ['test', 'train'], but training"
        with pytest.raises(ValueError, match=re.escape(message)):
            trainer(tmp_path, splits)


# Launched processes


def test_two_processes_that_would_train_apart_are_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("with a GPU, two processes without use_cpu do train together")
    ended = launch(tmp_path, "apart", processes=2)
    assert ended.code != 0 and ended.left == []
    assert "the launcher started 2 processes but Trainer sees 1" in ended.output
    assert "set use_cpu=True" in ended.output


@pytest.mark.parametrize("how", ["kill", "kill_first", "raise"])
def test_b62_the_others_end_when_a_rank_is_lost(tmp_path, how):
    as_users_do = how != "kill_first"  # their launcher says who failed first
    ended = launch(tmp_path, how, processes=2, forked=not as_users_do)
    assert ended.code != 0 and ended.left == []
    assert ended.ended - float((tmp_path / "died").read_text()) < 30
    first = "RuntimeError: rank 1 raises" if how == "raise" else "Signal 9 (SIGKILL) received"
    assert ended.output.count(first) == 1, ended.output[-8000:]
    assert not (tmp_path / "results.json").exists()
