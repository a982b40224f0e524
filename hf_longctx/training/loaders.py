"""Make data loaders of packs from data sets of documents: one batch per group and step.

Each data set is validated once and compared among the trainers, since ranks of a group that hold
different documents would train on parts of both. Layer: training.
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
class _ComparedData:
    """A data set that all trainers hold, with what was found out about it.

    Args:
        dataset: The data set itself: as long as it is kept, no other one has its id.
        fingerprint (`int`): 63-bit hash of its rows; of the first ones of a stream.
        documents (`Documents`, *optional*): None of a stream.
    """

    dataset: Any
    fingerprint: int
    documents: Documents | None = None


class Loaders:
    """Makes this rank's samplers and data loaders, and validates each data set once.

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
        self._compared: dict[int, _ComparedData] = {}  # by the data set's id

    @property
    def budget(self) -> int:
        """Tokens that one batch of a group can hold."""
        return int(self.group.size * self.arguments.longctx_max_tokens_per_rank)

    def validate_same_names(self, datasets: Mapping[str, Any]) -> None:
        """Raise if only some trainers hold a data set, before any waits for another's.

        Args:
            datasets (`Mapping[str, Any]`): By name; `None` if this trainer has none.

        Raises:
            ValueError: With the names on each trainer.
        """
        mine = [name for name, dataset in datasets.items() if dataset is not None]
        everyone = gather_object([mine])
        if any(names != mine for names in everyone):
            raise ValueError(
                f"the trainers hold different data sets, in rank order {everyone}; give every "
                "process the same train_dataset and eval_dataset"
            )

    def fingerprint(self, dataset: Any) -> int:
        """Return a 63-bit hash of the training rows, or of the first ones of a stream.

        Args:
            dataset: See `source`.
        """
        if id(dataset) not in self._compared:  # rows given to a Trainer after it was made
            self.source(dataset, training=True)
        return self._compared[id(dataset)].fingerprint

    def source(
        self, dataset: Any, *, training: bool, description: str | None = None
    ) -> GroupBatchSampler | PackStream:
        """Make the packs of this rank's group, from a data set with a length or from a stream.

        Args:
            dataset: Rows; see `validate_documents`.
            training (`bool`): Whether packs are shuffled, and a stream starts again at its end.
            description (`str`, *optional*): What to call the data set in messages.

        Raises:
            ValueError: Anything is wrong with the data; see `validate_documents` and
                `packing.fit`.
        """
        name = description or ("train_dataset" if training else "eval_dataset")
        arguments = self.arguments
        given: dict[str, Any] = {
            "capacity": self.budget,
            "overflow": arguments.longctx_overflow,
            "balance": arguments.longctx_balance,
            "groups": self.group.groups,
            "group": self.group.index,
        }
        new, logs = id(dataset) not in self._compared, arguments.process_index == 0
        if isinstance(dataset, IterableDataset):
            self._validate_stream(dataset, training=training, name=name)
            stream = PackStream(
                dataset,
                **given,
                lookahead=arguments.longctx_lookahead,
                vocab_size=self.vocab_size,
                ignore_id=self.ignore_id,
                description=name,
                endless=training,
                log=logs,
            )
            if new:
                number = stream.peek(_PEEK)
                self.compare_rows(number, name=name)
                self._compared[id(dataset)] = _ComparedData(dataset=dataset, fingerprint=number)
            return stream
        documents = self._documents(dataset, name=name)
        sampler = GroupBatchSampler(
            documents.lengths,
            **given,
            seed=arguments.data_seed if arguments.data_seed is not None else arguments.seed,
            shuffle=training and arguments.train_sampling_strategy == "random",
        )
        if new and logs:
            sampler.report.log(name)
            documents.log_targets()
        return sampler

    def _validate_stream(self, dataset: Any, *, training: bool, name: str) -> None:
        """Raise ValueError for settings under which a stream would be read wrongly."""
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

    def _documents(self, dataset: Any, *, name: str) -> Documents:
        """Return the documents of a data set; validate and compare them at first."""
        compared = self._compared.get(id(dataset))
        if compared is None:
            fingerprint = hashlib.blake2b(digest_size=8)
            documents = validate_documents(
                dataset,
                vocab_size=self.vocab_size,
                description=name,
                progress=self.arguments.process_index == 0,
                fingerprint=fingerprint,
                ignore_id=self.ignore_id,
            )
            number = int.from_bytes(fingerprint.digest(), "little") >> 1  # fits an int64
            self.compare_rows(number, size=len(dataset), name=name)
            compared = _ComparedData(dataset=dataset, fingerprint=number, documents=documents)
            self._compared[id(dataset)] = compared
        assert compared.documents is not None, name
        return compared.documents

    def compare_rows(self, fingerprint: int, *, size: int = 0, name: str) -> None:
        """Raise if data differs between the trainers; a collective call.

        Args:
            fingerprint (`int`): Hash of the rows that this trainer has read.
            size (`int`, *optional*, defaults to 0): Rows of the data set; 0 for a stream.
            name (`str`): What to call the data set.

        Raises:
            ValueError: With the number of rows on each trainer, if it is known.
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
        """Make a data loader of packs: this rank's tokens of each.

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
            halves=training and options.overlap == "pingpong",  # evaluation runs batches whole
        )
        source = self.source(dataset, training=training)
        if isinstance(source, PackStream):
            packs: dict[str, Any] = {"dataset": source, "batch_size": 1}
        else:
            documents = PackDataset(self._documents(dataset, name="train_dataset"))
            packs = {"dataset": documents, "batch_sampler": source}
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
