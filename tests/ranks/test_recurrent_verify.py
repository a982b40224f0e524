"""Verify `zeco_linear` for every family: `hf-longctx verify` holds its bounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from helpers import SAMPLES, assert_bf16_reports
from recurrent_models import FAMILIES
from tiny import CONFIGS

from hf_longctx import LongCtxArguments
from hf_longctx.verify.compare import verify

LENGTHS = (1, 70, 33)
EXACT = dict.fromkeys(("logit_error", "loss_error", "grad_error"), 1e-9)
CLOSE = {"logit_error": 1e-5, "loss_error": 1e-5, "grad_error": 1e-4}

pytestmark = pytest.mark.filterwarnings("ignore")


def report_of(pool: Any, family: str, **given: Any) -> dict[str, Any]:
    options = {"name": "zeco_linear", "ranks": 1, "document_lengths": LENGTHS} | given
    return verify(model=str(CONFIGS / f"tiny_{family}.json"), pool=pool, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact_and_leak_nothing(rank_pool, family):
    report = report_of(rank_pool, family)
    assert report["failed"] == [] and report["leak"] == 0.0
    assert all(0 <= report[key] <= bound for key, bound in EXACT.items())
    assert {key: report["bounds"][key] for key in EXACT} == EXACT
    assert all(0 <= report[f"{key}_vs_transformers"] <= bound for key, bound in CLOSE.items())
    assert report["bytes_sent"] == report["bytes_planned"] == 0


@pytest.mark.parametrize("softmax", ["distca", "charm", "ring", "ulysses"])
def test_softmax_layers_run_by_the_flag(rank_pool, softmax):
    arguments = LongCtxArguments(longctx_softmax=softmax)
    report = report_of(rank_pool, "qwen3_next", arguments=arguments, checkpointing=True)
    assert report["failed"] == [] and report["recompute_bytes"] == 0
    assert report["layout"] == "contiguous"


@pytest.mark.parametrize("family", ["qwen3_next", "minimax"])
@SAMPLES
def test_bf16_is_as_close_as_the_plain_path(rank_pool, family, samples):
    assert_bf16_reports(partial(report_of, rank_pool, family), samples=samples)
