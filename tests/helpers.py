"""Run plans on random rows with R ranks in one process, and compare with the naive reference.

Ranks run as threads with blocking waits, or in lock step in the calling thread. Letters: T tokens,
H query heads, K key/value heads, D head size, R ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.channels import Channel, Hub, sent_over_all
from hf_longctx.kernels.reference import attention
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, Layout, cut
from hf_longctx.planning.planners.options import ALGORITHMS, OVERLAPS, PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.counts import Widths
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account, Execution
from hf_longctx.support import Sharing

LENGTHS = st.lists(
    st.one_of(st.integers(1, 4), st.integers(1, 90), st.integers(100, 700)), min_size=1, max_size=8
)
WINDOWS = st.one_of(st.just(0), st.integers(1, 300))
SCALE = 0.3

# Four ranks of 16,384 tokens, and four of 131,072, whose attention work differs by 4 and by 10.
GOLDEN_1 = [[16384], [8192] * 2, [4096] * 4, [2048] * 8]
GOLDEN_2 = [
    [6432, 14688, 6496, 6752, 11296, 9008, 3824, 3840, 8368, 11360, 6064, 8528, 9040, 80, 25296],
    [128800, 2272],
    [9424, 2624, 8144, 128, 110752],
    [23264, 3312, 12000, 9568, 6400, 7936, 2656, 2400]
    + [10320, 22608, 1840, 6080, 10304, 5648, 4848, 1888],
]


def examples(number: int) -> settings:
    """Run a property on this many random examples, or on the share that the profile allows."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100))


