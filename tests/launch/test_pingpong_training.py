"""Training in halves over two trainers, whatever wraps the model: as training without overlap."""

from __future__ import annotations

import json
from typing import Any

import pingpong_cases
import pytest
from pingpong_cases import CASES, REFUSED
from plain_loop import plain_loop
from train_cases import launch

CLOSE = 1e-6
TRAINED = [name for name in CASES if name not in REFUSED]
FIGURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "longctx_tokens", "longctx_fill")


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Both overlaps of all cases, in one launch."""
    folder = tmp_path_factory.mktemp("pingpong")
    ended = launch(folder, *CASES, processes=2, script=pingpong_cases.__file__)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    return json.loads((folder / "results.json").read_text())["cases"]


def steps(case: dict[str, Any], overlap: str) -> list[dict[str, float]]:
    return [entry for entry in case[overlap]["history"] if "loss" in entry]


@pytest.mark.parametrize("name", TRAINED)
def test_each_step_is_that_of_overlap_none(name, cases):
    ours, right = (steps(cases[name], overlap) for overlap in ("pingpong", "none"))
    bound = 2e-3 if name == "bf16" else CLOSE  # whose halves are rounded apart
    assert len(ours) == len(right) > 0
    for mine, other in zip(ours, right, strict=True):
        for figure in (key for key in FIGURES if key in other):
            assert mine[figure] == pytest.approx(other[figure], rel=bound, abs=1e-12), figure
    if "weights" in cases[name]["none"]:
        right_sum = cases[name]["none"]["weights"]
        assert cases[name]["pingpong"]["weights"] == pytest.approx(right_sum, rel=bound)


@pytest.mark.parametrize("name", ["plain", "accumulated"])
def test_b07_each_step_is_that_of_a_plain_loop(name, cases):
    right = plain_loop(CASES[name], world=2)
    ours = steps(cases[name], "pingpong")
    assert [entry["loss"] for entry in ours] == pytest.approx(right.losses, rel=1e-5)
    assert [entry["grad_norm"] for entry in ours] == pytest.approx(right.norms, rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_halves_alternate_and_recomputes_send_nothing(name, cases):
    assert cases[name]["pingpong"]["switches"] > 0 == cases[name]["none"]["switches"]
    assert cases[name]["pingpong"]["recompute_bytes"] == 0


def test_batches_without_halves_are_counted_and_logged(cases):
    halved = [entry["longctx_halved"] for entry in steps(cases["plain"], "pingpong")]
    assert {*halved} == {0.0, 1.0}
    assert len(cases["plain"]["pingpong"]["lines"]) == halved.count(0.0)
    line = cases["plain"]["pingpong"]["lines"][0]
    assert "a batch of 1 documents over 2 ranks, the longest with 96 of 96 tokens" in line
    assert all("longctx_halved" not in entry for entry in steps(cases["plain"], "none"))
    shared = [entry["longctx_halved"] for entry in steps(cases["accumulated"], "pingpong")]
    assert 0.5 in shared


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        (
            "fsdp2_reshards",
            "reshard_after_forward=True of FSDP",
            "set_reshard_after_forward(False)",
        ),
        ("reentrant", "use_reentrant=True", "activation_checkpointing_kwargs={'use_reentrant': F"),
    ],
)
def test_what_cannot_take_turns_is_refused(name, value, remedy, cases):
    assert steps(cases[name], "none")
    message = cases[name]["pingpong"]["error"]
    assert value in message and remedy in message
