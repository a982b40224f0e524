"""Attention across ranks with real kernels: ours and other libraries', errors, seconds and bytes.

One layer on one causal document in float32; every side has its own rows of it. What
an interface carries is counted there, so headers and acknowledgements are in it. Letters: T tokens,
H query heads, K key/value heads, D head size, R ranks.
"""

import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention_peers import (
    Attended,
    Attention,
    contiguous_rows,
    deepspeed_ulysses,
    head_tail_rows,
    torch_ring,
)
from benchmarks.timed import Case, Way, carried_bytes
from hf_longctx.kernels.reference import attention
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.runtime.autograd import Layer
from hf_longctx.runtime.autograd import attend as run_layer
from hf_longctx.runtime.executor import Account
from hf_longctx.verify.rank_pool import RankContext

Side = tuple[Attention, np.ndarray]  # and the tokens that a rank holds


@dataclass(slots=True, kw_only=True)
class Compared:
    """What one rank found of each side, by name.

    Args:
        seconds (`dict[str, float]`): Of forward and backward, the best round.
        carried (`dict[str, int]`): Bytes that left through the interface `cross` in one round.
        errors (`dict[str, float]`): Largest difference of the output or a gradient from one process
            in float64, over the largest entry there; empty where it was not computed.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    carried: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def ways(ranks_of_domain: int) -> dict[str, Way]:
    """Our sides: the hybrid exchanges heads inside domains."""
    return {
        "charm": Way(algorithm="charm"),
        "ring": Way(algorithm="ring"),
        "ulysses": Way(algorithm="ulysses"),
        "hybrid": Way(algorithm="ring", ulysses_size=ranks_of_domain),
    }


def compare(context: RankContext, *, case: Case, rounds: int, exact: bool) -> Compared:
    """Run all sides in turn; the job of one rank.

    Args:
        context (`RankContext`): With as many channels as the levels need.
        case (`Case`): One document, which 2 R divides.
        rounds (`int`): Of each side, after one that is not timed.
        exact (`bool`): Compare with one process in float64, which holds T x T scores of each head.
    """
    (tokens,) = case.lengths
    given = _given(case)
    right = _right(given, tokens) if exact else None
    found = Compared()
    sides = _sides(context, case)
    own = {name: [x[torch.from_numpy(rows)] for x in given] for name, (_, rows) in sides.items()}
    for number in range(rounds + 1):
        for name, (attend, rows) in sides.items():
            q, k, v, grad = own[name]
            context.channel.agree(0, what="that all are ready")
            before, started = carried_bytes(), time.perf_counter()
            results = attend(q, k, v, grad)
            seconds = time.perf_counter() - started
            context.channel.agree(0, what="that all are done")
            if number:
                found.seconds[name] = min(seconds, found.seconds.get(name, seconds))
                found.carried[name] = carried_bytes() - before
            elif right is not None:
                found.errors[name] = _error(results, right, rows)
    return found


def _given(case: Case) -> list[Tensor]:
    """Queries, keys, values and the output's gradient: the same on all ranks."""
    noise = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [torch.randn(sum(case.lengths), h, case.head_dim, generator=noise) for h in heads]


def _sides(context: RankContext, case: Case) -> dict[str, Side]:
    (tokens,), ranks, rank = case.lengths, context.ranks, context.rank
    inside = ranks // case.levels.sizes[0] if case.levels.sizes[0] < ranks else ranks
    ours = {name: _ours(context, case, way) for name, way in ways(inside).items()}
    group: dist.ProcessGroup = context.group
    peers = {
        "torch_ring": (torch_ring(group), head_tail_rows(tokens, ranks, rank)),
        "deepspeed": (deepspeed_ulysses(group), contiguous_rows(tokens, ranks, rank)),
    }
    return {**ours, **peers}


def _ours(context: RankContext, case: Case, way: Way) -> Side:
    plan = case.plan(way)
    program = plan.program(context.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Attended:
        scoring = Scoring(scale=case.head_dim**-0.5)
        layer = Layer(program, context.channel, scoring, Account())
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = run_layer(layer, *given)
        dq, dk, dv = torch.autograd.grad(out, given, grad)
        return out.detach(), dq, dk, dv

    return attend, plan.layout.flat_rows(context.rank)


def _right(given: list[Tensor], tokens: int) -> Attended:
    q, k, v, grad = (x.double() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, lengths=[tokens], scale=q.shape[-1] ** -0.5)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    return out.detach(), dq, dk, dv


def _error(results: Attended, right: Attended, rows: np.ndarray) -> float:
    own = torch.from_numpy(rows)
    return max(
        float((a.double() - b[own]).abs().max() / b.abs().max())
        for a, b in zip(results, right, strict=True)
    )
