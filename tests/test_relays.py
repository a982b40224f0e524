"""Relays and channels: what is computed and sent does not depend on when messages come."""

from __future__ import annotations

import time
from random import Random
from threading import Timer
from typing import Any

import pytest
import torch
from helpers import (
    Results,
    Rows,
    differentiate,
    examples,
    gather,
    reference,
    run_threads,
    scoring,
    shard,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.comm.channels import Channel, ExchangeError, Hub, ThreadChannel
from hf_longctx.plan.check import PlanError, lock_step
from hf_longctx.plan.count import sent_by_channel, sent_in_layer
from hf_longctx.plan.layout import cut
from hf_longctx.plan.levels import Levels
from hf_longctx.plan.plans import Plan, make_plan
from hf_longctx.plan.program import Block, Fold, Op, Post, Program, Wait
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account

LENGTHS = [57, 1, 40, 23]


def late_channels(ranks: int, *, seed: int) -> list[Channel]:
    """Channels on which each message comes after a random time, whatever was sent before it."""
    noise = Random(seed)

    class Late(ThreadChannel):
        def send(self, data: Tensor, key: Any) -> None:
            Timer(noise.uniform(0, 0.003), ThreadChannel.send, (self, data, key)).start()

    hub = Hub(ranks, timeout=20.0)
    return [Late(hub, rank) for rank in range(ranks)]


def nested(sizes: tuple[int, ...], rows: Rows) -> Plan:
    """charm on documents that all ranks have a part of."""
    levels = Levels(sizes)
    held = cut(LENGTHS, ranks=levels.ranks, layout="zigzag")
    return make_plan("charm", held, kind=rows.kind(), topology=levels)


def same(one: Results, other: Results) -> bool:
    return all(torch.equal(getattr(one, n), getattr(other, n)) for n in Results.__slots__)


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["keys", "queries"])
def test_results_are_the_same_bits_under_fifty_draws_of_delays(kv_heads: int) -> None:
    rows = Rows.random(sum(LENGTHS), kv_heads=kv_heads, dtype=torch.float32)
    plan = nested((2, 2), rows)
    assert plan.moves_queries == (kv_heads == 2)
    assert all(
        plan.program(rank).relayed(backward=back) for rank in range(4) for back in (False, True)
    )
    first = run_threads(plan, rows).results
    for seed in range(50 if kv_heads == 1 else 10):
        again = run_threads(plan, rows, channels=late_channels(4, seed=seed))
        assert same(again.results, first), seed


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    sizes=st.sampled_from([(2, 2), (2, 2), (4,), (2, 1), (3, 1), (2, 1, 2), (2, 2, 2)]),
    name=st.sampled_from(["charm", "charm", "ring"]),
    by_heads=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
@examples(200)
def test_two_hundred_plans_end_and_send_what_is_planned(
    lengths: list[int],
    sizes: tuple[int, ...],
    name: str,
    by_heads: bool,
    kv_heads: int,
    seed: int,
) -> None:
    levels, rows = Levels(sizes), Rows.random(sum(lengths), kv_heads=kv_heads)
    held = cut(lengths, ranks=levels.ranks, layout="zigzag", levels=levels)
    size = 2 if by_heads and sizes[-1] % 2 == 0 else 1
    plan = make_plan(name, held, kind=rows.kind(), topology=levels, ulysses_size=size)
    run = run_threads(plan, rows, channels=late_channels(levels.ranks, seed=seed))
    assert run.results.error(reference(rows, lengths)) < 1e-12
    for rank, sent in enumerate(run.sent):
        assert sent == sent_in_layer(plan.program(rank), rows.widths)


