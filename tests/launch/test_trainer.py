"""Compare trained models step by step with a plain loop, over 1, 2 and 3 trainers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import Plain, plain_loop, token_loss, weights_of
from tiny import collate, documents, tiny
from torch import Tensor
from train_cases import CASES, arguments, launch, run, trainer_of
from transformers import AutoModelForCausalLM

from hf_longctx import LongCtxTrainer
from hf_longctx.data.packing import Piece
from hf_longctx.training.report import summary

CLOSE = 1e-5
ANY_WORLD = ["distca", "ring", "groups", "one_document", "evaluate"]
TRAINED = [*ANY_WORLD, "groups_of_uneven", "twelve_packs", "no_targets", "evaluate_groups"]
TRAINED += ["reentrant", "nonreentrant", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a launch wrote."""

    world: int
    folder: Path
    distributed_type: str
    cases: dict[str, dict[str, Any]]

    def steps(self, name: str, key: str = "history") -> list[dict[str, Any]]:
        """The log entries of optimizer steps."""
        return [entry for entry in self.cases[name][key] if "loss" in entry]

    def weights(self, name: str, saved: str = "final") -> dict[str, Tensor]:
        """Of a saved model, loaded as anyone would."""
        return weights_of(AutoModelForCausalLM.from_pretrained(self.folder / name / saved))


def results_of(folder: Path, *names: str, processes: int) -> Results:
    ended = launch(folder, *names, processes=processes)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    found = json.loads((folder / "results.json").read_text())
    return Results(folder=folder, **found)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Results:
    """All cases over two trainers."""
    folder = tmp_path_factory.mktemp("two")
    return results_of(folder, *TRAINED, "resume", "digest", "flags", processes=2)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Results:
    """Some cases over three trainers."""
    return results_of(tmp_path_factory.mktemp("three"), *ANY_WORLD, processes=3)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Results:
    """Some cases in this process."""
    folder = tmp_path_factory.mktemp("one")
    cases = {name: run(name, folder / name) for name in ANY_WORLD}
    return Results(world=1, folder=folder, distributed_type="DistributedType.NO", cases=cases)


@pytest.fixture(scope="module")
def plain() -> Callable[[str, int], Plain]:
    """The plain loop of a case, run once."""
    kept: dict[tuple[str, int], Plain] = {}

    def of(name: str, world: int) -> Plain:
        if (name, world) not in kept:
            kept[name, world] = plain_loop(CASES[name], world=world)
        return kept[name, world]

    return of


@pytest.fixture
def trained(request) -> Results:
    """The launch that a test asks for by name."""
    return request.getfixturevalue(request.param)


RUNS = [
    *(pytest.param("one", name, id=f"1-{name}") for name in ANY_WORLD),
    *(pytest.param("two", name, id=f"2-{name}") for name in TRAINED),
    *(pytest.param("three", name, id=f"3-{name}") for name in ANY_WORLD),
]
EACH_RUN = pytest.mark.parametrize(("trained", "name"), RUNS, indirect=["trained"])


def relative(found: list[float], right: list[float]) -> float:
    """Largest relative difference; absolute where the right value is 0."""
    each = [abs(a - b) / (abs(b) or 1.0) for a, b in zip(found, right, strict=True)]
    return float(np.max(each))  # NaN where there is one; max would hide it


@EACH_RUN
def test_b07_b08_loss_and_gradient_norm_of_each_step(trained, name, plain):
    right, steps = plain(name, trained.world), trained.steps(name)
    assert [entry["step"] for entry in steps] == [*range(1, len(right.losses) + 1)]
    assert relative([entry["loss"] for entry in steps], right.losses) < CLOSE
    assert relative([entry["grad_norm"] for entry in steps], right.norms) < CLOSE


@EACH_RUN
def test_sgd_weights_after_the_last_step(trained, name, plain):
    right = plain(name, trained.world).weights
    before = weights_of(tiny("sdpa", dtype=torch.float32))
    for key, weight in trained.weights(name).items():
        torch.testing.assert_close(weight, right[key], rtol=0, atol=CLOSE)
        assert float((weight - before[key]).abs().max()) > 20 * CLOSE


