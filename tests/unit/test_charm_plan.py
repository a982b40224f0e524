"""Check charm's programs: exact, across each link once, in memory that does not grow with ranks."""

from __future__ import annotations

import pytest
import torch
from helpers import LENGTHS, WINDOWS, Results, Rows, examples, reference, run_lock_step, run_threads
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import LAYOUTS, PlacedSegment, cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners import charm
from hf_longctx.planning.planners.hierarchical_units import queries_are_lighter
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.planners.remote_rows import RemoteRowsBuilder
from hf_longctx.planning.predict.predict import entries, events
from hf_longctx.planning.program.checker import check
from hf_longctx.planning.program.counts import Widths, peak_bytes, sent, sent_by_level
from hf_longctx.planning.program.operations import Attend, Block, Post

WIDTHS = Widths(heads=2, kv_heads=1, head_dim=4, value_dim=4, itemsize=2)
B, B_G = WIDTHS.row("kv"), WIDTHS.row("dkv")  # of one row
MHA = LayerKind(query_width=32, key_value_width=64, kv_heads=2)  # queries are lighter
GQA = LayerKind(query_width=64, key_value_width=32, kv_heads=1)


def moves_queries(plan: Plan) -> bool:
    return queries_are_lighter(plan.layout, plan.kind, levels=plan.levels)


def planned(sizes: tuple[int, ...], lengths: list[int], *, kind: LayerKind = GQA) -> Plan:
    levels = Levels(sizes)
    held = cut(lengths, ranks=levels.ranks, layout="zigzag")
    return make_plan(held, kind=kind, options=PlanOptions(algorithm="charm", topology=levels))


@given(
    lengths=LENGTHS,
    sizes=st.sampled_from(
        [(2, 2), (2, 4), (4, 2), (2, 2, 2), (3, 2), (2, 3, 2), (5,), (1, 3), (3, 1), (1,)]
    ),
    window=WINDOWS,
    causal=st.booleans(),
    heads=st.sampled_from([1, 3]),
    layout=st.sampled_from(LAYOUTS),
)
@examples(25)
def test_any_levels_and_masks_are_exact(
    lengths: list[int],
    sizes: tuple[int, ...],
    window: int,
    causal: bool,
    heads: int,
    layout: str,
) -> None:
    levels = Levels(sizes)
    kind = LayerKind(
        window=window, causal=causal, query_width=16 * heads, key_value_width=32, kv_heads=1
    )
    held = cut(lengths, ranks=levels.ranks, layout=layout)
    check(make_plan(held, kind=kind, options=PlanOptions(algorithm="charm", topology=levels)))


@pytest.mark.parametrize(
    ("sizes", "kv_heads"), [((2, 2), 1), ((2, 2), 2), ((2, 2, 2), 1), ((3, 2), 2)]
)
def test_ranks_compute_what_one_process_does(sizes: tuple[int, ...], kv_heads: int) -> None:
    lengths = [130, 31, 1, 20]
    rows = Rows.random(sum(lengths), heads=2, kv_heads=kv_heads)
    plan = planned(sizes, lengths, kind=rows.kind())
    assert moves_queries(plan) == (kv_heads == 2)
    run = run_threads(plan, rows)
    assert run.results.error(reference(rows, lengths)) < 1e-12
    again = run_lock_step(plan, rows, seed=1)
    for name in Results.__slots__:
        assert torch.equal(getattr(again, name), getattr(run.results, name))


def test_the_query_route_is_taken_where_it_crosses_with_fewer_bytes() -> None:
    assert moves_queries(planned((2, 2), [400], kind=MHA))
    assert not moves_queries(planned((2, 2), [400], kind=GQA))
    assert not moves_queries(planned((1, 4), [400], kind=MHA))  # nothing crosses


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 2), (2, 2, 2)], ids=str)
def test_crossing_bytes_are_those_of_the_notes(sizes: tuple[int, ...]) -> None:
    # Every row is seen by every rank: (N - 1) b across in forward, (N - 1)(b + b_g) in backward; at
    # each level as many domains as it has, times the chunks that came from outside.
    levels, rows = Levels(sizes), 64
    kind = LayerKind(causal=False, query_width=64, key_value_width=32)
    held = cut([rows * levels.ranks], ranks=levels.ranks, layout="zigzag")
    plan = make_plan(held, kind=kind, options=PlanOptions(algorithm="charm", topology=levels))
    for rank in range(levels.ranks):
        chunks = 1
        for level, size in enumerate(sizes):
            for backward, each in ((False, B), (True, B + B_G)):
                by_level = sent_by_level(
                    plan.program(rank), WIDTHS, rank=rank, levels=levels, backward=backward
                )
                assert by_level[level] == chunks * (size - 1) * rows * each
            chunks *= size


