"""Run programs on ranks of one process: exact, in planned bytes and peaks, in any order.

Ranks are threads with blocking waits, or generators in lock step in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

import pytest
import torch
from helpers import (
    SCALE,
    Results,
    Rows,
    assert_bf16_rule,
    examples,
    gather,
    nan_memory,
    plans,
    reference,
    run_lock_step,
    run_threads,
    shard,
    threads,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.channels import Channel, ExchangeError, Hub, Payload, ThreadChannel
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.counts import peak_bytes, sent_in_layer
from hf_longctx.planning.program.operations import Post
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account

LENGTHS = [700, 1, 37, 260, 129, 2, 3]
every_algorithm = pytest.mark.parametrize("algorithm", ["distca", "ring"])
every_layout = pytest.mark.parametrize("layout", ["contiguous", "spread"])
every_rank_count = pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)


def planned(
    algorithm: str,
    lengths: Sequence[int],
    *,
    ranks: int,
    layout: str = "contiguous",
    rows: Rows,
    window: int = 0,
    causal: bool = True,
) -> Plan:
    held = cut(lengths, ranks=ranks, layout=layout)
    return make_plan(
        held, kind=rows.kind(window=window, causal=causal), options=PlanOptions(algorithm=algorithm)
    )


@every_algorithm
@every_layout
@every_rank_count
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [0, 50], ids="window{}".format)
def test_ranks_compute_what_one_process_does(
    algorithm: str, layout: str, ranks: int, window: int, causal: bool
) -> None:
    rows = Rows.random(sum(LENGTHS), heads=4, kv_heads=2, head_dim=8)
    sees = {"window": window, "causal": causal}
    plan = planned(algorithm, LENGTHS, ranks=ranks, layout=layout, rows=rows, **sees)
    run = run_threads(plan, rows)
    assert run.results.error(reference(rows, LENGTHS, **sees)) < 1e-12
    for rank in range(ranks):
        program = plan.program(rank)
        assert run.sent[rank] == sent_in_layer(program, rows.widths)
        peak = max(peak_bytes(program, rows.widths, backward=b) for b in (False, True))
        assert run.accounts[rank].peak_bytes == peak
    assert (sum(run.sent) > 0) == (ranks > 1)


@given(plan=plans(ranks=4), heads_per_key=st.sampled_from([1, 2]), seed=st.integers(0, 9))
@examples(40)
def test_any_plan_in_lock_step(plan: Plan, heads_per_key: int, seed: int) -> None:
    lengths, kv_heads = plan.layout.lengths.tolist(), plan.kind.kv_heads
    heads = plan.kind.heads if plan.ulysses_size > 1 else heads_per_key * kv_heads
    rows = Rows.random(sum(lengths), heads=heads, kv_heads=kv_heads, seed=seed)
    with nan_memory():
        ours = run_lock_step(plan, rows, seed=seed)
    sees = {"window": plan.kind.window, "causal": plan.kind.causal}
    assert ours.error(reference(rows, lengths, **sees)) < 1e-12


@every_algorithm
@every_layout
@pytest.mark.parametrize("lengths", [[1], [2], [1, 1], [3]], ids=str)
def test_ranks_without_tokens_take_part(algorithm: str, layout: str, lengths: list[int]) -> None:
    rows = Rows.random(sum(lengths))
    run = run_threads(planned(algorithm, lengths, ranks=4, layout=layout, rows=rows), rows)
    assert run.results.error(reference(rows, lengths)) < 1e-12
    if algorithm == "distca":
        assert run.sent[3] == 0  # the ring passes on what others hold


@every_algorithm
def test_b35_gradients_over_two_ranks(algorithm: str) -> None:
    rows = Rows.random(8, heads=2, kv_heads=2, head_dim=4)
    run = run_threads(planned(algorithm, [8], ranks=2, rows=rows), rows)
    assert run.results.error(reference(rows, [8])) < 1e-12


def test_b37_a_window_ends_over_ranks() -> None:
    rows = Rows.random(16)
    plan = planned("distca", [16], ranks=2, rows=rows, window=4)
    before = run_threads(plan, rows).results.out
    for key, moved in ((4, [4, 5, 6, 7]), (5, [5, 6, 7, 8])):
        other = Rows(q=rows.q, k=rows.k.clone(), v=rows.v.clone(), grad=rows.grad)
        other.k[key] += 1.0
        other.v[key] += 1.0
        after = run_threads(plan, other).results.out
        assert (after != before).flatten(1).any(1).nonzero().flatten().tolist() == moved


@every_algorithm
@every_layout
def test_uninitialised_memory_reaches_nothing(algorithm: str, layout: str) -> None:
    rows = Rows.random(sum(LENGTHS), dtype=torch.bfloat16)
    plan = planned(algorithm, LENGTHS, ranks=3, layout=layout, rows=rows)
    plain = run_threads(plan, rows).results
    with nan_memory():
        filled = run_threads(plan, rows).results
    for name in Results.__slots__:
        assert torch.equal(getattr(filled, name), getattr(plain, name))


@every_algorithm
@pytest.mark.parametrize("ranks", [1, 2, 4, 8], ids="ranks{}".format)
def test_b31_bf16_error_does_not_grow_with_the_ranks(algorithm: str, ranks: int) -> None:
    def compute(rows: Rows) -> Results:
        plan = planned(algorithm, [256], ranks=ranks, layout="spread", rows=rows)
        found = run_threads(plan, rows).results
        assert found.out.dtype == found.dk.dtype == torch.bfloat16
        return found

    assert_bf16_rule(compute, lengths=[256], heads=2, kv_heads=2, head_dim=64)


@every_algorithm
@every_layout
def test_bf16_documents_and_mixed_messages(algorithm: str, layout: str) -> None:
    # one head of odd size: bf16 and float32 blocks of a message begin at any byte pair
    def compute(rows: Rows) -> Results:
        plan = planned(algorithm, LENGTHS, ranks=3, layout=layout, rows=rows)
        run = run_threads(plan, rows)
        for rank in range(3):
            assert run.sent[rank] == sent_in_layer(plan.program(rank), rows.widths)
        return run.results

    assert_bf16_rule(compute, lengths=LENGTHS, samples=4, heads=3, kv_heads=1, head_dim=5)


class LateChannel(ThreadChannel):
    """Posts late, by a random time, and takes arrivals in a random order."""

    def __init__(self, hub: Hub, rank: int, *, seed: int) -> None:
        super().__init__(hub, rank)
        self.random = Random(1000 * seed + rank)

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        time.sleep(self.random.uniform(0.0, 0.004))
        mixed = [self.random.sample(list(side), len(side)) for side in (sends, recvs)]
        return super().post(*mixed, what=what)


@every_algorithm
@every_layout
def test_results_do_not_depend_on_the_order_of_arrival(algorithm: str, layout: str) -> None:
    rows = Rows.random(sum(LENGTHS), dtype=torch.float32)
    plan = planned(algorithm, LENGTHS, ranks=4, layout=layout, rows=rows)
    first = run_threads(plan, rows).results
    for seed in range(3):
        hub = Hub(4, timeout=20.0)
        late: list[Channel] = [LateChannel(hub, rank, seed=seed) for rank in range(4)]
        late_run = run_threads(plan, rows, channels=late).results
        for again in (late_run, run_lock_step(plan, rows, seed=seed)):
            for name in Results.__slots__:
                assert torch.equal(getattr(again, name), getattr(first, name))


@every_layout
def test_ring_memory_does_not_grow_with_the_ranks(layout: str) -> None:
    # Three visiting chunks of keys and values; in backward three of gradients as well, and what
    # comes home. All are in use from six ranks on.
    peaks, chunk = {}, 256
    for ranks in (6, 7, 8):
        rows = Rows.random(chunk * ranks)
        run = run_threads(
            planned("ring", [chunk * ranks], ranks=ranks, layout=layout, rows=rows), rows
        )
        peaks[ranks] = max(account.peak_bytes for account in run.accounts)
    fewest, *more = peaks.values()
    assert 0 < max(more) <= fewest
    assert fewest <= chunk * (3 * rows.widths.row("kv") + 4 * rows.widths.row("dkv"))


@every_algorithm
def test_a_missing_message_names_rank_operation_and_peer(algorithm: str) -> None:
    rows = Rows.random(600)
    plan = planned(algorithm, [600], ranks=2, rows=rows)
    hub = Hub(2, timeout=0.2)
    own = shard(plan.layout, 1, rows)
    layer = Layer(plan.program(1), hub.channels()[1], Scoring(scale=SCALE), Account())
    started = time.monotonic()
    expected = (
        r"rank 1: exchange 0 of forward phase 0 with rank 0 did not finish: no message.*"
        r"\(rank 0 may itself be blocked on a stalled or dead rank\)"
    )
    with pytest.raises(ExchangeError, match=expected):
        attend(layer, own.q, own.k, own.v)
    assert time.monotonic() - started >= 0.2


def test_a_peer_that_stops_in_backward_is_named() -> None:
    rows = Rows.random(600)
    plan = planned("ring", [600], ranks=2, rows=rows)
    channels = Hub(2, timeout=3.0).channels()
    posts = [op for op in plan.program(0).backward[0] if isinstance(op, Post)]
    tag = next(op.tag for op in posts if op.recvs)  # what leaves before needs no answer

    def work(rank: int) -> None:
        own = shard(plan.layout, rank, rows)
        q = own.q.requires_grad_()
        layer = Layer(plan.program(rank), channels[rank], Scoring(scale=SCALE), Account())
        out, _ = attend(layer, q, own.k, own.v)
        if rank == 0:
            out.backward(own.grad)

    expected = rf"rank 0: exchange {tag} of backward phase 0 with rank 1 did not"
    with pytest.raises(ExchangeError, match=expected):
        threads(work, ranks=2)


def test_a_message_of_another_size_is_named() -> None:
    first, second = Hub(2, timeout=1.0).channels()
    first.post([(1, torch.zeros(3, dtype=torch.uint8))], [], what="x")
    exchange = second.post([], [(0, torch.empty(4, dtype=torch.uint8))], what="the test")
    with pytest.raises(ExchangeError, match="rank 1: the test with rank 0.*3 bytes came, 4 were"):
        exchange.wait()


def test_messages_keep_their_order_and_are_counted() -> None:
    first, second = Hub(2, timeout=1.0).channels()
    buffers = [torch.zeros(2, dtype=torch.uint8) for _ in range(2)]
    waits = [second.post([], [(0, buffer)], what="in") for buffer in buffers]
    assert not waits[0].done()
    data = torch.tensor([1, 2], dtype=torch.uint8)
    first.post([(1, data)], [], what="out")
    data += 2  # a channel sends what was there when it was posted
    first.post([(1, data)], [], what="out")
    assert waits[1].done()
    waits[1].wait()
    waits[0].wait()
    assert [buffer.tolist() for buffer in buffers] == [[1, 2], [3, 4]]
    assert (first.sent, second.sent) == ({1: 4}, {})


def test_agreement_is_checked_and_timed() -> None:
    channels = Hub(3, timeout=20.0).channels()
    threads(lambda rank: channels[rank].agree(7, what="the plan"), ranks=3)
    with pytest.raises(ValueError, match="disagree on the plan: . here, between 7 and 9"):
        threads(lambda rank: channels[rank].agree(9 if rank == 1 else 7, what="the plan"), ranks=3)
    channels = Hub(3, timeout=0.3).channels()
    with pytest.raises(ExchangeError, match="rank 0: comparing the plan did not finish: not all 3"):
        channels[0].agree(7, what="the plan")


@every_algorithm
def test_an_expanded_gradient_and_strided_rows(algorithm: str) -> None:
    lengths = [1500, 500]  # under distca the second document moves
    rows = Rows.random(2000, heads=4, kv_heads=2)
    plan = planned(algorithm, lengths, ranks=2, rows=rows)
    channels = Hub(2, timeout=20.0).channels()
    shards: dict[int, Results] = {}

    def strided(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().requires_grad_()

    def work(rank: int) -> None:
        own = shard(plan.layout, rank, rows)
        leaves = [strided(x) for x in (own.q, own.k, own.v)]
        layer = Layer(plan.program(rank), channels[rank], Scoring(scale=SCALE), Account())
        out, _ = attend(layer, *(x.transpose(0, 1) for x in leaves))
        out.sum().backward()
        dq, dk, dv = (x.grad.transpose(0, 1) for x in leaves if x.grad is not None)
        shards[rank] = Results(out=out.detach(), dq=dq, dk=dk, dv=dv)

    threads(work, ranks=2)
    ones = Rows(q=rows.q, k=rows.k, v=rows.v, grad=torch.ones_like(rows.grad))
    ours = gather(plan.layout, [shards[rank] for rank in range(2)])
    assert ours.error(reference(ones, lengths)) < 1e-12


def test_a_recompute_with_saved_results_sends_nothing() -> None:
    lengths = [1500, 500]
    rows = Rows.random(2000)
    plan = planned("distca", lengths, ranks=2, rows=rows)
    channels = Hub(2, timeout=20.0).channels()
    shards: dict[int, Results] = {}

    def work(rank: int) -> None:
        own, program = shard(plan.layout, rank, rows), plan.program(rank)
        first = Layer(program, channels[rank], Scoring(scale=SCALE), Account())
        with torch.no_grad():
            out, lse = attend(first, own.q, own.k, own.v)
        before = channels[rank].sent.total()

        def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = Layer(
                program, channels[rank], Scoring(scale=SCALE), Account(), saved=(out, lse)
            )
            return attend(layer, q, k, v)[0]

        leaves = [x.requires_grad_() for x in (own.q, own.k, own.v)]
        kept = again(*leaves)
        assert channels[rank].sent.total() == before
        kept.backward(own.grad)
        dq, dk, dv = (x.grad for x in leaves)
        assert dq is not None and dk is not None and dv is not None
        shards[rank] = Results(out=kept.detach(), dq=dq, dk=dk, dv=dv)

    threads(work, ranks=2)
    ours = gather(plan.layout, [shards[rank] for rank in range(2)])
    assert ours.error(reference(rows, lengths)) < 1e-12


def test_phases_are_three_where_tasks_move_and_one_where_nothing_does() -> None:
    rows = Rows.random(1)
    moving = planned("distca", [1500, 500], ranks=2, rows=rows).program(0)
    assert (len(moving.forward), len(moving.backward)) == (3, 3)
    assert isinstance(moving.forward[0][-1], Post)
    still = planned("distca", [500, 500], ranks=2, rows=rows).program(0)
    assert (len(still.forward), len(still.backward)) == (1, 1)
