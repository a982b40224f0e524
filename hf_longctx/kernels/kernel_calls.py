"""Turn attention tasks into kernel calls: rectangles without masks if possible, batched if short.

A task is a run of query rows with a run of keys of the same document. Its causal (and window) mask
is cut into *tiles*, rectangles of scores that a kernel takes: full ones, causal squares and, under
a window, bands with a small dense mask. A bidirectional task is one full tile, or bands. Short
squares of similar length share one call.
Layer: kernels. Letters: n tiles of one call, L rows of the longest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowRuns:
    """n runs of rows of an array: read as `[n, heads, L, ...]`, written or added back unpadded.

    Args:
        starts (`np.ndarray`): int64 `[n]`, the first row of each run.
        lens (`np.ndarray`): int64 `[n]`, its rows, at least 1.
    """

    def __init__(self, starts: np.ndarray, lens: np.ndarray) -> None:
        self.starts, self.lens = starts, lens
        self.n, self.longest, self.first = len(starts), int(lens.max()), int(starts[0])
        self.even = bool((lens == self.longest).all())
        # Runs of one length that lie end to end are a view of the array; others are gathered.
        self.view = self.even and bool((np.diff(starts) == self.longest).all())

    @cached_property
    def _padded(self) -> Tensor:
        """int64 `[n * L]`: which row of the array is read at each place of the batch."""
        # Past a run's end its last row repeats: padding holds numbers of a real row, so that
        # exp(score - lse) stays finite there.
        offset = np.minimum(np.arange(self.longest), self.lens[:, None] - 1)
        return torch.from_numpy((self.starts[:, None] + offset).ravel())

    @cached_property
    def _real(self) -> Tensor:
        """bool `[n * L]`: places of the batch that are no padding."""
        return torch.from_numpy((np.arange(self.longest) < self.lens[:, None]).ravel())

    @cached_property
    def _real_at(self) -> tuple[Tensor, Tensor]:
        """int64 `[rows]`: the rows that are no padding, in the batch and in the array."""
        return self._real.nonzero().flatten(), self._padded[self._real]

    def _of(self, array: Tensor) -> Tensor:
        return array[self.first : self.first + self.n * self.longest]

    def read(self, array: Tensor) -> Tensor:
        """Read `[n, heads, L, ...]`; rows past a run's end repeat its last row."""
        rows = self._of(array) if self.view else array.index_select(0, self._padded)
        return rows.unflatten(0, (self.n, self.longest)).transpose(1, 2)

    def read_zero_padded(self, array: Tensor) -> Tensor:
        """Read `[n, heads, L, ...]`, with zeros past a run's end."""
        read = self.read(array)
        if self.even:
            return read
        return read * self._real.view(self.n, 1, self.longest, 1)

    def write(self, array: Tensor, values: Tensor) -> None:
        """Write `[n, heads, L, ...]` into the array's rows, without the padding."""
        rows = values.transpose(1, 2).flatten(0, 1)
        if self.view:
            self._of(array).copy_(rows)
        else:
            inside, target = self._real_at
            array.index_copy_(0, target, rows.index_select(0, inside).to(array.dtype))

    def add(self, array: Tensor, values: Tensor) -> None:
        """Add `[n, heads, L, ...]`, which must be zero past a run's end, to the array's rows."""
        rows = values.transpose(1, 2).flatten(0, 1)
        if self.view:
            self._of(array).add_(rows)
        else:
            # index_add_, as a row may be in several runs: keys that several tiles see.
            array.index_add_(0, self._padded, rows.to(array.dtype))


FULL, CAUSAL, BAND = "full", "causal", "band"
_SQUARE = 256  # rows of a causal square in a backward, at most
_BATCHED_ROWS = 32  # gathering longer tiles costs more than calls of their own
_BATCHED_KEYS = 65_536  # rows of gathered keys in one call, at most
_PADDING = 1.125  # longest over shortest square of a batch


class Tile(NamedTuple):
    """Rows `[q, q + q_len)` against keys `[k, k + k_len)`, from the task's first row and key on.

    `shift` (bands only) is the position of the first row minus that of the first key. `merges` says
    that an earlier tile of the task has written these rows.
    """

    mask: str
    q: int
    q_len: int
    k: int
    k_len: int
    shift: int
    merges: bool


def tiles(
    q_pos: int, q_len: int, k_pos: int, k_len: int, *, window: int, causal: bool = True
) -> list[Tile]:
    """Cut the mask of one task into tiles; rows that see none of the keys are in none.

    Args:
        q_pos, q_len (`int`): Position of the first query row in its document, and rows.
        k_pos, k_len (`int`): Position of the first key, and keys.
        window (`int`): Keys a row sees on one side, itself included; 0 for all.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key.
    """
    if not causal and not window:
        return [Tile(FULL, 0, q_len, 0, k_len, 0, False)]
    ahead = 0 if causal else window - 1
    first = max(q_pos, k_pos - ahead)  # rows before it see none of the keys
    last = q_pos + q_len
    stop = k_pos + k_len
    if window:
        return _bands(q_pos, first, min(last, stop + window - 1), k_pos, stop, window, ahead)
    found = []
    diagonal = min(last, stop)

    def add(mask: str, rows: tuple[int, int], keys: tuple[int, int], merges: bool = False) -> None:
        if rows[0] < rows[1] and keys[0] < keys[1]:
            q, k = rows[0] - q_pos, keys[0] - k_pos
            found.append(Tile(mask, q, rows[1] - rows[0], k, keys[1] - keys[0], 0, merges))

    # Left of the diagonal, on it, and the rows that see every key. The kernel aligns a causal mask
    # at the top left, which is right for a square that begins on the diagonal.
    add(FULL, (first, diagonal), (k_pos, first))
    add(CAUSAL, (first, diagonal), (first, diagonal), merges=k_pos < first)
    add(FULL, (max(first, diagonal), last), (k_pos, stop))
    return found


