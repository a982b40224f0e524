"""Wrong input -> a clear ValueError before the first step; a lost rank -> a quick end of all."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import Document, documents, tiny
from train_cases import Case, arguments, launch
from transformers import HfArgumentParser, TrainingArguments, default_data_collator

from hf_longctx import LongCtxArguments, LongCtxTrainer, LongCtxTrainingArguments
from hf_longctx.data.batch import KEY
from hf_longctx.training.groups import find_group

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
            "attention_mask[2] is 0; a packed path takes documents without padding",
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
    with pytest.raises(ValueError, match=re.escape("load it with one of ('distca', 'ring')")):
        stock.train()
    assert stock.state.global_step == 0


@pytest.mark.parametrize("name", ["distac", "charm", "zeco_linear", "distca2"])
def test_misspelt_and_unbuilt_names_are_refused_when_the_model_is_made(name):
    with pytest.raises(ValueError, match=name):
        tiny(name)


def test_hooks_that_cut_or_shift_are_refused(tmp_path):
    rows = documents([9])
    with pytest.raises(ValueError, match="data_collator=function would pad or cut"):
        trainer(tmp_path, rows, data_collator=default_data_collator)
    with pytest.raises(ValueError, match="compute_loss_func would see one rank's labels"):
        trainer(tmp_path, rows, compute_loss_func=lambda *given, **more: None)
    model, given = tiny("distca", dtype=torch.float32), arguments(SMALL, tmp_path)
    with pytest.raises(ValueError, match="data_collator=function"):
        LongCtxTrainer(model, given, default_data_collator, rows)
    with pytest.raises(ValueError, match="compute_loss_func"):
        LongCtxTrainer(model, given, None, rows, None, None, None, lambda *x, **more: None)


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


# Arguments and flags


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"longctx_max_tokens_per_rank": 0}, "longctx_max_tokens_per_rank=0 must be at least 1"),
        ({"longctx_group_size": 0}, "longctx_group_size=0 must be at least 1 and divide"),
        ({"longctx_lookahead": 0}, "longctx_lookahead=0 must be at least 1"),
        ({"longctx_tolerance": -0.1}, "longctx_tolerance=-0.1 must be 0 or more"),
        ({"longctx_tolerance": float("nan")}, "longctx_tolerance=nan must be 0 or more"),
        ({"longctx_layout": "zigzga"}, "longctx_layout='zigzga' is not built yet; use one of"),
        ({"longctx_balance": "attention"}, "longctx_balance='attention' is not built yet"),
        ({"longctx_overlap": "heads"}, "longctx_overlap='heads' is not built yet"),
        ({"longctx_servers": 2}, "longctx_servers=2 is not built yet; use one of 0"),
        ({"longctx_server_devices": "cpu"}, "longctx_server_devices='cpu' is not built yet"),
        ({"longctx_server_timeout": 1.0}, "longctx_server_timeout=1.0 is not built yet"),
        ({"longctx_server_memory": 1}, "longctx_server_memory=1 is not built yet"),
        ({"longctx_topology": "2x4"}, "longctx_topology='2x4' is not built yet"),
        ({"longctx_ulysses_size": 2}, "longctx_ulysses_size=2 is not built yet"),
        ({"longctx_scan": "tree"}, "longctx_scan='tree' is not built yet"),
        ({"longctx_softmax": "ring"}, "longctx_softmax='ring' is not built yet"),
        ({"longctx_verify": "always"}, "longctx_verify='always' is not built yet"),
        ({"longctx_overflow": "wrap"}, "longctx_overflow='wrap'"),
    ],
)
def test_values_are_refused_by_name(tmp_path, given, message):
    for make in (LongCtxArguments, lambda **x: arguments(SMALL, tmp_path, **x)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size=2"),
        ({"per_device_eval_batch_size": 8}, "per_device_eval_batch_size=8"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    ],
)
def test_training_arguments_are_refused_also_when_set_later(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        arguments(SMALL, tmp_path, **given)
    late = arguments(SMALL, tmp_path)
    for name, value in given.items():
        setattr(late, name, value)
    with pytest.raises(ValueError, match=message):
        LongCtxTrainer(model=tiny("distca"), args=late, train_dataset=documents([9]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--longctx_layuot", "spread"], "--longctx_layuot"),
        (["--longctx_layout", "spiral"], "invalid choice"),
        (["--longctx_group_size", "two"], "invalid"),
        (["--longctx_server", "2", "--longctx_foo"], "longctx_server"),
    ],
)
def test_flags_of_a_script_are_refused(tmp_path, capsys, flags, message):
    parser = HfArgumentParser(LongCtxTrainingArguments)
    with pytest.raises((ValueError, SystemExit)) as refusal:
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu", *flags])
    assert message in str(refusal.value) + capsys.readouterr().err


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_group_size_that_does_not_divide_is_refused(size):
    given = SimpleNamespace(world_size=1, process_index=0, longctx_group_size=size)
    with pytest.raises(ValueError, match=rf"longctx_group_size={size} must divide the 1 trainers"):
        find_group(given)


def test_a_group_size_over_several_trainers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    given = SimpleNamespace(world_size=6, process_index=5, longctx_group_size=None)
    assert (find_group(given).size, find_group(given).rank) == (6, 5)
    given.longctx_group_size = 2
    group = find_group(given)
    assert (group.groups, group.index, group.rank) == (3, 2, 1)
    given.longctx_group_size = 4
    with pytest.raises(ValueError, match=re.escape("6 trainers; use one of [1, 2, 3, 6]")):
        find_group(given)


# Launched processes


def test_two_processes_that_would_train_apart_are_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("with a GPU, two processes without use_cpu do train together")
    ended = launch(tmp_path, "apart", processes=2)
    assert ended.code != 0 and ended.left == []
    assert "the launcher started 2 processes but Trainer sees 1" in ended.output
    assert "set use_cpu=True" in ended.output


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_b62_the_others_end_when_a_rank_is_lost(tmp_path, how):
    ended = launch(tmp_path, how, processes=2)
    assert ended.code != 0 and ended.left == []
    assert ended.ended - float((tmp_path / "died").read_text()) < 30
    first = "RuntimeError: rank 1 raises" if how == "raise" else "Signal 9 (SIGKILL) received"
    assert ended.output.count(first) == 1, ended.output[-8000:]
    assert not (tmp_path / "results.json").exists()
