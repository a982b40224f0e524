"""Run the recipe: what its files and flags lead to, and what they are rejected for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from tiny import tiny
from train_cases import launch
from words import said, tokenizer

from hf_longctx.cli import sft

RECIPE = ROOT / "recipes" / "sft.py"
CHATS = [{"messages": said(*["hello how are you", "fine thanks"] * n)} for n in (1, 3, 2, 5)]


@pytest.fixture
def recipe() -> Iterator[Any]:
    names = ("hf_longctx", "transformers.tokenization_utils_base")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    yield sft
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def jsonl(place: Path, rows: list[Any]) -> str:
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(place)


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Of a run over conversations; the model is tiny."""
    tiny("sdpa", dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    values = {
        "model_name_or_path": str(tmp_path / "model"),
        "data": jsonl(tmp_path / "train.jsonl", CHATS),
        "output_dir": str(tmp_path / "out"),
        "longctx_max_tokens_per_rank": 24,
        "longctx_overflow": "truncate",
        "logging_steps": 1,
        "save_steps": 2,
        "optim": "adamw_torch",
        "report_to": "none",
        "summary_json": str(tmp_path / "summary.json"),
    }
    return [
        *(part for name, value in values.items() for part in (f"--{name}", str(value))),
        "--use_cpu",
        "--disable_tqdm=true",
        "--dataloader_pin_memory=false",
    ]


def test_chat_recipe_trains_evaluates_and_resumes(recipe, flags, tmp_path, caplog, capsys):
    more = ["--assistant_only_loss", "--eval_data", jsonl(tmp_path / "test.jsonl", CHATS[:2])]
    recipe.train([*flags, *more, "--max_steps", "2"])
    lines = caplog.messages
    assert any("distca: LlamaForCausalLM, " in line and " 2 steps; " in line for line in lines)
    assert "train_dataset: columns ['messages'], read as messages" in lines
    (line,) = [line for line in lines if line.startswith("eval_dataset: 2 documents")]
    assert "1 truncated" in line
    assert "eval_loss" in capsys.readouterr().out
    recipe.train([*flags, *more, "--max_steps", "4", "--resume_from_checkpoint", "last"])
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [e["step"] for e in state["log_history"] if "loss" in e] == [1, 2, 3, 4]


def test_stream_recipe_trains(recipe, flags, tmp_path):
    recipe.train([*flags, "--streaming", "--max_steps", "3", "--max_documents", "3"])
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["--summary_json", "no_such_folder/a.json"],
            "--summary_json no_such_folder/a.json: no",
        ),
        (["--summary_json", "."], "--summary_json .: no file can be written there"),
        (["--output_dir", str(RECIPE / "out")], "--output_dir"),
        (["--resume_from_checkpoint", "none"], "--resume_from_checkpoint none: no such folder"),
        (["--data", "broken.jsonl"], "broken.jsonl cannot be read: "),
        (["--data", "other.jsonl"], "has the columns ['a'], but needs messages, conversations"),
        (["--eval_data", "none.jsonl"], "none.jsonl: no such file"),
        (["--data", "empty.jsonl"], "empty.jsonl: no such file, or an empty one"),
        (["--eval_split", "test"], "train.jsonl has no split 'test', only train; give --eval_data"),
        (
            ["--model_name_or_path", "none"],
            "--model_name_or_path none: no such folder, and no model",
        ),
        (
            ["--attn_implementation", "chram"],
            "use one of distca, charm, ring, ulysses, zeco_linear; di",
        ),
        (["--eval_split", "train", "--streaming"], "--streaming needs --max_steps"),
        (["--longctx_group_size", "3", "--data", "empty.jsonl"], "longctx_group_size=3 must"),
        (["--longctx_servers", "63", "--data", "empty.jsonl"], "at most 62 servers"),
    ],
)
def test_a_run_is_refused_before_it_starts(recipe, flags, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"messages": [}\n')
    Path("empty.jsonl").touch()
    jsonl(Path("other.jsonl"), [{"a": 1}])
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe.train([*flags, *change])
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("longctx_layuot: spread", [], "unknown keys ['longctx_layuot']; --help lists the flags"),
        ("longctx_verify: off", [], "longctx_verify was removed: it had the one value off; run"),
        ("data: x", ["--longctx_verify", "off"], "longctx_verify was removed: it had the one"),
        ("data: x", [], "--model_name_or_path is missing"),
        ("model_name_or_path: x", [], "--data is missing"),
        ("data: x\nmodel_name_or_path: x\nlongctx_layout: spiral", [], "longctx_layout='spiral'"),
        ("data: x\nmodel_name_or_path: x", ["--longctx_servers", "-1"], "longctx_servers=-1"),
    ],
)
def test_a_recipes_file_and_flags_are_refused(recipe, tmp_path, text, flags, message):
    place = tmp_path / "recipe.yaml"
    place.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\n{text}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe.parse(["--config", str(place), *flags])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing; write one `flag: value` a line"),
        ("- a\n", "holds list; write one"),
        ("a: [", "is no YAML: "),
    ],
)
def test_a_file_that_is_no_list_of_flags_is_refused(recipe, tmp_path, text, message):
    place = tmp_path / "recipe.yaml"
    place.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe.parse(["--config", str(place)])
    with pytest.raises(ValueError, match="no such file"):
        recipe.parse(["--config", str(tmp_path / "none.yaml")])


def test_a_hybrid_from_scratch_learns_as_its_committed_curves_say(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = Path("recipes/qwen3_next_tiny")
    one, two = (json.loads((folder / f"loss_{n}.json").read_text()) for n in ("1_rank", "2_ranks"))
    assert (one["ranks"], two["ranks"], one["bytes_moved"]) == (1, 2, 0) and two["bytes_moved"]
    assert len(one["losses"]) == 20 and one["losses"][-1] < one["losses"][0] - 3
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    flags = {
        "config": str(folder / "zeco_cpu.yaml"),
        "longctx_max_tokens_per_rank": "2048",
        "max_steps": "2",
        "output_dir": str(tmp_path),
        "summary_json": str(tmp_path / "made.json"),
    }
    recipe.train([part for name, value in flags.items() for part in (f"--{name}", value)])
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["losses"] == pytest.approx(one["losses"][:2], rel=1e-4)


def test_a_config_that_is_none_is_refused(recipe, flags, tmp_path):
    jsonl(tmp_path / "config.json", [{"model_type": "no_such_type"}])
    for name in ("config.json", "none.json"):
        with pytest.raises(ValueError, match=rf"--model_config .*{name} is no config as JSON: "):
            recipe.train([*flags, "--model_config", str(tmp_path / name)])


def test_a_package_that_is_missing_is_refused(recipe):
    with pytest.raises(ValueError, match="no package 'no_such_package' is installed"):
        recipe.in_package("package:no_such_package/data")


def test_a_users_error_is_said_once(tmp_path):
    ended = launch(tmp_path, processes=2, script=str(RECIPE))  # a folder is no flag
    assert ended.code != 0 and ended.left == []
    assert ended.output.count("error: ") == 1, ended.output
