"""Balance plans: two golden batches move by move, and what holds for every batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from helpers import GOLDEN_1, GOLDEN_2, LENGTHS, WINDOWS, examples
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planning.layouts.cost import GRANULE, LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, Layout, cut
from hf_longctx.planning.planners.distca import balance
from hf_longctx.planning.planners.key_splits import NO_SPLITS
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, local_plan, make_plan
from hf_longctx.planning.planners.rebalance import items
from hf_longctx.planning.program.counts import Widths, block_bytes, sent
from hf_longctx.planning.program.operations import Post

# Llama-8B in bf16: 8,192 bytes of queries and 4,096 bytes of keys and values per token.
WIDTHS = Widths(heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2)
KIND = LayerKind(query_width=8192, key_value_width=4096)
MIB = 2**20

Move = tuple[int, int, int, int, int]  # from, to, length of the document, first and last pair

GOLDEN_1_MOVES = [(0, 3, 16384, 5504, 8192), (0, 2, 16384, 3968, 5504)]
GOLDEN_2_MOVES = [
    (1, 0, 128800, 39312, 64400),
    (2, 3, 110752, 35920, 55376),
    (1, 3, 128800, 31504, 39312),
]
GOLDEN_2_SEQUENTIAL_MOVES = [
    (3, 0, 128800, 51088, 64400),
    (5, 7, 110752, 40912, 55376),
    (2, 6, 128800, 20608, 32768),
    (4, 1, 110752, 17616, 22608),
    (2, 1, 128800, 15744, 20608),
    (3, 1, 128800, 48528, 51088),
]


def documents(lists: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def one_list_each(lists: Sequence[Sequence[int]]) -> Layout:
    """Rank r holds the documents of list r, which all have as many tokens."""
    return cut(documents(lists), ranks=len(lists), layout="contiguous")


def sequential(lengths: Sequence[int], *, ranks: int) -> Layout:
    """Ranks filled in order; a document that crosses is laid head-tail, half of each share from
    its front and half from its back."""
    capacity = sum(lengths) // ranks
    held: list[tuple[int, int, int, int]] = []
    rank, room = 0, capacity
    for document, n in enumerate(lengths):
        done = 0
        while 2 * done < n:
            if not room:
                rank, room = rank + 1, capacity
            share = min(room, n - 2 * done)
            room -= share
            if share == n - 2 * done:
                held.append((rank, document, done, n - done))
            else:
                held.append((rank, document, done, done + share // 2))
                held.append((rank, document, n - done - share // 2, n - done))
            done += share // 2
    rows = [0] * ranks
    columns = []
    for rank, document, start, stop in sorted(held):
        columns.append((rank, rows[rank], document, start, stop))
        rows[rank] += stop - start
    return Layout(np.asarray(lengths, np.int32), ranks, np.asarray(columns, np.int32))


def moves(layout: Layout, *, tolerance: float, kind: LayerKind = KIND) -> list[Move]:
    """What `balance` moved, in its order; pairs are counted from the document's outer end."""
    return [
        (home, server, int(layout.lengths[document]), head + first, head + last)
        for document, head, _, first, last, _, home, server in balance(
            layout, kind=kind, tolerance=tolerance
        ).tolist()
        if home != server
    ]


def plan(layout: Layout, *, tolerance: float) -> Plan:
    """As published traces have it: without key splits."""
    made = make_plan(layout, kind=KIND, options=PlanOptions(tolerance=tolerance))
    return replace(made, splits=NO_SPLITS)


def forward_bytes(plan: Plan) -> np.ndarray:
    """`[from, to]`: bytes of queries, keys and values that leave for the servers."""
    moved = np.zeros((plan.layout.ranks, plan.layout.ranks), np.int64)
    for rank in range(plan.layout.ranks):
        program = plan.program(rank)
        for post in (op for op in program.forward[0] if isinstance(op, Post)):
            for peer, blocks in post.sends:
                moved[rank, peer] += sum(block_bytes(program, b, WIDTHS) for b in blocks)
    return moved


def test_golden_1_moves_loads_and_bytes() -> None:
    layout = one_list_each(GOLDEN_1)
    assert moves(layout, tolerance=0.1) == GOLDEN_1_MOVES
    made = plan(layout, tolerance=0.1)
    loads = [134225920, 67117056, 33562624, 16785408]
    before = made.work(balanced=False)
    assert before.tolist() == loads
    assert (before.sum(), before.mean()) == (251691008, 62922752)
    assert before.mean() - before[3] == 46137344
    moved = (made.work(balanced=True) - before).tolist()
    assert (moved[3], moved[2]) == (44042880, 25167360)
    assert made.work(balanced=True).tolist() == [65015680, 67117056, 58729984, 60828288]
    assert made.attention_max_over_mean(balanced=False) == pytest.approx(2.1332, abs=5e-5)
    assert made.attention_max_over_mean() == pytest.approx(1.0667, abs=5e-5)
    # 8,448 query rows and 23,296 key rows, peer by peer the V of each move
    assert sent(made.program(0), WIDTHS, backward=False) == {3: 88604672, 2: 76021760}
    assert forward_bytes(made).sum() == 8448 * 8192 + 23296 * 4096


