"""Predict the seconds of programs on a described machine, and choose the plan that `auto` runs.

A program is read as events: its exchanges in order, with the work between them. One rank's events
are played against a clock, as if its peers were in step: work takes the time of its score entries,
a message that of its bytes on the link of its level, after those that were posted there before.
Under `charm` with a topology that was found, not given, a batch's plan is charm's where that is
predicted to gain 5 % over the flat ring or more, and else the ring's. Layer: planning.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.layout import Layout
from ..layouts.levels import Levels, Machine
from ..planners import charm, ring
from ..planners.options import PlanOptions
from ..planners.plan import Plan, make_plan
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


GAIN = 0.05  # below it the flat ring is taken: predictions are no more accurate
BACKWARD = 2.5  # times the work of forward, by score entry
_AS_BUSY = 0.99  # of the most score entries: a domain with so many counts as one of the busiest
Make = Callable[[str, int], Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Predicted times of one layer's attention."""

    forward: float
    backward: float

    @property
    def layer(self) -> float:
        """Both directions."""
        return self.forward + self.backward


def predict(
    program: Program, machine: Machine, *, rank: int, kind: LayerKind, widths: Widths, at_once: bool
) -> Seconds:
    """Predict the seconds of one rank's program.

    Args:
        program (`Program`): The rank's program; choose a rank that waits for slow links.
        machine (`Machine`): Links and speed.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): What a row sees.
        widths (`Widths`): Bytes of a row.
        at_once (`bool`): All ranks of a domain send across together, as `charm`'s do, so that they
            share its link; of a ring one rank per domain does.
    """
    times = []
    for backward in (False, True):
        each = machine.entry_seconds * (BACKWARD if backward else 1.0)
        played, left = events(program, kind=kind, widths=widths, backward=backward)
        clock = Clock()
        for event in played:
            clock.now += event.work * each
            if event.posted:
                _post(event, clock, machine, rank, at_once)
            else:
                clock.wait(event.tag)
        times.append(clock.now + left * each)
    return Seconds(forward=times[0], backward=times[1])


def _post(event: Event, clock: Clock, machine: Machine, rank: int, at_once: bool) -> None:
    """Put the messages of a post on their links: now, or once what they relay has arrived."""
    begins = max(clock.now, clock.arrives.get(event.after, 0.0))
    clock.arrives[event.tag] = max(begins, clock.arrives.get(event.tag, 0.0))
    for way, peer, size in event.messages:
        level = machine.levels.crosses(rank, peer)
        link = machine.links[level]
        senders = machine.levels.below(level) if at_once else 1
        sharing = max(1.0, senders / link.lanes)
        due = ExpectedMessage(event.tag, (level, way), begins, size * sharing / link.rate)
        if way:
            clock.expect((rank - peer) % machine.levels.ranks, due)
        else:
            clock.take(due, begins)
            clock.send((peer - rank) % machine.levels.ranks, begins)


def choose(
    layout: Layout,
    machine: Machine,
    *,
    kind: LayerKind,
    widths: Widths,
    pieces: int = charm.PIECES,
    make: Make | None = None,
    heads_move: bool = False,
) -> tuple[str, Mapping[str, Seconds]]:
    """Choose between the flat ring and charm, and return what was predicted of each.

    It is the flat ring, unless charm is predicted to gain 5 % over it or more. Both programs are
    built for a few ranks only; see `_representative_ranks`.

    Args:
        layout (`Layout`): Where the tokens lie.
        machine (`Machine`): Links and speed.
        kind (`LayerKind`): The layers.
        widths (`Widths`): Bytes of a row.
        pieces (`int`, *optional*, defaults to 4): Of charm's crossings.
        make (`Callable`, *optional*): The program of an algorithm and a rank, where it is not built
            as these arguments say.
        heads_move (`bool`, *optional*, defaults to `False`): Ranks exchange heads in a ring's
            program, too, so that those of a domain send across together.
    """
    ranks = _representative_ranks(layout, machine.levels, kind)
    made: Make = make or partial(_made, layout, kind=kind, levels=machine.levels, pieces=pieces)
    found = {}
    for name in ("ring", "charm"):
        at_once = heads_move or name == "charm"
        each = [
            predict(made(name, rank), machine, rank=rank, kind=kind, widths=widths, at_once=at_once)
            for rank in ranks
        ]
        found[name] = Seconds(
            forward=max(s.forward for s in each), backward=max(s.backward for s in each)
        )
    gain = found["ring"].layer / found["charm"].layer - 1 if found["charm"].layer else 0.0
    return ("charm" if gain >= GAIN else "ring"), found


