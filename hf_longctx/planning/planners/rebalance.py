"""Move attention work between processes, each move the one of most work per byte.

The unit that moves is an *item*, which pairs rows of one document: pair x is rows (head + x,
tail - 1 - x). Without a window every pair of an item costs the same, so cutting pairs off the inner
end moves the most work per key. That holds for bidirectional documents too, whose rows all cost the
document's length. Layer: planning. Letters: P processes, ranks and extra servers.
"""

import numpy as np

from ..layouts.cost import GRANULE, CostTable, LayerKind
from ..layouts.layout import Layout

DOCUMENT, HEAD, TAIL, FIRST, LAST, MIDDLE, HOME, SERVER = range(8)  # columns of a table


def items(layout: Layout) -> np.ndarray:
    """Return the item table of a layout in which each rank serves its own rows.

    Two equally long pieces of a document on one rank form one item (head rows, tail rows); every
    other piece is folded on itself, and an odd one keeps its middle row.

    Returns:
        int64 `[items, 8]`: document, head, tail, first pair, last pair, middle row?, home, server.
    """
    rank, _, document, start, stop = layout.columns.astype(np.int64).T  # by rank and document
    same = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
    runs = np.diff(np.flatnonzero(np.append(np.append(True, ~same), True)))  # pieces held together
    pieces = np.repeat(runs, runs)
    size = stop - start
    mirrored = same & (pieces[1:] == 2) & (size[1:] == size[:-1])
    head, tail = np.append(mirrored, False), np.append(False, mirrored)
    stop = np.where(head, np.append(stop[1:], 0), stop)
    pairs, middle = np.where(head, size, size // 2), np.where(head, 0, size % 2)
    table = np.stack([document, start, stop, 0 * size, pairs, middle, rank, rank], axis=1)
    return table[~tail]


def runs(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the runs of rows of items: head rows and tail rows, or one run where they touch.

    Returns:
        Each int64 `[runs]`: the item, its first row and its end.
    """
    _, head, tail, first, last, middle, _, _ = table.T
    split = tail - last - (head + last) > middle
    item = np.arange(len(table))
    start = np.concatenate([head + first, (tail - last)[split]])
    stop = np.concatenate([np.where(split, head + last, tail - first), (tail - first)[split]])
    item = np.concatenate([item, item[split]])
    held = start < stop
    return item[held], start[held], stop[held]


def cost(
    start: np.ndarray,
    stop: np.ndarray,
    *,
    length: np.ndarray,
    kind: LayerKind,
    costs: CostTable | None,
) -> np.ndarray:
    """Return the score entries of tasks of query rows `[start, stop)`, or their seconds."""
    entries = kind.entries(start, stop, length=length)
    if costs is None:
        return entries
    low, high = kind.keys_seen_by(start, stop, length=length)
    return costs.seconds(stop - start, high - low, entries)


def cost_over(
    start: np.ndarray,
    stop: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    *,
    length: np.ndarray,
    kind: LayerKind,
    costs: CostTable | None,
) -> np.ndarray:
    """Return the `cost` of query rows `[start, stop)` with keys `[low, high)` alone."""
    entries = kind.entries_over(start, stop, low, high, length=length)
    return entries if costs is None else costs.seconds(stop - start, high - low, entries)


class Rebalance:
    """Which process serves which item so far, and how much work each has.

    Args:
        layout (`Layout`): Where the tokens lie; each rank first serves its own rows.
        kind (`LayerKind`): What a row sees, and its widths, which weigh a move's bytes.
        speed (`np.ndarray`): float64 `[P]`: how fast each process attends.
        linear (`np.ndarray`): float64 `[P]`: work of each process that cannot move.
        costs (`CostTable`, *optional*): Work is seconds by it; score entries without.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        kind: LayerKind,
        speed: np.ndarray,
        linear: np.ndarray,
        costs: CostTable | None = None,
    ) -> None:
        self.layout, self.kind, self.costs = layout, kind, costs
        self.table = items(layout)
        self.work = self._cost(self.table)
        served = np.bincount(self.table[:, SERVER], weights=self.work, minlength=len(speed))
        self.load = served + linear
        self.target = _targets(served.sum(), speed=speed, linear=linear)

    def _cost(self, table: np.ndarray) -> np.ndarray:
        """Return the score entries of each item, or its seconds by the table."""
        item, start, stop = runs(table)
        length = self.layout.lengths[table[item, DOCUMENT]]
        each = cost(start, stop, length=length, kind=self.kind, costs=self.costs)
        return np.bincount(item, weights=each, minlength=len(table))

    def make(
        self,
        receiver: int,
        *,
        donors: np.ndarray,
        floor: np.ndarray,
        ceiling: float,
        fine: bool = False,
    ) -> bool:
        """Make the move to `receiver` with the most work per byte; return whether there was one.

        Args:
            receiver (`int`): Who gets work.
            donors (`np.ndarray`): bool `[P]`: who may give some.
            floor (`np.ndarray`): float64 `[P]`: work that each donor keeps at least.
            ceiling (`float`): Work that the receiver has at most, after it.
            fine (`bool`, *optional*, defaults to `False`): Where head and tail rows touch, cut off
                half a granule of pairs, which makes a whole one of rows; never less than that.
        """
        candidates = np.flatnonzero(donors[self.table[:, SERVER]])
        if not len(candidates):
            return False
        rows, total = self.table[candidates], self.work[candidates]
        surplus = (self.load - floor)[rows[:, SERVER]]
        limit = np.minimum(total, np.minimum(surplus, ceiling - self.load[receiver]))
        pairs = rows[:, LAST] - rows[:, FIRST]
        everything = limit >= total
        per_pair = np.maximum(total / np.maximum(pairs, 1), np.finfo(np.float64).tiny)
        # Cut in the middle, head and tail rows that touch stay one run of twice as many rows.
        touching = rows[:, HEAD] + rows[:, LAST] + rows[:, MIDDLE] == rows[:, TAIL] - rows[:, LAST]
        granule = np.where(touching & fine, GRANULE // 2, GRANULE)
        cut = np.floor(limit / per_pair).astype(np.int64) // granule * granule
        taken = np.where(everything, pairs, cut)
        keys = self._keys(rows, taken, receiver)
        volume = 2 * taken * self.kind.query_width + keys * self.kind.key_value_width
        gain = np.where(taken + everything > 0, taken * per_pair / np.maximum(volume, 1), -1.0)
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            return False
        self._give(int(candidates[best]), pairs=int(taken[best]), receiver=receiver)
        return True

    def _keys(self, rows: np.ndarray, taken: np.ndarray, receiver: int) -> np.ndarray:
        """Count the keys that `taken` inner pairs need and the receiver neither owns nor gets."""
        if self.kind.window:
            sides = 2 if self.kind.causal else 4
            seen = 2 * taken + sides * self.kind.window
            return np.minimum(seen, rows[:, TAIL])
        stop = np.minimum(rows[:, TAIL] - rows[:, LAST] + taken, rows[:, TAIL])
        if not self.kind.causal:
            stop = self.layout.lengths[rows[:, DOCUMENT]].astype(np.int64)
        return np.maximum(stop - self._held(receiver)[rows[:, DOCUMENT]], 0)

    def _held(self, process: int) -> np.ndarray:
        """Return int64 `[documents]`: the keys of each that a process owns or receives.

        They end with the last row that it serves: no row is served without the keys before it.
        """
        served = self.table[self.table[:, SERVER] == process]
        held = np.zeros(len(self.layout.lengths), np.int64)
        last = served[:, TAIL] - served[:, FIRST]
        if not self.kind.causal:
            last = self.layout.lengths[served[:, DOCUMENT]]
        np.maximum.at(held, served[:, DOCUMENT], last)
        return held

    def _give(self, item: int, *, pairs: int, receiver: int) -> None:
        """Let `receiver` serve the inner pairs of an item, or all of it."""
        donor, before = int(self.table[item, SERVER]), self.work[item]
        if pairs == self.table[item, LAST] - self.table[item, FIRST]:
            self.table[item, SERVER] = receiver
            self.load[donor] -= before
            self.load[receiver] += before
            return
        moved = self.table[item].copy()
        moved[FIRST], moved[SERVER] = moved[LAST] - pairs, receiver
        self.table[item, LAST] -= pairs
        self.table[item, MIDDLE] = 0
        kept, gone = self._cost(np.stack([self.table[item], moved]))
        self.table = np.concatenate([self.table, moved[None]])
        self.work = np.append(self.work, gone)
        self.work[item] = kept
        self.load[donor] += kept - before
        self.load[receiver] += gone


def _targets(attention: float, *, speed: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """Return the target work per process, float64 `[P]`, that minimises the makespan.

    It is proportional to speed, but at least the work that cannot move.
    """
    order = np.argsort(
        linear / speed, kind="stable"
    )  # by how long their own work takes: these have room first
    for filled in range(len(order), 0, -1):
        free = order[:filled]
        level = (attention + linear[free].sum()) / speed[free].sum()
        if level >= linear[order[filled - 1]] / speed[order[filled - 1]]:
            break
    return np.maximum(level * speed, linear)
