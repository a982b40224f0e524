"""Verify models over gloo ranks: they are exact, and faults put into a rank are found."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import SAMPLES, SharedPool, assert_bf16_reports
from tiny import CONFIGS

from hf_longctx import LongCtxArguments
from hf_longctx.attention import hook
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.kernels import softmax
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.runtime.autograd import attend
from hf_longctx.verify import compare
from hf_longctx.verify.rank_pool import RankContext, RankError, RankPool
from hf_longctx.verify.ranks import RankResult, run_rank

pytestmark = pytest.mark.usefixtures("references_once")

FLOAT64 = dict.fromkeys(("logit_error", "loss_error", "grad_error"), 1e-10)
FLOAT32 = {f"{key}_vs_transformers": 1e-5 for key in FLOAT64}
ZERO = {"leak": 0.0, "recompute_bytes": 0}


def verify(pool: Any, family: str = "llama", **given: Any) -> dict[str, Any]:
    options = {"name": "distca", "ranks": 2} | given
    return compare.verify(model=str(CONFIGS / f"tiny_{family}.json"), pool=pool, **options)


def assert_holds(report: dict[str, Any], bounds: dict[str, float]) -> None:
    assert report["failed"] == []
    for key, bound in bounds.items():
        assert 0 <= report[key] <= bound, (key, report[key])
    assert report["attention_calls"] == report["ranks"] * 2 * 3  # layers, batches
    assert report["bytes_sent"] == report["bytes_planned"]
    assert (report["bytes_sent"] > 0) is (report["ranks"] > 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)
@pytest.mark.parametrize("name", ["distca", "ring"])
def test_float64(rank_pool, name, ranks, family):
    report = verify(rank_pool, family, name=name, ranks=ranks)
    assert_holds(report, FLOAT64 | FLOAT32 | ZERO)
    json.dumps(report)


def test_servers_are_exact_and_send_what_is_planned(rank_pool):
    report = verify(rank_pool, servers=1, checkpointing=True)
    assert_holds(report, FLOAT64 | FLOAT32 | ZERO)
    assert report["servers"] == 1 and report["tasks_on_servers"] > 0
    with pytest.raises(ValueError, match="--servers 1 with ring: .* only distca has servers"):
        verify(rank_pool, name="ring", servers=1)


def test_documents_of_ones_own(rank_pool):
    report = verify(rank_pool, ranks=3, document_lengths=(1, 5, 300))
    assert report["failed"] == [] and report["attention_calls"] == 3 * 2  # layers, one batch
    assert report["bytes_sent"] == report["bytes_planned"] > 0


@pytest.mark.parametrize("lengths", [(), (0, 5), (1, 1, 1), (2,)])
def test_documents_that_leave_a_rank_or_the_loss_empty_are_refused(lengths):
    with pytest.raises(ValueError, match="--document_lengths .* each must be at least 1"):
        verify(None, ranks=3, document_lengths=lengths)


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_dropout_is_off_on_both_sides(rank_pool, tmp_path, family):
    """Masks are drawn anew in every run: with them, exact models would differ."""
    given = {
        "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
        | {"attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.2},
        "phi3": json.loads((CONFIGS / "tiny_phi3.json").read_text()) | {"resid_pdrop": 0.3},
    }[family]
    place = tmp_path / "config.json"
    place.write_text(json.dumps(given))
    report = compare.verify(model=str(place), name="distca", ranks=2, pool=rank_pool)
    assert report["failed"] == []
    noisy = {"gpt2": ["embd_pdrop", "resid_pdrop"], "phi3": ["resid_pdrop"]}[family]
    assert {*noisy} <= {*report["set_to_0"]}


@pytest.mark.parametrize(
    ("name", "family", "ranks", "topology", "size"),
    [
        ("charm", "llama", 4, "2x2", 1),
        ("charm", "llama_9_3", 3, "3x1", 1),
        ("ring", "llama", 2, "2x1", 1),
        ("ulysses", "llama_9_3", 3, "3x1", 1),
        ("charm", "llama", 4, "2x2", 2),
    ],
)
def test_domains_of_ranks(rank_pool, name, family, ranks, topology, size):
    arguments = LongCtxArguments(longctx_topology=topology, longctx_ulysses_size=size)
    report = verify(rank_pool, family, name=name, ranks=ranks, arguments=arguments)
    assert_holds(report, FLOAT64 | FLOAT32 | ZERO)
    assert report["topology"] == topology


@pytest.mark.parametrize(("name", "layout"), [("distca", "contiguous"), ("ring", "spread")])
def test_the_layout_that_is_not_the_default(rank_pool, name, layout):
    arguments = LongCtxArguments(longctx_layout=layout, longctx_tolerance=0.0)
    report = verify(rank_pool, name=name, ranks=3, arguments=arguments)
    assert_holds(report, FLOAT64 | FLOAT32 | ZERO)


@pytest.mark.parametrize("name", ["distca", "ring"])
def test_b47_checkpointing_of_both_kinds(rank_pool, name):
    plain, report = (verify(rank_pool, name=name, checkpointing=c) for c in (False, True))
    assert_holds(report, FLOAT64 | FLOAT32 | ZERO)
    assert report["bytes_sent"] == plain["bytes_sent"]


def test_overlap_of_head_groups(rank_pool):
    arguments = LongCtxArguments(longctx_overlap="heads")
    report = verify(rank_pool, arguments=arguments, ranks=4, checkpointing=True)
    assert report["failed"] == []
    assert (report["overlap"], report["head_groups"]) == ("heads", 2)
    assert report["bytes_sent"] > 0


@SAMPLES
def test_overlap_of_head_groups_in_bf16(rank_pool, samples):
    arguments = LongCtxArguments(longctx_overlap="heads")

    def report(**given: Any) -> dict[str, Any]:
        found = verify(rank_pool, "gemma2", arguments=arguments, ranks=3, **given)
        assert (found["overlap"], found["head_groups"]) == ("heads", 2)
        assert found["bytes_sent"] > 0
        return found

    assert_bf16_reports(report, samples=samples)


def test_float32(rank_pool):
    in_float32 = verify(rank_pool, dtype="float32")
    assert_holds(in_float32, dict.fromkeys(FLOAT64, 1e-5) | FLOAT32 | ZERO)


@SAMPLES
def test_bf16(rank_pool, samples):
    def report(**given: Any) -> dict[str, Any]:
        found = verify(rank_pool, ranks=3, **given)
        for key, bound in (dict.fromkeys(FLOAT64, 0.1) | FLOAT32 | ZERO).items():
            assert 0 <= found[key] <= bound, key
        return found

    assert_bf16_reports(report, samples=samples)


def test_batches_hold_the_documents_that_break_things():
    for ranks in (2, 3, 4):
        edges = {compare.ROWS * r for r in range(1, ranks)}
        ends, kinds = set(), set()
        for lengths in compare.case_lengths(ranks):
            assert compare.ROWS * ranks - sum(lengths) in (0, 1)  # 1: uneven ranks
            layout = cut(lengths, ranks=ranks, layout="contiguous")
            kinds |= {f"over {len({s.rank for s in held})}" for held in layout.by_document.values()}
            kinds |= {"one token"} if 1 in lengths else set()
            kinds |= {"odd"} if any(n % 2 for n in lengths if n > 1) else set()
            ends |= {sum(lengths[: i + 1]) for i in range(len(lengths))}
        assert {f"over {ranks}", "one token", "odd"} <= kinds
        first = min(edges)
        assert {first - 1, first, first + 1} <= ends


# It sees faults: what a rank computes is made wrong, and the figure for it says so


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """For a while, another value of an attribute."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def one_document() -> Any:
    """All rows of a batch attend as if they were one document."""

    def plan(batch: LongCtxBatch, algorithm: str, kind: Any) -> Any:
        lengths, ranks = [int(batch.layout.lengths.sum())], batch.layout.ranks
        joined = cut(lengths, ranks=ranks, layout="contiguous")
        options = PlanOptions(algorithm=algorithm)
        plans = batch.binding.plans
        return plans.setdefault((options, kind), make_plan(joined, kind=kind, options=options))

    return replaced(LongCtxBatch, "plan", plan)


