"""Data sets of documents -> data loaders of packs, one batch per group and step.

Layer: training.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, IterableDataset

from ..data.collator import LongCtxCollator, PackDataset
from ..data.documents import Documents
from ..data.sampler import GroupBatchSampler
from ..data.stream import PackStream
from ..data.validate import validate_documents
from ..planning.planners.options import PlanOptions
from .groups import Group

_PEEK = 8  # rows of a stream that trainers compare before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scanned:
    """A data set, kept with its id, and what the scan found."""

    dataset: Any
    documents: Documents


class Loaders:
    """Makes this rank's samplers and data loaders; scans each data set once.

    Args:
        arguments: The training arguments, with `longctx_*` fields.
        group (`Group`): The ranks that share this process's batches.
        accelerator: Where batches go, and how trainers compare their data.
        vocab_size (`int`): Ids that the model knows.
        ignore_id (`int`, *optional*): In documents without labels, the id that is no target; see
            `data.documents.Documents`.
    """

    def __init__(
        self,
        arguments: Any,
        group: Group,
        *,
        accelerator: Any,
        vocab_size: int,
        ignore_id: int | None = None,
    ) -> None:
        self.arguments, self.group = arguments, group
        self.accelerator, self.vocab_size, self.ignore_id = accelerator, vocab_size, ignore_id
        self._scanned: dict[int, _Scanned] = {}
        self._streams: dict[int, Any] = {}  # compared among the trainers
        self._fingerprints: dict[int, int] = {}

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

    def fingerprint(self, dataset: Any) -> int:
        """63 bits that stand for the training rows; for the first ones of a stream.

        Args:
            dataset: See `source`.
        """
        if id(dataset) not in self._fingerprints:  # a Trainer may be given other rows once made
            self.source(dataset, training=True)
        return self._fingerprints[id(dataset)]

    def source(
        self, dataset: Any, *, training: bool, description: str | None = None
    ) -> GroupBatchSampler | PackStream:
        """The packs of this rank's group, from a data set with a length or from a stream.

        Args:
            dataset: Rows; see `validate_documents`.
            training (`bool`): Whether packs are shuffled, and a stream starts again at its end.
            description (`str`, *optional*): What to call the data set in messages.

        Raises:
            ValueError: for anything wrong with the data; see `validate_documents` and `packing.fit`.
        """
        name = description or ("train_dataset" if training else "eval_dataset")
        if isinstance(dataset, IterableDataset):
            return self._stream(dataset, training=training, name=name)
        return self._sampler(dataset, training=training, name=name)

    def _sampler(self, dataset: Any, *, training: bool, name: str) -> GroupBatchSampler:
        new = id(dataset) not in self._scanned
        if new:
            documents = self._scan(dataset, name=name)
            self._scanned[id(dataset)] = _Scanned(dataset=dataset, documents=documents)
        arguments = self.arguments
        sampler = GroupBatchSampler(
            self._scanned[id(dataset)].documents.lengths,
            capacity=self.budget,
            overflow=arguments.longctx_overflow,
            balance=arguments.longctx_balance,
            groups=self.group.groups,
            group=self.group.index,
            seed=arguments.data_seed if arguments.data_seed is not None else arguments.seed,
            shuffle=training and arguments.train_sampling_strategy == "random",
        )
        if new and arguments.process_index == 0:
            sampler.report.log(name)
            self._scanned[id(dataset)].documents.log_targets()
        return sampler

    def _stream(self, dataset: Any, *, training: bool, name: str) -> PackStream:
        arguments = self.arguments
        if arguments.dataloader_num_workers > 1:
            raise ValueError(
                f"dataloader_num_workers={arguments.dataloader_num_workers} would each read all of "
                f"the stream {name} and repeat its documents; use 0 or 1"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError(
                f"{name} is split by node, but every rank reads the whole stream and takes its "
                "part of each pack; leave out datasets.distributed.split_dataset_by_node"
            )
        for field in ("eval_strategy", "save_strategy", "logging_strategy") if training else ():
            if getattr(arguments, field) == "epoch":
                raise ValueError(
                    f"{field}=epoch with a stream: a stream is one epoch of max_steps steps, "
                    "however often it starts again; use steps"
                )
        stream = PackStream(
            dataset,
            capacity=self.budget,
            overflow=arguments.longctx_overflow,
            balance=arguments.longctx_balance,
            groups=self.group.groups,
            group=self.group.index,
            lookahead=arguments.longctx_lookahead,
            vocab_size=self.vocab_size,
            ignore_id=self.ignore_id,
            description=name,
            endless=training,
            log=arguments.process_index == 0,
        )
        if id(dataset) not in self._streams:
            self._fingerprints[id(dataset)] = number = stream.peek(_PEEK)
            self.compare_rows(number, name=name)
            self._streams[id(dataset)] = dataset
        return stream

    def _scan(self, dataset: Any, *, name: str) -> Documents:
        """The documents of a data set; every trainer must hold the same ones."""
        fingerprint = hashlib.blake2b(digest_size=8)
        documents = validate_documents(
            dataset,
            vocab_size=self.vocab_size,
            description=name,
            progress=self.arguments.process_index == 0,
            fingerprint=fingerprint,
            ignore_id=self.ignore_id,
        )
        number = int.from_bytes(fingerprint.digest(), "little") >> 1
        self._fingerprints[id(dataset)] = number
        self.compare_rows(number, size=len(dataset), name=name)
        return documents

    def compare_rows(self, fingerprint: int, *, size: int = 0, name: str) -> None:
        """Refuse data that differs between the trainers; a collective call.

        Args:
            fingerprint (`int`): Stands for the rows that this trainer has read.
            size (`int`, *optional*, defaults to 0): Rows of the data set; 0 for a stream.
            name (`str`): What to call the data set.

        Raises:
            ValueError: with the rows on each trainer, where they have a number.
        """
        mine = torch.tensor([fingerprint, size], device=self.accelerator.device)
        everyone = self.accelerator.gather(mine[None])
        if bool((everyone != mine).any()):
            rows = f" (rows {everyone[:, 1].tolist()})" if size else ""
            raise ValueError(
                f"{name} differs between the trainers{rows}: ranks of a group would train on parts "
                "of different documents, and groups on some twice and on others never; give every "
                "process the same data, in the same order"
            )

    def loader(self, dataset: Any, *, training: bool, options: PlanOptions) -> DataLoader[Any]:
        """A data loader of packs: this rank's rows of each.

        Args:
            dataset: Rows of `input_ids` and optional `labels`; see `validate_documents`.
            training (`bool`): See `source`.
            options (`PlanOptions`): What plans depend on, and the name of the layout.
        """
        arguments = self.arguments
        collator = LongCtxCollator(
            rank=self.group.rank,
            ranks=self.group.size,
            options=options,
            budget=self.budget,
            halves=training and options.overlap == "pingpong",  # nothing overlaps alone
        )
        source = self.source(dataset, training=training)
        if isinstance(source, PackStream):
            packs: dict[str, Any] = {"dataset": source, "batch_size": 1}
        else:
            documents = self._scanned[id(dataset)].documents
            packs = {"dataset": PackDataset(documents), "batch_sampler": source}
        loader: DataLoader[Any] = DataLoader(
            **packs,
            collate_fn=collator,
            num_workers=arguments.dataloader_num_workers,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
        )
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            device=self.accelerator.device,
            num_processes=1,  # the packs are those of this group already
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
        )
        return prepared
