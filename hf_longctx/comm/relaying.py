"""What a program with relays, or with several channels, needs of a channel.

Floor: comm. A relayed message is posted long before it can leave: its place in the order is taken
at once, on both sides, so that timing cannot change which message meets which receive.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from .arrivals import Arrivals, Exchange
from .channels import Channel


class Reserved(Exchange, Protocol):
    """Messages whose place in the order is taken before they can leave."""

    def leave(self, messages: Sequence[Tensor]) -> None:
        """Send them, once; then, and not before, they can be waited for."""
        ...


@runtime_checkable
class Relaying(Channel, Protocol):
    """A channel on which messages can leave as others arrive.

    Attributes:
        arrivals (`Arrivals`): What is to be done as its exchanges arrive.
    """

    arrivals: Arrivals

    def reserve(self, sizes: Sequence[tuple[int, int]], *, what: str) -> Reserved:
        """Take the place of one message to each `(peer, bytes)`; they count as sent."""
        ...


def numbered(channel: Channel, number: int) -> Channel:
    """The channel that a program means by `number`."""
    have = 1 + len(channel.more)
    assert number < have, f"the program uses channel {number}, and there are {have}"
    return channel.more[number - 1] if number else channel


def sent_over_all(channel: Channel) -> int:
    """Bytes sent to all peers over a channel and its further ones."""
    return sum(sum(each.sent.values()) for each in (channel, *channel.more))


def sent_to_each(channel: Channel) -> Counter[int]:
    """Bytes sent to each peer over a channel and its further ones."""
    return sum((each.sent for each in (channel, *channel.more)), Counter())
