"""Items on their homes -> items moved between servers, each move the one of most work per byte.

Floor: plan. Letters: P processes, ranks and extra servers.
"""

import numpy as np

from .cost import GRANULE, LayerKind
from .items import DOCUMENT, FIRST, HEAD, LAST, MIDDLE, SERVER, TAIL, items, work
from .layout import Layout
from .measured import CostTable


class Moves:
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
        self.share = _shares(served.sum(), speed=speed, linear=linear)

    def _cost(self, table: np.ndarray) -> np.ndarray:
        return work(table, layout=self.layout, kind=self.kind, costs=self.costs)

    def make(
        self,
        receiver: int,
        *,
        donors: np.ndarray,
        floor: np.ndarray,
        ceiling: float,
        fine: bool = False,
    ) -> bool:
        """Make the move to `receiver` with the most work per byte; `False` when there is none.

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
        whole = limit >= total
        per_pair = np.maximum(total / np.maximum(pairs, 1), np.finfo(np.float64).tiny)
        touching = rows[:, HEAD] + rows[:, LAST] + rows[:, MIDDLE] == rows[:, TAIL] - rows[:, LAST]
        granule = np.where(touching & fine, GRANULE // 2, GRANULE)
        cut = np.floor(limit / per_pair).astype(np.int64) // granule * granule
        taken = np.where(whole, pairs, cut)
        keys = self._keys(rows, taken, receiver)
        volume = 2 * taken * self.kind.query_width + keys * self.kind.key_value_width
        gain = np.where(taken + whole > 0, taken * per_pair / np.maximum(volume, 1), -1.0)
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            return False
        self._give(int(candidates[best]), pairs=int(taken[best]), receiver=receiver)
        return True

    def _keys(self, rows: np.ndarray, taken: np.ndarray, receiver: int) -> np.ndarray:
        """Keys that `taken` inner pairs of items need, and the receiver neither owns nor gets."""
        if self.kind.window:
            sides = 2 if self.kind.causal else 4
            seen = 2 * taken + sides * self.kind.window
            return np.minimum(seen, rows[:, TAIL])
        stop = np.minimum(rows[:, TAIL] - rows[:, LAST] + taken, rows[:, TAIL])
        if not self.kind.causal:
            stop = self.layout.lengths[rows[:, DOCUMENT]].astype(np.int64)
        return np.maximum(stop - self._held(receiver)[rows[:, DOCUMENT]], 0)

    def _held(self, process: int) -> np.ndarray:
        """int64 `[documents]`: the keys of each that a process owns or receives: those before it.

        They end with the last row that it serves: it does not serve rows without the keys before.
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


def _shares(attention: float, *, speed: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """Work of each process, float64 `[P]`, when all end as early as can be: in proportion to speed,
    but what cannot move stays."""
    order = np.argsort(linear / speed, kind="stable")  # who is filled up first
    for filled in range(len(order), 0, -1):
        free = order[:filled]
        level = (attention + linear[free].sum()) / speed[free].sum()
        if level >= linear[order[filled - 1]] / speed[order[filled - 1]]:
            break
    return np.maximum(level * speed, linear)
