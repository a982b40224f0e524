"""Compute what attention costs: score entries, or measured seconds, of runs of query rows.

A query row at position p of a causal document sees p + 1 keys, or at most `window` keys under a
sliding window, so a run of rows costs the sum of that. `window` 0 means no window. A bidirectional
row also sees the mirror image: later keys, as far as the window reaches backwards.

Score entries mispredict time: a kernel is slower on short pieces and on those near the diagonal. A
`CostTable` holds measured seconds per score entry over a grid of (query rows, keys); planners that
are given one balance seconds instead of entries. It is an input of plans, the same on every rank.
Layer: planning.
"""

import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from .intervals import Range

GRANULE = 128  # rows; a flash kernel loses speed on shorter pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What a planner must know of a layer. Layers of one kind share one plan.

    Args:
        window (`int`): Keys a row may see on one side, itself included; 0 for none.
        causal (`bool`): Rows see no later key; `False`: as far forwards as backwards.
        query_width (`int`): Elements of one token's queries, heads x head size.
        key_value_width (`int`): Elements of one token's keys and values together.
        kv_heads (`int`): Key/value heads, which an overlapped exchange cuts into groups.
        heads (`int`): Query heads, which the ranks of a domain divide among themselves.
    """

    window: int = 0
    causal: bool = True
    query_width: int = 1
    key_value_width: int = 1
    kv_heads: int = 1
    heads: int = 1

    def entries(self, start: ArrayLike, stop: ArrayLike, *, length: ArrayLike) -> np.ndarray:
        """Count the score entries of query rows `[start, stop)` of documents of `length` tokens."""
        start, stop, length = (np.asarray(x, np.int64) for x in (start, stop, length))
        earlier = self._up_to(stop) - self._up_to(start)
        if self.causal:
            return earlier
        mirrored = self._up_to(length - start) - self._up_to(length - stop)
        return earlier + mirrored - (stop - start)  # both count the row itself

    def _up_to(self, rows: np.ndarray) -> np.ndarray:
        """Count the score entries of the first rows of a causal document."""
        # Balancing spends most of its time here: without a window the closed form is faster.
        return _clipped(rows + 1, self.window) if self.window else rows * (rows + 1) // 2

    def entries_over(
        self, start: np.ndarray, stop: np.ndarray, low: np.ndarray, high: np.ndarray, *,
        length: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Count the score entries of query rows `[start, stop)` with keys `[low, high)`."""
        reach = self.window or length
        ahead = 1 if self.causal else reach

        # Row p sees keys from p + 1 - reach to p + ahead. Counted: those below a key.
        def before(key: np.ndarray) -> np.ndarray:
            ends = _clipped(stop + ahead, key) - _clipped(start + ahead, key)
            return ends - _clipped(stop - reach + 1, key) + _clipped(start - reach + 1, key)

        return before(high) - before(low)

    def keys_seen(self, rows: Range, *, length: int) -> Range:
        """Return the keys that query rows `[start, stop)` of a document of `length` tokens see."""
        # Planners ask this of every pair of runs: plain numbers, not `keys_seen_by` of arrays.
        start, stop = rows
        if not self.window:
            return 0, stop if self.causal else length
        high = stop if self.causal else min(length, stop + self.window - 1)
        return max(0, start - self.window + 1), high

    def keys_seen_by(
        self, start: np.ndarray, stop: np.ndarray, *, length: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `keys_seen` of many runs of rows: int64 first keys, and ends."""
        if not self.window:
            return np.zeros_like(start), stop if self.causal else length.astype(np.int64)
        low = np.maximum(0, start - self.window + 1)
        return low, stop if self.causal else np.minimum(length, stop + self.window - 1)


def _clipped(number: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Sum 0, 1, ... up to `number` - 1, each at most `bound`."""
    number = np.maximum(number, 0)
    below = np.minimum(number, bound)
    return below * (below - 1) // 2 + (number - below) * bound


def max_over_mean(loads: np.ndarray) -> float:
    """Return the largest load over the mean: 1.0 is perfect balance, or no load at all."""
    mean = float(np.mean(loads)) if len(loads) else 0.0
    return float(np.max(loads)) / mean if mean else 1.0


_LARGEST = 1 << 40  # size that a grid may have: a larger one is a damaged file


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds per score entry, forward and backward of one layer together.

    Args:
        rows (`tuple[int, ...]`): Query rows of the grid, rising.
        keys (`tuple[int, ...]`): Keys of the grid, rising.
        per_entry (`tuple[tuple[float, ...], ...]`): For each number of rows, by number of keys:
            seconds over score entries of a causal task, whose last row sees all keys.
        tile (`int`, *optional*, defaults to 1): Rows and keys that the kernel pads a piece to.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    per_entry: tuple[tuple[float, ...], ...]
    tile: int = 1

    def seconds(self, rows: np.ndarray, keys: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Return the time of tasks, float64 by element.

        Between grid points the rate is interpolated bilinearly, over logarithms of sizes; beyond
        the grid it is that of the nearest edge, where the kernel is saturated.

        Args:
            rows, keys (`np.ndarray`): Of each task, int64; a task without rows costs nothing.
            entries (`np.ndarray`): Score entries of each task.
        """
        padded_rows, padded_keys = (-(-size // self.tile) * self.tile for size in (rows, keys))
        padding = padded_rows * padded_keys / np.maximum(rows * keys, 1)
        table = np.asarray(self.per_entry)
        r, r_part = _place(padded_rows, self.rows)
        k, k_part = _place(padded_keys, self.keys)
        fewer, more = (
            table[i, k] * (1 - k_part) + table[i, np.minimum(k + 1, len(self.keys) - 1)] * k_part
            for i in (r, np.minimum(r + 1, len(self.rows) - 1))
        )
        rate: np.ndarray = fewer * (1 - r_part) + more * r_part
        return rate * entries * padding

    def saturated(self) -> "CostTable":
        """Return the table of a device that runs every piece at this one's rate for the largest."""
        return CostTable(rows=(1,), keys=(1,), per_entry=((self.per_entry[-1][-1],),))

    def to_json(self) -> str:
        """Return the table as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Read a table from its text.

        Raises:
            ValueError: where the text is no table, or its grid does not rise or fit its rates.
        """
        try:
            fields = json.loads(text)
            table = cls(
                rows=tuple(fields["rows"]),
                keys=tuple(fields["keys"]),
                per_entry=tuple(map(tuple, fields["per_entry"])),
                tile=fields["tile"],
            )
            rates = np.asarray(table.per_entry)
            axes = [np.asarray(axis) for axis in (table.rows, table.keys, (table.tile,))]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"no cost table ({error}); write it with hf-longctx profile") from None
        whole = all(a.dtype == np.int64 and len(a) and a.min() > 0 for a in axes)
        rising = whole and all((np.diff(a) > 0).all() and a[-1] < _LARGEST for a in axes)
        fits = rates.shape == (len(table.rows), len(table.keys)) and rates.dtype == np.float64
        if not (rising and fits and (rates > 0).all() and rates.max() < 1.0):
            raise ValueError(
                f"a cost table of {rates.shape} rates for rows {table.rows} and keys {table.keys}: "
                "sizes must be whole and rise, and rates be positive seconds, one for each pair of "
                "sizes; write it anew with hf-longctx profile"
            )
        return table


def _place(sizes: np.ndarray, grid: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the grid point at or below each size, and how far on to the next, in [0, 1)."""
    logs, at = np.log2(grid), np.log2(np.maximum(sizes, 1))
    low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, len(grid) - 1)
    step = np.append(np.diff(logs), 1.0)[low]
    part = np.where(low == len(grid) - 1, 0.0, np.clip((at - logs[low]) / step, 0.0, 1.0))
    return low, part
