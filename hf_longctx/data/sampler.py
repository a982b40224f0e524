"""Draw the batches of one group, epoch by epoch, from the lengths of a data set's documents.

`GroupBatchSampler` is a batch sampler for `torch.utils.data.DataLoader` on every rank. It depends
on the group alone, so the ranks of one group see the same packs. It is sharded already: pass its
data loader to `accelerate.data_loader.prepare_data_loader` with `num_processes=1`. Layer: data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import numpy as np

from .packing import Balance, Overflow, OverflowReport, Pack, Piece, fit, pack

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