def test_golden_1_at_a_closer_tolerance() -> None:
    layout = one_list_each(GOLDEN_1)
    assert moves(layout, tolerance=0.05) == [*GOLDEN_1_MOVES, (1, 2, 8192, 3712, 4096)]
    assert plan(layout, tolerance=0.05).attention_max_over_mean() == pytest.approx(1.0333, abs=5e-5)


@pytest.mark.parametrize(
    ("layout", "expected", "before", "after", "mean_max_received"),
    [
        (one_list_each(GOLDEN_2), GOLDEN_2_MOVES, 2.0510, 1.0037, [460, 1244, 1098]),
        (
            sequential(documents(GOLDEN_2), ranks=8),
            GOLDEN_2_SEQUENTIAL_MOVES,
            2.0865,
            1.0048,
            [422, 1165, 1006],
        ),
    ],
    ids=["4-ranks", "8-ranks-sequential"],
)
def test_golden_2_moves_balance_and_bytes(
    layout: Layout,
    expected: list[Move],
    before: float,
    after: float,
    mean_max_received: list[int],
) -> None:
    assert moves(layout, tolerance=0.1) == expected
    made = plan(layout, tolerance=0.1)
    assert made.work(balanced=True).sum() == 16181982720
    assert made.attention_max_over_mean(balanced=False) == pytest.approx(before, abs=5e-5)
    assert made.attention_max_over_mean() == pytest.approx(after, abs=5e-5)
    left, came = forward_bytes(made).sum(1) / MIB, forward_bytes(made).sum(0) / MIB
    assert [round(x) for x in (left.mean(), left.max(), came.max())] == mean_max_received


def test_golden_2_loads() -> None:
    made = plan(one_list_each(GOLDEN_2), tolerance=0.1)
    assert made.work(balanced=False).tolist() == [806663168, 8297366528, 6214087424, 863865600]
    assert made.work(balanced=True).tolist() == [4038022656, 4060328832, 4059277056, 4024354176]


def test_spread_leaves_nothing_to_move_on_golden_2() -> None:
    layout = cut(documents(GOLDEN_2), ranks=8, layout="spread")
    assert moves(layout, tolerance=0.1) == []
    made = plan(layout, tolerance=0.1)
    assert made.attention_max_over_mean() <= 1.06
    left, came = forward_bytes(made).sum(1) / MIB, forward_bytes(made).sum(0) / MIB
    assert round(left.mean()) == 319
    assert left.max() <= 1.5 * left.mean()  # in sequence, 2.8 times as much
    assert came.max() <= 450  # in sequence, 1006


def test_nothing_moves_while_no_rank_is_above_the_tolerance() -> None:
    # The last rank has hardly any work, but a step lasts as long as its busiest rank.
    layout = one_list_each([*[[4096, 4096]] * 9, [8] * 1024])
    assert 1.1 < plan(layout, tolerance=0.2).attention_max_over_mean(balanced=False) < 1.2
    assert moves(layout, tolerance=0.2) == []
    assert moves(layout, tolerance=0.05) != []


def test_second_pass_relieves_a_donor_that_no_receiver_asks() -> None:
    # Eleven ranks lie within the tolerance under the mean, one lies half above it.
    layout = one_list_each([[65536], *[[49920, 15616]] * 11])
    made = plan(layout, tolerance=0.1)
    before = made.work(balanced=False)
    assert before[0] > 1.4 * before.mean() and before[1:].min() > 0.9 * before.mean()
    assert made.attention_max_over_mean() <= 1.1
    assert made.work(balanced=True)[1:].max() <= before.mean()


def test_a_donor_whose_granule_no_gap_holds_is_relieved_within_the_tolerance() -> None:
    # A granule of the long document is 1.2 % of the mean, every other rank 0.9 % under it.
    layout = one_list_each([[8192], *[[6784, 1408]] * 31])
    made = plan(layout, tolerance=0.05)
    before = made.work(balanced=False)
    granule = GRANULE * 8193
    assert before[0] > 1.3 * before.mean()
    assert before.mean() - before[1] < granule < 0.05 * before.mean()
    assert made.attention_max_over_mean() <= 1.05


@given(lengths=LENGTHS, ranks=st.integers(1, 6), layout=st.sampled_from(LAYOUTS), window=WINDOWS)
@examples(60)
def test_infinite_tolerance_moves_nothing(
    lengths: list[int], ranks: int, layout: str, window: int
) -> None:
    made = cut(lengths, ranks=ranks, layout=layout)
    kind = LayerKind(window=window)
    assert moves(made, tolerance=float("inf"), kind=kind) == []


