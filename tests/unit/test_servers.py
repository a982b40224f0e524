"""Plan for extra attention servers: tasks by speed, and a loss that shows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers import Rows, reference, run_threads

from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.bridge import BridgedChannel
from hf_longctx.comm.channels import ExchangeError, Hub, Payload
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.planning.program.program import pack

KIND = LayerKind(query_width=2, key_value_width=2)
LENGTHS = [4000, 700, 300, 1, 2000, 999]


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0), (0.5, 2.0)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)
def test_servers_take_their_share(ranks: int, speeds: tuple[float, ...]) -> None:
    layout = cut(LENGTHS, ranks=ranks, layout="spread")
    plan = make_plan(layout, kind=KIND, options=PlanOptions(speeds=speeds))
    check(plan)
    work = plan.work(balanced=True)
    filled = work / np.asarray([1.0] * ranks + list(speeds))
    assert filled.max() < 1.12 * work.sum() / (ranks + sum(speeds))
    assert filled.min() > 0.5 * filled.max()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)
def test_results_stay_whoever_serves(ranks: int) -> None:
    lengths = [900, 1, 300, 2, 99]
    rows = Rows.random(sum(lengths))
    layout = cut(lengths, ranks=ranks, layout="spread")
    plan = make_plan(
        layout, kind=rows.kind(), options=PlanOptions(tolerance=0.0, speeds=(1.0, 0.5))
    )
    run = run_threads(plan, rows)
    assert run.sent[ranks] > 0
    assert run.results.error(reference(rows, lengths)) < 1e-12


def test_rank_0_keeps_step_with_ranks_that_use_servers() -> None:
    """Rank 0 tells servers of a layer, in the order in which halves alternate elsewhere."""
    lengths = [300, 300, 600]
    rows = Rows.random(sum(lengths))
    layout = cut(lengths, ranks=2, layout="contiguous")
    plan = make_plan(layout, kind=rows.kind(), options=PlanOptions(speeds=(1.0,)))
    assert not pack(plan.program(0)).exchanges and pack(plan.program(1)).exchanges
    assert [plan.program(p).phases.tolist() for p in range(3)] == [[3, 3]] * 3
    check(plan)
    assert run_threads(plan, rows).results.error(reference(rows, lengths)) < 1e-12


def test_servers_change_the_plan_but_not_the_layout_or_the_plan_without() -> None:
    layout = cut(LENGTHS, ranks=2, layout="spread")
    plans = [
        make_plan(layout, kind=LayerKind(), options=PlanOptions(speeds=speeds))
        for speeds in ((), (1.0,), (2.0,))
    ]
    assert len({plan.digest for plan in plans}) == 3
    assert [plan.processes for plan in plans] == [2, 3, 3]


@pytest.mark.parametrize(
    ("algorithm", "speeds"), [("ring", (1.0,)), ("distca", (0.0,)), ("distca", (1.0, -1.0))]
)
def test_servers_that_cannot_be_planned_are_refused(
    algorithm: str, speeds: tuple[float, ...]
) -> None:
    layout = cut([8], ranks=2, layout="contiguous")
    with pytest.raises(ValueError, match="only distca has servers, and each speed must be"):
        make_plan(layout, kind=LayerKind(), options=PlanOptions(algorithm=algorithm, speeds=speeds))


class _Gone:
    """A bridge whose server is lost: at once, or while an exchange is under way."""

    def __init__(self, *, posts: bool) -> None:
        self.posts = posts

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        if not self.posts:
            raise ExchangeError(what)
        return self  # type: ignore[return-value]

    def done(self) -> bool:
        return True

    def wait(self, *, since: float | None = None) -> None:
        raise ExchangeError("connection closed")


@pytest.mark.parametrize("posts", [False, True], ids=["post", "wait"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_a_lost_server_owes_is_nan(posts: bool, dtype: torch.dtype) -> None:
    channel = BridgedChannel(None, [_Gone(posts=posts)], ranks=1, rank=0)  # type: ignore[list-item]
    due = torch.zeros(4, dtype=dtype)
    for _ in range(2):
        data = due.zero_().view(torch.uint8)
        channel.post([(1, data.clone())], [(1, data)], what="a test").wait()
        assert due.isnan().all()
    assert list(channel.lost) == [0]
    assert channel.sent[1] == (due.numel() * due.element_size() if posts else 0)


def test_a_bridged_channel_reaches_peers_and_servers() -> None:
    peers, bridge = Hub(2, timeout=1.0).channels(), Hub(3, timeout=1.0).channels()
    ranks = [BridgedChannel(peers[r], [bridge[r]], ranks=2, rank=r) for r in range(2)]
    sent = torch.arange(3, dtype=torch.uint8)
    to_peer, to_server = torch.zeros_like(sent), torch.zeros_like(sent)
    ranks[0].post([(1, sent), (2, sent + 1)], [], what="out").wait()
    ranks[1].post([], [(0, to_peer)], what="in").wait()
    bridge[2].post([], [(0, to_server)], what="in").wait()
    assert (to_peer.tolist(), to_server.tolist()) == ([0, 1, 2], [1, 2, 3])
    assert ranks[0].sent == {1: 3, 2: 3}


def test_servers_that_stall_together_take_as_long_as_one() -> None:
    bridges = [Hub(2, timeout=1.5).channels()[0] for _ in range(4)]
    channel = BridgedChannel(None, bridges, ranks=1, rank=0)
    due = [(1 + n, torch.zeros(4, dtype=torch.uint8)) for n in range(4)]
    started = time.monotonic()
    channel.post([], due, what="a test").wait()
    assert 1.5 <= time.monotonic() - started < 4 * 1.5  # what they take one after another
    assert len(channel.lost) == 4
