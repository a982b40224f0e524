"""Find the rows that each process needs for its assignments, and who sends them.

Home sends query rows, and each owner the keys that a server lacks, once: a server gathers the keys
of a document in one buffer, whatever tasks read them. `serve` makes programs of this.

Where exchanges shall overlap, what a server waits for is cut into *parts* of about equal rows that
travel one behind the other: each brings its rows, and the keys that no earlier part brought.
Layer: planning.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from ..layouts.cost import GRANULE, LayerKind
from ..layouts.intervals import Range, intersect, subtract, union
from ..layouts.layout import Layout, PlacedSegment
from .key_splits import Assignment

PART_ROWS = 512  # of a part, at least: each costs a message per peer and shorter kernel calls
KeyRun = tuple[int, Range]  # a document and some of its keys


@dataclass(frozen=True, slots=True)
class Context:
    """The keys `[start, stop)` of `document` that one server gathers into one run of rows."""

    document: int
    start: int
    stop: int


class ExchangePlan:
    """What every process sends and computes, for one layer kind.

    Args:
        layout (`Layout`): Where the tokens lie.
        assignments (`Iterable[Assignment]`): What is computed where, by server, document, row and
            key.
        kind (`LayerKind`): The layers it is for.
        processes (`int`, *optional*): Ranks and extra servers; the ranks alone by default.
        parts (`int`, *optional*, defaults to 1): Parts that a server's arrivals are cut into, at
            most.
    """

    def __init__(
        self,
        layout: Layout,
        assignments: Iterable[Assignment],
        *,
        kind: LayerKind,
        processes: int | None = None,
        parts: int = 1,
    ) -> None:
        self.layout, self.kind, self.parts = layout, kind, parts
        self.processes = processes or layout.ranks
        self.segments: dict[tuple[int, int], list[PlacedSegment]] = {}  # by rank and document
        for segment in layout.segments:
            self.segments.setdefault((segment.rank, segment.document), []).append(segment)
        self.served: dict[int, list[Assignment]] = defaultdict(list)
        self.moved: dict[int, list[Assignment]] = defaultdict(list)  # by home: computed elsewhere
        self.cut: dict[int, list[Assignment]] = defaultdict(list)  # by home: partials to merge
        for assigned in assignments:
            self.served[assigned.server].append(assigned)
        for server, of_server in self.served.items():
            self.served[server] = list(self._in_parts(of_server))
            for assigned in self.served[server]:
                if assigned.server != assigned.home:
                    self.moved[assigned.home].append(assigned)
                if assigned.cut:
                    self.cut[assigned.home].append(assigned)
        self._needed = {server: self._needs(server) for server in self.served}
        self.contexts = {server: self._gathered(server) for server in self.served}
        self._read = cache(self._reads)

    def _waits(self, assigned: Assignment) -> bool:
        """Return whether its server needs rows or keys of others for it."""
        return assigned.home != assigned.server or self._gathers(assigned)

    def _gathers(self, assigned: Assignment) -> bool:
        keys = assigned.low, assigned.high
        return self.local(assigned.server, assigned.document, keys) is None

    def _in_parts(self, of_server: list[Assignment]) -> Iterator[Assignment]:
        """Number one server's waiting assignments by part, and cut them where a part ends.

        Assignments of cut keys are not cut by rows too, as home merges them by rows.
        """
        rows = sum(a.stop - a.start for a in of_server if self._waits(a))
        parts = max(1, min(self.parts, rows // PART_ROWS))
        done = 0
        for assigned in of_server:
            if not self._waits(assigned):
                yield assigned
                continue
            while True:
                # A part may end half a granule early or late, so that cuts keep to granules.
                part = min((done + GRANULE // 2) * parts // rows, parts - 1)
                to_edge = -(-(part + 1) * rows // parts) - done
                wanted = assigned.start + round(to_edge / GRANULE) * GRANULE
                inside = assigned.start < wanted < assigned.stop
                if assigned.cut or part == parts - 1 or not inside:
                    break
                yield self._narrowed(assigned, assigned.start, wanted)._replace(part=part)
                done += wanted - assigned.start
                assigned = self._narrowed(assigned, wanted, assigned.stop)
            yield assigned._replace(part=part)
            done += assigned.stop - assigned.start

    def _narrowed(self, assigned: Assignment, start: int, stop: int) -> Assignment:
        """Return some rows of an assignment, with the keys that they see."""
        length = int(self.layout.lengths[assigned.document])
        low, high = self.kind.keys_seen((start, stop), length=length)
        return assigned._replace(start=start, stop=stop, low=low, high=high)

    def _needs(self, server: int) -> dict[int, list[tuple[int, Range]]]:
        """Return, by document, part and keys of each assignment whose keys `server` gathers."""
        needed: dict[int, list[tuple[int, Range]]] = defaultdict(list)
        for assigned in self.served[server]:
            if self._gathers(assigned):
                keys = assigned.low, assigned.high
                needed[assigned.document].append((assigned.part, keys))
        return needed

    def _gathered(self, server: int) -> tuple[Context, ...]:
        """Return the keys that `server` gathers: all it needs but does not hold in one run."""
        needed = self._needed[server]
        return tuple(
            Context(d, *run) for d in sorted(needed) for run in union(run for _, run in needed[d])
        )

    def local(self, rank: int, document: int, tokens: Range) -> int | None:
        """Return the row of `rank` where `tokens` begin, if it holds them in one run."""
        for s in self.segments.get((rank, document), ()):
            if s.start <= tokens[0] and tokens[1] <= s.stop:
                return s.row + tokens[0] - s.start
        return None

    def keys_sent(self, owner: int, server: int) -> list[KeyRun]:
        """Return the keys that travel from `owner` to `server`, in the order of their parts."""
        return [run for part in range(self.parts) for run in self.keys_of(owner, server, part)]

    def keys_of(self, owner: int, server: int, part: int, *, last: bool = False) -> list[KeyRun]:
        """Return those that are first read in `part`, or (`last`) that no later part reads."""
        return [
            (document, common)
            for document, run in self._read(server, last)[part]
            for s in self.segments.get((owner, document), ())
            if (common := intersect((s.start, s.stop), run))
        ]

    def _reads(self, server: int, last: bool) -> list[list[KeyRun]]:
        """Return, by part, the gathered keys that are read first, or last, in it."""
        parts: list[list[KeyRun]] = [[] for _ in range(self.parts)]
        needed = self._needed.get(server, {})
        for document in sorted(needed):
            for part, runs in enumerate(parts):
                other = [run for at, run in needed[document] if at != part and last == (at > part)]
                for own in union(run for at, run in needed[document] if at == part):
                    runs += [(document, run) for run in subtract(own, other)]
        return parts
