"""Run `hf-longctx verify`: the bounds it judges by, its exit codes, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SharedPool
from tiny import CONFIGS

from hf_longctx.cli import main as cli
from hf_longctx.cli.verify import FIGURES, KILL_FIGURES
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.verify import compare
from hf_longctx.verify.compare import bounds_of, broken
from hf_longctx.verify.rank_pool import RankError
from hf_longctx.verify.ranks import Case

ROOT = CONFIGS.parents[1]
ERRORS = ("logit_error", "loss_error", "grad_error")
VS_TRANSFORMERS = tuple(f"{key}_vs_transformers" for key in ERRORS)
NO_ERROR = dict.fromkeys(ERRORS, 0.0)
GOOD = dict.fromkeys((*ERRORS, *VS_TRANSFORMERS, "leak", "recompute_bytes"), 0.0)
GOOD |= {"bytes_sent": 8, "bytes_planned": 8, "attention_calls": 4}


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        *((key, 2e-10) for key in ERRORS),
        *((key, 2e-5) for key in VS_TRANSFORMERS),
        ("logit_error", float("nan")),
        ("leak", 1e-300),
        ("leak", float("nan")),
        ("recompute_bytes", 1),
        ("bytes_sent", 9),
        ("attention_calls", 0),
    ],
)
def test_each_bound_is_checked(key, bad):
    bounds = bounds_of("float64", plain=NO_ERROR, single=NO_ERROR, recurrent=False)
    assert broken(GOOD, bounds) == []
    (line,) = broken(GOOD | {key: bad}, bounds)
    assert key in line or key == "attention_calls"


def test_bf16_is_measured_by_the_plain_path():
    plain = dict.fromkeys(ERRORS, 0.01)
    bounds = bounds_of("bf16", plain=plain, single=NO_ERROR, recurrent=False)
    good = GOOD | {"logit_error": 0.0199, "loss_error": 0.0199, "grad_error": 0.0299}
    assert broken(good, bounds) == []
    bad = {key: value * 1.01 for key, value in good.items() if key in plain}
    assert len(broken(good | bad, bounds)) == 3


def test_float32_is_measured_by_the_plain_path_where_that_is_beyond_the_fixed_bound():
    single = {"logit_error": 9e-6, "loss_error": 2e-5, "grad_error": 2e-5}
    allowed = {"logit_error": 1e-5, "loss_error": 4e-5, "grad_error": 6e-5}
    found = bounds_of("float32", plain=single, single=single, recurrent=False)
    for key, bound in allowed.items():
        assert found[key] == found[f"{key}_vs_transformers"] == pytest.approx(bound)
    in_float64 = bounds_of("float64", plain=single, single=single, recurrent=False)
    assert in_float64["grad_error"] == 1e-10
    assert in_float64["grad_error_vs_transformers"] == pytest.approx(6e-5)


def test_an_infinite_error_fails_even_where_the_plain_path_has_one():
    infinite = dict.fromkeys(ERRORS, float("inf"))
    bounds = bounds_of("float32", plain=infinite, single=infinite, recurrent=False)
    assert len(broken(GOOD | infinite, bounds)) == 3


def test_a_large_vocabulary_is_compared_in_some_of_its_logits():
    small, large = (
        Case(model="", name="distca", options=PlanOptions(), dtype="float64",
             lengths=((2,),), vocab_size=size)
        for size in (64, 150_000)
    )  # fmt: skip
    assert small.columns.tolist() == list(range(64))
    assert len(set(large.columns.tolist())) == 4096 and int(large.columns.max()) > 140_000
    assert large.columns.equal(large.columns)


def test_nan_in_any_tensor_is_an_error_of_infinity():
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    right = compare.Reference([good, good], 1.0, {"a": good, "b": good})
    ours = compare.Reference([good, bad], 1.0, {"a": good, "b": bad})
    assert compare.errors(right, right) == dict.fromkeys(ERRORS, 0.0)
    infinite = dict.fromkeys(("logit_error", "grad_error"), float("inf"))
    assert compare.errors(ours, right) == {"loss_error": 0.0} | infinite


# The command


@pytest.fixture
def command(monkeypatch, rank_pool, tmp_path):
    """Runs `hf-longctx verify` on the shared ranks; gives its exit code and JSON."""
    monkeypatch.setattr(compare, "RankPool", lambda ranks: SharedPool(rank_pool))

    def run(*flags: str, family: str = "llama") -> tuple[int, dict[str, Any] | None]:
        place = tmp_path / "report.json"
        model = family if "/" in family else str(CONFIGS / f"tiny_{family}.json")
        code = cli.main(["verify", "--model", model, *flags, "--json", str(place)])
        return code, json.loads(place.read_text()) if place.exists() else None

    return run


RING = ("--attn_implementation", "ring", "--ranks", "2")


def test_exit_code_0_with_json(command, capsys):
    code, report = command(*RING, "--layout", "spread", "--tolerance", "0.1")
    assert code == 0 and report is not None
    assert report["failed"] == [] and report["ranks"] == 2
    assert {*GOOD} <= {*report}
    shown = capsys.readouterr()
    assert "logit_error" in shown.out and "bounds.logit_error" in shown.out
    assert shown.out.splitlines()[-1] == "exact: all bounds hold"
    assert "2 ranks, ring in float64" in shown.err


def test_help_explains_every_figure(command, capsys):
    _, report = command(*RING)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["verify", "--help"])
    shown = capsys.readouterr().out
    named = {key for keys in FIGURES for key in keys.split(", ")}
    assert {*report, "switches", "head_groups", "scan"} == named
    assert {"orphans", "replayed_steps", "loss_difference"} < {*KILL_FIGURES}
    for key in (*FIGURES, *KILL_FIGURES):
        assert f"\n  {key}" in shown, key


def test_exit_code_1_still_writes_json(command, monkeypatch, capsys):
    monkeypatch.setattr(
        compare, "_report", lambda *given: GOOD | {"leak": 1.0, "attention_calls": 4}
    )
    code, report = command(*RING)
    assert code == 1 and report is not None
    assert report["failed"] == ["leak 1 is above 0"]
    assert capsys.readouterr().out.splitlines()[-1] == "failed: leak 1 is above 0"


def test_a_rank_that_stops_ends_with_code_1_and_one_line(monkeypatch, command, capsys):
    trace = "rank 0 failed:\nTraceback\nExchangeError: rank 0: Post with rank 1 did not finish"

    def stopped(*given: Any, **options: Any) -> list[Any]:
        raise RankError(trace)

    monkeypatch.setattr(SharedPool, "run", stopped)
    assert command(*RING) == (1, None)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert "was stopped" in line and line.endswith("Post with rank 1 did not finish")


@pytest.mark.parametrize(
    ("flags", "family", "message"),
    [
        (RING, "bloom", "model_type=bloom: this family never calls"),
        (("--attn_implementation", "distac", "--ranks", "2"), "llama", "did you mean 'distca'?"),
        (("--attn_implementation", "zeco_linear", "--ranks", "1"), "llama", "no recurrent layers"),
        ((*RING, "--topology", "2x2"), "llama", "longctx_topology=2x2 holds 4 ranks, but 2 share"),
        (("--attn_implementation", "ring", "--ranks", "0"), "llama", "--ranks 0 must be at least"),
        (RING, "/no/such/folder", "--model /no/such/folder: no such file or folder; give a"),
        ((*RING, "--servers", "1"), "llama", "--servers 1 with ring: it must be 0 or more, and"),
        ((*RING, "--tolerance", "-1"), "llama", "longctx_tolerance=-1.0 must be 0 or more"),
        ((*RING, "--document_lengths", "1,1"), "llama", "--document_lengths 1,1: each must"),
    ],
)
def test_exit_code_2_without_json(command, capsys, flags, family, message):
    assert command(*flags, family=family) == (2, None)
    assert message in capsys.readouterr().err


def test_a_folder_without_weights_ends_with_code_2(command, tmp_path, capsys):
    (tmp_path / "config.json").write_text((CONFIGS / "tiny_llama.json").read_text())
    assert command(*RING, family=str(tmp_path)) == (2, None)
    assert "safetensors" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    model = str(CONFIGS / "tiny_llama.json")
    place = str(tmp_path / "none" / "f.json")
    assert cli.main(["verify", "--model", model, *RING, "--json", place]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--layuot", "spread"),
        ("--dtype", "float16"),
        ("--document_lengths", "1,x"),
        *((flag, "1") for flag in ("--group_size", "--max_tokens_per_rank")),
        *(("--balance", "none"), ("--overflow", "split")),
    ],
)
def test_flags_that_verify_does_not_use_end_with_code_2(command, flags):
    with pytest.raises(SystemExit) as end:
        command(*RING, *flags)
    assert end.value.code == 2


def test_a_process_of_its_own(tmp_path):
    """As a user starts it: with its own ranks."""
    place = tmp_path / "report.json"
    model = str(Path("tests", "configs", "tiny_llama.json"))
    flags = ["--model", model, *RING, "--dtype", "float32", "--json", str(place)]
    command = [sys.executable, "-m", "hf_longctx.cli.main", "verify", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(place.read_text())["failed"] == []
