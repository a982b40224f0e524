"""The tensors of a message's blocks -> its bytes, and back.

Layer: runtime. A message holds its blocks' fields end to end, whatever their dtypes and strides.

Posts and waits of one program -> messages over its channels, relays included. An exchange is unpacked at its wait. Only where relays pass it on, its channel's
waiting thread unpacks it as it arrives, and has them leave; a program without relays has no thread.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..comm.arrivals import Arrival, Exchange, JoinedExchange, RelayedExchange
from ..comm.channels import Channel, Payload, RelayChannel, select_channel
from ..planning.program.operations import Block, Post
from ..planning.program.program import Program


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' bytes, uint8, each copied once."""
    data = torch.empty(size(tensors), dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        part = data[start : start + size([tensor])]
        if start % tensor.element_size():  # a view in another dtype must be aligned
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        else:
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += len(part)
    return data


def unpack(data: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill the tensors from a message's bytes."""
    start = 0
    for tensor in tensors:
        part = data[start : start + size([tensor])]
        if start % tensor.element_size():
            part = part.clone()  # a view in another dtype must be aligned
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        start += len(part)


Views = Callable[[Block], list[Tensor]]
_Leaving = list[tuple[list[int], list[Tensor]]]  # peers, and what the message to each holds
_Arriving = list[tuple[Tensor, list[Tensor]]]  # a message's bytes, and what they fill


@dataclass(slots=True)
class _Pending:
    """An exchange between its post and its wait."""

    exchange: Exchange
    arriving: _Arriving
    arrival: Arrival | None  # where relays pass it on


class Exchanges:
    """The exchanges of one direction of a program.

    Args:
        program (`Program`): This rank's program.
        backward (`bool`): Which direction.
        channel (`Channel`, *optional*): Number 0 of the program's channels, with the others.
        views (`Callable`): A block -> its tensors, in the order of its kind's fields.
        layer (`int`, *optional*): Number of the layer that exchanges, for errors to name.

    Attributes:
        peak_bytes (`int`): Largest sum of messages that were posted and not waited for.
    """

    def __init__(
        self,
        program: Program,
        *,
        backward: bool,
        channel: Channel | None,
        views: Views,
        layer: int | None = None,
    ) -> None:
        self.channel, self.views, self.backward = channel, views, backward
        self.of_layer = "" if layer is None else f" of layer {layer}"
        self.relayed = program.relayed(backward=backward)
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._pending: dict[int, _Pending] = {}

    def post(self, op: Post, *, phase: int) -> None:
        """Start an exchange; see `plan.program.Post`. Never blocks."""
        assert self.channel is not None, "a program that exchanges needs a channel"
        channel = select_channel(self.channel, op.channel)
        what = f"exchange {op.tag} of {'backward' if self.backward else 'forward'} phase {phase}"
        what += self.of_layer
        arriving: _Arriving = []
        for _, blocks in op.recvs:
            filled = self._tensors(blocks)
            arriving.append((torch.empty(size(filled), dtype=torch.uint8), filled))
        sends = self._leaving(op)
        recvs = [(peer, data) for (peer, _), (data, _) in zip(op.recvs, arriving, strict=True)]
        exchange: Exchange
        arrival: Arrival | None = None
        if op.tag not in self.relayed and op.after < 0:
            exchange = channel.post(_packed(sends), recvs, what=what)
        else:
            assert isinstance(channel, RelayChannel), f"{type(channel).__name__} has no relays"
            exchange = channel.post([], recvs, what=what)
            if op.tag in self.relayed:
                fill = partial(_unpack, arriving, torch.is_inference_mode_enabled())
                exchange = arrival = channel.arrivals.add(exchange, fill)
            if op.after >= 0:
                exchange = self._relay(op.after, sends, channel, exchange, what=what)
            else:
                exchange = JoinedExchange([channel.post(_packed(sends), [], what=what), exchange])
        tensors = [each for _, of_message in (*sends, *arriving) for each in of_message]
        self._sizes[op.tag] = size(tensors)
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))
        self._pending[op.tag] = _Pending(exchange, arriving, arrival)

    def _relay(
        self, after: int, sends: _Leaving, channel: RelayChannel, received: Exchange, *, what: str
    ) -> Exchange:
        """Have the sends leave once the exchange that they pass on has arrived."""
        sizes = [(peer, size(tensors)) for peers, tensors in sends for peer in peers]
        leaving, upon = channel.reserve(sizes, what=what), self._pending[after].arrival
        assert upon is not None, after
        upon.then(lambda: leaving.send([data for _, data in _packed(sends)]))
        return RelayedExchange(upon, JoinedExchange([received, leaving]))

    def _leaving(self, op: Post) -> _Leaving:
        """The distinct messages: what several peers get is copied once."""
        peers: dict[tuple[Block, ...], list[int]] = {}
        for peer, blocks in op.sends:
            peers.setdefault(tuple(blocks), []).append(peer)
        return [(to, self._tensors(blocks)) for blocks, to in peers.items()]

    def _tensors(self, blocks: Iterable[Block]) -> list[Tensor]:
        return [view for block in blocks for view in self.views(block)]

    def wait(self, tag: int) -> Generator[Exchange]:
        """Yield the exchange, to be resumed once it is done; then its blocks are filled.

        Raises:
            ExchangeError: where an exchange that relays pass on is known to have failed.
        """
        for pending in self._pending.values():
            if pending.arrival is not None and pending.arrival.error is not None:
                raise pending.arrival.error
        pending = self._pending.pop(tag)
        yield pending.exchange
        if pending.arrival is None:
            _unpack(pending.arriving, torch.is_inference_mode_enabled())
        del self._sizes[tag]


def _packed(sends: _Leaving) -> list[Payload]:
    made = [(peers, pack(tensors)) for peers, tensors in sends]
    return [(peer, data) for peers, data in made for peer in peers]


def _unpack(arriving: _Arriving, inference: bool) -> None:
    """Fill tensors from messages, in the `inference` mode in which they were made."""
    with torch.inference_mode(inference):
        for data, tensors in arriving:
            unpack(data, tensors)
