"""Resume with the data that the checkpoint did not take, or name the setting that prevents it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from plain_loop import weights_of
from tiny import documents, tiny
from train_cases import Case, arguments, trainer_of
from transformers import Trainer, TrainingArguments

CASE = Case(
    lengths=(40, 30, 17, 1, 44, 40, 9, 33, 2, 20),
    options={"optim": "adamw_torch", "num_train_epochs": 2, "data_seed": 3},
)
STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    """Of a whole run, in its first epoch, with the weights of its end beside it."""
    folder = tmp_path_factory.mktemp("resume")
    trainer = trainer_of(CASE, folder, save_strategy="steps", save_steps=STEPS)
    assert len(trainer.get_train_dataloader()) > STEPS
    trainer.train()
    torch.save(weights_of(trainer.model), folder / "end.pt")
    return folder / f"checkpoint-{STEPS}"


def resumed(checkpoint: Path, folder: Path, **changes: Any) -> Any:
    """A trainer with changed arguments that went on from the checkpoint to its end."""
    trainer = trainer_of(CASE, folder, **changes)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def as_if(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """The checkpoint as a run with other arguments would have left it."""
    copy = folder / "as_if"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).symlink_to(file)
    kept = torch.load(checkpoint / "training_args.bin", weights_only=False)
    for name, value in changes.items():
        setattr(kept, name, value)
    (copy / "training_args.bin").unlink()
    torch.save(kept, copy / "training_args.bin")
    return copy


def distance_to_end(trainer: Any, checkpoint: Path) -> float:
    """Largest difference between a trainer's weights and those of the run without a break."""
    end = torch.load(checkpoint.parent / "end.pt")
    found = weights_of(trainer.model)
    return max(float((found[name] - weight).abs().max()) for name, weight in end.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"longctx_balance": "none"}, "longctx_balance was 'tokens' and is 'none'; start with"),
        ({"longctx_overflow": "truncate"}, "longctx_overflow was 'split' and is 'truncate'"),
        ({"longctx_max_tokens_per_rank": 64}, "longctx_max_tokens_per_rank was 48 and is 64"),
        ({"data_seed": 4}, "data_seed (or seed) was 3 and is 4"),
        ({"data_seed": None, "seed": 5}, "data_seed (or seed) was 3 and is 5"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1 and is 2"),
        (
            {"train_sampling_strategy": "sequential"},
            "train_sampling_strategy was 'random' and is 'sequential'",
        ),
    ],
)
def test_resume_with_other_batches_is_refused(checkpoint, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        resumed(checkpoint, tmp_path, **changes)
    assert "would skip other data than that run trained on" in str(refusal.value)
    assert "or pass ignore_data_skip=True" in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ({"longctx_trainers": 2}, "on: longctx_trainers was 2 and is 1; start"),
        (
            {"longctx_trainers": 2, "longctx_group_size": 1},
            "longctx_trainers was 2 and is 1; longctx_group_size was 1 and is None; start",
        ),
        ({"longctx_trainers": None}, "on: it ran without hf_longctx; start"),
    ],
)
def test_resume_with_another_number_of_trainers_is_refused(checkpoint, tmp_path, before, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resumed(as_if(checkpoint, tmp_path, **before), tmp_path)


@pytest.mark.parametrize("change", [lambda rows: rows[::-1], lambda rows: rows[:-1]])
def test_resume_on_other_rows_is_refused(checkpoint, tmp_path, change):
    trainer = trainer_of(CASE, tmp_path)
    trainer.train_dataset = Dataset.from_list(change(CASE.rows()))
    message = "train_dataset is not that of the checkpoint: its rows, or their order, are others"
    with pytest.raises(ValueError, match=f"skip other data than .*: {message}; start with"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_resume_over_fewer_trainers_with_more_tokens_each_is_exact(checkpoint, tmp_path):
    before = {"longctx_trainers": 2, "longctx_max_tokens_per_rank": 24}
    trainer = resumed(as_if(checkpoint, tmp_path, **before), tmp_path)
    assert distance_to_end(trainer, checkpoint) == 0.0


def test_resume_logs_what_only_changes_how_attention_runs(checkpoint, tmp_path, caplog):
    changes = {"longctx_layout": "zigzag", "longctx_tolerance": 0.5}
    trainer = resumed(checkpoint, tmp_path, model=tiny("ring", dtype=torch.float32), **changes)
    for line in (
        "longctx_attention was 'distca' and is 'ring'",
        "longctx_layout was 'auto' and is 'zigzag'",
        "longctx_tolerance was 0.05 and is 0.5",
    ):
        assert f"resuming, but {line}" in caplog.text
    assert distance_to_end(trainer, checkpoint) < 1e-5


def test_resume_with_the_same_arguments_says_nothing_and_is_exact(checkpoint, tmp_path, caplog):
    trainer = resumed(checkpoint, tmp_path, logging_steps=2, seed=7)
    assert "resuming" not in caplog.text
    assert distance_to_end(trainer, checkpoint) == 0.0


def test_resume_with_ignore_data_skip_takes_other_batches(checkpoint, tmp_path, caplog):
    trainer = resumed(checkpoint, tmp_path, longctx_balance="none", ignore_data_skip=True)
    assert "resuming without skipping data: longctx_balance was 'tokens'" in caplog.text
    assert trainer.state.global_step == trainer.state.max_steps
    assert distance_to_end(trainer, checkpoint) > 1e-4


def test_resume_from_a_stock_trainer_is_refused(tmp_path):
    stock = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1, save_steps=1
    )
    rows = Dataset.from_list([row | {"labels": row["input_ids"]} for row in documents([9] * 8)])
    Trainer(model=tiny("sdpa", dtype=torch.float32), args=stock, train_dataset=rows).train()
    with pytest.raises(ValueError, match="it ran without hf_longctx; start with the old values"):
        resumed(tmp_path / "checkpoint-1", tmp_path / "again")


def test_resume_from_a_file_that_is_cut_is_refused(checkpoint, tmp_path):
    cut = as_if(checkpoint, tmp_path)
    whole = (cut / "training_args.bin").read_bytes()
    (cut / "training_args.bin").write_bytes(whole[:500])
    with pytest.raises(ValueError, match=re.escape("training_args.bin cannot be read (")):
        resumed(cut, tmp_path)


class Harmful:
    """What runs when a file that holds it is unpickled as Python would."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_c31_resume_runs_no_code_that_a_checkpoint_brings(checkpoint, tmp_path):
    mark = tmp_path / "mark"
    strange = as_if(checkpoint, tmp_path, run_name=Harmful(mark))
    trainer = resumed(strange, tmp_path / "again")
    assert not mark.exists() and trainer.state.global_step == trainer.state.max_steps
    torch.load(strange / "training_args.bin", weights_only=False)
    assert mark.exists()  # it was no empty threat


def test_resume_reads_arguments_under_classes_and_flags_that_are_gone(checkpoint, tmp_path):
    was = as_if(checkpoint, tmp_path, longctx_verify="off", longctx_trainers=2)
    file = was / "training_args.bin"
    old = torch.load(file, weights_only=False)
    gone = type("GoneArguments", (type(old),), {"__module__": "hf_longctx.gone"})
    sys.modules["hf_longctx.gone"] = SimpleNamespace(GoneArguments=gone)
    old.__class__ = gone
    torch.save(old, file)
    del sys.modules["hf_longctx.gone"]
    with pytest.raises(ValueError, match=r"trained on: longctx_trainers was 2 and is 1; start"):
        resumed(was, tmp_path)


def test_resume_without_a_checkpoint_is_trainers_own_error(tmp_path):
    trainer = trainer_of(CASE, tmp_path / "none")
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)


def test_a_saved_run_keeps_the_number_of_its_trainers(checkpoint, tmp_path):
    kept = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert (kept.longctx_trainers, kept.longctx_attention) == (1, "distca")
    assert arguments(CASE, tmp_path).longctx_trainers is None
