"""Pieces of numbered chunks -> where some of them stand, each chunk's in an array of its own.

Floor: plan. Many chunks pass a rank of a ring: these are tables over all of them at once.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .program import BlockColumns


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces:
    """Rows of chunks, one int64 entry a piece in each array, by chunk and row.

    Args:
        chunk (`np.ndarray`): Its number, from 0 to below `chunks`.
        rank, segment (`np.ndarray`): Its owner, and a number of the segment that it is part of.
        start, stop (`np.ndarray`): The owner's rows.
        document, token (`np.ndarray`): What the first row holds.
        chunks (`int`): How many numbers there are.
    """

    chunk: np.ndarray
    rank: np.ndarray
    segment: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    document: np.ndarray
    token: np.ndarray
    chunks: int

    def runs(self, chosen: np.ndarray, *, cut: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """First and last piece of each run of chosen pieces that touch; `cut`: of one segment."""
        at = np.flatnonzero(chosen)
        before, after = at[:-1], at[1:]
        apart = (self.chunk[before] != self.chunk[after]) | (self.stop[before] != self.start[after])
        if cut:
            apart |= self.segment[before] != self.segment[after]
        opens = np.append(True, apart)[: len(at)]
        return at[opens], at[np.append(opens[1:], True)[: len(at)]]

    def at_home(self, chosen: np.ndarray) -> "Blocks":
        """Where chosen pieces stand at their owner."""
        first, last = self.runs(chosen)
        return Blocks(self.start[first], self.stop[last], self.by_chunk(first))

    def by_chunk(self, first: np.ndarray) -> list[int]:
        """Where those of each chunk begin among runs, and the end."""
        bounds: list[int] = np.searchsorted(self.chunk[first], np.arange(self.chunks + 1)).tolist()
        return bounds


class Standing:
    """Some of the pieces, those of each chunk end to end.

    Args:
        pieces (`Pieces`): All of them.
        held (`np.ndarray`): bool, which stand here.
    """

    def __init__(self, pieces: Pieces, held: np.ndarray) -> None:
        self.pieces, self.held = pieces, held
        size = np.where(held, pieces.stop - pieces.start, 0)
        before = np.append(0, np.cumsum(size))
        begins = np.searchsorted(pieces.chunk, np.arange(pieces.chunks + 1))
        self.rows: list[int] = np.diff(before[begins]).tolist()
        self.low = before[:-1] - before[begins[pieces.chunk]]
        self.high = self.low + size

    @cached_property
    def _segments(self) -> tuple[np.ndarray, list[int]]:
        pieces = self.pieces
        first, last = pieces.runs(self.held, cut=True)
        token = pieces.token[first]
        stop = token + pieces.stop[last] - pieces.start[first]
        columns = np.stack([self.low[first], pieces.document[first], token, stop], axis=1)
        return columns, pieces.by_chunk(first)

    def segments(self, chunk: int) -> np.ndarray:
        """int64 `[runs, 4]`: what a chunk's array holds, the fields of `Held` but the array."""
        columns, bounds = self._segments
        return columns[bounds[chunk] : bounds[chunk + 1]]

    def blocks(self, chosen: np.ndarray) -> "Blocks":
        """Where chosen pieces, all of which stand here, do so."""
        first, last = self.pieces.runs(chosen)
        return Blocks(self.low[first], self.high[last], self.pieces.by_chunk(first))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows `[low, high)` of arrays, by chunk."""

    low: np.ndarray
    high: np.ndarray
    bounds: list[int]

    def of(self, chunk: int, array: int) -> BlockColumns:
        """Those of a chunk, which stands in `array`."""
        of_chunk = slice(self.bounds[chunk], self.bounds[chunk + 1])
        return BlockColumns(array, self.low[of_chunk], self.high[of_chunk])
