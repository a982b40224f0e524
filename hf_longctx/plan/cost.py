"""Rows of a document -> score entries: the cost of attention that planners balance.

Floor: plan. A query row at position p of a causal document sees p + 1 keys, or at most `window`
keys under a sliding window, so a run of rows costs the sum of that. `window` 0 means no window. A
bidirectional row also sees the mirror image: later keys, as far as the window reaches backwards.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..intervals import Range

GRANULE = 128  # rows; a flash kernel loses speed on shorter pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What a planner must know of a layer: layers of one kind share one plan.

    Args:
        window (`int`): Keys a row may see on one side, itself included; 0 for none.
        causal (`bool`): Rows see no later key; `False`: as far forwards as backwards.
        query_width (`int`): Elements of one token's queries, heads x head size.
        key_value_width (`int`): Elements of one token's keys and values together.
        kv_heads (`int`): Key/value heads, which an overlapped exchange cuts into groups.
        heads (`int`): Query heads, which ranks of a domain share out.
    """

    window: int = 0
    causal: bool = True
    query_width: int = 1
    key_value_width: int = 1
    kv_heads: int = 1
    heads: int = 1

    def entries(self, start: ArrayLike, stop: ArrayLike, *, length: ArrayLike) -> np.ndarray:
        """Score entries of query rows `[start, stop)` of documents of `length` tokens, int64."""
        start, stop, length = (np.asarray(x, np.int64) for x in (start, stop, length))
        earlier = entries(start, stop, window=self.window)
        if self.causal:
            return earlier
        mirrored = entries(length - stop, length - start, window=self.window)
        return earlier + mirrored - (stop - start)  # both count the row itself

    def entries_over(
        self, start: np.ndarray, stop: np.ndarray, low: np.ndarray, high: np.ndarray, *,
        length: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Score entries of query rows `[start, stop)` with keys `[low, high)`, int64."""
        reach = self.window or length
        ahead = 1 if self.causal else reach

        def before(key: np.ndarray) -> np.ndarray:
            ends = _clipped(stop + ahead, key) - _clipped(start + ahead, key)
            return ends - _clipped(stop - reach + 1, key) + _clipped(start - reach + 1, key)

        return before(high) - before(low)

    def keys_seen(self, rows: Range, *, length: int) -> Range:
        """The keys that query rows `[start, stop)` of a document of `length` tokens see."""
        low, high = keys_seen(rows, window=self.window)
        if not self.causal:
            mirrored, _ = keys_seen((length - rows[1], length - rows[0]), window=self.window)
            high = length - mirrored
        return low, high

    def keys_seen_by(
        self, start: np.ndarray, stop: np.ndarray, *, length: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`keys_seen` of many runs of rows: int64 first keys, and ends."""
        if not self.window:
            return np.zeros_like(start), stop if self.causal else length.astype(np.int64)
        low = np.maximum(0, start - self.window + 1)
        return low, stop if self.causal else np.minimum(length, stop + self.window - 1)


def _entries_before(position: ArrayLike, window: int) -> np.ndarray:
    """Score entries of rows `[0, position)` of a document, int64."""
    rows = np.asarray(position, np.int64)
    if not window:
        return rows * (rows + 1) // 2
    ramp = np.minimum(rows, window)
    return ramp * (ramp + 1) // 2 + (rows - ramp) * window


def _clipped(number: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The sum of 0, 1, ... up to `number` - 1, each at most `bound`."""
    number = np.maximum(number, 0)
    below = np.minimum(number, bound)
    return below * (below - 1) // 2 + (number - below) * bound


def entries(start: ArrayLike, stop: ArrayLike, *, window: int) -> np.ndarray:
    """Score entries of query rows `[start, stop)` of causal documents (int64, by element)."""
    return _entries_before(stop, window) - _entries_before(start, window)


def keys_seen(rows: Range, *, window: int) -> Range:
    """The keys that query rows `[start, stop)` of a causal document see."""
    start, stop = rows
    return (max(0, start - window + 1) if window else 0, stop)


def max_over_mean(loads: np.ndarray) -> float:
    """Largest load over the mean: 1.0 is perfect balance; 1.0 for no load at all."""
    mean = float(np.mean(loads)) if len(loads) else 0.0
    return float(np.max(loads)) / mean if mean else 1.0
