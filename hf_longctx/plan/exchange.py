"""Shares of balanced tasks -> the rows that each process needs, and who sends them.

Floor: plan. Home sends query rows, and each owner the keys that a server lacks, once: a server
gathers the keys of a document in one buffer, whatever tasks read them. `serve` makes programs of
these.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..intervals import Range, intersect, union
from .layout import Layout, Placed
from .subranges import Share


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
        processes (`int`, *optional*): Ranks and extra servers; the ranks alone by default.
    """

    def __init__(
        self, layout: Layout, shares: Iterable[Share], *, processes: int | None = None
    ) -> None:
        self.layout = layout
        self.processes = processes or layout.ranks
        self.pieces: dict[tuple[int, int], list[Placed]] = {}  # by rank and document, in order
        for segment in layout.segments:
            self.pieces.setdefault((segment.rank, segment.document), []).append(segment)
        self.served: dict[int, list[Share]] = {}
        self.moved: dict[int, list[Share]] = {}  # by home
        self.cut: dict[int, list[Share]] = {}  # by home: those whose results it merges
        for share in shares:
            self.served.setdefault(share.server, []).append(share)
            if share.server != share.home:
                self.moved.setdefault(share.home, []).append(share)
            if share.cut:
                self.cut.setdefault(share.home, []).append(share)
        self.contexts = {s: self._gathered(s) for s in self.served}

    def _gathered(self, server: int) -> tuple[Context, ...]:
        """Key runs that `server` must gather: all it needs but does not hold in one piece."""
        needed: dict[int, list[Range]] = {}
        for share in self.served[server]:
            keys = share.low, share.high
            if self.local(server, share.document, keys) is None:
                needed.setdefault(share.document, []).append(keys)
        return tuple(Context(d, *run) for d in sorted(needed) for run in union(needed[d]))

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
