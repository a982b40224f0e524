"""Data sets of documents -> data loaders of packs, one batch per group and step.

Floor: training.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, IterableDataset

from ..data.collator import LongCtxCollator, PackDataset
from ..data.sampler import GroupBatchSampler
from ..data.scan import scan_documents
from .groups import Group


class Loaders:
    """Makes this rank's samplers and data loaders; scans each data set once.

    Args:
        arguments: The training arguments, with `longctx_*` fields.
        group (`Group`): The ranks that share this process's batches.
        accelerator: Where batches go, and how trainers compare their data.
        vocab_size (`int`): Ids that the model knows.
    """

    def __init__(self, arguments: Any, group: Group, *, accelerator: Any, vocab_size: int) -> None:
        self.arguments, self.group = arguments, group
        self.accelerator, self.vocab_size = accelerator, vocab_size
        self._scanned: dict[int, tuple[Any, np.ndarray]] = {}  # a data set is kept with its id

    @property
    def budget(self) -> int:
        """Tokens that one batch of a group can hold."""
        return int(self.group.size * self.arguments.longctx_max_tokens_per_rank)

    def compare(self, datasets: Mapping[str, Any]) -> None:
        """Refuse data sets that only some trainers hold, before any waits for another's scan.

        Args:
            datasets (`Mapping[str, Any]`): By name; `None` where this trainer has none.

        Raises:
            ValueError: with the names on each trainer.
        """
        mine = [name for name, dataset in datasets.items() if dataset is not None]
        everyone = gather_object([mine])
        if any(names != mine for names in everyone):
            raise ValueError(
                f"the trainers hold different data sets, in rank order {everyone}; give every "
                "process the same train_dataset and eval_dataset"
            )

    def sampler(self, dataset: Any, *, training: bool) -> GroupBatchSampler:
        """The packs of this rank's group.

        Raises:
            ValueError: for anything wrong with the data; see `scan_documents` and `packing.fit`.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{type(dataset).__name__} has no length: streaming is not built yet; pass a data "
                "set with one"
            )
        if id(dataset) not in self._scanned:
            name = "train_dataset" if training else "eval_dataset"
            self._scanned[id(dataset)] = dataset, self._scan(dataset, name=name)
        arguments = self.arguments
        return GroupBatchSampler(
            self._scanned[id(dataset)][1],
            capacity=self.budget,
            overflow=arguments.longctx_overflow,
            balance=arguments.longctx_balance,
            groups=self.group.groups,
            group=self.group.index,
            seed=arguments.data_seed if arguments.data_seed is not None else arguments.seed,
            shuffle=training and arguments.train_sampling_strategy == "random",
        )

    def _scan(self, dataset: Any, *, name: str) -> np.ndarray:
        """Tokens of each document; every trainer must hold the same ones."""
        fingerprint = hashlib.blake2b(digest_size=8)
        lengths = scan_documents(
            dataset,
            vocab_size=self.vocab_size,
            description=name,
            progress=self.arguments.process_index == 0,
            fingerprint=fingerprint,
        )
        number = int.from_bytes(fingerprint.digest(), "little") >> 1
        mine = torch.tensor([number, len(lengths)], device=self.accelerator.device)
        everyone = self.accelerator.gather(mine[None])
        if bool((everyone != mine).any()):
            raise ValueError(
                f"{name} differs between the trainers (rows {everyone[:, 1].tolist()}): ranks of a "
                "group would train on parts of different documents; give every process the same "
                "data, in the same order"
            )
        return lengths

    def loader(self, dataset: Any, *, name: str, training: bool) -> DataLoader[Any]:
        """A data loader of packs: this rank's rows of each.

        Args:
            dataset: Documents, as rows of `input_ids` and optional `labels`.
            name (`str`): The attention name, which chooses the layout.
            training (`bool`): Whether packs are shuffled.
        """
        arguments = self.arguments
        collator = LongCtxCollator(
            rank=self.group.rank,
            ranks=self.group.size,
            layout=arguments.layout_for(name),
            tolerance=arguments.longctx_tolerance,
            budget=self.budget,
        )
        loader: DataLoader[Any] = DataLoader(
            PackDataset(dataset),
            batch_sampler=self.sampler(dataset, training=training),  # type: ignore[arg-type]
            collate_fn=collator,
            num_workers=arguments.dataloader_num_workers,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
        )
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            device=self.accelerator.device,
            num_processes=1,  # the sampler is sharded already
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
        )
        return prepared
