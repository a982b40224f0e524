"""Exchange heads between ranks: exact for any heads, alone and with charm or ring."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import Rows, nan_memory, reference, run_lock_step, run_threads

from hf_longctx.comm.topology import given_levels
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.planning.program.counts import peak_bytes, sent, sent_in_layer
from hf_longctx.planning.program.operations import Post
from hf_longctx.support import Sharing, validate_heads

LENGTHS = [37, 1, 90, 2, 3, 1]


def planned(
    name: str, *, ranks: int, size: int, rows: Rows, lengths: list[int] = LENGTHS, **sees: int
) -> Plan:
    layout = cut(lengths, ranks=ranks, layout="contiguous" if size == ranks else "zigzag")
    kind = rows.kind(window=sees.get("window", 0), causal=bool(sees.get("causal", True)))
    return make_plan(layout, kind=kind, options=PlanOptions(algorithm=name, ulysses_size=size))


def sharings(heads: int, kv_heads: int, *, most: int) -> list[tuple[int, int]]:
    """(ranks, size) that such heads allow."""
    counts = range(2, most + 1)
    sizes = {r: Sharing(r, 1, heads, kv_heads).sizes for r in counts}
    return [(r, size) for r in counts for size in sizes[r] if size > 1]


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [("ulysses", 4, 4), ("charm", 4, 2), ("ulysses", 4, 1), ("charm", 9, 3), ("ulysses", 28, 4)],
)
def test_every_pair_is_computed_once(name: str, heads: int, kv_heads: int) -> None:
    rows = Rows.random(sum(LENGTHS), heads=heads, kv_heads=kv_heads, head_dim=1)
    for ranks, size in [
        *sharings(heads, kv_heads, most=5),
        *sharings(heads, kv_heads, most=8)[-1:],
    ]:
        sees = {"window": 7 * (ranks % 2), "causal": ranks % 3 > 0}
        check(planned(name, ranks=ranks, size=size, rows=rows, **sees))


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [("ulysses", 4, 4), ("charm", 4, 2), ("ulysses", 4, 1), ("charm", 9, 3), ("ulysses", 12, 2)],
)
def test_b26_outputs_and_gradients_are_those_of_one_process(
    name: str, heads: int, kv_heads: int
) -> None:
    rows = Rows.random(sum(LENGTHS), heads=heads, kv_heads=kv_heads)
    for ranks, size in sharings(heads, kv_heads, most=4):
        sees = {"window": 7 * (ranks % 2), "causal": ranks > 2}
        plan = planned(name, ranks=ranks, size=size, rows=rows, **sees)
        with nan_memory():
            error = run_lock_step(plan, rows).error(reference(rows, LENGTHS, **sees))
        assert error < 1e-12, (ranks, size)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)])
def test_bytes_are_those_of_the_formula(heads: int, kv_heads: int) -> None:
    ranks, tokens, head_dim, item = 4, 16, 4, 8
    rows = Rows.random(ranks * tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    plan = planned("ulysses", ranks=ranks, size=ranks, rows=rows, lengths=[ranks * tokens])
    away = tokens * item * (ranks - 1) // ranks
    whole = 2 * head_dim * (heads + max(kv_heads, ranks)) * away  # q, k, v and out
    for rank in range(ranks):
        counted = sent(plan.program(rank), rows.widths, backward=False)
        assert sum(counted.values()) == whole + heads * away  # and the log-sum-exps


@pytest.mark.parametrize(("name", "size"), [("ulysses", 4), ("charm", 2)])
def test_ranks_send_and_hold_what_is_planned(name: str, size: int) -> None:
    rows = Rows.random(sum(LENGTHS), heads=4, kv_heads=2, dtype=torch.bfloat16)
    plan = planned(name, ranks=4, size=size, rows=rows)
    run = run_threads(plan, rows)
    for rank, account in enumerate(run.accounts):
        program = plan.program(rank)
        assert run.sent[rank] == sent_in_layer(program, rows.widths) > 0
        peak = max(peak_bytes(program, rows.widths, backward=b) for b in (False, True))
        assert account.peak_bytes == peak


def test_memory_does_not_grow_with_the_ranks() -> None:
    peaks = {}
    for ranks in (2, 4, 8):
        rows = Rows.random(32 * ranks, heads=8, kv_heads=8)
        plan = planned("ulysses", ranks=ranks, size=ranks, rows=rows, lengths=[32 * ranks])
        program = plan.program(0)
        peaks[ranks] = [peak_bytes(program, rows.widths, backward=b) for b in (False, True)]
    assert peaks[2] == peaks[4] == peaks[8]


@pytest.mark.parametrize(
    ("name", "size", "sizes", "forward", "backward"),
    [
        ("ulysses", 4, (2, 2), {0}, {0, 1}),
        ("ring", 2, (2, 2), {0, 2}, {0, 2, 3}),
        ("charm", 2, (2, 2), {0, 2}, {0, 1, 2, 3}),
        ("charm", 2, (4,), {0}, {0, 1}),
        ("charm", 4, (2, 2), {0}, {0, 1}),
    ],
)
def test_heads_are_exchanged_over_the_channels_of_the_level_that_their_domain_crosses(
    name: str, size: int, sizes: tuple[int, ...], forward: set[int], backward: set[int]
) -> None:
    kind = LayerKind(query_width=16, key_value_width=16, heads=4, kv_heads=2)
    held = cut(LENGTHS, ranks=4, layout="zigzag")
    plan = make_plan(
        held,
        kind=kind,
        options=PlanOptions(algorithm=name, ulysses_size=size, topology=Levels(sizes)),
    )
    check(plan)
    for rank in range(4):
        for direction, used in enumerate((forward, backward)):
            (phase,) = plan.program(rank).backward if direction else plan.program(rank).forward
            assert {op.channel for op in phase if isinstance(op, Post)} == used


def test_work_follows_the_shares_of_the_heads() -> None:
    rows = Rows.random(sum(LENGTHS), heads=9, kv_heads=3)
    even = planned("ulysses", ranks=3, size=3, rows=rows)
    assert even.attention_max_over_mean() == 1.0
    assert even.attention_max_over_mean(balanced=False) > 1.1
    uneven = planned("ulysses", ranks=2, size=2, rows=rows)  # one key/value head, and two
    assert uneven.attention_max_over_mean() == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("sharing", "message"),
    [
        (Sharing(8, 8, 28, 4), "8 ranks, 28 query heads, 4 key/value heads; of 8 "
         "ranks use 2 or 4 or ring or charm without it"),
        (Sharing(3, 3, 4, 2), "3 ranks, 4 query heads, 2 key/value heads"),
        (Sharing(6, 4, 8, 8), "longctx_ulysses_size=4 of 6 ranks; use 2 or 3 or 6 or ring "
         "or charm without it"),
    ],
)  # fmt: skip
def test_b24_heads_that_cannot_be_shared_are_refused(sharing: Sharing, message: str) -> None:
    ranks, size, heads, kv_heads = sharing
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_heads(sharing)
    layout = cut([64], ranks=ranks, layout="contiguous")
    kind = LayerKind(heads=heads, kv_heads=kv_heads)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(layout, kind=kind, options=PlanOptions(algorithm="ulysses", ulysses_size=size))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "exact"),
    [(40, 8, 8, 1), (40, 8, 16, 0), (40, 8, 40, 1), (28, 4, 8, 0), (32, 8, 16, 1), (8, 2, 4, 1)],
)
def test_b24_heads_that_can_be_shared(heads: int, kv_heads: int, ranks: int, exact: int) -> None:
    assert Sharing(ranks, ranks, heads, kv_heads).exact == bool(exact)


def test_domains_are_refused_where_nothing_is_exchanged_by_heads() -> None:
    layout = cut([64], ranks=4, layout="contiguous")
    with pytest.raises(ValueError, match="ulysses_size=2 for 'distca': its ranks exchange no"):
        make_plan(layout, kind=LayerKind(heads=4, kv_heads=4), options=PlanOptions(ulysses_size=2))
    assert Levels((2, 4)).outside(2) == Levels((2, 2))
    assert Levels((2, 4)).outside(4) == Levels((2,))
    assert Levels((2, 4)).outside(8) == Levels((1,))
    with pytest.raises(ValueError, match="ulysses_size=3 does not divide the domains"):
        Levels((2, 4)).outside(3)
    held = cut([64], ranks=6, layout="zigzag")
    with pytest.raises(ValueError, match="ulysses_size=2 does not divide the domains of .*=2x3"):
        make_plan(
            held,
            kind=LayerKind(heads=2),
            options=PlanOptions(algorithm="charm", topology=Levels((2, 3)), ulysses_size=2),
        )
    with pytest.raises(ValueError, match="ulysses_size=2 does not divide the domains of .*=2x3"):
        given_levels("2x3", ranks=6, ulysses_size=2)
