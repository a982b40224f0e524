"""One rank's messages on its links -> when they pass, if its peers are in step.

Floor: plan. Nothing is known here of programs: `predict` plays one against it.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Due(NamedTuple):
    """A message that is expected: of which exchange, over which link, since when, for how long."""

    tag: int
    link: tuple[int, int]
    begins: float
    seconds: float


@dataclass(slots=True)
class Clock:
    """One rank's time, when each of its links is taken, each way, and what meets what.

    Peers are in step and ranks alike: the n-th message from the rank `d` before leaves when this
    rank sends its n-th to the rank `d` after, or else at once.
    """

    now: float = 0.0
    arrives: dict[int, float] = field(default_factory=dict)
    taken: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    left: dict[int, list[float]] = field(default_factory=dict)  # by distance: when sends began
    came: Counter[int] = field(default_factory=Counter)  # by distance: messages expected so far
    due: dict[tuple[int, int], Due] = field(default_factory=dict)  # by distance and number

    def send(self, distance: int, begins: float) -> None:
        """A message to the rank so far after leaves: as one comes from the rank as far before."""
        times = self.left.setdefault(distance, [])
        times.append(begins)
        if due := self.due.pop((distance, len(times)), None):
            self.take(due, begins)

    def expect(self, distance: int, due: Due) -> None:
        """A message from the rank so far before."""
        self.came[distance] += 1
        number, times = self.came[distance], self.left.get(distance, [])
        if number <= len(times):
            self.take(due, times[number - 1])
        else:
            self.due[distance, number] = due

    def take(self, due: Due, sent: float) -> None:
        """Have an expected message come, which left at `sent`."""
        passed = self.carry(due.link, max(due.begins, sent), due.seconds)
        self.arrives[due.tag] = max(self.arrives.get(due.tag, 0.0), passed)

    def wait(self, tag: int) -> None:
        """Until an exchange is done."""
        for key in [key for key, due in self.due.items() if due.tag == tag]:
            self.take(self.due.pop(key), 0.0)
        self.now = max(self.now, self.arrives[tag])

    def carry(self, link: tuple[int, int], begins: float, seconds: float) -> float:
        """When a message that is ready at `begins` has passed: it takes the first gap."""
        busy = [span for span in self.taken.get(link, []) if span[1] > self.now]
        for start, end in busy:
            if begins + seconds <= start:
                break
            begins = max(begins, end)
        if seconds:
            insort(busy, (begins, begins + seconds))
        self.taken[link] = busy
        return begins + seconds
