"""Resume from a checkpoint that an old commit saved, as that commit did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoint_cases
import pytest
from checkpoint_cases import CHECKPOINT, SAVED_AT, STEPS, losses
from launching import ROOT, launching
from train_cases import launch
from words import tokenizer


@pytest.fixture
def run() -> dict[str, Any]:
    """Flags, documents and losses of the run that saved it."""
    return json.loads((CHECKPOINT / "run.json").read_text())


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy that a run may write beside."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))


def test_the_checkpoint_is_whole_and_small():
    names = {path.name for path in CHECKPOINT.iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "run.json",
        "trainer_state.json", "training_args.bin", "rng_state_0.pth", "rng_state_1.pth",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 300_000
    assert json.loads((CHECKPOINT / "trainer_state.json").read_text())["global_step"] == SAVED_AT


def test_a_trainer_goes_on_from_it_as_the_run_that_saved_it(run, copied):
    ended = launch(copied.parent, "resume", processes=2, script=checkpoint_cases.__file__)
    assert ended.code == 0 and ended.left == [], ended.output[-8000:]
    found = json.loads((copied.parent / "results.json").read_text())["cases"]["resume"]
    assert found["losses"] == pytest.approx(run["losses"], abs=1e-6)
    assert sorted(found["losses"]) == [str(step) for step in range(SAVED_AT + 1, STEPS + 1)]
    assert not [line for line in found["lines"] if line.startswith("resuming, but")]


def test_the_recipe_goes_on_from_it(run, copied):
    folder = copied.parent
    shutil.copytree(copied, folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = [json.dumps({"input_ids": ids}) for ids in run["documents"]]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    values = run["flags"] | {
        "model_name_or_path": folder / "model",
        "data": folder / "train.jsonl",
        "output_dir": folder / "out",
        "resume_from_checkpoint": copied,
        "save_steps": STEPS,
    }
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    recipe = str(ROOT / "recipes" / "sft.py")
    with launching("--num_processes", "2", recipe, *flags) as under_way:
        assert under_way.wait(seconds=200) == 0, under_way.printed()[-8000:]
        printed = under_way.printed()
    state = json.loads((folder / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert losses(state["log_history"]) == pytest.approx(run["losses"], abs=1e-6)
    assert "resuming, but" not in printed
