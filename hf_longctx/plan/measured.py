"""Measured seconds of attention tasks by size -> what any task costs on that device.

Floor: plan. Score entries mispredict time: a kernel is slower on short pieces and on those near the
diagonal. A table holds seconds per score entry over a grid of (query rows, keys); planners that are
given one balance seconds instead of entries. It is part of a plan's input, the same on every rank.
"""

import json
from dataclasses import asdict, dataclass

import numpy as np

_LARGEST = 1 << 40  # of a grid's sizes


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
        """float64 by element: time of tasks.

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
        """A device that runs every piece at this one's rate for the largest."""
        return CostTable(rows=(1,), keys=(1,), per_entry=((self.per_entry[-1][-1],),))

    def to_json(self) -> str:
        """The table as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """A table from its text.

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
    """The grid point at or below each size, and how far on to the next one it lies, in [0, 1)."""
    logs, at = np.log2(grid), np.log2(np.maximum(sizes, 1))
    low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, len(grid) - 1)
    step = np.append(np.diff(logs), 1.0)[low]
    part = np.where(low == len(grid) - 1, 0.0, np.clip((at - logs[low]) / step, 0.0, 1.0))
    return low, part
