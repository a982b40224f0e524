"""Runs of rows of one array -> a batch for a kernel, and its results back into the array.

Layer: kernels. Letters: n runs, L rows of the longest run.

Attention tasks -> kernel calls: rectangles without masks where possible, batched where short. A task is a run of query rows with a run of keys of the same document. Its causal
(and window) mask is cut into full rectangles, causal squares (whose top-left alignment is right)
and, under a window, bands with a small dense mask; a bidirectional task is one full rectangle, or
bands. Short squares of similar length share one call:
padding at the end of a causal square is never seen by its real rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowRuns:
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


FULL, CAUSAL, BAND = "full", "causal", "band"
_SQUARE = 256  # rows of a causal square in a backward, at most
_BATCHED_ROWS = 32  # gathering longer pieces costs more than calls of their own
_BATCHED_KEYS = 65_536  # rows of gathered keys in one call, at most
_PADDING = 1.125  # longest over shortest square of a batch


class Tile(NamedTuple):
    """Rows `[q, q + q_len)` against keys `[k, k + k_len)`, from the task's first row and key on.

    `shift` (bands only) is the position of the first row minus that of the first key. `merges` says
    that an earlier piece of the task has written these rows.
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
    """Cut one task's mask; rows that see none of the keys are in no piece.

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

    add(FULL, (first, diagonal), (k_pos, first))
    add(CAUSAL, (first, diagonal), (first, diagonal), merges=k_pos < first)
    add(FULL, (max(first, diagonal), last), (k_pos, stop))
    return found


def _halved(piece: Tile) -> Iterator[Tile]:
    """Cut a causal square into small ones along the diagonal and full rectangles below it.

    The kernel computes whole blocks on the diagonal, half of each in vain. Gradients of pieces just
    add up, so cutting pays in a backward; in a forward, merging the pieces costs what is saved.
    """
    n = piece.q_len
    if piece.mask != CAUSAL or n <= _SQUARE:
        yield piece
        return
    half = -(-n // 2 // 64) * 64
    yield from _halved(piece._replace(q_len=half, k_len=half))
    lower = piece._replace(q=piece.q + half, q_len=n - half)
    yield lower._replace(mask=FULL, k_len=half)
    yield from _halved(lower._replace(k=piece.k + half, k_len=n - half))


def _bands(
    q_pos: int, first: int, last: int, k_pos: int, stop: int, window: int, ahead: int
) -> list[Tile]:
    """Tiles of rows with the keys that any of them sees."""
    tile = min(max(window, 128), 512)
    found = []
    for start in range(first, last, tile):
        end = min(start + tile, last)
        low, high = max(k_pos, start - window + 1), min(stop, end + ahead)
        all_seen = high - 1 <= start + ahead and end - 1 - low < window
        mask = FULL if all_seen else BAND
        shape = (start - q_pos, end - start, low - k_pos, high - low)
        found.append(Tile(mask, *shape, start - low, False))
    return found


class KernelTask(NamedTuple):
    """A task's place in its arrays: rows of each array it touches, and its positions."""

    rows: dict[str, int]  # role (q, kv, into, grad, dq, dkv) -> first row
    q_pos: int
    q_len: int
    k_pos: int
    k_len: int


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call on `len(q_lens)` pieces of one shape (causal squares: of similar size).

    Args:
        mask (`str`): `full`, `causal` or `band`.
        rows (`dict[str, Rows]`): Role -> the rows of each piece.
        q_lens, k_lens (`np.ndarray`): Rows and keys of each piece, int64.
        shift (`int`): As in `Tile`.
        merges (`bool`): As in `Tile`.
    """

    mask: str
    rows: dict[str, RowRuns]
    q_lens: np.ndarray
    k_lens: np.ndarray
    shift: int
    merges: bool


@dataclass(slots=True)
class _Batch:
    tiles: list[tuple[KernelTask, Tile]] = field(default_factory=list)

    def call(self) -> KernelCall:
        task, piece = self.tiles[0]
        q_lens = np.asarray([p.q_len for _, p in self.tiles])
        k_lens = np.asarray([p.k_len for _, p in self.tiles])
        rows = {}
        for role in task.rows:
            keys = role in ("kv", "dkv")
            starts = [t.rows[role] + (p.k if keys else p.q) for t, p in self.tiles]
            rows[role] = RowRuns(np.asarray(starts), k_lens if keys else q_lens)
        return KernelCall(piece.mask, rows, q_lens, k_lens, piece.shift, piece.merges)


def calls(
    tasks: Iterable[KernelTask], *, window: int, causal: bool = True
) -> tuple[KernelCall, ...]:
    """The kernel calls of tasks on the same arrays; merging pieces follow those they merge with."""
    cut = [
        (task, part)
        for task in tasks
        for piece in tiles(*task[1:], window=window, causal=causal)
        for part in (_halved(piece) if "dq" in task.rows else (piece,))
    ]
    # equal keys stand together; merging pieces last
    order = sorted(range(len(cut)), key=lambda i: (_shape(cut[i][1]), i))
    batches: list[_Batch] = []
    for i in order:
        if not batches or not _joins(batches[-1], cut[i][1]):
            batches.append(_Batch())
        batches[-1].tiles.append(cut[i])
    for batch in batches:  # rows in order, so that a regular batch is a view
        batch.tiles.sort(key=lambda tp: tp[0].rows["q"] + tp[1].q)
    return tuple(batch.call() for batch in batches)


def _shape(piece: Tile) -> tuple[bool, str, int, int, int]:
    return piece.merges, piece.mask, piece.q_len, piece.k_len, piece.shift


def _joins(batch: _Batch, piece: Tile) -> bool:
    """Whether a piece may share a call with a batch of pieces no longer than itself."""
    first = batch.tiles[0][1]
    if piece.q_len > _BATCHED_ROWS or piece.k_len > 2 * _BATCHED_ROWS:
        return False
    if (len(batch.tiles) + 1) * piece.k_len > _BATCHED_KEYS:
        return False
    if piece.mask == CAUSAL:
        same = first.mask == CAUSAL and first.merges == piece.merges
        return same and piece.q_len <= _PADDING * first.q_len
    return _shape(piece) == _shape(first)
