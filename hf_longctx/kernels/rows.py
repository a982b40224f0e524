"""Runs of rows of one array -> a batch for a kernel, and its results back into the array.

Floor: kernels. Letters: n runs, L rows of the longest run.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class Rows:
    """n runs of rows of an array: read as `[n, heads, L, ...]`, written or added back unpadded.

    Runs of one length that lie end to end are views; others are gathered, and rows past a run's end
    repeat its last row.

    Args:
        starts (`np.ndarray`): int64 `[n]`, the first row of each run.
        lens (`np.ndarray`): int64 `[n]`, its rows, at least 1.
    """

    def __init__(self, starts: np.ndarray, lens: np.ndarray) -> None:
        self.starts, self.lens = starts, lens
        self.n, self.longest, self.first = len(starts), int(lens.max()), int(starts[0])
        self.even = bool((lens == self.longest).all())
        self.view = self.even and bool((np.diff(starts) == self.longest).all())

    @cached_property
    def _padded(self) -> Tensor:
        """int64 `[n * L]`: which row of the array stands where in the batch."""
        offset = np.minimum(np.arange(self.longest), self.lens[:, None] - 1)
        return torch.from_numpy((self.starts[:, None] + offset).ravel())

    @cached_property
    def _real(self) -> Tensor:
        """bool `[n * L]`: rows of the batch that are no padding."""
        return torch.from_numpy((np.arange(self.longest) < self.lens[:, None]).ravel())

    @cached_property
    def _real_at(self) -> tuple[Tensor, Tensor]:
        """int64 `[rows]`: the rows that are no padding, in the batch and in the array."""
        return self._real.nonzero().flatten(), self._padded[self._real]

    def _of(self, array: Tensor) -> Tensor:
        return array[self.first : self.first + self.n * self.longest]

    def read(self, array: Tensor) -> Tensor:
        """`[n, heads, L, ...]`; rows past a run's end repeat its last row."""
        rows = self._of(array) if self.view else array.index_select(0, self._padded)
        return rows.unflatten(0, (self.n, self.longest)).transpose(1, 2)

    def read_zero_padded(self, array: Tensor) -> Tensor:
        """As `read`, with zeros past a run's end."""
        read = self.read(array)
        if self.even:
            return read
        return read * self._real.view(self.n, 1, self.longest, 1)

    def write(self, array: Tensor, values: Tensor) -> None:
        """Store `[n, heads, L, ...]` in the array's rows, without the padding."""
        rows = values.transpose(1, 2).flatten(0, 1)
        if self.view:
            self._of(array).copy_(rows)
        else:
            inside, target = self._real_at
            array.index_copy_(0, target, rows.index_select(0, inside).to(array.dtype))

    def add(self, array: Tensor, values: Tensor) -> None:
        """Add `[n, heads, L, ...]`, zero past a run's end, to the array's rows.

        A row may stand in several runs.
        """
        rows = values.transpose(1, 2).flatten(0, 1)
        if self.view:
            self._of(array).add_(rows)
        else:
            array.index_add_(0, self._padded, rows.to(array.dtype))
