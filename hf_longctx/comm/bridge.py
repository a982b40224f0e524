"""Reach the ranks of a group and its extra servers, numbered after them, over one channel.

Each server is joined over a bridge, a channel of its own in which the ranks keep their numbers and
the server comes after them: losing a server breaks no collective of the ranks. What a lost server
owes arrives as NaN, so that a step made of it cannot pass for a good one, and nothing more is sent
to it. Whoever owns the channel looks at `lost` and runs the step again.
Layer: comm.
"""

from collections import Counter
from collections.abc import Sequence

from .arrivals import Exchange, JoinedExchange
from .channels import Channel, ExchangeError, Payload

_NAN = 0xFF  # a float whose bytes are all ones is NaN, in every format


class _BridgeExchange:
    """One bridge's part of an exchange, which never raises for a lost server."""

    def __init__(
        self,
        channel: "BridgedChannel",
        number: int,
        exchange: Exchange | None,
        recvs: Sequence[Payload],
    ) -> None:
        self.channel, self.number, self.recvs = channel, number, recvs
        self.exchange = exchange  # None: the server was lost before

    def done(self) -> bool:
        return self.exchange is None or self.exchange.done()

    def wait(self, *, since: float | None = None) -> None:
        try:
            if self.exchange is not None:
                self.exchange.wait(since=since)
                return
        except ExchangeError as error:
            self.channel.lose(self.number, error)
        # Results of a lost server must not look like numbers, whatever the buffer held before.
        for _, data in self.recvs:
            data.fill_(_NAN)


class BridgedChannel:
    """A rank's channel to its peers and to extra servers.

    Args:
        peers (`Channel`, *optional*): To the other ranks; `None` for a rank without peers.
        bridges (`Sequence[Channel]`): To each server, whose number in it is `ranks`.
        ranks (`int`): Ranks of the group.
        rank (`int`): This one.

    Attributes:
        lost (`dict[int, ExchangeError]`): By number of the bridge, what showed the loss.
    """

    def __init__(
        self, peers: Channel | None, bridges: Sequence[Channel], *, ranks: int, rank: int
    ) -> None:
        self.peers, self.bridges, self.ranks, self.rank = peers, tuple(bridges), ranks, rank
        self.sent: Counter[int] = Counter()
        self.lost: dict[int, ExchangeError] = {}

    @property
    def more(self) -> Sequence[Channel]:
        """Further channels to the peers; a program with servers uses none."""
        return self.peers.more if self.peers is not None else ()

    def lose(self, number: int, error: ExchangeError) -> None:
        """Give a server up: nothing more is sent to it or awaited from it."""
        self.lost.setdefault(number, error)  # the first error shows the cause

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        """Start an exchange as `Channel.post`; a lost server's part is done at once, with NaN."""
        parts: list[Exchange] = []
        own = [[p for p in side if p[0] < self.ranks] for side in (sends, recvs)]
        if own[0] or own[1]:
            assert self.peers is not None, "a rank without peers exchanges with servers only"
            parts.append(self.peers.post(*own, what=what))
        for number in range(len(self.bridges)):
            at = self.ranks + number
            # Within its bridge every server has the same number.
            there = [[(self.ranks, d) for p, d in side if p == at] for side in (sends, recvs)]
            if there[0] or there[1]:
                parts.append(self._post_to_server(number, *there, what=what))
        for peer, data in sends:
            if peer < self.ranks or peer - self.ranks not in self.lost:
                self.sent[peer] += data.numel()  # what a lost server was to get never left
        return JoinedExchange(parts)

    def _post_to_server(
        self, number: int, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str
    ) -> Exchange:
        exchange = None
        if number not in self.lost:
            try:
                exchange = self.bridges[number].post(sends, recvs, what=what)
            except ExchangeError as error:
                self.lose(number, error)
        return _BridgeExchange(self, number, exchange, recvs)

    def agree(self, number: int, *, what: str) -> None:
        """Compare a number among the ranks, as `Channel.agree`."""
        if self.peers is not None:
            self.peers.agree(number, what=what)
