"""Choose the schedule of a state scan, and the pieces of a chain, by a link between neighbours.

One send takes `hop + bytes / rate` seconds; D are the bytes of a state, D' with its M, and P how
many ranks share one document, at most: its scan takes longest.

    chain       (P - 2 + K) (hop + D / (K rate))           in K pieces
    tree        ceil(log2 P) (hop + D' / rate)
    allgather   hop + (P - 1) D' / rate

Layer: planning.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..layouts.layout import Layout
from ..layouts.levels import NeighbourLink
from ..planners.state_scan import State

_MOST_PIECES = 32  # each costs a message, and the gain of one more falls with their square


class StateSizes(NamedTuple):
    """A layer's state: heads, value columns of each, and bytes of an element."""

    state: State
    heads: int
    columns: int
    itemsize: int = 4

    def __str__(self) -> str:
        rows, decay = self.state
        return f"{self.heads} heads x {rows} x {self.columns}, decay by {decay}"

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, D."""
        return self.heads * self.state.rows * self.columns * self.itemsize

    @property
    def pair_bytes(self) -> int:
        """Bytes of a state and its M, D'."""
        width = self.state.rows if self.state.decay == "matrix" else 1
        return self.state_bytes + self.heads * self.state.decay_rows * width * self.itemsize


class Schedule(NamedTuple):
    """One of `state_scan.SCHEDULES`, the pieces of a chain, and its predicted seconds."""

    name: str
    pieces: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanChoice:
    """What was chosen for the layers of one kind in one batch.

    Args:
        sizes (`StateSizes`): StateSizes of their state.
        ranks (`int`): P.
        schedule (`Schedule`): The schedule of their scans.
        link (`NeighbourLink`): The link by which it was chosen.
        measured (`bool`): Whether the link was measured, not assumed.
    """

    sizes: StateSizes
    ranks: int
    schedule: Schedule
    link: NeighbourLink
    measured: bool

    def __str__(self) -> str:
        name, pieces, seconds = self.schedule
        return (
            f"{self.sizes}: {name} over {self.ranks} ranks, pieces {pieces}, predicted to take "
            f"{1e3 * seconds:.3g} ms by a link of {self.link} "
            f"({'measured' if self.measured else 'assumed, as none was measured'})"
        )

    def figures(self) -> dict[str, Any]:
        """Return what was chosen, for a report."""
        return {
            "schedule": self.schedule.name,
            "pieces": self.schedule.pieces,
            "ranks": self.ranks,
            "predicted_seconds": self.schedule.seconds,
            "hop_seconds": self.link.hop,
            "bytes_per_second": self.link.rate,
            "measured": self.measured,
        }


def choose_schedule(
    sizes: StateSizes, *, ranks: int, link: NeighbourLink, flag: str = "auto"
) -> Schedule:
    """Choose the fastest schedule, and for a chain the pieces that make it fastest.

    Args:
        sizes (`StateSizes`): Of the state.
        ranks (`int`): P; see `longest_chain`.
        link (`NeighbourLink`): Between neighbours.
        flag (`str`, *optional*, defaults to `auto`): What `--longctx_scan` says.
    """
    hops = max(ranks - 1, 0)
    state, pair = sizes.state_bytes / link.rate, sizes.pair_bytes / link.rate
    found = [
        Schedule("chain", k, max(hops - 1 + k, 0) * (link.hop + state / k))
        for k in cuts(sizes.heads, sizes.columns)
    ]
    found.append(Schedule("tree", 1, math.ceil(math.log2(max(ranks, 1))) * (link.hop + pair)))
    found.append(Schedule("allgather", 1, link.hop + hops * pair))
    return min((s for s in found if flag in ("auto", s.name)), key=lambda s: s.seconds)


def cuts(heads: int, columns: int) -> list[int]:
    """Return the numbers of equal pieces that a state can be cut into, by heads, then columns."""
    by_heads = [k for k in range(1, heads + 1) if heads % k == 0]
    by_columns = [heads * k for k in range(2, columns + 1) if columns % k == 0]
    return [k for k in (*by_heads, *by_columns) if k <= _MOST_PIECES]


def longest_chain(layout: Layout) -> int:
    """Count the ranks of the document that lies on most."""
    held = np.unique(layout.columns[:, [2, 0]], axis=0)
    return int(np.bincount(held[:, 0]).max())
