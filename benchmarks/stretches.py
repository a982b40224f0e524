"""What each rank did in each round of a step -> the seconds of that step.

A shared machine's speed moves by a tenth from second to second, and other load only
adds: two whole steps differ by as much as an exchange costs. So a step is cut at every kernel, post
and wait; a stretch counts with its least CPU seconds of all rounds, an exchange with its least time
from when both ends of its messages were posted, and the stretches are put together again, so that
who waits for whom follows. Every side is treated so, and nothing is left out: stretches hold
packing, unpacking and what gloo's threads do beside them.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.channels import Channel, Payload

_BLOCKED = 2e-4  # seconds; a wait that returns sooner tells nothing of how long its exchange took

Message = tuple[int, int, int]  # from, to, how many went that way before


class Stretch(NamedTuple):
    """Work of one rank up to an event.

    Args:
        event (`str`): `start` or `stop` of a kernel, `post`, `wait`, or the step's `end`.
        messages (`tuple[Message, ...]`): Those of the exchange that is posted or awaited.
        cpu (`float`): CPU seconds of the thread that runs the step.
        beside (`float`): CPU seconds of other threads meanwhile: gloo's.
        at (`float`): The machine's clock at the event.
        until (`float`): The same after it; later where the rank was blocked.
        sent (`int`): Bytes, of a post.
    """

    event: str
    messages: tuple[Message, ...]
    cpu: float
    beside: float
    at: float
    until: float
    sent: int


Rounds = Sequence[Sequence[Stretch]]  # of one rank


@dataclass(slots=True)
class _Recorded:
    """An exchange whose waits are written down; none beneath it where nothing was sent."""

    recorder: "Recorder"
    messages: tuple[Message, ...]
    exchange: Exchange | None

    def done(self) -> bool:
        return self.exchange is None or self.exchange.done()

    def wait(self, *, since: float | None = None) -> None:
        self.recorder.note("wait", self.messages if self.exchange else ())
        if self.exchange:
            self.exchange.wait(since=since)
        self.recorder.resume()


class Recorder:
    """A channel that writes down one step of its rank, and the clock of its `Account`.

    Args:
        channel (`Channel`): Where exchanges go.
        filled (`bool`, *optional*): Send nothing; what is due is there at once, as zeros.

    Attributes:
        stretches (`list[Stretch]`): What was written down.
    """

    def __init__(self, channel: Channel, *, filled: bool = False) -> None:
        self.channel, self.filled = channel, filled
        self.rank, self.sent, self.more = channel.rank, Counter[int](), channel.more
        self.stretches: list[Stretch] = []
        self._posted: Counter[tuple[int, int]] = Counter()
        self._in_kernel = False
        self.restart()

    def clock(self) -> float:
        """CPU seconds; an `Account` reads them before and after each kernel."""
        self.note("stop" if self._in_kernel else "start")
        self._in_kernel = not self._in_kernel
        return self._thread

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        """As `Channel.post`."""
        ways = [(self.rank, peer) for peer, _ in sends] + [(peer, self.rank) for peer, _ in recvs]
        messages = tuple((*way, self._posted[way]) for way in ways)
        self._posted.update(ways)
        self.note("post", messages, sent=sum(data.numel() for _, data in sends))
        for peer, data in sends:
            self.sent[peer] += data.numel()
        if not self.filled:
            return _Recorded(self, messages, self.channel.post(sends, recvs, what=what))
        for _, data in recvs:
            data.zero_()
        return _Recorded(self, messages, None)

    def agree(self, number: int, *, what: str) -> None:
        """As `Channel.agree`."""
        self.channel.agree(number, what=what)

    def note(self, event: str, messages: tuple[Message, ...] = (), *, sent: int = 0) -> None:
        """End a stretch."""
        cpu, process = time.thread_time() - self._thread, time.process_time() - self._process
        at = time.perf_counter()
        self.stretches.append(Stretch(event, messages, cpu, max(0.0, process - cpu), at, at, sent))
        self.restart()

    def resume(self) -> None:
        """Begin a stretch after a wait, whose CPU seconds are gloo's and lie within it."""
        self.stretches[-1] = self.stretches[-1]._replace(until=time.perf_counter())
        self.restart()

    def restart(self) -> None:
        """Begin a stretch now."""
        self._thread, self._process = time.thread_time(), time.process_time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """One rank's part of a step that was put together.

    Args:
        attending (`float`): CPU seconds in attention kernels.
        working (`float`): Other CPU seconds: linear layers, and packing for exchanges.
        waiting (`float`): Seconds blocked.
    """

    attending: float
    working: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds from the start of the step until this rank was done."""
        return self.attending + self.working + self.waiting


def assemble(ranks: Sequence[Rounds], *, alike: Sequence[Rounds] = ()) -> list[Seconds]:
    """Put one step together.

    Args:
        ranks (`Sequence[Rounds]`): Its rounds on each rank.
        alike (`Sequence[Rounds]`, *optional*): Rounds of another step whose thread does the same:
            its best counts for both, so that they differ by what exchanges do alone.

    Returns:
        Each rank's seconds.
    """
    steps = [
        _best(rounds, [*rounds, *more])
        for rounds, more in zip(ranks, alike or [()] * len(ranks), strict=True)
    ]
    took = [_took(ranks, rank) for rank in range(len(ranks))]
    posted: dict[tuple[int, Message], float] = {}
    clocks, waited, places = [0.0] * len(ranks), [0.0] * len(ranks), [0] * len(ranks)

    def run(rank: int) -> None:
        """Go on until a message is awaited that another rank has not posted yet."""
        for event, messages, cpu in steps[rank][places[rank] :]:
            ends = [(end, m) for m in messages for end in m[:2]] if event == "wait" else []
            if any(end not in posted for end in ends):
                return
            clocks[rank] += cpu
            if event == "post":
                posted.update({(rank, m): clocks[rank] for m in messages})
            if ends:
                there = max(posted[end] for end in ends) + took[rank][messages]
                waited[rank] += max(0.0, there - clocks[rank])
                clocks[rank] = max(clocks[rank], there)
            places[rank] += 1

    while any(place < len(step) for place, step in zip(places, steps, strict=True)):
        before = sum(places)
        for rank in range(len(ranks)):
            run(rank)
        assert sum(places) > before, "ranks that wait for each other"
    return [
        Seconds(
            attending=sum(cpu for event, _, cpu in step if event == "stop"),
            working=sum(cpu for event, _, cpu in step if event != "stop"),
            waiting=waiting,
        )
        for step, waiting in zip(steps, waited, strict=True)
    ]


def _best(rounds: Rounds, alike: Rounds) -> list[tuple[str, tuple[Message, ...], float]]:
    """Event, messages and least CPU seconds of each stretch of one rank."""
    found = []
    for own, same in zip(zip(*rounds, strict=True), zip(*alike, strict=True), strict=True):
        assert len({s.event for s in same}) == 1, same
        least = min(s.cpu for s in same) + min(s.beside for s in own)
        found.append((own[0].event, own[0].messages, least))
    return found


def _took(ranks: Sequence[Rounds], rank: int) -> dict[tuple[Message, ...], float]:
    """Seconds of each exchange that a rank awaits, from when all its messages were posted.

    The least within which it was seen to be done, in any round; 0 where the rank was never blocked.
    """
    awaited = [s.messages for s in _of(ranks[rank][0], "wait")]
    found, blocked = dict.fromkeys(awaited, float("inf")), set[tuple[Message, ...]]()
    for number, stretches in enumerate(ranks[rank]):
        opened: dict[Message, float] = {}
        for rounds in ranks:
            for s in _of(rounds[number], "post"):
                opened.update({m: max(opened.get(m, s.at), s.at) for m in s.messages})
        for s in _of(stretches, "wait"):
            since = max((opened[m] for m in s.messages), default=s.at)
            found[s.messages] = min(found[s.messages], s.until - since)
            if s.until - s.at > _BLOCKED:
                blocked.add(s.messages)
    return {messages: s if messages in blocked else 0.0 for messages, s in found.items()}


def _of(stretches: Sequence[Stretch], event: str) -> Iterator[Stretch]:
    return (s for s in stretches if s.event == event)
