"""Run the bench of `charm` at tiny sizes: bytes, work, equal results and quotients, never times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks import charm, sweep
from benchmarks.__main__ import main
from benchmarks.cluster import ClusterUnavailable
from benchmarks.cluster_spec import ClusterSpec
from benchmarks.on_cluster import run_on
from benchmarks.public_ring import PublicRing
from benchmarks.real import compare
from benchmarks.timed import Case, Measured, Way, time_ways
from hf_longctx.comm.topology import LinkRate
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.predict.predict import entries
from hf_longctx.planning.program.checker import check
from hf_longctx.planning.program.counts import sent

if TYPE_CHECKING:
    from hf_longctx.verify.rank_pool import RankPool

EIGHT = Case(levels=Levels((2, 4)), lengths=(256,), heads=8, kv_heads=4, head_dim=8)
PUBLIC = Way(algorithm="ring", public=True)


def public(case: Case) -> PublicRing:
    made = case.plan(PUBLIC)
    assert isinstance(made, PublicRing)
    return made


@pytest.mark.parametrize(
    ("ranks", "lengths"), [(2, (100,)), (4, (800,)), (3, (5, 1, 333)), (8, (800, 1)), (2, (3,))]
)
def test_a_public_ring_is_exact(ranks: int, lengths: tuple[int, ...]) -> None:
    check(public(replace(EIGHT, levels=Levels((ranks,)), lengths=lengths)))


def test_a_public_ring_sends_what_its_closed_form_says() -> None:
    # R - 1 chunks; and in backward R gradients, of twice their bytes: float32 beside bfloat16
    plan = public(EIGHT)
    for rank in range(8):
        program = plan.program(rank)
        for backward, chunks in ((False, 7), (True, 7 + 2 * 8)):
            bytes_sent = sum(sent(program, EIGHT.widths, backward=backward).values())
            assert bytes_sent == chunks * EIGHT.chunk_bytes


def test_every_way_does_the_whole_work() -> None:
    whole = 256 * 257 / 2
    for way in sweep.ways(EIGHT).values():
        plan = EIGHT.plan(way)
        for backward in (False, True):
            programs = [plan.program(rank) for rank in range(8)]
            done = [entries(p, kind=EIGHT.kind, backward=backward).sum() for p in programs]
            assert sum(done) == pytest.approx(whole)
            assert max(done) < 1.01 * whole / 8


def test_what_crosses_a_shared_link_bounds_every_schedule() -> None:
    setup = sweep.Setup(case=EIGHT, rails="shared", tau=1e-3)
    found = {name: sweep.loads(setup, way) for name, way in sweep.ways(EIGHT).items()}
    assert found["public_ring"].crossing == pytest.approx((7e-3, 23e-3))
    # Keys: four chunks one way. Back come the gradients of the front halves that went the other
    # way, and of the chunks that came this way go four: 4 + 4 and 2 + 8.
    assert found["charm"].crossing == pytest.approx((4e-3, 10e-3))
    assert found["ring"].crossing[1] < found["public_ring"].crossing[1]
    c = found["charm"].bound(setup.entry_seconds(1.0))
    assert (c.forward, c.backward) == pytest.approx((8e-3, 20e-3), rel=0.01)  # compute, in chunks


def test_ranks_send_what_is_planned(rank_pool: RankPool) -> None:
    case = replace(EIGHT, levels=Levels((2, 2)), lengths=(64, 1))
    named = {**sweep.ways(case), "flat": Way(algorithm="ring", flat=True)}
    runs = rank_pool.run(
        time_ways, ranks=4, channels=4, case=case, ways=named, points=[0.0, 1e-9], rounds=[2, 1]
    )
    for run in runs:
        assert run.sent == run.planned
        assert {name: [len(point) for point in of_way] for name, of_way in run.seconds.items()} == {
            name: [2, 1] for name in named
        }
        assert len(run.rates) == 2


def measured(times: dict[str, tuple[float, float]], *, late: float) -> list[Measured]:
    """Two ranks, one of which is `late`; a second round that is slower."""
    runs = []
    for wait in (0.0, late):
        seconds = {
            name: [[(f + wait, b + wait), (f + wait + 9, b + wait + 9)]]
            for name, (f, b) in times.items()
        }
        rates = tuple(LinkRate(together=x, alone=4 * x) for x in (1e6, 1e9))
        counts = dict.fromkeys(times, 1)
        runs.append(
            Measured(seconds=seconds, sent=counts, planned=counts, carried=counts, rates=rates)
        )
    return runs


def test_figures_are_those_of_the_last_rank_at_its_best() -> None:
    setup = sweep.Setup(case=EIGHT, rails="shared", tau=1e-3)
    times = {"public_ring": (9.0, 29.0), "ring": (8.0, 24.0), "charm": (7.0, 15.0)}
    times |= {"ulysses": (20.0, 20.0), "hybrid": (6.0, 14.0)}
    found = sweep.figures(setup, measured(times, late=1.0), ratios=[0.7])
    (row,) = found["sweep"]
    assert (row["forward_seconds"], row["ring_backward_seconds"]) == (8.0, 30.0)
    assert (row["auto"], row["forward_speedup"]) == ("charm", 10 / 8)
    assert row["model_forward_speedup"] == pytest.approx(7.7 / 5.6)
    assert row["backward_speedup_over_our_ring"] == 25 / 16
    assert found["ring_fraction_of_bound"]["min"] == pytest.approx(7.7e-3 / 10)
    assert found["charm_fraction_of_bound"]["min"] == pytest.approx(5.6e-3 / 8)
    assert found["auto_regret"] == pytest.approx((8 + 16) / (7 + 15))  # the hybrid was faster
    json.dumps(found, allow_nan=False)


def test_from_where_a_flat_ring_is_as_good() -> None:
    def row(ratio: float, ring: float) -> dict[str, float]:
        ours = {"forward_seconds": 1.0, "backward_seconds": 1.0}
        return (
            ours
            | {"c_over_tau": ratio, "our_ring_forward_seconds": ring / 2}
            | {"our_ring_backward_seconds": ring / 2}
        )

    assert charm.even_from([row(0.0, 4.0), row(1.0, 2.04), row(2.0, 2.0)]) == 1.0
    assert charm.even_from([row(0.0, 2.0), row(1.0, 2.5)]) is None


def test_real_attention_of_ours_and_of_others_is_right() -> None:
    case = replace(EIGHT, levels=Levels((2, 1)), lengths=(64,))
    spec = ClusterSpec(nodes=2, ranks_per_node=1, cross=10**9)
    try:
        runs = run_on(spec, compare, channels=4, seconds=240.0, case=case, rounds=1, exact=True)
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    names = {"charm", "ring", "ulysses", "hybrid", "torch_ring", "deepspeed"}
    for run in runs:
        assert run.errors.keys() == names
        assert max(run.errors.values()) < 1e-5
        assert min(run.carried.values()) > 64 / 2 * case.widths.row("kv")  # at least all keys


def test_a_machine_without_nodes_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["charm"]) == 2
    assert "no unshare" in capsys.readouterr().err
