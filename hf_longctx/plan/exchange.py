"""Balanced tasks -> the rows that each process needs, and who sends them.

Floor: plan. Home sends query rows, and each owner the keys that a server lacks, once: a server
gathers the keys of a document in one buffer, whatever tasks read them. `serve` makes programs of
these.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..intervals import Range, intersect, union
from .cost import LayerKind
from .distca import Task
from .layout import Layout, Placed


@dataclass(frozen=True, slots=True)
class Context:
    """The keys `[start, stop)` of `document` that one server gathers into one run of rows."""

    document: int
    start: int
    stop: int


class ExchangePlan:
    """What every rank sends and computes, for one layer kind.

    Args:
        layout (`Layout`): Where the tokens lie.
        tasks (`Iterable[Task]`): The balanced tasks of all ranks, by server, document and row.
        kind (`LayerKind`): What its rows see bounds the keys a task needs.
        processes (`int`, *optional*): Ranks and extra servers; the ranks alone by default.
    """

    def __init__(
        self,
        layout: Layout,
        tasks: Iterable[Task],
        *,
        kind: LayerKind,
        processes: int | None = None,
    ) -> None:
        self.layout, self.kind = layout, kind
        self.processes = processes or layout.ranks
        self.pieces: dict[tuple[int, int], list[Placed]] = {}  # by rank and document, in order
        for segment in layout.segments:
            self.pieces.setdefault((segment.rank, segment.document), []).append(segment)
        self.served: dict[int, list[Task]] = {}
        self.moved: dict[int, list[Task]] = {}  # by home
        for task in tasks:
            self.served.setdefault(task.server, []).append(task)
            if task.server != task.home:
                self.moved.setdefault(task.home, []).append(task)
        self.contexts = {s: self._gathered(s) for s in self.served}

    def _gathered(self, server: int) -> tuple[Context, ...]:
        """Key runs that `server` must gather: all it needs but does not hold in one piece."""
        needed: dict[int, list[Range]] = {}
        for task in self.served[server]:
            keys = self.keys(task)
            if self.local(server, task.document, keys) is None:
                needed.setdefault(task.document, []).append(keys)
        return tuple(Context(d, *run) for d in sorted(needed) for run in union(needed[d]))

    def keys(self, task: Task) -> Range:
        """The keys that a task reads."""
        length = int(self.layout.lengths[task.document])
        return self.kind.keys_seen((task.start, task.stop), length=length)

    def local(self, rank: int, document: int, tokens: Range) -> int | None:
        """The row of `rank` where `tokens` begin, if it holds them in one run."""
        for s in self.pieces.get((rank, document), ()):
            if s.start <= tokens[0] and tokens[1] <= s.stop:
                return s.row + tokens[0] - s.start
        return None

    def keys_sent(self, owner: int, server: int) -> list[tuple[int, Range]]:
        """Key runs that travel from `owner` to `server`, in the order of the server's rows."""
        runs = []
        for c in self.contexts.get(server, ()):
            for s in self.pieces.get((owner, c.document), ()):
                common = intersect((s.start, s.stop), (c.start, c.stop))
                if common:
                    runs.append((c.document, common))
        return runs
