"""Pack documents into batches, and draw the batches of one group, epoch by epoch.

A pack is the documents of one batch of one group; its capacity is group_size x max_tokens_per_rank
tokens. First `fit` makes every document at most one capacity long, then `pack` puts the pieces
together; `GroupBatchSampler` hands a group its packs, and every group the same number of them. All
of it is pure and seeded: every rank computes the same packs. Layer: data.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

import numpy as np

logger = logging.getLogger(__name__)

Overflow = Literal["error", "split", "truncate"]
Balance = Literal["none", "tokens", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [start, stop) of a document of the data set, from now on a document of their own."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens in this piece, at least 1."""
        return self.stop - self.start


Pack = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowReport:
    """What `fit` did to the documents that were longer than one batch.

    Args:
        documents (`int`): Documents of the data set.
        tokens (`int`): Their tokens, before anything was cut or dropped.
        split_documents (`int`): Documents that became several pieces.
        fragments (`int`): Pieces that those became.
        truncated_documents (`int`): Documents that lost their tail.
        dropped_tokens (`int`): Tokens in the lost tails.
    """

    documents: int = 0
    tokens: int = 0
    split_documents: int = 0
    fragments: int = 0
    truncated_documents: int = 0
    dropped_tokens: int = 0

    def __add__(self, other: OverflowReport) -> OverflowReport:
        return OverflowReport(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        )

    def summary(self) -> str:
        """Return the report in one line, for a log."""
        line = f"{self.documents:,} documents, {self.tokens:,} tokens: "
        if self.split_documents:
            return line + f"{self.split_documents:,} split into {self.fragments:,} fragments"
        if self.truncated_documents:
            share = self.dropped_tokens / self.tokens
            return line + (
                f"{self.truncated_documents:,} truncated, "
                f"{self.dropped_tokens:,} tokens ({share:.1%}) dropped"
            )
        return line + "all kept whole"

    def log(self, description: str) -> None:
        """Log the report of a data set; a warning where a document was split or truncated."""
        changed = self.split_documents or self.truncated_documents
        level = logging.WARNING if changed else logging.INFO
        logger.log(level, "%s: %s", description, self.summary())


def fit(
    lengths: Sequence[int] | np.ndarray, *, capacity: int, overflow: Overflow, first: int = 0
) -> tuple[tuple[Piece, ...], OverflowReport]:
    """Turn documents into pieces that fit a batch, in the order of the data set.

    Args:
        lengths (`Sequence[int]` or `np.ndarray`): Tokens of each document, `[documents]`.
        capacity (`int`): Tokens that one batch of one group holds.
        overflow (`str`): What happens to a longer document: `"error"` raises, `"split"` cuts it
            into pieces of `capacity` tokens (the last one shorter), `"truncate"` keeps the first.
        first (`int`, *optional*, defaults to 0): Number of the first document, in pieces and
            messages.

    Returns:
        The pieces, and the report of what was split or dropped.

    Raises:
        ValueError: No documents, an empty document, a capacity under 1, an unknown `overflow`, or a
            document longer than `capacity` under `overflow="error"`.
    """
    if overflow not in ("error", "split", "truncate"):
        raise ValueError(f"longctx_overflow={overflow!r} is unknown; use error, split or truncate")
    if capacity < 1:
        raise ValueError(
            f"a batch holds {capacity} tokens, but needs room for at least 1; "
            "raise --longctx_max_tokens_per_rank"
        )
    sizes = np.asarray(lengths, dtype=np.int64)
    if not sizes.size:
        raise ValueError("there are no documents to pack; pass a data set with at least one row")
    empty = first + np.flatnonzero(sizes < 1)
    if empty.size:
        some = ", ".join(map(str, empty[:5])) + (", ..." if empty.size > 5 else "")
        raise ValueError(
            f"{empty.size:,} of {sizes.size:,} documents are empty (row {some}), but a document "
            "has at least 1 token; drop them: dataset.filter(lambda row: len(row['input_ids']) > 0)"
        )
    long = sizes > capacity
    if overflow == "error" and long.any():
        row = int(long.argmax())
        raise ValueError(
            f"row {first + row} has {sizes[row]:,} tokens, but one batch holds {capacity:,} "
            f"(longctx_group_size x longctx_max_tokens_per_rank); {long.sum():,} of {sizes.size:,} "
            "rows are too long. Raise --longctx_max_tokens_per_rank or --longctx_group_size, or "
            "pass --longctx_overflow split (fragments become documents of their own) or "
            "--longctx_overflow truncate (tails are dropped)"
        )
    pieces = tuple(
        Piece(document=document, start=start, stop=min(start + capacity, size))
        for document, size in enumerate(sizes.tolist(), start=first)
        for start in range(0, capacity if overflow == "truncate" else size, capacity)
    )
    cut_documents = int(long.sum())
    split = overflow == "split"
    return pieces, OverflowReport(
        documents=sizes.size,
        tokens=int(sizes.sum()),
        split_documents=cut_documents if split else 0,
        fragments=len(pieces) - (sizes.size - cut_documents) if split else 0,
        truncated_documents=0 if split else cut_documents,
        dropped_tokens=0 if split else int((sizes[long] - capacity).sum()),
    )


