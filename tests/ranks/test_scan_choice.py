"""Choose one schedule on every rank by the measured link (`--longctx_scan auto`), and log it."""

from __future__ import annotations

import logging
import pickle
from typing import Any

from helpers import threads

from hf_longctx.comm import topology
from hf_longctx.comm.channels import Hub
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.layouts.levels import NeighbourLink
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.state_scan import State
from hf_longctx.planning.predict.scan_schedule import StateSizes
from hf_longctx.training.measurements import find_link, log_scans

DELTA = StateSizes(State(128, "matrix"), 32, 128)  # 2 MiB
LIGHTNING = StateSizes(State(64, "head"), 8, 64)
FAST, SLOW = NeighbourLink(1e-3, 40e9), NeighbourLink(1e-4, 1e8)


def batch(
    link: NeighbourLink | None, *, ranks: int = 8, lengths: tuple[int, ...] = (64,)
) -> LongCtxBatch:
    layout = cut(lengths, ranks=ranks, layout="contiguous")
    return LongCtxBatch(layout, 0, PlanOptions(link=link))


def test_the_link_decides() -> None:
    for link, name in ((FAST, "allgather"), (SLOW, "chain"), (None, "chain")):
        given = batch(link)
        assert given.scan_program(DELTA) is not None
        taken = given.binding.scans[DELTA]
        assert (taken.schedule.name, taken.ranks) == (name, 8)
        assert (taken.link, taken.measured) == (link or NeighbourLink(), link is not None)


def test_choices_stay_with_their_process_and_ranks_that_differ_are_found_out() -> None:
    given = batch(FAST)
    assert given.scan_program(DELTA) is not None and given.binding.scans
    sent = pickle.loads(pickle.dumps(given))
    assert not sent.binding.scans and not sent.binding.programs
    found = [batch(link).fingerprints for link in (FAST, SLOW, None)]
    assert len({tuple(each.values()) for each in found}) == 3


def test_all_ranks_go_by_the_slowest_one(monkeypatch: Any) -> None:
    pace = {0: 1e9, 1: 4e9, 2: 2e9}
    small = {0: 1e4, 1: 5e3, 2: 2e4}  # messages of a byte, per second

    def rate(channel: Any, pair: Any, size: int, *, what: str) -> float:
        return (small if size == 1 else pace)[channel.rank]

    monkeypatch.setattr(topology, "_rate", rate)
    channels, found = Hub(3).channels(), dict[int, NeighbourLink]()

    def work(rank: int) -> None:
        found[rank] = find_link(channels[rank], ranks=3)

    threads(work, ranks=3)
    assert {*found.values()} == {NeighbourLink(2e-4, 1e9)}


def measure(context: Any) -> NeighbourLink:
    """A rank's job."""
    return find_link(context.channel, ranks=context.ranks)


def test_ranks_over_gloo_agree_on_what_they_measured(rank_pool: Any) -> None:
    first, *others = rank_pool.run(measure, ranks=3)
    assert all(link == first for link in others)
    assert 0 < first.hop < 1 and 0 < first.rate < float("inf")
    assert first.hop < topology.PROBE_BYTES / first.rate  # a byte takes less than 4 MiB


def test_each_kind_of_layer_and_length_of_a_chain_is_logged_once(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    said: frozenset[tuple[StateSizes, int]] = frozenset()
    for lengths in ((64,), (64,), (24, 40), (8,) * 8):
        given = batch(SLOW, lengths=lengths)
        for sizes in (DELTA, LIGHTNING):
            given.scan_program(sizes)
        said = log_scans(given, before=said)
    delta, lightning, shorter, _ = caplog.messages
    assert delta.startswith(
        "longctx_scan=auto, 32 heads x 128 x 128, decay by matrix: chain over 8 ranks, pieces "
    )
    assert delta.endswith(" ms by a link of 100 us a hop and 0.1 GB/s (measured)")
    assert ", 8 heads x 64 x 64, decay by head: " in lightning
    assert "over 5 ranks, pieces" in shorter
    assert len(said) == 4


def test_a_link_that_was_not_measured_is_called_assumed(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    given = batch(None)
    given.scan_program(DELTA)
    log_scans(given, before=frozenset())
    (line,) = caplog.messages
    assert line.endswith("a link of 50 us a hop and 1 GB/s (assumed, as none was measured)")
