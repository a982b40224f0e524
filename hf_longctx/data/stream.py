"""Pack a stream of rows into the batches of one group, a number of documents ahead.

This does for a stream what `validate`, `packing` and the sampler do for a data set with a length.
Every rank reads the whole stream in the same order: the ranks of a group see the same packs, and
the packs go to the groups in turn. Layer: data.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from .documents import split_row
from .packing import FILLER, Balance, Overflow, OverflowReport, Pack, Piece, fit
from .validate import hash_row, read_columns, validate_columns, validate_rows

Document = dict[str, np.ndarray]


class PackDocuments(dict[int, Document]):
    """The documents of one pack, by number, and two fingerprints for ranks to compare.

    No rank has compared a stream's documents before the first step. So the ranks of a group compare
    the documents of their pack, and all trainers compare what they have read so far.
    """

    stream: int = 0
    """63-bit hash of all rows that were read before this step; set when the pack is yielded."""

    @property
    def fingerprint(self) -> int:
        """32-bit hash of the ids and labels."""
        hashed = hashlib.blake2b(digest_size=4)
        for document in self.values():
            for values in document.values():
                hashed.update(values.tobytes())
        return int.from_bytes(hashed.digest(), "little")


class LookaheadBuffer:
    """Pieces that were read ahead and wait to be packed.

    Args:
        capacity (`int`): Tokens that one batch of one group holds.
        balance (`str`): `"tokens"` fills the pack of the oldest piece with the longest that fit;
            `"none"` keeps the order of the stream.
    """

    def __init__(self, *, capacity: int, balance: Balance) -> None:
        self._capacity, self._ordered = capacity, balance == "none"
        self._waiting: dict[int, tuple[Piece, Document]] = {}  # by arrival: the first is the oldest
        # (length, -arrival), ascending: the last that fits is the longest, and of those the oldest
        self._by_length: list[tuple[int, int]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, piece: Piece, document: Document) -> None:
        """Add a piece of at most one batch, with the document it is cut from."""
        arrival = next(self._arrivals)
        self._waiting[arrival] = piece, document
        insort(self._by_length, (piece.length, -arrival))

    def take(self) -> tuple[Pack, PackDocuments]:
        """Remove and return the next pack. It is never empty."""
        room, pack, documents = self._capacity, [], PackDocuments()
        # Each pack starts with the oldest piece, so that none waits for ever.
        chosen: int | None = next(iter(self._waiting))
        while chosen is not None:
            piece, documents[piece.document] = self._waiting.pop(chosen)
            self._by_length.remove((piece.length, -chosen))
            pack.append(piece)
            room -= piece.length
            chosen = self._next(room)
        return tuple(pack), documents

    def _next(self, room: int) -> int | None:
        """Return the arrival of the piece that the pack takes next; `None` if none fits."""
        if self._ordered:
            oldest = next(iter(self._waiting), None)
            fits = oldest is not None and self._waiting[oldest][0].length <= room
            return oldest if fits else None
        at = bisect_right(self._by_length, (room, 0)) - 1
        return -self._by_length[at][1] if at >= 0 else None


@dataclass(eq=False)
class PackStream(IterableDataset):  # type: ignore[type-arg]
    """Batches of one group from a stream: an item is a pack, and the documents it is cut from.

    A pass over the stream ends for all groups in the same step, for some of them with `FILLER`. In
    training, pass follows pass without end: Trainer takes a stream as one epoch of `max_steps`
    steps, and a resumed run can so skip to its place in any pass. `set_epoch` is called before each
    pass if the stream has it. What was read, split and dropped is logged at the end of each pass,
    and when a run stops within one.

    Args:
        rows (`Iterable`): Yields rows as `validate_documents` takes them, from the first one each
            time, the same on every rank.
        capacity (`int`), overflow (`str`), balance (`str`): See `packing`.
        groups (`int`), group (`int`): See `GroupBatchSampler`.
        lookahead (`int`): Documents (or fragments) to choose from for a pack.
        vocab_size (`int`): Ids that the model knows.
        ignore_id (`int` or `None`): See `Documents`.
        description (`str`): What to call the stream in messages.
        endless (`bool`): Whether pass follows pass, as in training; evaluation ends after one.
        log (`bool`): Whether to log passes, as one process should.

    Raises:
        ValueError: While iterating, as `validate_documents` and `packing.fit`, naming the row; for
            a pass without rows.
    """

    rows: Iterable[Any]
    _: KW_ONLY
    capacity: int
    overflow: Overflow
    balance: Balance
    groups: int
    group: int
    lookahead: int
    vocab_size: int
    ignore_id: int | None
    description: str
    endless: bool
    log: bool

    def __iter__(self) -> Iterator[tuple[Pack, PackDocuments]]:
        hashed = hashlib.blake2b(digest_size=8)
        for number in count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(number)
            packs = self._pass(number, hashed)
            while step := [*islice(packs, self.groups)]:  # a pack for each group
                pack, documents = (FILLER, PackDocuments())
                if self.group < len(step):
                    pack, documents = step[self.group]
                documents.stream = _number(hashed)
                yield pack, documents
            if not self.endless:
                return

    def describe(self) -> str:
        """Describe how an epoch is made, for a log."""
        return f"a stream, packed {self.lookahead:,} documents ahead"

    def peek(self, rows: int) -> int:
        """Check the first rows and return a fingerprint of them, so that trainers can compare it.

        Args:
            rows (`int`): How many rows, or all if there are fewer.

        Raises:
            ValueError: As iterating; and if a second look finds other rows.
        """
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(0)
        looks = []
        for _ in range(2):
            hashed = hashlib.blake2b(digest_size=8)
            for row in islice(self._checked(0), rows):
                hash_row(hashed, row)
            looks.append(_number(hashed))
        if looks[0] != looks[1]:
            raise ValueError(
                f"{self.description} reads differently each time, so ranks would hold different "
                "documents, and a resumed run too; seed what is random, and let every iteration "
                "start from the first row"
            )
        return looks[0]

    def _checked(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows of one pass, each validated."""
        where, columns, at = self.description, None, -1
        for at, row in enumerate(self.rows):
            if columns is None:
                columns = read_columns(row, where=f"{where}: row 0")
            validate_columns(row, columns, where=f"{where}: row {at}")
            yield from validate_rows([row], start=at, vocab_size=self.vocab_size, description=where)
        if at < 0:
            raise ValueError(
                f"{where} gave no rows in pass {number}; pass a stream with at least one document, "
                "which starts again each time it is iterated"
            )

    def _hashed(self, number: int, hashed: Any) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows of one pass, each one after its successor, or the end, was hashed.

        So trainers whose streams end at different rows find out while all of them have a batch.
        """
        waiting = None
        for row in self._checked(number):
            hash_row(hashed, row)
            if waiting is not None:
                yield waiting
            waiting = row
        hashed.update(b"end")
        assert waiting is not None  # a pass without rows was refused
        yield waiting

    def _pass(self, number: int, hashed: Any) -> Iterator[tuple[Pack, PackDocuments]]:
        """Yield the packs of all groups from one pass over the stream; hash the rows it reads."""
        buffer = LookaheadBuffer(capacity=self.capacity, balance=self.balance)
        report, end = OverflowReport(), " so far"
        try:
            for pieces, document, changed in self._documents(number, hashed):
                report += changed
                for piece in pieces:
                    buffer.add(piece, document)
                while len(buffer) > self.lookahead:
                    yield buffer.take()
            while len(buffer):
                yield buffer.take()
            end = ""
        finally:  # also when a run stops within a pass
            if self.log:
                report.log(f"{self.description}, pass {number}{end}")

    def _documents(
        self, number: int, hashed: Any
    ) -> Iterator[tuple[tuple[Piece, ...], Document, OverflowReport]]:
        """Yield the documents of one pass, each with its pieces and what was cut off."""
        documents = (
            found
            for at, row in enumerate(self._hashed(number, hashed))
            for found in split_row(
                row, where=f"{self.description}: row {at}", ignore_id=self.ignore_id
            )
        )
        for at, (start, stop, document) in enumerate(documents):
            length = [stop - start]
            pieces, changed = fit(length, capacity=self.capacity, overflow=self.overflow, first=at)
            yield pieces, document, changed


def _number(hashed: Any) -> int:
    """Return a hash of 8 bytes as a non-negative int64."""
    return int.from_bytes(hashed.digest(), "little") >> 1
