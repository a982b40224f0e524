"""Channels on which every message is late, and what must not change by that; threads and gloo."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from helpers import Results, Rows, differentiate, gather, run_threads, scoring, shard
from torch import Tensor

from hf_longctx.comm.channels import GlooChannel, Hub, ThreadChannel
from hf_longctx.planning.planners.plan import Plan
from hf_longctx.planning.program.counts import message_peak_bytes, peak_bytes, sent_by_channel
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account
from hf_longctx.verify.rank_pool import RankContext

Sent = list[Counter[int]]  # by channel: bytes to each peer


class LateHub(Hub):
    """Messages come late, in a random order."""

    def __init__(self, ranks: int, *, seed: int, timeout: float = 20.0) -> None:
        super().__init__(ranks, timeout=timeout)
        self.random, self.held = Random(seed), list[tuple[Any, Tensor]]()

    def channels(self) -> list[ThreadChannel]:
        return [LateThreads(self, rank) for rank in range(self.ranks)]

    def keep(self, data: Tensor, key: Any) -> None:
        with self.changed:
            self.held.insert(self.random.randint(0, len(self.held)), (key, data))
            if len(self.held) == 1:
                threading.Thread(target=self._deliver).start()

    def _deliver(self) -> None:
        while True:
            time.sleep(self.random.uniform(0.0, 0.001))
            with self.changed:
                for _ in range(self.random.randint(1, len(self.held))):
                    key, data = self.held.pop()
                    self.messages[key] = data
                self.changed.notify_all()
                if not self.held:
                    return


class LateThreads(ThreadChannel):
    """A channel of such a hub."""

    @cached_property
    def more(self) -> tuple[ThreadChannel, ...]:
        numbers = range(1, self.hub.more + 1 if self.number == 0 else 1)
        return tuple(LateThreads(self.hub, self.rank, n) for n in numbers)

    def send(self, data: Tensor, key: Any) -> None:
        assert isinstance(self.hub, LateHub)
        self.hub.keep(data, key)


class _LateWork:
    """A gloo message that leaves from a thread of its own."""

    def __init__(self, delay: float, send: Any) -> None:
        self.delay, self.send, self.work = delay, send, None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        time.sleep(self.delay)
        self.work = self.send()

    def wait(self, timeout: timedelta) -> None:
        self.thread.join()
        assert self.work is not None
        self.work.wait(timeout)


class LateGloo(GlooChannel):
    """Each message leaves late, by a random time of its own."""

    def __init__(self, like: GlooChannel, *, seed: int, number: int = 0) -> None:
        super().__init__(like.group, timeout=like.timeout.total_seconds())
        self._numbers, self.random = like._numbers, Random(f"{seed} {self.rank} {number}")
        self.more = tuple(
            LateGloo(each, seed=seed, number=n) for n, each in enumerate(like.more, start=1)
        )

    def send(self, data: Tensor, peer: int, tag: int) -> Any:
        send = super().send
        return _LateWork(self.random.uniform(0.0, 0.003), lambda: send(data, peer, tag))


@dataclass(slots=True, kw_only=True)
class Ran:
    """What one gloo rank computed and counted."""

    results: Results
    account: Account
    sent: Sent


def run_late(context: RankContext, *, seeds: Sequence[int], plan: Plan, rows: Rows) -> list[Ran]:
    """A rank's job: the plan once per seed of delays; without delays for seed -1."""
    ran = []
    for seed in seeds:
        plain = context.channel
        assert isinstance(plain, GlooChannel)
        channel = plain if seed < 0 else LateGloo(plain, seed=seed)
        before = [Counter(c.sent) for c in (channel, *channel.more)]
        account, own = Account(clock=time.perf_counter), shard(plan.layout, context.rank, rows)
        layer = Layer(plan.program(context.rank), channel, scoring(plan), account)
        results = differentiate(lambda q, k, v, to=layer: attend(to, q, k, v)[0], own)
        after = [c.sent for c in (channel, *channel.more)]
        sent = [new - old for new, old in zip(after, before, strict=True)]
        ran.append(Ran(results=results, account=account, sent=sent))
    return ran


def same(one: Results, other: Results) -> bool:
    """Whether outputs and gradients are the same bits."""
    return all(torch.equal(getattr(one, n), getattr(other, n)) for n in Results.__slots__)


def as_planned(plan: Plan, rank: int, rows: Rows, *, account: Account, sent: Sent) -> bool:
    """Whether a rank sent over each channel to each peer, and held, what its program says."""
    program, planned = plan.program(rank), [Counter[int]() for _ in sent]
    for backward in (False, True):
        by_channel = sent_by_channel(program, rows.widths, backward=backward)
        for number, peers in by_channel.items():
            planned[number] += peers
    arrays, messages = (
        max(count(program, rows.widths, backward=b) for b in (False, True))
        for count in (peak_bytes, message_peak_bytes)
    )
    held = (account.peak_bytes, account.message_peak_bytes)
    return sent == planned and held == (arrays, messages)


def assert_delays_change_nothing(plan: Plan, rows: Rows, *, seeds: int, pool: Any) -> Results:
    """Threads and gloo ranks under some draws of delays: the same bits, bytes and peaks; them."""
    ranks = plan.layout.ranks
    first = run_threads(plan, rows).results
    for seed in range(seeds):
        channels = LateHub(ranks, seed=seed).channels()
        run = run_threads(plan, rows, channels=channels)
        assert same(run.results, first), seed
        for rank, (account, of_rank) in enumerate(zip(run.accounts, channels, strict=True)):
            sent = [c.sent for c in (of_rank, *of_rank.more)]
            assert as_planned(plan, rank, rows, account=account, sent=sent)
    given = {"seeds": [-1, *range(seeds)], "plan": plan, "rows": rows}
    for ran in zip(*pool.run(run_late, ranks=ranks, channels=6, **given), strict=True):
        assert same(gather(plan.layout, [each.results for each in ran]), first)
        for rank, each in enumerate(ran):
            assert as_planned(plan, rank, rows, account=each.account, sent=each.sent)
    return first


def lose_a_relay(context: RankContext) -> str:
    """Rank 1 passes nothing on of what rank 0 sends; rank 2 says what it met."""
    group = dist.new_group(list(range(context.ranks)))  # it will not be whole after
    channel = GlooChannel(group, timeout=1.0 if context.rank == 2 else 20.0)
    data, said = torch.zeros(8, dtype=torch.uint8), ""
    if context.rank == 0:
        channel.post([(1, data)], [], what="a chunk").wait()
    if context.rank == 1:
        channel.post([], [(0, data)], what="a chunk").wait()
    if context.rank == 2:
        due = channel.post([], [(1, data)], what="exchange 4 of forward phase 0")
        arrival = channel.arrivals.add(due, lambda: None)
        try:
            arrival.wait()
        except RuntimeError as error:
            said = str(error)
    dist.barrier(group=context.group)
    return said
