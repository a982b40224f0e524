"""A model with recurrent layers over two trainers, step by step, against a plain loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import recurrent_cases
import torch
from plain_loop import Plain, plain_loop, weights_of
from recurrent_cases import CASES, FAMILY
from tiny import tiny
from train_cases import launch_pairs, logged_by_pairs
from transformers import AutoModelForCausalLM

CLOSE = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases, in one launch."""
    return launch_pairs(
        tmp_path_factory.mktemp("recurrent"), CASES, script=recurrent_cases.__file__
    )


@pytest.fixture(scope="module")
def cases(folder) -> dict[str, Any]:
    """What each case logged."""
    return logged_by_pairs(folder)


@pytest.fixture(scope="module")
def right() -> dict[str, Plain]:
    """The plain loop of each case."""
    return {
        name: plain_loop(case, world=2, model=tiny("sdpa", family=FAMILY, dtype=torch.float32))
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_b08_b42_loss_gradient_norm_and_weights_of_each_step(name, cases, folder, right):
    steps = [entry for entry in cases[name]["history"] if "loss" in entry]
    assert len(steps) == len(right[name].losses) > 1
    for key, wanted in (("loss", right[name].losses), ("grad_norm", right[name].norms)):
        found = torch.tensor([entry[key] for entry in steps])
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=CLOSE, atol=0)
    before = weights_of(tiny("sdpa", family=FAMILY, dtype=torch.float32))
    after = weights_of(AutoModelForCausalLM.from_pretrained(folder / name / "final"))
    for key, weight in after.items():
        torch.testing.assert_close(weight, right[name].weights[key], rtol=0, atol=CLOSE)
    assert max(float((after[key] - before[key]).abs().max()) for key in after) > 20 * CLOSE


def test_documents_span_ranks_and_recompute_sends_nothing(cases):
    for name, case in cases.items():
        moved = sum(entry.get("longctx_bytes_moved", 0) for entry in case["history"])
        assert (moved > 0) is (name != "groups")
        assert case["recompute_bytes"] == 0
        assert (case["recomputed"] > 0) is ("activation_checkpointing" in CASES[name].options)


def test_wrappers_are_what_they_seem(cases):
    wrappers = {"fsdp2": "FSDPQwen3_5ForCausalLM", "deepspeed2": "DeepSpeedEngine"}
    for name, case in cases.items():
        assert case["wrapper"] == wrappers.get(name, "DistributedDataParallel")


def test_b51_evaluation_is_weighted_by_tokens(cases, right):
    entries = [e for e in cases["evaluate"]["history"] if "eval_long_loss" in e]
    entries += [e for e in cases["evaluate"]["history"] if "eval_short_loss" in e]
    found = {key: e[key] for e in entries for key in e if key.endswith("_loss")}
    assert len(found) == 2
    for key, loss in found.items():
        wanted = right["evaluate"].evaluations[-1][key.split("_")[1]]
        assert abs(loss / wanted - 1) < CLOSE


def test_what_scans_take_is_logged_once_with_the_link_it_goes_by(cases):
    chain = r"chain over 2 ranks, pieces 1, predicted .* \(measured\)"
    expected = dict.fromkeys(CASES, [chain]) | {"groups": []}
    expected["ddp"] = [
        r"tree over 2 ranks, pieces 1, predicted .* \(assumed, as none was measured\)"
    ]
    for name, case in cases.items():
        assert len(case["scans"]) == len(expected[name])
        for line, wanted in zip(case["scans"], expected[name], strict=True):
            assert re.search(f": {wanted}$", line), line
        moved = [entry["longctx_bytes_moved"] for entry in case["history"] if "loss" in entry]
        assert max(moved) < 1 << 20  # the probe's messages of 4 MiB are not among them
