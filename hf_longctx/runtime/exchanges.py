"""Turn the posts and waits of a program into messages over its channels.

A message holds the fields of its blocks end to end, whatever their dtypes and strides. Receivers
unpack at the wait. Only where other messages pass on what arrives (relays) does the channel's
waiting thread unpack it, and then let those leave. Layer: runtime.
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


def size(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the tensors."""
    return sum(t.nbytes for t in tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy the tensors' bytes end to end into one uint8 tensor."""
    data = torch.empty(size(tensors), dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        part = data[start : start + tensor.nbytes]
        if start % tensor.element_size():  # a view in another dtype must be aligned
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        else:
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += len(part)
    return data


def unpack(data: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill the tensors from the bytes that `pack` made."""
    start = 0
    for tensor in tensors:
        part = data[start : start + tensor.nbytes]
        if start % tensor.element_size():
            part = part.clone()  # a view in another dtype must be aligned
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        start += len(part)


Views = Callable[[Block], list[Tensor]]
_Sends = list[tuple[list[int], list[Tensor]]]  # peers, and what the message to each holds
_Receives = list[tuple[Tensor, list[Tensor]]]  # bytes of a message, and what they fill


@dataclass(slots=True)
class _Pending:
    """An exchange between its post and its wait."""

    exchange: Exchange
    receives: _Receives
    arrival: Arrival | None  # where relays pass it on
    bytes: int  # of its messages, both ways


class Exchanges:
    """The exchanges of one direction of a program.

    Args:
        program (`Program`): This rank's program.
        backward (`bool`): Which direction.
        channel (`Channel`, *optional*): Number 0 of the program's channels, with the others.
        views (`Callable`): Gives the tensors of a block, in the order of its kind's fields.
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
        self._pending: dict[int, _Pending] = {}

    def post(self, op: Post, *, phase: int) -> None:
        """Start an exchange without blocking; see `operations.Post`."""
        assert self.channel is not None, "a program that exchanges needs a channel"
        channel = select_channel(self.channel, op.channel)
        what = f"exchange {op.tag} of {'backward' if self.backward else 'forward'} phase {phase}"
        what += self.of_layer
        receives: _Receives = []
        for _, blocks in op.recvs:
            filled = self._tensors(blocks)
            receives.append((torch.empty(size(filled), dtype=torch.uint8), filled))
        sends = self._sends(op)
        recvs = [(peer, data) for (peer, _), (data, _) in zip(op.recvs, receives, strict=True)]
        exchange: Exchange
        arrival: Arrival | None = None
        if op.tag not in self.relayed and op.after < 0:
            exchange = channel.post(_packed(sends), recvs, what=what)
        else:
            assert isinstance(channel, RelayChannel), f"{type(channel).__name__} has no relays"
            exchange = channel.post([], recvs, what=what)
            if op.tag in self.relayed:
                # the thread that fills knows nothing of this one's inference mode
                fill = partial(_unpack, receives, torch.is_inference_mode_enabled())
                exchange = arrival = channel.arrivals.add(exchange, fill)
            if op.after >= 0:
                exchange = self._relay(op.after, sends, channel, exchange, what=what)
            else:
                exchange = JoinedExchange([channel.post(_packed(sends), [], what=what), exchange])
        tensors = (t for _, of_message in (*sends, *receives) for t in of_message)
        self._pending[op.tag] = _Pending(exchange, receives, arrival, size(tensors))
        under_way = sum(pending.bytes for pending in self._pending.values())
        self.peak_bytes = max(self.peak_bytes, under_way)

    def _relay(
        self, after: int, sends: _Sends, channel: RelayChannel, received: Exchange, *, what: str
    ) -> Exchange:
        """Let the sends leave once the exchange that they pass on has arrived."""
        sizes = [(peer, size(tensors)) for peers, tensors in sends for peer in peers]
        # numbered now, on both sides: when it arrives must not change which message meets which
        leaving, upon = channel.reserve(sizes, what=what), self._pending[after].arrival
        assert upon is not None, after
        upon.then(lambda: leaving.send([data for _, data in _packed(sends)]))
        return RelayedExchange(upon, JoinedExchange([received, leaving]))

    def _sends(self, op: Post) -> _Sends:
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
        # any of them: a relay that failed may be why this exchange would never end
        for pending in self._pending.values():
            if pending.arrival is not None and pending.arrival.error is not None:
                raise pending.arrival.error
        pending = self._pending[tag]
        yield pending.exchange
        if pending.arrival is None:
            _unpack(pending.receives, torch.is_inference_mode_enabled())
        del self._pending[tag]  # its bytes counted until they were unpacked


def _packed(sends: _Sends) -> list[Payload]:
    made = [(peers, pack(tensors)) for peers, tensors in sends]
    return [(peer, data) for peers, data in made for peer in peers]


def _unpack(receives: _Receives, inference: bool) -> None:
    """Fill tensors from messages, in the inference mode in which they were made."""
    with torch.inference_mode(inference):
        for data, tensors in receives:
            unpack(data, tensors)