def test_launches_are_what_they_seem(two, three):
    assert (two.world, three.world) == (2, 3)
    assert two.distributed_type == three.distributed_type == "DistributedType.MULTI_CPU"


def test_b08_gradient_norm_does_not_depend_on_the_trainers(one, two, three):
    model = tiny("sdpa", dtype=torch.float32)
    rows = CASES["one_document"].rows()
    token_loss(model, rows, [Piece(document=0, start=0, stop=64)]).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for results in (one, two, three):
        (step,) = results.steps("one_document")
        assert abs(step["grad_norm"] / norm - 1) < 1e-3


def test_b05_windows_without_targets_step_with_loss_0(two):
    first, second, third = two.steps("no_targets")
    assert (second["loss"], second["grad_norm"]) == (0.0, 0.0)
    assert first["loss"] > 0 and third["loss"] > 0
    inputs = [
        collate(CASES["no_targets"].rows()[:1], rank=rank, ranks=2, layout="contiguous")
        for rank in range(2)
    ]
    counts = [int(x["shift_labels"].ne(-100).sum()) for x in inputs]
    assert counts == [4, 0]  # the second rank had none in the first step
    assert two.cases["no_targets"]["steps"] == 3


def test_b59_five_packs_over_two_groups_take_three_steps(two):
    case = two.cases["groups"]
    assert case["batches"] == case["steps"] == case["max_steps"] == 3
    assert [entry["longctx_tokens"] for entry in two.steps("groups")] == [96, 96, 48]
    assert [entry["longctx_fill"] for entry in two.steps("groups")] == [1.0, 1.0, 0.5]


def test_b50_twelve_packs_take_three_steps(two):
    case = two.cases["twelve_packs"]
    assert case["batches"] == 6 and case["steps"] == case["max_steps"] == case["scheduler"] == 3
    (arithmetic,) = [line for line in case["lines"] if "trainers" in line]
    assert "2 trainers = 2 group(s) of 1 ranks; a batch holds 1 x 48 = 48 tokens" in arithmetic
    assert "12 packs / 2 group(s) = 6 batches per epoch, accumulated 2 at a time" in arithmetic
    assert arithmetic.endswith("3 steps; overlap none, 0 server(s)")


@pytest.mark.parametrize(
    ("trained", "name"),
    [("one", "evaluate"), ("two", "evaluate"), ("two", "evaluate_groups"), ("three", "evaluate")],
    indirect=["trained"],
)
def test_b51_evaluation_is_weighted_by_tokens(trained, name, plain):
    right = plain(name, trained.world).evaluations
    found = {}
    for entry in trained.cases[name]["history"]:
        for key in (k for k in entry if k.startswith("eval_") and k.endswith("_loss")):
            found[entry["step"], key.split("_")[1]] = entry[key]
    assert len(found) == 2 * (2 if name == "evaluate" else 1)
    for (step, key), loss in found.items():
        assert abs(loss / right[step - 1][key] - 1) < CLOSE
    for again in ("test_loss", "eval_loss"):
        assert abs(trained.cases[name][again] / right[-1]["long"] - 1) < CLOSE


def test_evaluation_is_not_in_the_log_of_steps(two):
    moved = [[e["longctx_bytes_moved"] for e in two.steps(n)][:4] for n in ("distca", "evaluate")]
    assert moved[0] == moved[1] and all(moved[0])


def test_the_log_tells_balance_bytes_and_waiting(two):
    for entry in two.steps("distca"):
        assert 1.0 <= entry["longctx_attention_after"] <= entry["longctx_attention_before"] < 2.0
        assert entry["longctx_fill"] == round(entry["longctx_tokens"] / 96, 4)
        assert entry["longctx_wait_seconds"] >= 0
    assert sum(e["longctx_tokens"] for e in two.steps("distca")) == 2 * sum(CASES["distca"].lengths)
    case = two.cases["distca"]
    assert case["summary"]["bytes_moved"] == sum(
        entry["longctx_bytes_moved"] for entry in two.steps("distca")
    )
    assert case["summary"]["spanning_documents"] > 0
    assert any("1 split into 2 fragments" in line for line in case["lines"])
    empty = summary([], ranks=2, spanning=0)
    assert empty["steps"] == 0 and empty["loss_first"] is None


