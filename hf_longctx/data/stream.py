"""A stream of rows -> the batches of one group, packed a number of documents ahead.

Layer: data. What `scan`, `packing` and the sampler do for a data set with a length, done as rows
come. Every rank reads the whole stream, in the same order: the ranks of a group see the same packs,
and groups take turns.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from .documents import read, sizes
from .packing import Balance, Overflow, OverflowReport, Pack, Piece, fit
from .sampler import FILLER
from .validate import add_row, check_rows, columns_of, same_columns

Document = dict[str, np.ndarray]


class PackDocuments(dict[int, Document]):
    """The documents of one pack, by number, and two fingerprints that ranks compare.

    Nothing has compared a stream's documents before, as the scan does for a data set with a length.
    The ranks of a group compare the documents of their pack, all trainers what was read so far.
    """

    stream: int = 0
    """63 bits that stand for all rows that were read before this step; set where it is yielded."""

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
        # by arrival, so the first is the oldest
        self._waiting: dict[int, tuple[Piece, Document]] = {}
        self._by_length: list[tuple[int, int]] = []  # (length, -arrival), ascending
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, piece: Piece, document: Document) -> None:
        """Let a piece of at most one batch wait, with the document it is cut from."""
        arrival = next(self._arrivals)
        self._waiting[arrival] = piece, document
        insort(self._by_length, (piece.length, -arrival))

    def take(self) -> tuple[Pack, PackDocuments]:
        """The next pack: never empty, and no piece waits for ever."""
        room, pack, documents = self._capacity, [], PackDocuments()
        chosen: int | None = next(iter(self._waiting))
        while chosen is not None:
            piece, documents[piece.document] = self._waiting.pop(chosen)
            self._by_length.remove((piece.length, -chosen))
            pack.append(piece)
            room -= piece.length
            chosen = self._next(room)
        return tuple(pack), documents

    def _next(self, room: int) -> int | None:
        """Arrival of the piece that the pack takes next."""
        if self._ordered:
            oldest = next(iter(self._waiting), None)
            fits = oldest is not None and self._waiting[oldest][0].length <= room
            return oldest if fits else None
        at = bisect_right(self._by_length, (room, 0)) - 1  # of equal lengths, the oldest
        return -self._by_length[at][1] if at >= 0 else None


class PackStream(IterableDataset):  # type: ignore[type-arg]
    """Batches of one group from a stream: an item is a pack, and the documents it is cut from.

    A pass over the stream ends for all groups in the same step, some of them on `FILLER`. To train,
    one pass follows another without end, with `set_epoch` called on the stream where it has it:
    Trainer takes a stream as one epoch of `max_steps` steps, so that is how a resumed run skips to
    its place in any pass. At the end of each pass, and where a run stops within one, what was read,
    split and dropped is logged.

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
        read_rows = hashlib.blake2b(digest_size=8)
        for number in count():
            if hasattr(self._rows, "set_epoch"):
                self._rows.set_epoch(number)
            packs = self._pass(number, read_rows)
            while step := [*islice(packs, self._groups)]:  # a pack for each group
                pack, documents = (FILLER, PackDocuments())
                if self._group < len(step):
                    pack, documents = step[self._group]
                documents.stream = _number(read_rows)
                yield pack, documents
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
            looks.append(_number(hashed))
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

    def _hashed(self, number: int, read_rows: Any) -> Iterator[dict[str, np.ndarray]]:
        """The rows of one pass, each after the next one, or the end, went into the hash: trainers
        whose streams end apart find out while all of them still have a batch."""
        waiting = None
        for row in self._checked(number):
            add_row(read_rows, row)
            if waiting is not None:
                yield waiting
            waiting = row
        read_rows.update(b"end")
        assert waiting is not None  # a pass without rows was refused
        yield waiting

    def _pass(self, number: int, read_rows: Any) -> Iterator[tuple[Pack, PackDocuments]]:
        """The packs of all groups from one pass over the stream; hashes the rows that it reads."""
        window = Window(capacity=self._capacity, balance=self._balance)
        report, end = OverflowReport(), " so far"
        try:
            for pieces, document, changed in self._documents(number, read_rows):
                report += changed
                for piece in pieces:
                    window.add(piece, document)
                while len(window) > self._lookahead:
                    yield window.take()
            while len(window):
                yield window.take()
            end = ""
        finally:  # a run may stop within a pass
            if self._log:
                report.log(f"{self._description}, pass {number}{end}")

    def _documents(
        self, number: int, read_rows: Any
    ) -> Iterator[tuple[tuple[Piece, ...], Document, OverflowReport]]:
        """The documents of one pass, each with its pieces and what became of it."""
        at = 0
        for row_number, row in enumerate(self._hashed(number, read_rows)):
            stops = np.cumsum(sizes(row, where=f"{self._description}: row {row_number}"))
            for start, stop in zip([0, *stops[:-1]], stops, strict=True):
                pieces, changed = fit(
                    [stop - start], capacity=self._capacity, overflow=self._overflow, first=at
                )
                yield pieces, read(row, start=start, stop=stop, ignore_id=self._ignore_id), changed
                at += 1


def _number(hashed: Any) -> int:
    """A hash of 8 bytes as a non-negative int64."""
    return int.from_bytes(hashed.digest(), "little") >> 1