def run_late(context: Any, *, sizes: tuple[int, ...], seed: int) -> tuple[Results, list[int]]:
    """A rank's job: its rows' results, and the bytes that it sent over each channel."""
    rows = Rows.random(sum(LENGTHS), dtype=torch.float32)
    plan, noise = nested(sizes, rows), Random(1000 * seed + context.rank)
    channels = (context.channel, *context.channel.more)
    for channel in channels:
        at_once = channel.send

        def later(*message: Any, send: Any = at_once) -> Any:
            time.sleep(noise.uniform(0, 0.003) if seed else 0)
            return send(*message)

        channel.send = later
    layer = Layer(plan.program(context.rank), channels[0], scoring(plan), Account())
    own = shard(plan.layout, context.rank, rows)
    results = differentiate(lambda q, k, v: attend(layer, q, k, v)[0], own)
    return results, [sum(channel.sent.values()) for channel in channels]


def test_gloo_gives_the_same_bits_and_each_channel_sends_its_share(rank_pool: Any) -> None:
    rows = Rows.random(sum(LENGTHS), dtype=torch.float32)
    plan = nested((2, 2), rows)
    right = run_threads(plan, rows).results
    for seed in range(3):
        shards = rank_pool.run(run_late, ranks=4, channels=4, sizes=(2, 2), seed=seed)
        assert same(gather(plan.layout, [results for results, _ in shards]), right)
        for rank, (_, sent) in enumerate(shards):
            by_channel = [
                sent_by_channel(plan.program(rank), rows.widths, backward=back)
                for back in (False, True)
            ]
            counted = [
                sum(sum(way[number].values()) for way in by_channel if number in way)
                for number in range(4)
            ]
            assert sent == counted and min(sent) > 0


def test_a_peer_that_is_lost_behind_a_relay_is_named() -> None:
    rows = Rows.random(sum(LENGTHS))
    plan = nested((2, 2), rows)
    channel = Hub(4, timeout=0.2).channels()[1]
    own = shard(plan.layout, 1, rows)
    layer = Layer(plan.program(1), channel, scoring(plan), Account())
    expected = r"rank 1: exchange \d+ of forward phase 0 with rank [03] did not finish: no message"
    with pytest.raises(ExchangeError, match=expected):
        attend(layer, own.q, own.k, own.v)


# The checker, on three ranks: 0 sends rows to 1, which passes them on to 2.

BLOCK = Block(0, 0, 2)
SEND, RECEIVE = Post(0, ((1, (BLOCK,)),), ()), Post(0, (), ((0, (BLOCK,)),))
RELAY = Post(1, ((2, (BLOCK,)),), (), after=0)


def in_lock_step(*ops: Op) -> list[Any]:
    """Rank 1 runs `ops`, the others what belongs to them."""
    ends = (SEND, Wait(0)), ops, (Post(0, (), ((1, (BLOCK,)),)), Wait(0))
    programs = {
        rank: Program.build(arrays=[("q", 2)], held=[], forward=(of_rank,), backward=())
        for rank, of_rank in enumerate(ends)
    }
    return lock_step(programs, backward=False)


def test_a_relay_passes_on_what_came() -> None:
    first, middle, last = in_lock_step(RECEIVE, RELAY, Wait(0), Wait(1))
    assert (first.values[0] == last.values[0]).all() and (middle.values[0] == last.values[0]).all()


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((RELAY, RECEIVE, Wait(0), Wait(1)), "1 relays 0, not under way then"),
        ((RECEIVE, Wait(0), RELAY, Wait(1)), "1 relays 0, not under way then"),
        (
            (Post(0, (), ((0, (Block(0, 0, 1),)),)), RELAY, Wait(0), Wait(1)),
            "which 0 does not receive",
        ),
        (
            (RECEIVE, RELAY, Fold(BLOCK, (BLOCK,), "cat"), Wait(0), Wait(1)),
            "which tag 0 from 0 fills and relays; wait for it first",
        ),
        (
            (Post(0, (), ((2, (BLOCK,)),)), RELAY, Wait(0), Wait(1)),
            r"no progress: .*rank 1 waits for 2",
        ),
    ],
)
def test_relays_that_depend_on_timing_are_refused(ops: tuple[Op, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        in_lock_step(*ops)