def pack(
    pieces: Sequence[Piece],
    *,
    capacity: int,
    balance: Balance,
    seed: int,
    epoch: int,
    shuffle: bool = True,
) -> tuple[Pack, ...]:
    """Put pieces into packs of at most `capacity` tokens, as few as a greedy rule finds.

    The number of packs is the same at every seed and epoch, since only pieces of equal length
    change places.

    Args:
        pieces (`Sequence[Piece]`): Pieces of at most `capacity` tokens each.
        capacity (`int`): Tokens that one batch of one group holds.
        balance (`str`): `"tokens"` fills each pack as far as possible (best-fit decreasing, equal
            lengths in random order); `"none"` keeps the given order and starts a new pack when a
            piece does not fit (next-fit).
        seed (`int`), epoch (`int`): Together they determine the random order. At least 0.
        shuffle (`bool`, *optional*, defaults to `True`): Whether the packs come in random order.

    Raises:
        ValueError: `balance` is unknown or not built yet.
    """
    assert all(0 < piece.length <= capacity for piece in pieces), capacity
    rng = np.random.default_rng([seed, epoch])
    if balance == "tokens":
        packs = _best_fit_decreasing(pieces, capacity=capacity, rng=rng)
    elif balance == "none":
        packs = _next_fit(pieces, capacity=capacity)
    elif balance == "attention":
        raise ValueError(
            "longctx_balance='attention' is not built yet; use --longctx_balance tokens"
        )
    else:
        raise ValueError(f"longctx_balance={balance!r} is unknown; use none or tokens")
    order = rng.permutation(len(packs)).tolist() if shuffle else range(len(packs))
    return tuple(tuple(packs[index]) for index in order)


def _best_fit_decreasing(
    pieces: Sequence[Piece], *, capacity: int, rng: np.random.Generator
) -> list[list[Piece]]:
    """Put each piece, longest first, into the pack with the least room that it fits in."""
    lengths = np.array([piece.length for piece in pieces], dtype=np.int64)
    # A stable sort of a random order: equal lengths stay shuffled.
    order = rng.permutation(len(pieces))
    order = order[np.argsort(-lengths[order], kind="stable")]
    packs: list[list[Piece]] = []
    smallest = int(lengths.min(initial=capacity))
    room: list[
        tuple[int, int]
    ] = []  # (free tokens, pack), ascending, so that bisection finds the best fit
    for index in order.tolist():
        piece = pieces[index]
        best = bisect_left(room, (piece.length, 0))
        if best < len(room):
            free, chosen = room.pop(best)
        else:
            free, chosen = capacity, len(packs)
            packs.append([])
        packs[chosen].append(piece)
        free -= piece.length
        if free >= smallest:  # a pack that no piece fits in would only lengthen the list
            insort(room, (free, chosen))
    return packs


