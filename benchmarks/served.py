"""Two trainers with one extra server against the same two in place, with timed compute.

Three processes do not compute at once on two cores, so kernels and linear layers
sleep for the time that they were measured to take, and compute nothing; rows have their real size
and really move. The server answers as `hf-longctx serve` does, and attends as fast as a trainer.
Letters: t seconds of a step, the wall seconds of the best round.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Shape
from benchmarks.sides import Side, Step
from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.bridge import BridgedChannel
from hf_longctx.comm.channels import Channel, ExchangeError, GlooChannel, Payload
from hf_longctx.kernels.kernel_calls import CAUSAL, KernelCall
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.runtime import executor
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account
from hf_longctx.runtime.requests import RequestSender, send_requests
from hf_longctx.servers.server_loop import ServerStats, serve_requests
from hf_longctx.verify.rank_pool import RankContext, RankPool

logger = logging.getLogger(__name__)
TRAINERS, SERVER = 2, 2  # ranks 0 and 1, and the number of the server
_FORWARD = 2 / 7  # of attention time: two products of the seven that a step forms per score
_LINEAR_FORWARD = 1 / 3  # of linear time


class Sleeping:
    """Kernels that take their time and leave their results as they are.

    Args:
        entry (`float`): Seconds of a score entry, forward and backward together.
    """

    def __init__(self, entry: float) -> None:
        self.entry = entry

    def attend(self, call: KernelCall, **given: Any) -> None:
        """In place of `softmax.attend`."""
        time.sleep(_FORWARD * self.entry * _entries(call))

    def attend_grad(self, call: KernelCall, **given: Any) -> None:
        """In place of `softmax.attend_grad`."""
        time.sleep((1 - _FORWARD) * self.entry * _entries(call))


def _entries(call: KernelCall) -> int:
    """Score entries of a call."""
    keys = (call.k_lens + 1) / 2 if call.mask == CAUSAL else call.k_lens
    return int((call.q_lens * keys).sum())


class _Ending:
    """A bridge that is lost after so many requests: the end of a server's loop."""

    def __init__(self, bridge: Channel, requests: int) -> None:
        self.bridge, self.left = bridge, requests
        self.rank, self.sent, self.more = bridge.rank, bridge.sent, bridge.more

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        if what == "a request":
            if not self.left:
                raise ExchangeError("the trainers are done")
            self.left -= 1
        return self.bridge.post(sends, recvs, what=what)

    def agree(self, number: int, *, what: str) -> None:
        self.bridge.agree(number, what=what)


def run_process(
    context: RankContext, *, shape: Shape, side: Side, work: Step, rounds: int
) -> list[float]:
    """One trainer's wall seconds of each round; a server has none.

    Args:
        context (`RankContext`): Of three processes; the last one serves where the side has a
            server.
        shape (`Shape`): The model.
        side (`Side`): How the trainers' documents are balanced.
        work (`Step`): What a step of them took, in place and without exchanges.
        rounds (`int`): How often.
    """
    plan = side.plan(shape)
    scores = float(plan.work(balanced=True).sum()) * shape.layers
    kernels = Sleeping(sum(rank.attending for rank in work.ranks) / scores)
    with patch.object(executor, "softmax", kernels):
        if context.rank == SERVER:
            requests = 2 * shape.layers * rounds if side.speeds else 0
            with suppress(ExchangeError):
                serve_requests(_Ending(context.channel, requests), ServerStats())
            return []
        bridges = [context.channel for _ in side.speeds]
        channel = BridgedChannel(
            GlooChannel(context.group), bridges, ranks=TRAINERS, rank=context.rank
        )
        senders = [RequestSender(bridge, ranks=TRAINERS) for bridge in bridges if context.rank == 0]
        program = plan.program(context.rank)
        call = partial(send_requests, channel, senders, plan) if bridges else None
        linear = max(rank.working for rank in work.ranks) / shape.layers
        taken = []
        for _ in range(rounds):
            _meet(channel, other=1 - context.rank)
            started = time.perf_counter()
            layers = [
                Layer(program, channel, Scoring(), Account(), call=call)
                for _ in range(shape.layers)
            ]
            _step(layers, shape, rows=side.layout.rows(context.rank), linear=linear)
            taken.append(time.perf_counter() - started)
        return taken


def _meet(channel: Channel, *, other: int) -> None:
    """Wait for the other trainer."""
    ours, theirs = torch.zeros(2, 1, dtype=torch.uint8)
    channel.post([(other, ours)], [(other, theirs)], what="the start of a step").wait()


def _step(layers: Sequence[Layer], shape: Shape, *, rows: int, linear: float) -> None:
    """Forward and backward of attention layers, with sleep for the linear ones between them."""
    outs = []
    for layer in layers:
        time.sleep(_LINEAR_FORWARD * linear)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        given = [torch.zeros(rows, n, shape.head_dim, requires_grad=True) for n in heads]
        outs.append(attend(layer, *given)[0])
    for out in reversed(outs):
        out.backward(torch.zeros_like(out))
        time.sleep((1 - _LINEAR_FORWARD) * linear)


def measure(
    pool: RankPool, *, shape: Shape, in_place: Side, work: Step, rounds: int
) -> dict[str, Any]:
    """Time both ways to attend.

    Args:
        pool (`RankPool`): Three processes or more.
        shape (`Shape`): The model.
        in_place (`Side`): Balanced over the trainers alone.
        work (`Step`): What a step of its documents took, without exchanges.
        rounds (`int`): Of each way.

    Returns:
        Figures by name.
    """
    with_server = replace(in_place, speeds=(1.0,))
    found = {}
    for name, side in {"in_place": in_place, "with_server": with_server}.items():
        logger.info("timed compute: two trainers, %s, %d rounds", name, rounds)
        taken = pool.run(
            run_process, ranks=TRAINERS + 1, shape=shape, side=side, work=work, rounds=rounds
        )
        found[f"t_{name}"] = min(map(max, zip(*taken[:TRAINERS], strict=True)))
    shares = with_server.plan(shape).work(balanced=True)
    return {
        "compute": "timed: kernels and linear layers sleep",
        **found,
        "server_ratio": found["t_in_place"] / found["t_with_server"],
        "attention_on_server": float(shares[SERVER] / shares.sum()),
    }