def test_checkpointing_moves_no_more_bytes(two):
    for name, without in (("reentrant", "distca"), ("nonreentrant", "ring")):
        moved = [e["longctx_bytes_moved"] for e in two.steps(name)]
        assert moved == [e["longctx_bytes_moved"] for e in two.steps(without)][: len(moved)]


def test_b48_ranks_with_other_documents_of_the_same_lengths_are_found_out(two):
    case = two.cases["digest"]
    assert "disagree on the plan of a batch" in case["error"] and case["steps"] == 0
    assert "give every rank the same data set, seed" in case["error"]


def test_c09_a_rank_with_another_flag_is_refused_before_the_first_step(two):
    case = two.cases["flags"]
    assert case["error"] == (
        "rank 0: the ranks of a group disagree on the flags of their plans: different from the "
        "other ranks is --longctx_scan on rank 1; give every rank the same data set, seed, flags "
        "and versions"
    )
    assert case["steps"] == 0 and case["seconds"] < 30  # not once an exchange has timed out


# Saving and resuming


def test_resuming_within_the_second_epoch_is_exact(two):
    case = two.cases["resume"]
    assert case["batches"] == 5  # so step 6 is the first of the second epoch
    whole, resumed = two.steps("resume"), two.steps("resume", "resumed")
    volatile = {"longctx_wait_seconds"}
    strip = [
        [{k: v for k, v in e.items() if k not in volatile} for e in x] for x in (whole, resumed)
    ]
    assert strip[0] == strip[1] and len(whole) == 15
    right, found = two.weights("resume"), two.weights("resume", "resumed")
    assert all(torch.equal(found[key], right[key]) for key in right)


def test_b40_resume_restores_the_hook_and_says_so(two):
    case = two.cases["resume"]
    assert case["attention"] == "distca"
    (line,) = [line for line in case["lines"] if line.startswith("resuming with")]
    assert "attn_implementation='distca'" in line


RELOAD = """
import sys
sys.modules["hf_longctx"] = None  # an import would fail
from transformers import AutoModelForCausalLM
sys.stdout.write(AutoModelForCausalLM.from_pretrained(sys.argv[1]).config._attn_implementation)
"""


def test_b40_a_checkpoint_loads_where_hf_longctx_is_missing(two):
    saved = two.folder / "resume" / "checkpoint-6"
    for name in ("distca", "longctx"):
        assert name not in (saved / "config.json").read_text()
    ended = subprocess.run(
        [sys.executable, "-c", RELOAD, str(saved)], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.strip() == "sdpa", ended.stderr
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="distca")
    model(**collate(documents([4, 3])))
    assert model.config._attn_implementation == "distca"


def test_b40_resume_by_true_takes_the_last_checkpoint(tmp_path):
    case = CASES["groups"]
    trainer_of(case, tmp_path, save_strategy="steps", save_steps=2).train()
    stock = tiny("sdpa", dtype=torch.float32)
    again = trainer_of(case, tmp_path, model=stock)
    with pytest.raises(ValueError, match="runs attn_implementation='sdpa'"):
        again.train()
    again.train(resume_from_checkpoint=True)
    assert again.longctx_attention == again.args.longctx_attention == "distca"


def test_b40_arguments_of_another_run_do_not_replace_a_models_own_name(tmp_path, caplog):
    first = trainer_of(CASES["ring"], tmp_path)
    assert first.args.longctx_attention == "ring"
    for name, then in (("distca", "distca"), ("sdpa", "ring")):
        model, given = tiny(name, dtype=torch.float32), arguments(CASES["ring"], tmp_path)
        given.longctx_attention = "ring"
        assert LongCtxTrainer(model=model, args=given).longctx_attention == then
        assert ("resuming with attn_implementation='ring'" in caplog.text) is (then == "ring")