@st.composite
def plans(draw: st.DrawFn, *, ranks: int = 5) -> Plan:
    """Any algorithm on any layout, mask and tolerance, with up to `ranks` ranks; distca also with
    up to two extra servers."""
    layout = cut(
        draw(LENGTHS), ranks=draw(st.integers(1, ranks)), layout=draw(st.sampled_from(LAYOUTS))
    )
    kind = LayerKind(
        window=draw(WINDOWS),
        causal=draw(st.booleans()),
        query_width=2,
        key_value_width=2,
        kv_heads=draw(st.sampled_from([1, 2, 3, 5])),
        heads=30,  # which up to five ranks but four can share
    )
    tolerance = draw(st.sampled_from([0.0, 0.05, 0.5]))
    algorithm = draw(st.sampled_from(ALGORITHMS))
    if algorithm == "ulysses" and not Sharing(layout.ranks, layout.ranks, 30, kind.kv_heads).exact:
        algorithm = "ring"
    speed = st.sampled_from([0.25, 1.0, 3.0])
    speeds = tuple(draw(st.lists(speed, max_size=2))) if algorithm == "distca" else ()
    overlap = draw(st.sampled_from(OVERLAPS)) if algorithm == "distca" else "none"
    return make_plan(
        layout,
        kind=kind,
        options=PlanOptions(
            algorithm=algorithm, tolerance=tolerance, speeds=speeds, overlap=overlap
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a batch, documents end to end, and the gradient of their output.

    Args:
        q, grad (`Tensor`): `[T, H, D]`.
        k, v (`Tensor`): `[T, K, D]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @classmethod
    def random(
        cls,
        tokens: int,
        *,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 4,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Rows:
        """Normal noise, drawn in float64, so that dtypes see the same numbers."""
        noise = torch.Generator().manual_seed(seed)
        q, k, v, grad = (
            torch.randn(tokens, h, head_dim, dtype=torch.float64, generator=noise).to(dtype)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        return cls(q=q, k=k, v=v, grad=grad)

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows in another dtype."""
        return Rows(**{name: getattr(self, name).to(dtype) for name in self.__slots__})

    @property
    def widths(self) -> Widths:
        """What the byte counter must know of them."""
        return Widths(
            heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            head_dim=self.q.shape[2],
            value_dim=self.v.shape[2],
            itemsize=self.q.element_size(),
            wide_itemsize=max(4, self.q.element_size()),
        )

    def kind(self, *, window: int = 0, causal: bool = True) -> LayerKind:
        """The layer kind that a planner sees."""
        _, heads, width = self.q.shape
        return LayerKind(
            window=window,
            causal=causal,
            query_width=heads * width,
            key_value_width=2 * self.k.shape[1] * width,
            kv_heads=self.k.shape[1],
            heads=heads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Output and gradients, documents end to end: `[T, heads, D]`."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def error(self, right: Results) -> float:
        """Largest absolute difference over all four."""
        return max(self.errors(right).values())

    def errors(self, right: Results) -> dict[str, float]:
        """Largest absolute difference of each."""
        pairs = {name: (getattr(self, name), getattr(right, name)) for name in self.__slots__}
        return {
            name: float((a.double() - b.double()).abs().max()) for name, (a, b) in pairs.items()
        }


def differentiate(forward: Callable[..., Tensor], rows: Rows) -> Results:
    """`forward(q, k, v)` and its gradients under the rows' output gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in (rows.q, rows.k, rows.v)]
    out = forward(*leaves)
    out.backward(rows.grad)
    dq, dk, dv = (x.grad for x in leaves)
    assert dq is not None and dk is not None and dv is not None
    return Results(out=out.detach(), dq=dq, dk=dk, dv=dv)


def reference(
    rows: Rows, lengths: Sequence[int], *, window: int = 0, causal: bool = True
) -> Results:
    """What one process computes, each document alone."""
    options = {"lengths": lengths, "scale": SCALE, "window": window, "causal": causal}
    return differentiate(lambda q, k, v: attention(q, k, v, **options), rows)


def plain(rows: Rows, lengths: Sequence[int]) -> Results:
    """Run stock attention in the rows' dtype on one process, each document alone."""

    def documents(*qkv: Tensor) -> Tensor:
        heads = [x.transpose(0, 1)[None].split(list(lengths), 2) for x in qkv]
        outs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
            for q, k, v in zip(*heads, strict=True)
        ]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return differentiate(documents, rows)


def root_mean_square(found: Sequence[Results], right: Sequence[Results]) -> dict[str, float]:
    """Root mean square difference of each tensor, over its entries and all samples."""
    return {
        name: float(
            torch.cat(
                [
                    (getattr(a, name).double() - getattr(b, name).double()).flatten()
                    for a, b in zip(found, right, strict=True)
                ]
            )
            .square()
            .mean()
            .sqrt()
        )
        for name in Results.__slots__
    }


@lru_cache(maxsize=20)  # tests of one shape differ in how they compute, not in their samples
def _sample(seed: int, lengths: tuple[int, ...], **shape: int) -> tuple[Rows, Results, Results]:
    """bf16 rows, what stock attention makes of them, and the float64 result."""
    rows = Rows.random(sum(lengths), dtype=torch.bfloat16, seed=seed, **shape)
    return rows, plain(rows, lengths), reference(rows.to(torch.float64), lengths)


def assert_bf16_rule(
    compute: Callable[[Rows], Results], *, lengths: Sequence[int], samples: int = 20, **shape: int
) -> None:
    """Check that bf16 errors stay within twice, for gradients three times, the plain path's.

    Errors are root mean squares over many samples: the largest error of one sample depends on the
    order in which a processor adds up, so its quotient is mostly luck (C29).

    Args:
        compute: Outputs and gradients of bf16 rows.
        lengths (`Sequence[int]`): Documents.
        samples (`int`, *optional*, defaults to 20): Random rows to compare. Few are enough where
            each tensor has tens of thousands of entries.
        shape (`int`): Heads and head sizes, for `Rows.random`.
    """
    found, bounds, right = [], [], []
    for seed in range(samples):
        rows, bound, exact = _sample(seed, tuple(lengths), **shape)
        found.append(compute(rows))
        bounds.append(bound)
        right.append(exact)
    bound = root_mean_square(bounds, right)
    for name, error in root_mean_square(found, right).items():
        factor = 2 if name == "out" else 3
        assert error <= factor * bound[name], (name, error, bound[name])


def assert_bf16_reports(verify: Callable[..., dict[str, Any]], *, samples: int) -> None:
    """Check bf16 reports of `compare.verify` by the rule of `assert_bf16_rule`.

    The loss of one sample is one number, whose error is luck: fewer than 20 samples leave it out.

    Args:
        verify: Makes the report of documents with the lengths `document_lengths`.
        samples (`int`): Sets of random documents.
    """
    keys = ("logit_error", "grad_error", "loss_error")[: 3 if samples >= 20 else 2]
    noise = np.random.default_rng(0)
    squares: dict[str, list[tuple[float, float]]] = {key: [] for key in keys}
    for _ in range(samples):
        lengths = tuple(map(int, noise.integers(2, 60, 3))) + (int(noise.integers(60, 120)),)
        report = verify(document_lengths=lengths, dtype="bf16")
        random = ("logit_error ", "grad_error ", "loss_error ")
        assert [line for line in report["failed"] if not line.startswith(random)] == []
        assert report["logit_error"] > 1e-4  # it did run in bf16
        for key in keys:  # the bound is twice, or three times, the plain path's error
            squares[key].append((report[key] ** 2, report["bounds"][key] ** 2))
    for key, pairs in squares.items():
        error, bound = np.sqrt(np.mean(pairs, axis=0))
        assert error <= bound, (key, error, bound)


# The fast run compares few samples, the slow one as many as a mean needs.
SAMPLES = pytest.mark.parametrize("samples", [3, pytest.param(20, marks=pytest.mark.slow)])


def scoring(plan: Plan) -> Scoring:
    """What the plan's layers tell the kernels."""
    return Scoring(scale=SCALE, window=plan.kind.window, causal=plan.kind.causal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the ranks of a run computed together, and what each of them counted."""

    results: Results
    accounts: list[Account]
    sent: list[int]


def threads(work: Callable[[int], None], *, ranks: int) -> None:
    """`work(rank)` on one thread per rank; raises the first error."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # carried to the calling thread
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(rank,)) for rank in range(ranks)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def run_threads(plan: Plan, rows: Rows, *, channels: Sequence[Channel] | None = None) -> Run:
    """Forward and backward of one layer through autograd, one thread per rank and server."""
    ranks, processes = plan.layout.ranks, plan.processes
    channels = channels or Hub(processes, timeout=20.0).channels()
    accounts = [Account() for _ in range(processes)]
    shards: list[Results | None] = [None] * ranks

    def work(rank: int) -> None:
        if rank >= ranks:
            for backward in (False, True):
                run = execution(plan, rank, rows, channels[rank], backward=backward)
                for phase in whole(run):
                    phase.wait()
            return
        layer = Layer(
            plan.program(rank),
            channels[rank],
            scoring(plan),
            accounts[rank],
        )
        own = shard(plan.layout, rank, rows)
        shards[rank] = differentiate(lambda q, k, v: attend(layer, q, k, v)[0], own)

    threads(work, ranks=processes)
    results = gather(plan.layout, [x for x in shards if x is not None])
    return Run(results=results, accounts=accounts, sent=[sent_over_all(c) for c in channels])


def shard(layout: Layout, rank: int, rows: Rows) -> Rows:
    """The rows that one rank holds, in its order."""
    own = torch.from_numpy(layout.flat_rows(rank))
    return Rows(**{name: getattr(rows, name)[own] for name in rows.__slots__})


def gather(layout: Layout, shards: Sequence[Results]) -> Results:
    """The ranks' rows, back in document order."""
    order = torch.from_numpy(layout.inverse())
    return Results(
        **{name: torch.cat([getattr(x, name) for x in shards])[order] for name in Results.__slots__}
    )


def lock_step(runs: Sequence[Generator[Exchange]], *, seed: int = 0) -> None:
    """Drive one phase of every rank in this thread, resuming ranks in a random order."""
    shuffled = Random(seed)
    waiting: dict[int, Exchange | None] = dict.fromkeys(range(len(runs)))
    last = time.monotonic()
    while waiting:
        ready = [r for r, exchange in waiting.items() if exchange is None or exchange.done()]
        if not ready:  # relays are passed on by other threads
            assert time.monotonic() - last < 60.0, f"ranks {sorted(waiting)} wait for each other"
            time.sleep(0.0002)
            continue
        last = time.monotonic()
        rank = shuffled.choice(ready)
        exchange = waiting[rank]
        if exchange is not None:
            exchange.wait()
        try:
            waiting[rank] = next(runs[rank])
        except StopIteration:
            del waiting[rank]


def whole(run: Execution) -> Generator[Exchange]:
    """All phases of a direction, one after another."""
    phases = run.program.backward if run.backward else run.program.forward
    for number in range(len(phases)):
        yield from run.phase(number)


def execution(
    plan: Plan,
    rank: int,
    rows: Rows,
    channel: Channel,
    *,
    backward: bool,
    account: Account | None = None,
) -> Execution:
    """One direction of the program of a rank, or of an extra server."""
    return Execution(
        plan.program(rank),
        widths=rows.widths,
        dtype=rows.q.dtype,
        backward=backward,
        channel=channel,
        scoring=scoring(plan),
        account=account,
    )


def run_lock_step(
    plan: Plan,
    rows: Rows,
    *,
    seed: int = 0,
    channels: Sequence[Channel] | None = None,
    account: Account | None = None,
) -> Results:
    """Forward and backward of one layer in this thread, without autograd; all ranks add to one
    account, if any."""
    ranks = range(plan.processes)
    channels = channels or Hub(plan.processes).channels()
    own = [shard(plan.layout, rank, rows) for rank in ranks]
    forward, backward = (
        [
            execution(plan, rank, rows, channels[rank], backward=direction, account=account)
            for rank in ranks
        ]
        for direction in (False, True)
    )
    for direction, executions in enumerate((forward, backward)):
        for rank, run in enumerate(executions):
            run.bind(0, q=own[rank].q)
            run.bind(1, k=own[rank].k, v=own[rank].v)
            if direction:
                run.bind(3, grad_out=own[rank].grad, **forward[rank].fields(2))
        lock_step([whole(x) for x in executions], seed=seed + direction)
    shards = [
        Results(
            out=there.fields(2)["out"],
            dq=back.fields(4)["dq"],
            dk=back.fields(5)["dk"],
            dv=back.fields(5)["dv"],
        )
        for there, back in zip(forward, backward, strict=True)
    ]
    return gather(plan.layout, shards[: plan.layout.ranks])


def uneven(lengths: Sequence[int], edges: Sequence[int]) -> Layout:
    """Rank r holds tokens `[edges[r], edges[r + 1])` of the documents laid end to end."""
    columns, bounds = [], [0, *np.cumsum(lengths).tolist()]
    for rank, (low, high) in enumerate(pairwise(edges)):
        row = 0
        for document, (start, stop) in enumerate(pairwise(bounds)):
            first, last = max(low, start), min(high, stop)
            if first < last:
                columns.append((rank, row, document, first - start, last - start))
                row += last - first
    table = np.asarray(columns, np.int32).reshape(-1, 5)
    return Layout(np.asarray(lengths, np.int32), len(edges) - 1, table)


@contextmanager
def nan_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that whatever reads it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class SharedPool:
    """The session's ranks for one command, which must not end them."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def run(self, job: Any, **given: Any) -> list[Any]:
        """As `RankPool.run`."""
        return self.pool.run(job, **given)

    def close(self) -> None:
        """The ranks stay."""
