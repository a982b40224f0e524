"""Run models with recurrent layers over ranks: outputs and gradients of one process, no leak."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import SAMPLES, assert_bf16_reports
from test_verify import verify
from tiny import documents, run_ranks, tiny, twin

from hf_longctx import LongCtxArguments, prepare

pytestmark = [
    pytest.mark.usefixtures("references_once"),
    pytest.mark.filterwarnings("ignore"),
]
CASES = [
    ("qwen3_next", 3, "chain"),  # gated delta rule
    ("kimi_linear", 3, "tree"),  # the delta rule with a decay per row
    ("minimax", 4, "chain"),  # lightning
    ("lfm2", 4, "auto"),  # convolutions alone
    ("mamba2", 3, "chain"),  # state-space layers alone, one decay per head
    ("falcon_h1", 2, "tree"),  # beside softmax in each layer
    ("jamba", 2, "allgather"),  # a decay per row, of vectors
]


def assert_exact(report: dict[str, Any]) -> None:
    assert report["failed"] == [] and report["leak"] == 0 and report["recompute_bytes"] == 0
    for key in ("logit_error", "loss_error", "grad_error"):
        assert 0 <= report[key] <= 1e-9, (key, report[key])
    assert report["bytes_sent"] == report["bytes_planned"] > 0


@pytest.mark.parametrize(("family", "ranks", "scan"), CASES)
def test_families_are_exact_over_ranks(rank_pool: Any, family: str, ranks: int, scan: str) -> None:
    arguments = LongCtxArguments(longctx_scan=scan)
    report = verify(rank_pool, family, name="zeco_linear", ranks=ranks, arguments=arguments)
    assert_exact(report)
    assert len(report["scan"]) == (family != "lfm2")
    for taken in report["scan"].values():
        assert (taken["schedule"], taken["ranks"]) == (scan, ranks)
        assert taken["measured"] is (scan == "chain")  # the others go by no link


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
@SAMPLES
def test_bf16_over_ranks_is_as_close_as_the_plain_path(
    rank_pool: Any, family: str, samples: int
) -> None:
    def report(**given: Any) -> dict[str, Any]:
        found = verify(rank_pool, family, name="zeco_linear", ranks=3, **given)
        assert found["bytes_sent"] == found["bytes_planned"] > 0
        return found

    assert_bf16_reports(report, samples=samples)


@pytest.mark.parametrize(("family", "softmax"), [("qwen3_next", "ring"), ("zamba2", "distca")])
def test_a_hybrid_recomputes_without_sending(rank_pool: Any, family: str, softmax: str) -> None:
    arguments = LongCtxArguments(longctx_softmax=softmax)
    given = {"ranks": 3, "arguments": arguments, "checkpointing": True}
    assert_exact(verify(rank_pool, family, name="zeco_linear", **given))


def test_short_documents_leave_recurrent_layers_without_traffic(rank_pool: Any) -> None:
    given = {"ranks": 2, "document_lengths": [60, 60]}
    report = verify(rank_pool, "lfm2", name="zeco_linear", **given)
    assert report["failed"] == [] and report["bytes_sent"] == report["bytes_planned"] == 0


def test_reentrant_recomputes_within_each_other_over_ranks() -> None:
    """Zamba2's hybrid blocks recompute around a block that recomputes: both ask for what came."""
    batches = [documents((30, 9))]
    model = prepare(tiny("zeco_linear", family="zamba2"))
    given = {"ranks": 3, "layout": "contiguous", "checkpointing": {"use_reentrant": True}}
    found = run_ranks(model, batches, **given)
    assert found.error(twin(batches, family="zamba2")) <= 1e-9
    assert all(not batch.binding.saved.results for batch in found.batches)
    assert all(runtime.account.recompute_bytes == 0 for runtime in found.runtimes)
