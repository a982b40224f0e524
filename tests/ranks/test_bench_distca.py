"""Run the bench of `distca` at tiny sizes: counts, bytes, balance, equal results, never times."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from benchmarks import distca, exposed, served, tables
from benchmarks.__main__ import main
from benchmarks.cluster import ClusterUnavailable
from benchmarks.cluster_spec import ClusterSpec
from benchmarks.common import Shape
from benchmarks.on_cluster import run_on
from benchmarks.sides import RankRun, Step, gain, lost, run_rank, step
from benchmarks.stretches import Seconds, Stretch, assemble

if TYPE_CHECKING:
    from hf_longctx.verify.rank_pool import RankPool

TINY = Shape(layers=2, hidden=32, mlp=48, heads=2, kv_heads=1, head_dim=16, vocabulary=64)
PUBLISHED = (8192,) + (256,) * 32
OUT, BACK = ((0, 1, 0),), ((1, 0, 0),)  # a message from rank 0 to rank 1, and its answer


def stretch(event: str, cpu: float, *, messages=(), at: float = 0.0, until: float = 0.0) -> Stretch:
    return Stretch(event, messages, cpu, 0.0, at, until, 0)


def test_pair_sides_compute_the_same_and_send_what_is_planned(rank_pool: RankPool) -> None:
    pair = distca.sides((1024,) + (128,) * 8)
    runs = rank_pool.run(run_rank, ranks=2, shape=TINY, sides=pair, rounds=1)
    found = distca.figures(runs, pair, shape=TINY)
    assert found["loss_error"] < 1e-6
    assert found["grad_error"] < 1e-4
    assert found["bytes_sent"] == found["bytes_planned"] > 0
    assert found["attention_max_over_mean"] < found["attention_max_over_mean_static"]
    json.dumps(found, allow_nan=False)


def test_distca_case_is_uneven_and_planned_within_the_tolerance() -> None:
    plan, static = (distca.sides(PUBLISHED)[name].plan(Shape()) for name in ("ours", "static"))
    assert [plan.layout.rows(rank) for rank in range(2)] == [8192, 8192]
    assert static.attention_max_over_mean() > 1.9
    assert plan.attention_max_over_mean(balanced=False) == static.attention_max_over_mean()
    assert plan.attention_max_over_mean() <= 1.05


def test_a_step_is_put_together_from_the_best_stretches() -> None:
    """Rank 1 works for rank 0, which waits: in one round rank 1 was slow, in the other rank 0."""

    def rank0(own: float, *, at: float) -> list[Stretch]:
        return [
            stretch("post", own, messages=OUT, at=at),
            stretch("post", 0.0, messages=BACK, at=at),
            stretch("start", 0.0),
            stretch("stop", 1.0),
            stretch("wait", 0.0, messages=BACK, at=at + 1, until=at + 9),
            stretch("end", 0.5),
        ]

    def rank1(served: float, *, came: float, at: float) -> list[Stretch]:
        return [
            stretch("post", 0.0, messages=OUT),
            stretch("wait", 0.0, messages=OUT, until=came),
            stretch("start", 0.0),
            stretch("stop", served),
            stretch("post", 0.25, messages=BACK, at=at),
            stretch("end", 0.0),
        ]

    # the message out takes 0.5 after its post at 2, or 0.75 after that at 5; the answer 0.125 after
    # its post at 10.875, and 1 after that at 13
    rounds = [[rank0(2.0, at=2.0), rank0(5.0, at=5.0)], [[], []]]
    rounds[1] = [rank1(9.0, came=2.5, at=10.875), rank1(4.0, came=5.75, at=13.0)]
    first, second = assemble(rounds)
    assert second.waiting == 2.0 + 0.5  # until rank 0, at its best, has posted, and the way
    assert second.total == 2.5 + 4.0 + 0.25
    assert first.waiting == second.total + 0.125 - 3.0
    assert (first.attending, first.working) == (1.0, 2.5)
    assert first.total == second.total + 0.125 + 0.5


def test_an_exchange_that_was_always_there_took_no_time() -> None:
    waits = [stretch("post", 1.0, messages=OUT, at=1.0), stretch("wait", 2.0, messages=OUT)]
    assert [rank.waiting for rank in assemble([[waits], [waits]])] == [0.0, 0.0]


def test_an_exchange_takes_no_longer_than_a_round_that_did_not_wait_for_it() -> None:
    """Blocked for 5 seconds in a disturbed round; in the other it was there after 2."""

    def rounds(came: float, *, at: float) -> list[Stretch]:
        post = stretch("post", 1.0, messages=OUT, at=1.0)
        return [post, stretch("wait", 0.0, messages=OUT, at=at, until=came)]

    ranks = [[rounds(6.0, at=1.0), rounds(3.0, at=3.0)]] * 2
    assert [rank.waiting for rank in assemble(ranks)] == [2.0, 2.0]


def test_gain_and_what_is_lost_from_known_seconds() -> None:
    def run(static: tuple[float, float], ours: tuple[float, float], wait: float) -> RankRun:
        sides = {"static": (*static, 0.0), "ours": (*ours, wait)}
        rounds = {
            name: [[stretch("start", working), stretch("stop", attending)]]
            for name, (working, attending, _) in sides.items()
        }
        return RankRun(rounds, {name: [1.0] for name in sides})

    runs = [run((6.0, 8.0), (6.5, 5.25), 0.0), run((5.0, 2.0), (6.0, 5.0), 0.0)]
    static, ours = step(runs, "static"), step(runs, "ours")
    assert (static.seconds, static.ideal_seconds, ours.seconds) == (14.0, 11.0, 11.75)
    assert gain(static, ours) == 0.75
    assert lost(static, ours) == {"attention": 0.25, "packing": 0.5, "waiting": 0.0}


def test_seeds_of_the_table_offer_the_speedup_by_their_multiplications() -> None:
    shape = distca.SHAPE
    found = list(islice(tables.seeds(shape), 5))
    assert found == [20, 37, 39, 56, 62]
    for seed in found:
        packs = tables.packs(seed)
        assert [sum(pack) for pack in packs] == [8192, 8192]
        work = [shape.operations(pack) for pack in packs]
        assert 2 * max(work) / sum(work) >= 0.98 * 1.3


def test_sides_of_the_table_share_documents_and_even_attention_out() -> None:
    shape = distca.SHAPE
    sides = tables.sides(sum(tables.packs(37), []), shape=shape)
    assert len({tuple(side.layout.lengths) for side in sides.values()}) == 1
    even = {name: side.plan(shape).attention_max_over_mean() for name, side in sides.items()}
    assert even["static"] > 1.7
    assert max(even["ours"], even["ours_contiguous"]) <= 1.05
    assert max(even["ring"], even["gather"]) < 1.001
    assert 1.05 < even["repacked"] < even["static"]
    assert sides["static"].bytes_planned(shape) == sides["repacked"].bytes_planned(shape) == 0
    repacked = sides["repacked"].layout
    assert len(repacked.columns) == len(repacked.lengths)  # whole documents


def test_table_sides_compute_the_same(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SPEEDUP", 0.0)  # times of so few tokens decide nothing
    found = tables.measure(rank_pool, shape=TINY, wanted=1, rounds=1, tokens=1024)
    assert found["seeds"] == [0]
    for row in found["by_seed"].values():
        assert row["loss_error"] < 1e-6
        assert row["grad_error"] < 1e-4
        assert row["bytes_sent_ours"] > 0
    json.dumps(found, allow_nan=False)


def test_every_overlap_computes_the_same_and_a_filled_run_sends_nothing(
    rank_pool: RankPool,
) -> None:
    cases = exposed.sides((1024, 1024) + (128,) * 16)
    shape = replace(TINY, heads=4, kv_heads=2)
    runs = rank_pool.run(run_rank, ranks=2, shape=shape, sides=cases, rounds=1)
    assert max(run.loss_error for run in runs) < 1e-6
    assert max(run.grad_error for run in runs) < 1e-4
    for name, side in cases.items():
        stretches = [s for run in runs for s in run.rounds[name][0]]
        assert step(runs, name).sent == side.bytes_planned(shape) > 0  # as if it were sent
        waits = [s for s in stretches if s.event == "wait"]
        assert all(bool(s.messages) != side.filled for s in waits)
        assert all(rank.waiting == 0 for rank in step(runs, name).ranks) or not side.filled
    posts = {
        name: sum(s.event == "post" for s in runs[0].rounds[name][0])
        for name in ("none", "heads", "pingpong")
    }
    assert posts["heads"] > posts["none"]  # in groups of heads
    assert posts["pingpong"] == 2 * posts["none"]  # both halves


def test_exposed_fractions_from_known_seconds() -> None:
    def rank(wait: float) -> list[list[Stretch]]:
        """Rank 1 has posted at once, and what it sends takes `wait` seconds."""
        return [
            [
                stretch("post", 0.0, messages=BACK, at=0.0),
                stretch("start", 0.0),
                stretch("stop", 2.0),
                stretch("wait", 0.0, messages=BACK, at=2.0, until=2.0 + wait),
                stretch("end", 6.0),
            ]
        ]

    rounds, alone = {}, {}
    for name, wait in {"none": 2.0, "heads": 0.5, "pingpong": 0.0}.items():
        filled = exposed.name_of(name, filled=True)
        rounds |= {name: rank(wait), filled: [[s._replace(messages=()) for s in rank(0.0)[0]]]}
        post = stretch("post", 0.0, messages=BACK)
        alone |= {name: [[post]], filled: [[post]]}
    wall = {name: [1.0] for name in rounds}
    found = exposed.figures([RankRun(rounds, wall), RankRun(alone, wall)], sent=3, rate=8)
    assert found["t"] == {"none": 10.0, "heads": 8.5, "pingpong": 8.0}
    assert set(found["t_nocomm"].values()) == {8.0}
    assert found["exposed_comm_fraction"] == {"none": 0.25, "heads": 0.0625, "pingpong": 0.0}
    assert found["hidden"] == {"heads": 0.75, "pingpong": 1.0}
    assert found["comm_over_attention"] == 3.0  # 3 seconds on the link, 1 of attention a rank


def test_links_carry_the_messages_in_half_of_attention_time() -> None:
    steps = Step(
        ranks=[Seconds(attending=a, working=1.0, waiting=0.0) for a in (3.0, 5.0)], wall=0.0, sent=0
    )
    assert exposed.links(steps, sent=10**8).cross == 8 * 10**8 / 2


def test_timed_compute_moves_attention_to_a_server(rank_pool: RankPool) -> None:
    in_place = distca.sides((1024,) + (128,) * 8)["ours"]
    work = Step(
        ranks=[Seconds(attending=a, working=0.02, waiting=0.0) for a in (0.4, 0.02)],
        wall=0.0,
        sent=0,
    )
    found = served.measure(rank_pool, shape=TINY, in_place=in_place, work=work, rounds=1)
    assert 0.2 < found["attention_on_server"] <= 0.35  # a third, but for whole granules
    assert found["t_in_place"] > 0.2  # a rank's share, slept for
    assert found["server_ratio"] == found["t_in_place"] / found["t_with_server"]


def test_ranks_of_a_cluster_run_the_sides() -> None:
    case = exposed.sides((1024, 1024) + (128,) * 16)["none"]
    spec = ClusterSpec(nodes=2, ranks_per_node=1, cross=10**9)
    try:
        runs = run_on(spec, run_rank, seconds=240.0, shape=TINY, sides={"none": case}, rounds=1)
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    assert step(runs, "none").sent == case.bytes_planned(TINY) > 0
    assert all(rank.total > 0 for rank in step(runs, "none").ranks)


def test_a_machine_without_nodes_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["distca"]) == 2
    said = capsys.readouterr().err
    assert "no unshare" in said
    assert "iproute2" in said
    assert "rounds" not in said


def test_one_report_names_every_figure(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that take long are stood in for: each is run by a test above."""
    medians = dict.fromkeys(tables.MEDIANS, 1.0)
    by_overlap = {"exposed_comm_fraction": {"none": 0.2}, "hidden": {"heads": 0.9}}
    monkeypatch.setattr(exposed, "check_cluster", lambda: None)
    monkeypatch.setattr(tables, "measure", lambda *_, **given: {"seeds": [20], **medians})
    monkeypatch.setattr(exposed, "measure", lambda *_, **given: {**by_overlap, "link_mbit": 1.0})
    monkeypatch.setattr(served, "measure", lambda *_, **given: {"server_ratio": 1.1})
    pair = (1024,) + (128,) * 8
    found = distca.run(shape=TINY, pair=pair, rounds=1, pool=rank_pool)
    assert (found["documents"], found["tokens"]) == (9, 2048)
    assert found.keys() >= {"shape", "seed", "cpu", "cores", "clock", "allocator", "rounds"}
    assert found.keys() >= {"t_static", "t_ideal", "t_ours", "gain_captured", "wlb_ratio"}
    assert found.keys() >= {"repack_ratio", "server_ratio", "exposed_comm_fraction", "hidden"}
    assert found["table"].keys() >= {"seeds", "gain_captured"}
    json.dumps(found, allow_nan=False)
