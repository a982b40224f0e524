"""Plan scans and halos: exact at any number of ranks, broken at documents, one state per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers import examples, uneven
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.layouts.levels import NeighbourLink
from hf_longctx.planning.planners import state_scan
from hf_longctx.planning.planners.state_scan import DECAYS, SCHEDULES, HaloArray, State
from hf_longctx.planning.predict.scan_schedule import (
    StateSizes,
    choose_schedule,
    cuts,
    longest_chain,
)
from hf_longctx.planning.program.checker import check_states, lock_step
from hf_longctx.planning.program.counts import Widths, message_peak_bytes, peak_bytes, sent
from hf_longctx.planning.program.message_queue import PlanError
from hf_longctx.planning.program.operations import Fold, Op, Phases, Post, Wait
from hf_longctx.planning.program.program import Program

WIDTHS = Widths(heads=4, kv_heads=4, head_dim=5, value_dim=3, state=2, itemsize=4)
ROWS = State(2, "row")
STATE, FACTORS = WIDTHS.row("state") * 2, WIDTHS.row("decay") * 2  # bytes of S, and of M
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_direction = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def contiguous(lengths: Sequence[int], *, ranks: int) -> Layout:
    return cut(lengths, ranks=ranks, layout="contiguous")


def programs(make: Callable[[int], Program | None], *, ranks: int) -> dict[int, Program]:
    return {rank: made for rank in range(ranks) if (made := make(rank))}


def scans(
    layout: Layout, schedule: str, *, pieces: int = 1, state: State = ROWS
) -> dict[int, Program]:
    def make(rank: int) -> Program | None:
        return state_scan.scan_program(
            layout, rank=rank, state=state, schedule=schedule, pieces=pieces
        )

    return programs(make, ranks=layout.ranks)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Documents of all lengths over up to nine ranks, whose shards may be empty."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    inner = draw(st.lists(st.integers(0, sum(lengths)), max_size=8))
    return uneven(lengths, [0, *sorted(inner), sum(lengths)])


@given(
    layout=layouts(),
    schedule=st.sampled_from(SCHEDULES),
    decay=st.sampled_from(sorted(DECAYS)),
    pieces=st.integers(1, 4),
)
@examples(150)
def test_every_state_is_composed_of_the_ranks_before(
    layout: Layout, schedule: str, decay: str, pieces: int
) -> None:
    count = pieces if schedule == "chain" else 1
    made = scans(layout, schedule, pieces=count, state=State(2, decay))
    spanning = {s.rank for of in layout.by_document.values() if len(of) > 1 for s in of}
    assert set(made) == spanning
    check_states(layout, made)


@pytest.mark.parametrize(
    ("schedule", "ranks", "pieces"),
    [("chain", 1024, 2), ("tree", 1024, 1), ("serial", 1024, 1), ("allgather", 48, 1)],
)
def test_many_ranks(schedule: str, ranks: int, pieces: int) -> None:
    layout = contiguous([2, 3 * ranks - 2], ranks=ranks)
    assert longest_chain(layout) == ranks
    check_states(layout, scans(layout, schedule, pieces=pieces, state=State(1, "head")))


Change = Callable[[list[Op]], list[Op]]


def swapped(ops: list[Op]) -> list[Op]:
    """The two last folds, the other way round."""
    folds = [at for at, op in enumerate(ops) if isinstance(op, Fold)]
    ops[folds[-1]], ops[folds[-2]] = ops[folds[-2]], ops[folds[-1]]
    return ops


def twice(ops: list[Op]) -> list[Op]:
    """The last fold done again."""
    return [*ops, next(op for op in ops[::-1] if isinstance(op, Fold))]


def without(ops: list[Op]) -> list[Op]:
    """The last fold left out."""
    last = max(at for at, op in enumerate(ops) if isinstance(op, Fold))
    return ops[:last] + ops[last + 1 :]


@pytest.mark.parametrize("change", [swapped, twice, without])
@pytest.mark.parametrize("schedule", ["allgather", "tree"])
def test_the_checker_finds_states_out_of_order_twice_or_missing(
    schedule: str, change: Change
) -> None:
    layout = contiguous([24], ranks=6)
    made = scans(layout, schedule)
    forward: Phases = (tuple(change(list(made[5].forward[0]))),)
    kinds = zip(made[5].kinds, made[5].rows, strict=True)
    made[5] = Program.build(arrays=list(kinds), held=(), forward=forward, backward=made[5].backward)
    with pytest.raises(PlanError, match="rank 5: the entering state is not composed of"):
        check_states(layout, made)


def test_the_checker_finds_a_rank_without_a_program_and_a_sum_in_place_of_a_map() -> None:
    layout = contiguous([12], ranks=3)
    made = scans(layout, "chain")
    with pytest.raises(PlanError, match="no progress: rank 1 waits for 0"):
        check_states(layout, {1: made[1], 2: made[2]})
    with pytest.raises(PlanError, match="rank 0 shares a document"):
        check_states(layout, {})
    columns = made[1].ops.copy()
    columns[columns[:, 2] == 4, 3] = 1
    made[1] = replace(made[1], ops=columns)
    with pytest.raises(PlanError, match="rank 1: sum makes"):
        check_states(layout, made)


@every_direction
@pytest.mark.parametrize("ranks", [3, 8, 64, 1024], ids="ranks{}".format)
def test_a_chain_sends_one_state_per_pass_and_holds_one_whatever_the_ranks(
    ranks: int, backward: bool
) -> None:
    layout = contiguous([4 * ranks], ranks=ranks)
    for pieces in (1, 4):
        for rank in (0, ranks // 2, ranks - 1):
            made = state_scan.scan_program(
                layout, rank=rank, state=ROWS, schedule="chain", pieces=pieces
            )
            assert made is not None
            ends = rank == (0 if backward else ranks - 1)
            way = -1 if backward else 1
            expected = {} if ends else {rank + way: STATE}
            assert sent(made, WIDTHS, backward=backward) == expected
            through = 0 < rank < ranks - 1
            assert peak_bytes(made, WIDTHS, backward=backward) == (STATE if through else 0)
            messages = message_peak_bytes(made, WIDTHS, backward=backward)
            assert messages <= (2 * STATE if through else STATE)


@every_direction
def test_a_tree_sends_one_window_per_step_and_holds_two(backward: bool) -> None:
    peaks = set()
    for ranks in (16, 256):
        layout = contiguous([4 * ranks], ranks=ranks)
        made = state_scan.scan_program(layout, rank=ranks // 2, state=ROWS, schedule="tree")
        assert made is not None
        steps = ranks.bit_length() - 2  # half of the ranks lie ahead
        total = sum(sent(made, WIDTHS, backward=backward).values())
        assert steps * (STATE + FACTORS) <= total <= (steps + 1) * (STATE + FACTORS)
        peaks.add(peak_bytes(made, WIDTHS, backward=backward))
    assert len(peaks) == 1 and peaks <= {2 * STATE + 3 * FACTORS}


def test_an_allgather_sends_every_pair_to_every_later_rank() -> None:
    layout = contiguous([32], ranks=8)
    made = scans(layout, "allgather")
    assert sent(made[0], WIDTHS, backward=False) == {peer: STATE for peer in range(1, 8)}
    both = STATE + FACTORS
    assert sent(made[3], WIDTHS, backward=False) == {peer: both for peer in range(4, 8)}
    assert sent(made[3], WIDTHS, backward=True) == {peer: both for peer in range(3)}


@every_schedule
def test_b42_ranks_without_a_common_document_exchange_nothing(schedule: str) -> None:
    assert not scans(contiguous([6] * 8, ranks=8), schedule)
    made = scans(contiguous([6, 6, 12, 6, 18, 6], ranks=9), schedule)
    assert sorted(made) == [2, 3, 5, 6, 7]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "serial"])  # it waits first
@every_direction
def test_a_rank_where_a_document_starts_sends_before_it_waits(
    schedule: str, backward: bool
) -> None:
    layout = contiguous([9, 9], ranks=3)
    made = state_scan.scan_program(layout, rank=1, state=ROWS, schedule=schedule)
    assert made is not None
    (ops,) = made.backward if backward else made.forward
    sends = [at for at, op in enumerate(ops) if isinstance(op, Post) and op.sends]
    waits = [at for at, op in enumerate(ops) if isinstance(op, Wait)]
    assert sends and max(sends) < min(waits)
    assert not any(isinstance(op, Fold) and op.how == "affine" for op in ops)


@pytest.mark.parametrize("pieces", [1, 2, 4], ids="pieces{}".format)
def test_a_rank_inside_a_document_passes_on_piece_by_piece(pieces: int) -> None:
    layout = contiguous([9], ranks=3)
    made = state_scan.scan_program(layout, rank=1, state=ROWS, schedule="chain", pieces=pieces)
    assert made is not None
    kinds = [
        "send" if isinstance(op, Post) and op.sends else "wait" if isinstance(op, Wait) else None
        for op in made.forward[0]
    ]
    assert [kind for kind in kinds if kind][: 2 * pieces] == ["wait", "send"] * pieces


def test_what_cannot_be_scanned_is_refused() -> None:
    layout = contiguous([8], ranks=2)
    with pytest.raises(ValueError, match="longctx_scan='ring' is not built yet; use one of"):
        state_scan.scan_program(layout, rank=0, state=ROWS, schedule="ring")
    with pytest.raises(ValueError, match="pieces=2 of 'tree': only a chain is cut"):
        state_scan.scan_program(layout, rank=0, state=ROWS, schedule="tree", pieces=2)
    other = cut([40, 5, 3], ranks=4, layout="zigzag")
    with pytest.raises(ValueError, match="use longctx_layout=contiguous"):
        state_scan.scan_program(other, rank=0, state=ROWS, schedule="chain")


@given(layout=layouts(), width=st.integers(1, 9))
@examples(150)
def test_halos_hold_the_rows_before_of_the_same_document(layout: Layout, width: int) -> None:
    made = programs(
        lambda r: state_scan.halo_program(layout, rank=r, width=width), ranks=layout.ranks
    )
    flat = [layout.flat_rows(rank) for rank in range(layout.ranks)]
    begins = np.cumsum(layout.lengths) - layout.lengths
    there = {r.rank: r for r in lock_step(made, backward=False)}
    back = {r.rank: r for r in lock_step(made, backward=True)}
    rows = {  # what each token's row holds, and what comes back to it
        token: (there[rank].values[HaloArray.TAIL][at], rank, at)
        for rank in made
        for at, token in enumerate(flat[rank][-width:].tolist())
    }
    returned = {rank: np.zeros_like(back[rank].values[HaloArray.TAIL_GRAD]) for rank in made}
    received = 0
    for rank in range(layout.ranks):
        segments = layout.of_rank(rank)
        reach = min(width, segments[0].start) if segments else 0
        first = begins[segments[0].document] + segments[0].start if segments else 0
        for distance in range(1, reach + 1):
            held, giver, at = rows[first - distance]
            assert there[rank].values[HaloArray.HALO][width - distance] == held
            returned[giver][at] += back[rank].values[HaloArray.HALO_GRAD][width - distance]
            received += 1
    for rank, grads in returned.items():
        assert (back[rank].values[HaloArray.TAIL_GRAD] == grads).all()
    per_row = WIDTHS.row("x")
    assert sum(sum(sent(p, WIDTHS, backward=False).values()) for p in made.values()) == (
        received * per_row
    )


def test_halos_come_in_one_message_unless_shards_are_shorter() -> None:
    wide, width = contiguous([64], ranks=8), 3
    for rank in range(8):
        made = state_scan.halo_program(wide, rank=rank, width=width)
        assert made is not None
        expected = {} if rank == 7 else {rank + 1: width * WIDTHS.row("x")}
        assert sent(made, WIDTHS, backward=False) == expected
    short = state_scan.halo_program(contiguous([8], ranks=8), rank=4, width=width)
    assert short is not None
    assert sent(short, WIDTHS, backward=False) == {peer: WIDTHS.row("x") for peer in (5, 6, 7)}
    assert state_scan.halo_program(contiguous([4] * 8, ranks=8), rank=4, width=width) is None


def test_the_model_picks_by_ranks_state_and_link() -> None:
    state = StateSizes(State(128, "matrix"), 32, 128)  # 2 MiB, as the delta rule's of the notes
    assert state.state_bytes == 2**21 and state.pair_bytes == 2**22
    fast = NeighbourLink(hop=2e-5, rate=40e9)
    chain, tree, gathered = (
        choose_schedule(state, ranks=64, link=fast, flag=flag)
        for flag in ("chain", "tree", "allgather")
    )
    assert chain.pieces == 16 and chain.seconds == pytest.approx(78 * (2e-5 + 2**17 / 40e9))
    assert tree.seconds == pytest.approx(6 * (2e-5 + 2**22 / 40e9))
    assert gathered.seconds == pytest.approx(2e-5 + 63 * 2**22 / 40e9)
    assert choose_schedule(state, ranks=64, link=fast) == tree
    slow = NeighbourLink(hop=1e-4, rate=1e8)
    assert choose_schedule(state, ranks=8, link=slow).name == "chain"
    assert choose_schedule(state, ranks=2, link=slow) == (
        "chain",
        1,
        pytest.approx(1e-4 + 2**21 / 1e8),
    )


def test_pieces_are_heads_or_columns() -> None:
    assert cuts(6, 4) == [1, 2, 3, 6, 12, 24]
    assert cuts(1, 3) == [1, 3]
    assert longest_chain(contiguous([5, 20, 5], ranks=6)) == 4
    assert longest_chain(contiguous([5] * 6, ranks=6)) == 1
