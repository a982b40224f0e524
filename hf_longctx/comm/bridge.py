"""The ranks of a group and its extra servers, numbered after them, as one channel.

Layer: comm. Each server is joined over a bridge, a channel of its own in which the ranks keep their
numbers and the server comes after them: losing one breaks no collective of the ranks. What was due
from a lost server arrives as NaN, so that a step made of it cannot pass for a good one, and
nothing more is sent to it; whoever owns the channel looks at `lost` and runs the step again.
"""

from collections import Counter
from collections.abc import Sequence

from .arrivals import Exchange, Joined
from .channels import Channel, ExchangeError, Payload

_NAN = 0xFF  # a float whose bytes are all ones is NaN, in every format


class _OverBridge:
    """One bridge's part of an exchange, which never raises for a lost server."""

    def __init__(
        self, channel: "BridgedChannel", number: int, under_way: Exchange | None,
        recvs: Sequence[Payload],
    ) -> None:  # fmt: skip
        self.channel, self.number, self.recvs = channel, number, recvs
        self.under_way = under_way

    def done(self) -> bool:
        return self.under_way is None or self.under_way.done()

    def wait(self, *, since: float | None = None) -> None:
        try:
            if self.under_way is not None:
                self.under_way.wait(since=since)
                return
        except ExchangeError as error:
            self.channel.lose(self.number, error)
        for _, data in self.recvs:
            data.fill_(_NAN)


class BridgedChannel:
    """A rank's channel to its peers and to extra servers.

    Args:
        peers (`Channel`, *optional*): To the other ranks; `None` where a rank is alone.
        bridges (`Sequence[Channel]`): To each server; there it has the number `ranks`.
        ranks (`int`): Ranks of the group.
        rank (`int`): This one.

    Attributes:
        lost (`dict[int, ExchangeError]`): Bridge number -> what showed that its server is lost.
    """

    def __init__(
        self, peers: Channel | None, bridges: Sequence[Channel], *, ranks: int, rank: int
    ) -> None:
        self.peers, self.bridges, self.ranks, self.rank = peers, tuple(bridges), ranks, rank
        self.sent: Counter[int] = Counter()
        self.lost: dict[int, ExchangeError] = {}

    @property
    def more(self) -> Sequence[Channel]:
        """Further channels to its peers; a program with servers uses none."""
        return self.peers.more if self.peers is not None else ()

    def lose(self, number: int, error: ExchangeError) -> None:
        """Give a server up: nothing more is sent to it or awaited from it."""
        self.lost.setdefault(number, error)

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        """As `Channel.post`; a lost server's part is done at once, with NaN."""
        parts: list[Exchange] = []
        own = [[p for p in side if p[0] < self.ranks] for side in (sends, recvs)]
        if own[0] or own[1]:
            assert self.peers is not None, "a rank without peers exchanges with servers only"
            parts.append(self.peers.post(*own, what=what))
        for number in range(len(self.bridges)):
            at = self.ranks + number
            there = [[(self.ranks, d) for p, d in side if p == at] for side in (sends, recvs)]
            if there[0] or there[1]:
                parts.append(self._over(number, *there, what=what))
        for peer, data in sends:
            if peer < self.ranks or peer - self.ranks not in self.lost:
                self.sent[peer] += data.numel()
        return Joined(parts)

    def _over(
        self, number: int, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str
    ) -> Exchange:
        under_way = None
        if number not in self.lost:
            try:
                under_way = self.bridges[number].post(sends, recvs, what=what)
            except ExchangeError as error:
                self.lose(number, error)
        return _OverBridge(self, number, under_way, recvs)

    def agree(self, number: int, *, what: str) -> None:
        """As `Channel.agree`, among the ranks."""
        if self.peers is not None:
            self.peers.agree(number, what=what)