def _made(
    layout: Layout, name: str, rank: int, *, kind: LayerKind, levels: Levels, pieces: int
) -> Program:
    if name == "ring":
        return ring.program(layout, rank=rank, kind=kind)
    return charm.program(layout, rank=rank, kind=kind, levels=levels, pieces=pieces)


def _representative_ranks(layout: Layout, levels: Levels, kind: LayerKind) -> list[int]:
    """Return the ranks whose programs are played: first ranks of the busiest domains.

    In a ring the first rank of a domain receives across the outermost link.
    """
    size = levels.below(0)
    if levels.sizes[0] == 2:  # both: their parts differ most
        return [0, size]
    rank, _, document, start, stop = layout.columns.T
    entries = kind.entries(start, stop, length=layout.lengths[document])
    work = np.bincount(rank // size, weights=entries, minlength=levels.sizes[0])
    # The second of equally busy domains: there the gradients of most chunks pass.
    most = np.flatnonzero(work >= _AS_BUSY * work.max())
    return [int(most[min(1, len(most) - 1)]) * size]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen for one batch and one layer kind.

    Args:
        plan (`Plan`): It keeps the programs that were built to predict.
        seconds (`Mapping[str, Seconds]`): Of a layer, by algorithm; empty without a machine.
    """

    plan: Plan
    seconds: Mapping[str, Seconds] = field(default_factory=dict)

    def __str__(self) -> str:
        name = self.plan.options.algorithm
        if not self.seconds:
            return f"{name}, as all ranks share one place, where no link was measured"
        ring, ours = (self.seconds[algorithm].layer for algorithm in ("ring", "charm"))
        gain = ring / ours - 1 if ours else 0.0
        return (
            f"{name}, as charm is predicted to gain {gain:.0%} over the flat ring ({GAIN:.0%} are "
            f"asked for): {1e3 * ours:.3g} against {1e3 * ring:.3g} ms a layer"
        )


def choose_plan(layout: Layout, *, kind: LayerKind, options: PlanOptions) -> Choice:
    """Plan a batch by charm or by the flat ring, whichever is predicted to be faster.

    Args:
        layout (`Layout`): Which rank holds which tokens.
        kind (`LayerKind`): The layers.
        options (`PlanOptions`): With `auto`, which the choice goes by.
    """
    auto = options.auto
    assert auto is not None
    names = ("ring", "charm") if auto.machine else ("ring",)
    plans = {
        name: make_plan(layout, kind=kind, options=replace(options, algorithm=name, auto=None))
        for name in names
    }
    if auto.machine is None:
        return Choice(plan=plans["ring"])
    head_dim = kind.query_width // kind.heads
    widths = Widths(
        heads=kind.heads,
        kv_heads=kind.kv_heads,
        head_dim=head_dim,
        value_dim=kind.key_value_width // kind.kv_heads - head_dim,
        itemsize=auto.itemsize,
        wide_itemsize=max(4, auto.itemsize),
    )
    name, seconds = choose(
        layout,
        auto.machine,
        kind=kind,
        widths=widths,
        make=lambda algorithm, rank: plans[algorithm].program(rank),
        heads_move=options.ulysses_size > 1,
    )
    return Choice(plan=plans[name], seconds=seconds)