@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    window=WINDOWS,
    tolerance=st.sampled_from([0.0, 0.05, 0.3]),
)
@examples(80)
def test_work_is_conserved_and_cut_at_the_granule(
    lengths: list[int], ranks: int, layout: str, window: int, tolerance: float
) -> None:
    held = cut(lengths, ranks=ranks, layout=layout)
    kind = LayerKind(window=window, query_width=2, key_value_width=1)
    made = make_plan(held, kind=kind, options=PlanOptions(tolerance=tolerance))
    total = sum(int(kind.entries(0, n, length=n)) for n in lengths)
    before, after = made.work(balanced=False), made.work(balanced=True)
    assert before.sum() == after.sum() == total
    assert after.max() <= before.max() + (0 if not window else GRANULE * 2 * window)

    rows = sorted((document, start, stop) for document, start, stop, _, _ in made.tasks.tolist())
    for document, n in enumerate(lengths):  # odd lengths and one-token documents among them
        own = [(start, stop) for d, start, stop in rows if d == document]
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == n

    outer = {tuple(row[:4]) for row in items(held).tolist()}
    for row in balance(held, kind=kind, tolerance=tolerance).tolist():
        *_, first, last, _, home, server = row
        if home != server:  # cut off an inner end, whole granules of rows, or left of an item
            assert 2 * (last - first) % GRANULE == 0 or tuple(row[:4]) in outer


def test_odd_lengths_keep_their_middle_row() -> None:
    layout = one_list_each([[2049], [1025, 1024], [513, 511, 1025]])
    made = plan(layout, tolerance=0.05)
    assert made.attention_max_over_mean(balanced=False) > 1.5
    assert made.attention_max_over_mean() < 1.2  # within two granules of 128 pairs
    assert made.work(balanced=True).sum() == sum(
        n * (n + 1) // 2 for n in (2049, 1025, 1024, 513, 511, 1025)
    )


@pytest.mark.parametrize(
    ("rows", "window", "keys"),
    [((0, 8), 0, (0, 8)), ((5, 8), 0, (0, 8)), ((5, 8), 4, (2, 8)), ((1, 2), 9, (0, 2))],
)
def test_keys_of_a_run_of_rows(rows: tuple[int, int], window: int, keys: tuple[int, int]) -> None:
    assert LayerKind(window=window).keys_seen(rows, length=9) == keys


def test_entries_are_the_sum_of_what_each_row_sees() -> None:
    for window in (0, 1, 3, 50):
        for start, stop in ((0, 0), (0, 9), (4, 9), (8, 9)):
            seen = sum(min(row + 1, window if window else row + 1) for row in range(start, stop))
            assert LayerKind(window=window).entries(start, stop, length=9) == seen


DIGESTS = {  # of a plan's columns: a change here means that plans of older runs no longer compare
    # Changed twice: all options enter; `spread` leaves work for the short documents of a rank.
    ("distca", "contiguous"): 5917644790197478317,
    ("distca", "spread"): 2062790859828196870,
    ("ring", "contiguous"): 8010539684224892571,
    ("ring", "spread"): 6247403948688693515,
}


def digest(algorithm: str, layout: str) -> int:
    held = cut(documents(GOLDEN_1), ranks=4, layout=layout)
    return make_plan(
        held, kind=KIND, options=PlanOptions(algorithm=algorithm, tolerance=0.1)
    ).digest


def test_digests_are_golden() -> None:
    assert {key: digest(*key) for key in DIGESTS} == DIGESTS
    assert all(0 <= value < 2**63 for value in DIGESTS.values())


def test_digests_differ_with_everything_that_a_program_follows_from() -> None:
    variants = [
        ("ring", [900, 300], 2, "spread", LayerKind()),
        ("distca", [900, 300], 2, "spread", LayerKind()),
        ("ring", [300, 900], 2, "spread", LayerKind()),
        ("ring", [900, 300], 3, "spread", LayerKind()),
        ("ring", [900, 300], 2, "contiguous", LayerKind()),
        ("ring", [900, 300], 2, "spread", LayerKind(window=7)),
        ("ring", [900, 300], 2, "spread", LayerKind(causal=False)),
    ]
    digests = {
        make_plan(
            cut(lengths, ranks=ranks, layout=layout),
            kind=kind,
            options=PlanOptions(algorithm=algorithm),
        ).digest
        for algorithm, lengths, ranks, layout, kind in variants
    }
    assert len(digests) == len(variants)


def test_a_local_plan_exchanges_nothing() -> None:
    made = local_plan((5, 1, 300), 4)
    assert not any(isinstance(op, Post) for phase in made.program(0).forward for op in phase)
    assert made.work(balanced=True).tolist() == made.work(balanced=False).tolist()


@pytest.mark.parametrize(
    ("algorithm", "tolerance", "message"),
    [
        ("usp", 0.05, "'usp' has no planner; use one of ('distca', 'ring'"),
        ("distca", -0.1, "longctx_tolerance=-0.1 must be 0 or more, for example 0.05"),
        ("distca", float("nan"), "longctx_tolerance=nan must be 0 or more"),
    ],
)
def test_bad_input_is_named(algorithm: str, tolerance: float, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(
            one_list_each([[8], [8]]),
            kind=KIND,
            options=PlanOptions(algorithm=algorithm, tolerance=tolerance),
        )