@pytest.mark.parametrize("sizes", [(128, 8), (8, 16, 8), (1024,)], ids=str)
def test_a_thousand_ranks_send_what_the_formulae_say(sizes: tuple[int, ...]) -> None:
    # Documents of 16 ranks, every row seen by every rank of them: 2 domains of 8, or of one level.
    levels, rows, width = Levels(sizes), 4, 16
    kind = LayerKind(causal=False, query_width=64, key_value_width=32)
    held = cut([rows * width] * (1024 // width), ranks=1024, layout="contiguous")
    plan = make_plan(held, kind=kind, options=PlanOptions(algorithm="charm", topology=levels))
    inside = sizes[-1] if sizes[-1] < width else width
    for rank in (0, 519, 1023):
        for backward, each in ((False, B), (True, B + B_G)):
            by_level = sent_by_level(
                plan.program(rank), WIDTHS, rank=rank, levels=levels, backward=backward
            )
            expected = {len(sizes) - 1: width // inside * (inside - 1) * rows * each}
            if inside < width:
                expected[len(sizes) - 2] = rows * each
            assert +by_level == expected


def test_a_chunk_goes_round_a_thousand_ranks_once() -> None:
    held = cut([4 * 1024], ranks=1024, layout="contiguous")
    kind = LayerKind(causal=False, query_width=64, key_value_width=32)
    plan = make_plan(held, kind=kind, options=PlanOptions(algorithm="ring"))
    for rank in (0, 700):
        for backward, each in ((False, B), (True, B + B_G)):
            found, _ = events(plan.program(rank), kind=kind, widths=WIDTHS, backward=backward)
            sizes = [size for event in found for way, _, size in event.messages if way == 0]
            assert sum(sizes) == 1023 * 4 * each


def test_a_causal_document_crosses_only_where_it_is_seen() -> None:
    # A higher domain sees front halves of a lower one; a lower one sees all of a higher one.
    levels, rows = Levels((2, 4)), 64
    plan = planned((2, 4), [rows * levels.ranks])
    crossing = [
        sent_by_level(plan.program(r), WIDTHS, rank=r, levels=levels, backward=False)[0]
        for r in range(levels.ranks)
    ]
    assert crossing == [rows * B // 2] * 4 + [rows * B] * 4


def test_nothing_crosses_where_every_document_fits_a_domain() -> None:
    levels = Levels((2, 2))
    held = cut([200, 56, 256], ranks=4, layout="contiguous")
    plan = make_plan(held, kind=GQA, options=PlanOptions(algorithm="charm", topology=levels))
    for rank in range(4):
        program = plan.program(rank)
        for backward in (False, True):
            by_level = sent_by_level(program, WIDTHS, rank=rank, levels=levels, backward=backward)
            assert by_level[0] == 0
        assert any(isinstance(op, Post) for op in program.backward[0])  # inside, keys travel


def test_a_window_moves_only_the_keys_it_reaches() -> None:
    held = cut([800], ranks=4, layout="contiguous")
    plan = make_plan(
        held,
        kind=LayerKind(window=11, query_width=64),
        options=PlanOptions(algorithm="charm", topology=Levels((2, 2))),
    )
    for rank in range(4):
        rows = sum(sent(plan.program(rank), WIDTHS, backward=False).values()) / B
        assert rows == 10  # of rank 3: those of rank 1, passed on to rank 2


@pytest.mark.parametrize(
    ("kind", "few", "many"),
    [
        (GQA, (4, 4), (16, 4)),
        (GQA, (2, 8), (2, 16)),
        (GQA, (2, 2, 4), (4, 4, 4)),
        (MHA, (4, 4), (8, 4)),
    ],
    ids=["more domains", "larger domains", "three levels", "queries travel"],
)
def test_memory_does_not_grow_with_the_ranks(
    kind: LayerKind, few: tuple[int, ...], many: tuple[int, ...]
) -> None:
    peaks: dict[tuple[int, ...], list[int]] = {}
    for sizes in (few, many):
        ranks = Levels(sizes).ranks
        plan = planned(sizes, [64 * ranks], kind=kind)
        programs = [plan.program(rank) for rank in (0, ranks // 2)]
        peaks[sizes] = [
            max(peak_bytes(p, WIDTHS, backward=back) for p in programs) for back in (False, True)
        ]
    for fewer, more in zip(peaks[few], peaks[many], strict=True):
        assert 0 < more <= 1.08 * fewer


def test_foreign_keys_are_attended_to_between_local_ones() -> None:
    levels = Levels((2, 4))
    program = planned((2, 4), [64 * 8]).program(0)
    foreign = []
    for op in program.forward[0]:
        if isinstance(op, Attend):
            blocks = [start // 32 for _, start, _ in program.tokens(op.kv)]
            far = {levels.crosses(0, min(b, 15 - b)) == 0 for b in blocks}  # rank r: r and 15 - r
            assert len(far) == 1
            foreign += far
    first, last = foreign.index(True), len(foreign) - 1 - foreign[::-1].index(True)
    assert False in foreign[first:last] and foreign[0] is False


def test_rows_side_by_side_that_all_queries_see_are_one_task() -> None:
    plan = planned((2, 4), [64 * 8])
    programs = [plan.program(rank) for rank in range(8)]
    for backward in (False, True):
        work = sum(entries(p, kind=GQA, backward=backward).sum() for p in programs)
        assert work == 512 * 513 // 2
    # Rank 0 holds the first block and the last, which sees everything: its own rows in two tasks,
    # and in one each what comes in 3 local units and 4 foreign ones.
    tasks = [op for op in programs[0].forward[0] if isinstance(op, Attend)]
    assert len(tasks) == 2 + 3 + 4
    assert max(len(programs[0].tokens(op.kv)) for op in tasks) == 4  # of each foreign rank a piece


def test_rows_side_by_side_that_some_query_does_not_see_stay_apart() -> None:
    builder = RemoteRowsBuilder(cut([64], ranks=2, layout="zigzag"), rank=0, kind=GQA)
    query = PlacedSegment(0, 16, 0, 48, 64)
    early, late = (
        (PlacedSegment(1, 0, 0, a, a + 16), (Block(1, r, r + 16),)) for a, r in ((16, 0), (32, 16))
    )
    own = PlacedSegment(0, 16, 0, 48, 64), (Block(1, 32, 48),)
    assert builder.joined(query, [early, late, own]) == [
        (own[0]._replace(start=16), (Block(1, 0, 48),))
    ]
    assert builder.joined(query._replace(start=40), [late, early]) == [late, early]
    windowed = RemoteRowsBuilder(builder.layout, rank=0, kind=LayerKind(window=8))
    assert windowed.joined(query, [early, late]) == [early, late]


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"longctx_topology=2x4 has 8 ranks, but 4 share a batch"):
        make_plan(
            cut([8], ranks=4, layout="zigzag"),
            kind=GQA,
            options=PlanOptions(algorithm="charm", topology=Levels((2, 4))),
        )


def test_pieces_change_messages_but_not_bytes() -> None:
    held = cut([700, 40], ranks=4, layout="zigzag")
    programs = [
        charm.program(held, rank=1, kind=GQA, levels=Levels((2, 2)), pieces=m) for m in (1, 8)
    ]
    whole, cut_up = (sent(p, WIDTHS, backward=True) for p in programs)
    assert whole == cut_up
    posts = [sum(isinstance(op, Post) for op in p.forward[0]) for p in programs]
    assert posts[1] > posts[0]
