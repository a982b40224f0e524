"""A stream of rows -> the batches of one group, packed a number of documents ahead.

Floor: data. What `scan`, `packing` and the sampler do for a data set with a length, done as rows
come. Every rank reads the whole stream, in the same order: the ranks of a group see the same packs,
and groups take turns.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from .documents import read, sizes
from .packing import Balance, Overflow, Pack, Piece, fit
from .sampler import FILLER
from .scan import add_row, check_rows, columns_of, same_columns

Document = dict[str, np.ndarray]


class PackDocuments(dict[int, Document]):
    """The documents of one pack, by number, and a fingerprint that ranks compare.

    Nothing has compared a stream's documents before, as the scan does for a data set with a length.
    """

    @property
    def fingerprint(self) -> int:
        """A 32-bit number that stands for the ids and labels."""
        hashed = hashlib.blake2b(digest_size=4)
        for document in self.values():
            for values in document.values():
                hashed.update(values.tobytes())
        return int.from_bytes(hashed.digest(), "little")


class Window:
    """Pieces that wait to be packed.

    Args:
        capacity (`int`): Tokens that one batch of one group holds.
        balance (`str`): `"tokens"` fills the pack of the oldest piece with the longest that fit;
            `"none"` keeps the order of the stream.
    """

    def __init__(self, *, capacity: int, balance: Balance) -> None:
        self._capacity, self._ordered = capacity, balance == "none"
        self._waiting: dict[int, Piece] = {}  # by arrival, so the first is the oldest
        self._by_length: list[tuple[int, int]] = []  # (length, -arrival), ascending
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, piece: Piece) -> None:
        """Let a piece of at most one batch wait."""
        arrival = next(self._arrivals)
        self._waiting[arrival] = piece
        insort(self._by_length, (piece.length, -arrival))

    def take(self) -> Pack:
        """The next pack: never empty, and no piece waits for ever."""
        room, pack = self._capacity, []
        chosen: int | None = next(iter(self._waiting))
        while chosen is not None:
            piece = self._waiting.pop(chosen)
            self._by_length.remove((piece.length, -chosen))
            pack.append(piece)
            room -= piece.length
            chosen = self._next(room)
        return tuple(pack)

    def _next(self, room: int) -> int | None:
        """Arrival of the piece that the pack takes next."""
        if self._ordered:
            oldest = next(iter(self._waiting), None)
            fits = oldest is not None and self._waiting[oldest].length <= room
            return oldest if fits else None
        at = bisect_right(self._by_length, (room, 0)) - 1  # of equal lengths, the oldest
        return -self._by_length[at][1] if at >= 0 else None


class PackStream(IterableDataset):  # type: ignore[type-arg]
    """Batches of one group from a stream: an item is a pack, and the documents it is cut from.

    A pass over the stream ends for all groups in the same step, some of them on `FILLER`. To train,
    one pass follows another without end, with `set_epoch` called on the stream where it has it:
    Trainer takes a stream as one epoch of `max_steps` steps, so that is how a resumed run skips to
    its place in any pass. At the end of each pass, what was read, split and dropped is logged.

    Args:
        rows (`Iterable`): Yields rows as `scan_documents` takes them, from the first one each time,
            the same on every rank.
        capacity (`int`), overflow (`str`), balance (`str`): See `packing`.
        groups (`int`), group (`int`): See `GroupBatchSampler`.
        lookahead (`int`): Documents (or fragments) to choose from for a pack.
        vocab_size (`int`): Ids that the model knows.
        ignore_id (`int` or `None`): See `Documents`.
        description (`str`): What to call the stream in messages.
        endless (`bool`): Whether pass follows pass, as training needs; evaluation ends after one.
        log (`bool`): Whether to log passes, as one process should.

    Raises:
        ValueError: While iterating, as `scan_documents` and `packing.fit`, naming the row; for a
            pass without rows.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        *,
        capacity: int,
        overflow: Overflow,
        balance: Balance,
        groups: int,
        group: int,
        lookahead: int,
        vocab_size: int,
        ignore_id: int | None,
        description: str,
        endless: bool,
        log: bool,
    ) -> None:
        self._rows, self._capacity = rows, capacity
        self._overflow: Overflow = overflow
        self._balance: Balance = balance
        self._groups, self._group, self._lookahead = groups, group, lookahead
        self._vocab_size, self._ignore_id = vocab_size, ignore_id
        self._description, self._endless, self._log = description, endless, log

    def __iter__(self) -> Iterator[tuple[Pack, PackDocuments]]:
        for number in count():
            if hasattr(self._rows, "set_epoch"):
                self._rows.set_epoch(number)
            turn = 0
            for item in self._pass(number):
                if turn == self._group:
                    yield item
                turn = (turn + 1) % self._groups
            if 0 < turn <= self._group:
                yield FILLER, PackDocuments()
            if not self._endless:
                return

    def describe(self) -> str:
        """How an epoch is made, for a log."""
        return f"a stream, packed {self._lookahead:,} documents ahead"

    def peek(self, documents: int) -> int:
        """A fingerprint of the first rows, so that trainers can compare them; checks these rows.

        Args:
            documents (`int`): So many rows, or all if there are fewer.

        Raises:
            ValueError: As iterating; and where a second look finds other rows.
        """
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(0)
        looks = []
        for _ in range(2):
            hashed = hashlib.blake2b(digest_size=8)
            for _, row in zip(range(documents), self._checked(0), strict=False):
                add_row(hashed, row)
            looks.append(int.from_bytes(hashed.digest(), "little") >> 1)
        if looks[0] != looks[1]:
            raise ValueError(
                f"{self._description} reads differently each time, so ranks would hold other "
                "documents, and a resumed run too; seed what is random, and let every iteration "
                "start from the first row"
            )
        return looks[0]

    def _checked(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        """The rows of one pass, each checked."""
        where, columns, at = self._description, None, -1
        for at, row in enumerate(self._rows):
            if columns is None:
                columns = columns_of(row, where=f"{where}: row 0")
            same_columns(row, columns, where=f"{where}: row {at}")
            yield from check_rows([row], start=at, vocab_size=self._vocab_size, description=where)
        if at < 0:
            raise ValueError(
                f"{where} gave no rows in pass {number}; pass a stream with at least one document, "
                "which starts again each time it is iterated"
            )

    def _pass(self, number: int) -> Iterator[tuple[Pack, PackDocuments]]:
        """The packs of all groups from one pass over the stream."""
        window = Window(capacity=self._capacity, balance=self._balance)
        held: dict[int, Document] = {}
        waiting: dict[int, int] = {}  # pieces of each document that is held
        report, document = None, 0

        def take() -> tuple[Pack, PackDocuments]:
            pack = window.take()
            documents = PackDocuments({piece.document: held[piece.document] for piece in pack})
            for piece in pack:
                waiting[piece.document] -= 1
                if not waiting[piece.document]:
                    del held[piece.document], waiting[piece.document]
            return pack, documents

        for at, row in enumerate(self._checked(number)):
            stops = np.cumsum(sizes(row, where=f"{self._description}: row {at}"))
            for start, stop in zip([0, *stops[:-1]], stops, strict=True):
                pieces, changed = fit(
                    [stop - start],
                    capacity=self._capacity,
                    overflow=self._overflow,
                    first=document,
                )
                report = changed if report is None else report + changed
                held[document] = read(row, start=start, stop=stop, ignore_id=self._ignore_id)
                waiting[document] = len(pieces)
                for piece in pieces:
                    window.add(piece)
                document += 1
            while len(window) > self._lookahead:
                yield take()
        while len(window):
            yield take()
        if self._log and report is not None:
            report.log(f"{self._description}, pass {number}")
