"""Read a program as events with sizes, and time one rank's messages on its links.

The events of one direction are its exchanges in order, with the work between them. They are read
from columns, as a program of a thousand ranks has too many blocks to look at each. The clock knows
nothing of programs: `predict` plays one against it. Layer: planning.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..layouts.cost import LayerKind
from ..program.counts import Widths
from ..program.operations import CODES, Attend, AttendGrad, Post, Wait
from ..program.program import Program


class Event(NamedTuple):
    """A post or a wait.

    Args:
        work (`float`): Score entries since the last event.
        tag (`int`): Of the exchange.
        posted (`bool`): Whether it is a post.
        after (`int`): The exchange that a relay passes on; -1 for others.
        messages (`tuple[tuple[int, int, float], ...]`): Of a post: 0 for one that is sent or 1 for
            one that comes, the peer, and its bytes.
    """

    work: float
    tag: int
    posted: bool
    after: int = -1
    messages: tuple[tuple[int, int, float], ...] = ()


def events(
    program: Program, *, kind: LayerKind, widths: Widths, backward: bool
) -> tuple[list[Event], float]:
    """Return the events of one direction, and the score entries that follow the last.

    Args:
        program (`Program`): One rank's program.
        kind (`LayerKind`): What a row sees.
        widths (`Widths`): Bytes of a row.
        backward (`bool`): Which direction.
    """
    ops, blocks = _columns(program, backward=backward)
    code = ops[:, 2]
    work = np.zeros(len(ops) + 1)
    work[_tasks(code) + 1] = entries(program, kind=kind, backward=backward)
    work = np.cumsum(work)
    exchanges = np.flatnonzero((code == CODES[Post]) | (code == CODES[Wait]))
    messages = _messages(program, blocks[code[blocks[:, 0]] == CODES[Post]], widths)
    found, before = [], 0.0
    for at, done in zip(exchanges.tolist(), work[exchanges].tolist(), strict=True):
        _, _, of, tag, after, _ = ops[at].tolist()
        posted = of == CODES[Post]
        found.append(Event(done - before, tag, posted, after, messages.get(at, ())))
        before = done
    return found, float(work[-1]) - before


def _columns(program: Program, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the operations of one direction, and their blocks, counted from its first."""
    first, end = np.searchsorted(program.ops[:, 0], (int(backward), int(backward) + 1))
    blocks = program.blocks[slice(*np.searchsorted(program.blocks[:, 0], (first, end)))]
    return program.ops[first:end], blocks - np.array([first, 0, 0, 0, 0, 0, 0, 0], np.int32)


def _tasks(code: np.ndarray) -> np.ndarray:
    return np.flatnonzero((code == CODES[Attend]) | (code == CODES[AttendGrad]))


def entries(program: Program, *, kind: LayerKind, backward: bool) -> np.ndarray:
    """Count the score entries of each task of one direction, float64, in order.

    A task of some heads counts as that part of its entries.
    """
    ops, blocks = _columns(program, backward=backward)
    tasks = _tasks(ops[:, 2])
    if not len(tasks):
        return np.zeros(0)
    begin = np.searchsorted(blocks[:, 0], tasks)
    queries, keys = blocks[begin], blocks[begin + 1]
    held = program.held.astype(np.int64)
    held = held[np.lexsort((held[:, 1], held[:, 0]))]
    stride = int(program.arrays[:, 1].max()) + 1

    def tokens(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        array, start, stop = blocks[:, 3:6].astype(np.int64).T
        last = array * stride + stop - 1
        run = np.searchsorted(held[:, 0] * stride + held[:, 1], last, "right") - 1
        end = held[run, 3] + stop - held[run, 1]  # see `Program.task`
        return end - (stop - start), end

    (start, stop), (low, high) = tokens(queries), tokens(keys)
    longest = np.maximum(stop, high)  # a bidirectional row sees no key past those given
    seen = kind.entries_over(start, stop, low, high, length=longest).astype(np.float64)
    share = queries[:, 7] / max(int(program.head_groups[0]), 1)
    found: np.ndarray = np.where(queries[:, 7], share, 1.0) * seen
    return found


def _messages(
    program: Program, blocks: np.ndarray, widths: Widths
) -> dict[int, tuple[tuple[int, int, float], ...]]:
    """Return, by post, (role, peer, bytes) of its messages."""
    if not len(blocks):
        return {}
    op, role, peer, array, start, stop, head, heads = blocks.T
    rows = _row_bytes(program, array, head, heads, widths)
    opens = np.append(True, (np.diff(blocks[:, :3], axis=0) != 0).any(axis=1))
    at = np.flatnonzero(opens)
    sizes = np.add.reduceat((stop - start) * rows, at)
    found: dict[int, list[tuple[int, int, float]]] = {}
    columns = (op[at].tolist(), role[at].tolist(), peer[at].tolist(), sizes.tolist())
    for post, way, whom, size in zip(*columns, strict=True):
        found.setdefault(post, []).append((way, whom, size))
    return {post: tuple(messages) for post, messages in found.items()}


def _row_bytes(
    program: Program, array: np.ndarray, head: np.ndarray, heads: np.ndarray, widths: Widths
) -> np.ndarray:
    """Return float64 `[blocks]`: bytes of a row of each block."""
    groups = int(program.head_groups[0])
    # Blocks are many, and combinations of kind and heads few: each is sized once.
    key = (program.arrays[array, 0] * (groups + 1) + head) * (groups + 1) + heads
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    kinds = program.kinds
    each = [
        widths.row(kinds[array[i]], heads=(int(head[i]), int(heads[i])), groups=groups)
        for i in first.tolist()
    ]
    return np.asarray(each, np.float64)[of]


class ExpectedMessage(NamedTuple):
    """A message of exchange `tag`: over which link, from when on, and for how long."""

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
    due: dict[tuple[int, int], ExpectedMessage] = field(
        default_factory=dict
    )  # by distance and number

    def send(self, distance: int, begins: float) -> None:
        """Send to the rank so far after; the rank as far before does the same now."""
        times = self.left.setdefault(distance, [])
        times.append(begins)
        if due := self.due.pop((distance, len(times)), None):
            self.take(due, begins)

    def expect(self, distance: int, due: ExpectedMessage) -> None:
        """Expect a message from the rank so far before."""
        self.came[distance] += 1
        number, times = self.came[distance], self.left.get(distance, [])
        if number <= len(times):
            self.take(due, times[number - 1])
        else:
            self.due[distance, number] = due

    def take(self, due: ExpectedMessage, sent: float) -> None:
        """Let an expected message arrive, which left at `sent`."""
        passed = self.carry(due.link, max(due.begins, sent), due.seconds)
        self.arrives[due.tag] = max(self.arrives.get(due.tag, 0.0), passed)

    def wait(self, tag: int) -> None:
        """Advance the time to when an exchange is done."""
        for key in [key for key, due in self.due.items() if due.tag == tag]:
            self.take(self.due.pop(key), 0.0)
        self.now = max(self.now, self.arrives[tag])

    def carry(self, link: tuple[int, int], begins: float, seconds: float) -> float:
        """Return when a message that is ready at `begins` has passed: it takes the first gap."""
        busy = [span for span in self.taken.get(link, []) if span[1] > self.now]
        for start, end in busy:
            if begins + seconds <= start:
                break
            begins = max(begins, end)
        if seconds:
            insort(busy, (begins, begins + seconds))
        self.taken[link] = busy
        return begins + seconds
