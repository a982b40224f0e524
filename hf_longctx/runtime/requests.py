"""Tell an extra server what to compute: one request for each direction of each layer.

The first rank of a group sends each server a header of fixed length, then the server's program if
it does not have it. Everything else travels as the program says. Both sides keep the same last
programs, so that neither asks the other what it has.
Layer: runtime.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..comm.arrivals import Exchange
from ..comm.bridge import BridgedChannel
from ..comm.channels import Channel, ExchangeError
from ..kernels.softmax import Scoring
from ..planning.planners.plan import Plan
from ..planning.program.counts import Widths
from ..planning.program.program import Program, pack, unpack

# Sent as an index, so the order is part of the protocol.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = struct.Struct("<11q2d")
# Programs that both sides keep: those of some batches, with a few layer kinds each. It is part of
# the protocol: a side that kept fewer would not find a program that the other did not send.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One direction of one layer.

    Args:
        backward (`bool`): Which direction.
        widths (`Widths`): Sizes of the layer's rows.
        dtype (`torch.dtype`): The model's.
        scoring (`Scoring`): How scores are formed.
    """

    backward: bool
    widths: Widths
    dtype: torch.dtype
    scoring: Scoring

    def header(self, digest: int, length: int) -> Tensor:
        """Encode the request for program `digest`, of which `length` bytes follow; uint8."""
        w, s = self.widths, self.scoring
        # Numbers of fixed size, and nothing pickled: what arrives is never run.
        packed = _HEADER.pack(
            digest, length, self.backward, _DTYPES.index(self.dtype),
            w.heads, w.kv_heads, w.head_dim, w.value_dim, w.state,
            s.window, s.causal, s.scale, s.softcap,
        )  # fmt: skip
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def read(cls, header: Tensor) -> "tuple[Request, int, int]":
        """Decode a header: the request, the program's digest, and the bytes of it that follow."""
        digest, length, backward, dtype, *rest = _HEADER.unpack(header.numpy().tobytes())
        heads, kv_heads, head_dim, value_dim, state, window, causal, scale, softcap = rest
        widths = Widths(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, state=state
        )
        scoring = Scoring(scale=scale, window=window, causal=bool(causal), softcap=softcap)
        return cls(bool(backward), widths, _DTYPES[dtype], scoring), digest, length


class _RecentPrograms:
    """The programs used last, by digest."""

    # Trainers and server use the same programs in the same order, and so drop the same ones.

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Program] = OrderedDict()

    def find(self, digest: int) -> Program | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def keep(self, digest: int, program: Program) -> None:
        self._kept[digest] = program
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)


class RequestSender:
    """Sends requests to one server; the first rank of a group has one for each server.

    Args:
        bridge (`Channel`): To the server.
        ranks (`int`): Ranks of the group: the server's number there.
    """

    def __init__(self, bridge: Channel, *, ranks: int) -> None:
        self.bridge, self.ranks = bridge, ranks
        self._programs = _RecentPrograms()
        self._pending: list[Exchange] = []

    def send(self, request: Request, program: Program) -> None:
        """Post a request. Raises `ExchangeError` if the server is lost."""
        packed = pack(program)
        known = self._programs.find(packed.digest) is not None
        data = torch.from_numpy(packed.columns).view(torch.uint8)
        sends = [(self.ranks, request.header(packed.digest, 0 if known else data.numel()))]
        if not known:
            self._programs.keep(packed.digest, program)
            sends.append((self.ranks, data))
        # Exchanges are kept until they are done: they hold the tensors that gloo still reads.
        self._pending = [x for x in self._pending if not x.done()]
        self._pending.append(self.bridge.post(sends, [], what="a request"))


def send_requests(
    channel: BridgedChannel, senders: Sequence[RequestSender], plan: Plan, request: Request
) -> None:
    """Send a request to each server that has a part in the plan; give up one that is lost."""
    for number, sender in enumerate(senders):
        program = plan.program(plan.layout.ranks + number)
        # A server without exchanges has no part in the plan and is not woken.
        if pack(program).exchanges and number not in channel.lost:
            try:
                sender.send(request, program)
            except ExchangeError as error:
                channel.lose(number, error)


class RequestReceiver:
    """Receives the requests of a group, in the order in which they were posted.

    Args:
        bridge (`Channel`): To the trainers.
    """

    def __init__(self, bridge: Channel) -> None:
        self.bridge = bridge
        self._programs = _RecentPrograms()

    def receive(self) -> tuple[Request, Program]:
        """Wait for the next request. Raises `ExchangeError` if the trainers are gone."""
        header = torch.empty(_HEADER.size, dtype=torch.uint8)
        self.bridge.post([], [(0, header)], what="a request").wait()
        request, digest, length = Request.read(header)
        if length:
            data = torch.empty(length, dtype=torch.uint8)
            self.bridge.post([], [(0, data)], what="a program").wait()
            self._programs.keep(digest, unpack(data.numpy().view(np.int32)))
        program = self._programs.find(digest)
        assert program is not None, "trainers and server keep the same programs"
        return request, program