def no_exchange() -> Any:
    """Each rank attends its own segments as documents of their own."""

    def plan(batch: LongCtxBatch, algorithm: str, kind: Any) -> Any:
        lengths = [s.stop - s.start for s in batch.layout.segments]
        apart = cut(lengths, ranks=batch.layout.ranks, layout="contiguous")
        options = PlanOptions(algorithm=algorithm, tolerance=float("inf"))
        plans = batch.binding.plans
        return plans.setdefault((options, kind), make_plan(apart, kind=kind, options=options))

    return replaced(LongCtxBatch, "plan", plan)


def wrong_scale() -> Any:
    """Scores are scaled five percent too much."""

    def scaled(layer: Any, *rows: Any, **given: Any) -> Any:
        layer.scoring = replace(layer.scoring, scale=1.05 * layer.scoring.scale)
        return attend(layer, *rows, **given)

    return replaced(hook, "attend", scaled)


def lost_gradients() -> Any:
    """The forward is right; a call's keys get no gradient."""
    plain = softmax.attend_grad

    def half(call: Any, *, dkv: Any, **given: Any) -> None:
        lost = {key: torch.zeros_like(value) for key, value in dkv.items()}
        plain(call, dkv=lost, **given)

    return replaced(softmax, "attend_grad", half)