def _next_fit(pieces: Sequence[Piece], *, capacity: int) -> list[list[Piece]]:
    """Put pieces into packs in their order; start a new pack when one does not fit."""
    packs: list[list[Piece]] = []
    free = 0
    for piece in pieces:
        if piece.length > free:
            packs.append([])
            free = capacity
        packs[-1].append(piece)
        free -= piece.length
    return packs


FILLER: Pack = ()
"""The batch of a group that ran out of packs: no documents, so nothing enters the loss."""


@dataclass(eq=False)
class GroupBatchSampler:
    """Batches of one group: its batch `i` is pack `i * groups + group`, or `FILLER` past the last.

    Every group takes `ceil(packs / groups)` batches in every epoch, so no rank waits for another at
    an epoch's end. Each batch is a list of one pack, the index that the data loader hands to its
    data set.

    Args:
        lengths (`Sequence[int]` or `np.ndarray`): Tokens of each document, `[documents]`.
        capacity (`int`): Tokens that one batch of one group holds.
        overflow (`str`): What happens to longer documents; see `packing.fit`.
        balance (`str`): How documents are chosen for a pack; see `packing.pack`.
        groups (`int`): Groups that share the data set.
        group (`int`): The group of this rank, in [0, groups).
        seed (`int`): Seed of the random order; the same on all ranks. At least 0.
        shuffle (`bool`): Whether packs change with the epoch; if not, all epochs are alike.

    Attributes:
        report (`OverflowReport`): What was split or dropped, in the whole data set.
        epoch (`int`): The epoch that the next iterator runs.
        packs (`tuple[Pack, ...]`): The packs of this epoch, those of all groups.

    Raises:
        ValueError: As `packing.fit` and `packing.pack`.
    """

    lengths: Sequence[int] | np.ndarray
    _: KW_ONLY
    capacity: int
    overflow: Overflow
    balance: Balance
    groups: int
    group: int
    seed: int
    shuffle: bool
    report: OverflowReport = field(init=False)
    epoch: int = field(default=0, init=False)
    packs: tuple[Pack, ...] = field(init=False)
    _pieces: tuple[Piece, ...] = field(init=False)

    batch_size: ClassVar[int] = 1  # DataLoader and Accelerate read these two
    drop_last: ClassVar[bool] = False

    def __post_init__(self) -> None:
        assert 0 <= self.group < self.groups, (self.group, self.groups)
        self._pieces, self.report = fit(
            self.lengths, capacity=self.capacity, overflow=self.overflow
        )
        self.packs = self._pack()

    def __iter__(self) -> Iterator[list[Pack]]:
        packs = self.packs  # an iterator keeps its epoch, whatever is set while it runs
        for first in range(0, len(packs), self.groups):
            index = first + self.group
            yield [packs[index] if index < len(packs) else FILLER]

    def __len__(self) -> int:
        return -(-len(self.packs) // self.groups)

    @property
    def sampler(self) -> GroupBatchSampler:
        """Itself, so that Accelerate's data loader finds `set_epoch` when it skips batches."""
        # A resumed epoch runs under a wrapper without that method, and the call goes to
        # `batch_sampler.batch_sampler.sampler.set_epoch`. If it were lost, the epoch would be 0.
        return self

    def describe(self) -> str:
        """Describe how an epoch is made, for a log."""
        packs, groups = len(self.packs), self.groups
        return f"{packs} packs / {groups} group(s) = {len(self)} batches per epoch"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs."""
        if epoch != self.epoch:  # a data loader sets it two or three times per epoch
            self.epoch = epoch
            if self.shuffle:
                self.packs = self._pack()

    def _pack(self) -> tuple[Pack, ...]:
        """Make the packs of the current epoch."""
        return pack(
            self._pieces,
            capacity=self.capacity,
            balance=self.balance,
            seed=self.seed,
            epoch=self.epoch,
            shuffle=self.shuffle,
        )
