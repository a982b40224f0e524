"""Train a tiny Qwen3.5 (recurrent layers) over two trainers and compare with a plain loop.

One launch runs this file as its script.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import Plain, plain_loop, weights_of
from tiny import tiny
from train_cases import (
    LONG_AND_SHORT,
    UNEVEN,
    Case,
    Lines,
    arguments,
    launch_pairs,
    logged_by_pairs,
    main,
    trainer_of,
)
from transformers import AutoModelForCausalLM

FAMILY = "qwen3_5"  # without experts, whose choices a rounding may turn
ACCUMULATED = {"gradient_accumulation_steps": 2}
CHECKPOINTING = ACCUMULATED | {"activation_checkpointing": True}
CASES = {
    "ddp": Case(  # three steps: after five, a rounding of the weights moves a norm by a thousandth
        lengths=UNEVEN,
        options={"longctx_softmax": "ring", "longctx_scan": "tree", "max_steps": 3},
    ),
    "groups": Case(lengths=UNEVEN, options=ACCUMULATED | {"longctx_group_size": 1}),
    "reentrant": Case(
        lengths=UNEVEN,
        options=CHECKPOINTING | {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "evaluate": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2},
    ),
    "fsdp2": Case(lengths=UNEVEN, options=CHECKPOINTING),
    "deepspeed2": Case(lengths=UNEVEN, options=CHECKPOINTING),
}


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case to its end and save the model."""
    import torch
    from tiny import tiny
    from train_cases import deepspeed_config, sharded

    given: dict[str, Any] = {}
    if name.startswith("deepspeed"):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # else it compiles an extension, for 40 seconds
        given = {"deepspeed": deepspeed_config(name)}
    if name.startswith("fsdp2"):
        arguments(CASES[name], folder)  # makes the default group
        model = sharded("zeco_linear", folder, family=FAMILY)
    else:
        model = tiny("zeco_linear", family=FAMILY, dtype=torch.float32)
    lines, logger = Lines(), logging.getLogger("hf_longctx")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    trainer = trainer_of(CASES[name], folder, model=model, **given)
    trainer.train()
    logger.removeHandler(lines)
    trainer.save_model(str(folder / "final"))
    return {
        "history": trainer.state.log_history,
        "wrapper": type(trainer.model_wrapped).__name__,
        "recompute_bytes": trainer.longctx_runtime.account.recompute_bytes,
        "recomputed": trainer.longctx_runtime.account.recomputed,
        "scans": [line for line in lines.lines if line.startswith("longctx_scan=")],
    }


CLOSE = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases, in one launch."""
    return launch_pairs(tmp_path_factory.mktemp("recurrent"), CASES, script=__file__)


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


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