def _halved(tile: Tile) -> Iterator[Tile]:
    """Cut a causal square into small ones along the diagonal and full rectangles below it."""
    # The kernel computes whole blocks on the diagonal, half of each in vain. Gradients of tiles add
    # up, so cutting pays in a backward; in a forward, merging the tiles costs what is saved.
    n = tile.q_len
    if tile.mask != CAUSAL or n <= _SQUARE:
        yield tile
        return
    half = -(-n // 2 // 64) * 64
    yield from _halved(tile._replace(q_len=half, k_len=half))
    lower = tile._replace(q=tile.q + half, q_len=n - half)
    yield lower._replace(mask=FULL, k_len=half)
    yield from _halved(lower._replace(k=tile.k + half, k_len=n - half))


def _bands(
    q_pos: int, first: int, last: int, k_pos: int, stop: int, window: int, ahead: int
) -> list[Tile]:
    """Cut rows under a window into tiles, each with the keys that any of its rows sees."""
    # Fewer rows per tile leave fewer masked scores; more rows make better use of a call.
    rows = min(max(window, 128), 512)
    found = []
    for start in range(first, last, rows):
        end = min(start + rows, last)
        low, high = max(k_pos, start - window + 1), min(stop, end + ahead)
        all_seen = high - 1 <= start + ahead and end - 1 - low < window
        mask = FULL if all_seen else BAND
        shape = (start - q_pos, end - start, low - k_pos, high - low)
        found.append(Tile(mask, *shape, start - low, False))
    return found


class KernelTask(NamedTuple):
    """Where a task is in its arrays, and in its document.

    Args:
        rows (`dict[str, int]`): By role (q, kv, into, grad, dq, dkv), the first row in its array.
        q_pos, q_len, k_pos, k_len (`int`): As in `tiles`.
    """

    rows: dict[str, int]
    q_pos: int
    q_len: int
    k_pos: int
    k_len: int


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call on n tiles of one shape (causal squares: of similar size).

    Args:
        mask (`str`): `full`, `causal` or `band`.
        rows (`dict[str, RowRuns]`): By role, the rows of each tile.
        q_lens, k_lens (`np.ndarray`): Rows and keys of each tile, int64.
        shift (`int`): As in `Tile`.
        merges (`bool`): As in `Tile`.
    """

    mask: str
    rows: dict[str, RowRuns]
    q_lens: np.ndarray
    k_lens: np.ndarray
    shift: int
    merges: bool


_Placed = tuple[KernelTask, Tile]  # a tile and the task that it is cut from


def calls(
    tasks: Iterable[KernelTask], *, window: int, causal: bool = True
) -> tuple[KernelCall, ...]:
    """Return the kernel calls of tasks on the same arrays, to be run in this order.

    Args:
        tasks (`Iterable[KernelTask]`): All with the same roles. With a role `dq` they are of a
            backward.
        window, causal: As in `tiles`.
    """
    cut = [
        (task, part)
        for task in tasks
        for tile in tiles(*task[1:], window=window, causal=causal)
        for part in (_halved(tile) if "dq" in task.rows else (tile,))
    ]
    # Tiles that merge come last, behind those they merge with; equal shapes are neighbours.
    order = sorted(range(len(cut)), key=lambda i: (_shape(cut[i][1]), i))
    batches: list[list[_Placed]] = []
    for i in order:
        if batches and _joins(batches[-1], cut[i][1]):
            batches[-1].append(cut[i])
        else:
            batches.append([cut[i]])
    return tuple(_call(batch) for batch in batches)


def _shape(tile: Tile) -> tuple[bool, str, int, int, int]:
    return tile.merges, tile.mask, tile.q_len, tile.k_len, tile.shift


def _joins(batch: list[_Placed], tile: Tile) -> bool:
    """Return whether a tile may share a call with tiles that are no longer than itself."""
    first = batch[0][1]
    if tile.q_len > _BATCHED_ROWS or tile.k_len > 2 * _BATCHED_ROWS:
        return False
    if (len(batch) + 1) * tile.k_len > _BATCHED_KEYS:
        return False
    if tile.mask == CAUSAL:
        # Padding at the end of a causal square is never seen by its real rows.
        same = first.mask == CAUSAL and first.merges == tile.merges
        return same and tile.q_len <= _PADDING * first.q_len
    return _shape(tile) == _shape(first)


def _call(batch: list[_Placed]) -> KernelCall:
    task, tile = batch[0]
    shift, merges = tile.shift, tile.merges
    batch.sort(key=lambda placed: placed[0].rows["q"] + placed[1].q)  # so that it may be a view
    q_lens = np.asarray([t.q_len for _, t in batch])
    k_lens = np.asarray([t.k_len for _, t in batch])
    rows = {}
    for role in task.rows:
        keys = role in ("kv", "dkv")
        starts = [task.rows[role] + (t.k if keys else t.q) for task, t in batch]
        rows[role] = RowRuns(np.asarray(starts), k_lens if keys else q_lens)
    return KernelCall(tile.mask, rows, q_lens, k_lens, shift, merges)
