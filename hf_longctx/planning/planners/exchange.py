"""Shares of balanced tasks -> the rows that each process needs, and who sends them.

Layer: planning. Home sends query rows, and each owner the keys that a server lacks, once: a server
gathers the keys of a document in one buffer, whatever tasks read them. `serve` makes programs of
these.

Where exchanges shall overlap, what a server waits for is cut into *parts* of about equal rows that
travel one behind the other: each brings its rows and the keys that no earlier part brought.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..layouts.cost import GRANULE, LayerKind
from ..layouts.intervals import Range, intersect, subtract, union
from ..layouts.layout import Layout, Placed
from .key_splits import Assignment

PART_ROWS = 512  # of a part, at least: each costs a message per peer and shorter kernel calls


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
        shares (`Iterable[Share]`): What is computed where, by server, document, row and key.
        kind (`LayerKind`): The layers it is for.
        processes (`int`, *optional*): Ranks and extra servers; the ranks alone by default.
        parts (`int`, *optional*, defaults to 1): Into how many a server's arrivals are cut, at
            most.
    """

    def __init__(
        self,
        layout: Layout,
        shares: Iterable[Assignment],
        *,
        kind: LayerKind,
        processes: int | None = None,
        parts: int = 1,
    ) -> None:
        self.layout, self.kind, self.parts = layout, kind, parts
        self.processes = processes or layout.ranks
        self.pieces: dict[tuple[int, int], list[Placed]] = {}  # by rank and document, in order
        for segment in layout.segments:
            self.pieces.setdefault((segment.rank, segment.document), []).append(segment)
        self.served: dict[int, list[Assignment]] = defaultdict(list)
        self.moved: dict[int, list[Assignment]] = defaultdict(list)  # by home
        self.cut: dict[int, list[Assignment]] = defaultdict(
            list
        )  # by home: whose results it merges
        for share in shares:
            self.served[share.server].append(share)
        for server, of_server in self.served.items():
            self.served[server] = list(self._in_parts(of_server))
            for share in self.served[server]:
                if share.server != share.home:
                    self.moved[share.home].append(share)
                if share.cut:
                    self.cut[share.home].append(share)
        self._needed = {s: self._needs(s) for s in self.served}
        self._reads: dict[tuple[int, bool], list[list[tuple[int, Range]]]] = {}
        self.contexts = {s: self._gathered(s) for s in self.served}

    def _waits(self, share: Assignment) -> bool:
        """Whether its server needs rows or keys of others for it."""
        return share.home != share.server or self._gathers(share)

    def _gathers(self, share: Assignment) -> bool:
        return self.local(share.server, share.document, (share.low, share.high)) is None

    def _in_parts(self, shares: list[Assignment]) -> Iterator[Assignment]:
        """One server's shares, those that wait numbered by part and cut where a part ends.

        Shares of cut keys stay whole, as home merges them by rows.
        """
        rows = sum(s.stop - s.start for s in shares if self._waits(s))
        parts = max(1, min(self.parts, rows // PART_ROWS))
        done = 0
        for share in shares:
            if not self._waits(share):
                yield share
                continue
            while True:
                part = min((done + GRANULE // 2) * parts // rows, parts - 1)
                to_edge = -(-(part + 1) * rows // parts) - done
                wanted = share.start + round(to_edge / GRANULE) * GRANULE
                if share.cut or part == parts - 1 or not share.start < wanted < share.stop:
                    break
                yield self._narrowed(share, share.start, wanted)._replace(part=part)
                done += wanted - share.start
                share = self._narrowed(share, wanted, share.stop)
            yield share._replace(part=part)
            done += share.stop - share.start

    def _narrowed(self, share: Assignment, start: int, stop: int) -> Assignment:
        """Some rows of a share, with the keys that they see."""
        length = int(self.layout.lengths[share.document])
        low, high = self.kind.keys_seen((start, stop), length=length)
        return share._replace(start=start, stop=stop, low=low, high=high)

    def _needs(self, server: int) -> dict[int, list[tuple[int, Range]]]:
        """By document: part and key run of each share whose keys `server` must gather."""
        needed: dict[int, list[tuple[int, Range]]] = defaultdict(list)
        for share in self.served[server]:
            if self._gathers(share):
                needed[share.document].append((share.part, (share.low, share.high)))
        return needed

    def _gathered(self, server: int) -> tuple[Context, ...]:
        """Key runs that `server` must gather: all it needs but does not hold in one piece."""
        needed = self._needed[server]
        return tuple(
            Context(d, *run) for d in sorted(needed) for run in union(run for _, run in needed[d])
        )

    def local(self, rank: int, document: int, tokens: Range) -> int | None:
        """The row of `rank` where `tokens` begin, if it holds them in one run."""
        for s in self.pieces.get((rank, document), ()):
            if s.start <= tokens[0] and tokens[1] <= s.stop:
                return s.row + tokens[0] - s.start
        return None

    def keys_sent(self, owner: int, server: int) -> list[tuple[int, Range]]:
        """Key runs that travel from `owner` to `server`, in the order of the server's rows."""
        return [run for part in range(self.parts) for run in self.keys_of(owner, server, part)]

    def keys_of(
        self, owner: int, server: int, part: int, *, last: bool = False
    ) -> list[tuple[int, Range]]:
        """Those runs that are first read in `part`, or (`last`) that no later part reads."""
        return [
            (document, common)
            for document, run in self._read(server, last=last)[part]
            for s in self.pieces.get((owner, document), ())
            if (common := intersect((s.start, s.stop), run))
        ]

    def _read(self, server: int, *, last: bool) -> list[list[tuple[int, Range]]]:
        """By part: document and run of gathered keys that are read first, or last, in it."""
        if (server, last) not in self._reads:
            parts: list[list[tuple[int, Range]]] = [[] for _ in range(self.parts)]
            needed = self._needed.get(server, {})
            for document in sorted(needed):
                for part, runs in enumerate(parts):
                    other = [
                        run for at, run in needed[document] if at != part and last == (at > part)
                    ]
                    for own in union(run for at, run in needed[document] if at == part):
                        runs += [(document, run) for run in subtract(own, other)]
            self._reads[server, last] = parts
        return self._reads[server, last]
