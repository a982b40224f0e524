"""A layer's direction and its plan -> what an extra server is told of it, and what it understands.

Layer: runtime. The first rank of a group tells each server what comes: a header of one length, then
the server's program where it does not know it. All else travels as the program says. Both sides
keep the same last programs, so that neither asks the other what it knows.
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

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = struct.Struct("<11q2d")
_KEPT = 64  # programs that both sides keep: those of some batches, with a few layer kinds each


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
        """The request for program `digest`, of which `length` bytes follow; uint8."""
        w, s = self.widths, self.scoring
        packed = _HEADER.pack(
            digest, length, self.backward, _DTYPES.index(self.dtype),
            w.heads, w.kv_heads, w.head_dim, w.value_dim, w.state,
            s.window, s.causal, s.scale, s.softcap,
        )  # fmt: skip
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def read(cls, header: Tensor) -> "tuple[Request, int, int]":
        """The request of a header, the program's digest, and the bytes of it that follow."""
        digest, length, backward, dtype, *rest = _HEADER.unpack(header.numpy().tobytes())
        heads, kv_heads, head_dim, value_dim, state, window, causal, scale, softcap = rest
        widths = Widths(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, state=state
        )
        scoring = Scoring(scale=scale, window=window, causal=bool(causal), softcap=softcap)
        return cls(bool(backward), widths, _DTYPES[dtype], scoring), digest, length


class _Programs:
    """The programs used last, by digest; trainers and server use, and so drop, the same ones."""

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


class Caller:
    """Tells one server what comes; the first rank of a group has one for each.

    Args:
        bridge (`Channel`): To the server.
        ranks (`int`): Ranks of the group: the server's number there.
    """

    def __init__(self, bridge: Channel, *, ranks: int) -> None:
        self.bridge, self.ranks = bridge, ranks
        self._programs = _Programs()
        self._under_way: list[Exchange] = []

    def call(self, request: Request, program: Program) -> None:
        """Post a request. Raises `ExchangeError` where the server is lost."""
        packed = pack(program)
        known = self._programs.find(packed.digest) is not None
        data = torch.from_numpy(packed.columns).view(torch.uint8)
        parcels = [(self.ranks, request.header(packed.digest, 0 if known else data.numel()))]
        if not known:
            self._programs.keep(packed.digest, program)
            parcels.append((self.ranks, data))
        self._under_way = [x for x in self._under_way if not x.done()]  # they hold what they send
        self._under_way.append(self.bridge.post(parcels, [], what="a request"))


def call_servers(
    channel: BridgedChannel, callers: Sequence[Caller], plan: Plan, request: Request
) -> None:
    """Tell each server that has a part in the plan; one that is lost is given up."""
    for number, caller in enumerate(callers):
        program = plan.program(plan.layout.ranks + number)
        if pack(program).exchanges and number not in channel.lost:
            try:
                caller.call(request, program)
            except ExchangeError as error:
                channel.lose(number, error)


class Hearer:
    """The server's side: hears requests, in the order in which they were posted.

    Args:
        bridge (`Channel`): To the trainers.
    """

    def __init__(self, bridge: Channel) -> None:
        self.bridge = bridge
        self._programs = _Programs()

    def hear(self) -> tuple[Request, Program]:
        """The next request; waits for it. Raises `ExchangeError` where the trainers are gone."""
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
