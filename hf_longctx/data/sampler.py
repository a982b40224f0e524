"""Document lengths -> the batches of one group, epoch by epoch.

Layer: data. A batch sampler for `torch.utils.data.DataLoader` on every rank; it looks at the group
alone, so the ranks of one group see the same packs. It is sharded already: hand its data loader to
`accelerate.data_loader.prepare_data_loader` with `num_processes=1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .packing import Balance, Overflow, OverflowReport, Pack, fit, pack

FILLER: Pack = ()
"""The batch of a group that ran out of packs: no documents, so nothing enters the loss."""


class GroupBatchSampler:
    """Batches of one group: its batch `i` is pack `i * groups + group`, or `FILLER` past the last.

    Every group takes `ceil(packs / groups)` batches, so no rank waits for another at the end of an
    epoch, and every epoch has as many. Each batch is a list of one pack, the index that the data
    loader hands to its data set.

    Args:
        lengths (`Sequence[int]` or `np.ndarray`): Tokens of each row of the data set, `[rows]`.
        capacity (`int`): Tokens that one batch of one group holds.
        overflow (`str`): What becomes of longer documents; see `packing.fit`.
        balance (`str`): How documents are chosen for a pack; see `packing.pack`.
        groups (`int`): Groups that share the data set.
        group (`int`): The group of this rank, in [0, groups).
        seed (`int`): Seed of the random order; the same on all ranks. At least 0.
        shuffle (`bool`): Whether packs change with the epoch; if not, all epochs are alike.

    Raises:
        ValueError: As `packing.fit` and `packing.pack`.
    """

    batch_size = 1
    drop_last = False

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        capacity: int,
        overflow: Overflow,
        balance: Balance,
        groups: int,
        group: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        assert 0 <= group < groups, (group, groups)
        self._pieces, self._report = fit(lengths, capacity=capacity, overflow=overflow)
        self._capacity = capacity
        self._balance: Balance = balance
        self._groups = groups
        self._group = group
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._packs = self._pack()

    def __iter__(self) -> Iterator[list[Pack]]:
        packs = self._packs  # an iterator keeps its epoch, whatever is set while it runs
        for first in range(0, len(packs), self._groups):
            index = first + self._group
            yield [packs[index] if index < len(packs) else FILLER]

    def __len__(self) -> int:
        return -(-len(self._packs) // self._groups)

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator runs."""
        return self._epoch

    @property
    def packs(self) -> tuple[Pack, ...]:
        """The packs of this epoch, those of all groups."""
        return self._packs

    @property
    def report(self) -> OverflowReport:
        """What was split or dropped, in the whole data set."""
        return self._report

    @property
    def sampler(self) -> GroupBatchSampler:
        """Itself, so that Accelerate's data loader finds `set_epoch` where it skips batches.

        A resumed epoch runs under a wrapper without that method, and the call goes to
        `batch_sampler.batch_sampler.sampler.set_epoch`. Lost, a later epoch would end like epoch 0.
        """
        return self

    def describe(self) -> str:
        """How an epoch is made, for a log."""
        packs, groups = len(self._packs), self._groups
        return f"{packs} packs / {groups} group(s) = {len(self)} batches per epoch"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iterator runs."""
        if epoch != self._epoch:  # a data loader sets it two or three times per epoch
            self._epoch = epoch
            if self._shuffle:
                self._packs = self._pack()

    def _pack(self) -> tuple[Pack, ...]:
        return pack(
            self._pieces,
            capacity=self._capacity,
            balance=self._balance,
            seed=self._seed,
            epoch=self._epoch,
            shuffle=self._shuffle,
        )