def sent_twice() -> Any:
    """A message is counted twice, as if it had been sent again."""
    plain = hook._with_batch

    def again(bound: Any, module: Any, batch: LongCtxBatch, *given: Any) -> Any:
        out = plain(bound, module, batch, *given)
        batch.binding.runtime.channel.sent[0] += 1
        return out

    return replaced(hook, "_with_batch", again)


FAULTS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "one_document": (one_document, {"logit_error", "grad_error", "loss_error", "leak"}),
    "no_exchange": (no_exchange, {"logit_error", "grad_error", "loss_error"}),
    "wrong_scale": (wrong_scale, {"logit_error", "grad_error", "loss_error"}),
    "lost_gradients": (lost_gradients, {"grad_error"}),
    "sent_twice": (sent_twice, {"bytes_sent"}),
}


def run_faulty(context: RankContext, *, case: Any, fault: str) -> RankResult:
    """A rank's job with a fault in it."""
    with FAULTS[fault][0]():
        return run_rank(context, case=case)


class FaultyPool(SharedPool):
    """Ranks that compute something wrong."""

    def __init__(self, pool: RankPool, fault: str) -> None:
        super().__init__(pool)
        self.fault = fault

    def run(self, job: Any, **given: Any) -> list[Any]:
        """`run_faulty` in place of `run_rank`."""
        assert job is run_rank
        return self.pool.run(run_faulty, fault=self.fault, **given)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["distca", "ring"])
def test_a_fault_breaks_the_bounds_that_it_touches(rank_pool, name, fault):
    report = verify(FaultyPool(rank_pool, fault), name=name)
    broken = {line.split()[0] for line in report["failed"]}
    ours = {key for key in FAULTS[fault][1] if key in FLOAT64}
    assert broken == FAULTS[fault][1] | {f"{key}_vs_transformers" for key in ours}
    if ours:
        assert min(report[key] for key in ours) > 1e-6


def test_one_rank_that_reads_all_rows_as_one_document_leaks(rank_pool):
    report = verify(FaultyPool(rank_pool, "one_document"), ranks=1)
    assert report["leak"] > 1e-3 and report["logit_error"] > 1e-3
    assert any(line.startswith("leak ") for line in report["failed"])


def fail(context: RankContext, *, how: str) -> None:
    """Rank 1 fails while rank 0 waits for its message."""
    if context.rank == 0:
        context.channel.post([], [(1, torch.empty(8, dtype=torch.uint8))], what="a test").wait()
    if how == "die":
        os._exit(3)
    raise ValueError("rank 1 does not like this")


def test_b62_a_rank_that_fails_ends_the_job_of_all():
    with RankPool(2) as pool:
        for how, message in (("raise", "does not like this"), ("die", "rank")):
            start = time.monotonic()
            with pytest.raises(RankError, match=message):
                pool.run(fail, how=how)
            assert pool.pids == ()
            assert time.monotonic() - start < 60  # when the exchange would time out


def test_b62_a_rank_that_never_joins_ends_the_job_with_the_error_of_another():
    with RankPool(2, timeout=1.0) as pool:
        pool._start()
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(RankError, match="(?s)rank 0 failed:.*imeout"):
            pool.run(fail, how="raise")
        assert pool.pids == ()
