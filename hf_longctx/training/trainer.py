"""`Trainer` over batches that a group of ranks shares: a cooperative mixin and a ready class.

Floor: training. The mixin builds the data loaders (documents in, packs out), binds this process's
channel to each batch. Trainer's own loss arithmetic is exact here: every rank gives `labels` and
`shift_labels` of different tokens, and the count is global. Evaluation is in `evaluation`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from ..attention.kinds import layer_kinds
from ..data.batch import KEY, LongCtxBatch
from ..data.documents import columns_in
from ..data.sampler import GroupBatchSampler
from ..data.stream import PackStream
from ..support import NAMES, refuse_arguments, refuse_given, refuse_model, refuse_wrappers
from .callback import LongCtxCallback
from .collators import leave_out, refuse_other_targets, say_left_out
from .evaluation import EvaluationMixin
from .groups import find_group, join
from .loaders import Loaders
from .loss import refuse_other_losses
from .overrides import WatchedStep, refuse_shadowed_loaders
from .positions import position_limit, refuse_longer
from .probe import probe
from .report import StepReport, summary
from .resume import arguments_of, refuse_other_data, refuse_sharded, restore_name


class LongCtxTrainerMixin(EvaluationMixin):
    """Makes a Trainer whose loss is a sum over tokens run on shared batches.

    Put it before the Trainer: `class MyTrainer(LongCtxTrainerMixin, Trainer)`. The model carries
    one of our attention names; data sets hold documents (`input_ids`, optional `labels`), not
    batches.

    Raises:
        ValueError: at construction, for anything that would not be exact; see `support`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ignored = leave_out(self.data_collator)
        say_left_out(self.data_collator, ignore_id=ignored)
        refuse_shadowed_loaders(self, mixin=LongCtxTrainerMixin)
        refuse_other_losses(self)
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func would see one rank's labels and shift them again; leave it out "
                "and use the model's own loss"
            )
        self._longctx_arguments()
        refuse_arguments(self.args)
        refuse_given(self.model, train_dataset=self.train_dataset)
        self.longctx_group = find_group(self.args)
        refuse_wrappers(self)
        self.longctx_loaders = Loaders(
            self.args,
            self.longctx_group,
            accelerator=self.accelerator,
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            ignore_id=ignored,
        )
        self._report = StepReport()
        self._spanning = 0
        self._logged = torch.zeros(2, dtype=torch.float64)  # `_exchanged` at the last log
        self.args.longctx_trainers = self.longctx_group.trainers
        if self.longctx_attention in NAMES:
            self._adopt()
        else:
            self._restore_name(self.args, source="the training arguments")
        self._position_limit = position_limit(self.model)
        self._check_data()
        self.longctx_runtime = join(self.longctx_group, default_seconds=self.args.ddp_timeout)
        self.add_callback(LongCtxCallback(self))

    def _build_accelerator_args(self, **kwargs: Any) -> Any:
        """As Trainer's; a PEFT model may recompute under DDP like any other.

        Trainer lets DDP look for unused parameters there, which ends a re-entrant recompute.
        """
        if self.args.activation_checkpointing and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False
        return super()._build_accelerator_args(**kwargs)

    @property
    def longctx_attention(self) -> str:
        """The model's attention name."""
        return str(self.model.config._attn_implementation)

    def _longctx_arguments(self) -> None:
        """Check that the training arguments have the `longctx_*` fields."""
        if not hasattr(self.args, "longctx_max_tokens_per_rank"):
            raise ValueError(
                f"args is a {type(self.args).__name__} without longctx_* fields; use "
                "LongCtxTrainingArguments, or start the script with `accelerate launch -m "
                "hf_longctx.run`"
            )

    def _adopt(self) -> None:
        """Refuse or accept the model under its name; keep the name for a resume."""
        refuse_model(self.model.config, name=self.longctx_attention)
        if not getattr(self, "model_accepts_loss_kwargs", True):
            raise ValueError(
                f"{type(self.model).__name__} does not take num_items_in_batch, so its loss cannot "
                "be a mean over all trainers' tokens; use a model whose loss takes it"
            )
        probe(self.model, name=self.longctx_attention)
        self.args.longctx_attention = self.longctx_attention

    def _check_data(self) -> None:
        """Scan and pack the data sets now, so that what is wrong with them shows before a step."""
        self.longctx_sampler: GroupBatchSampler | PackStream | None = None
        given = self.eval_dataset
        named = (
            {f"eval_dataset[{k!r}]": v for k, v in given.items()}
            if isinstance(given, dict)
            else {"eval_dataset": given}
        )
        self.longctx_loaders.compare({"train_dataset": self.train_dataset, **named})
        if self.train_dataset is not None:
            self.longctx_sampler = self._source(self.train_dataset, name="train_dataset")
        for name, dataset in named.items():
            if dataset is not None:
                self._source(dataset, name=name)

    def _source(self, dataset: Any, *, name: str) -> GroupBatchSampler | PackStream:
        source = self.longctx_loaders.source(
            dataset, training=name == "train_dataset", description=name
        )
        columns = columns_in(dataset)
        refuse_other_targets(self.data_collator, columns)
        if self._position_limit is not None and "position_ids" in columns:
            raise ValueError(
                f"{name} has position_ids, but documents are numbered from 0, which a model with a "
                "table of positions would notice; drop the column, or give seq_lengths"
            )
        if isinstance(source, GroupBatchSampler):  # a stream's documents are checked as they come
            lengths = (piece.length for pack in source.packs for piece in pack)
            refuse_longer(lengths, limit=self._position_limit)
        return source

    def _loader(self, dataset: Any, *, training: bool) -> DataLoader[Any]:
        if self.longctx_attention not in NAMES:
            raise ValueError(
                f"the model runs attn_implementation={self.longctx_attention!r}; load it with one "
                f"of {NAMES}, or resume from a checkpoint of such a run"
            )
        if leave_out(self.data_collator) != self.longctx_loaders.ignore_id:
            raise ValueError(
                "data_collator was replaced after the trainer was made, by one with another "
                "padding token; pass it when the trainer is made"
            )
        return self.longctx_loaders.loader(dataset, name=self.longctx_attention, training=training)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of this rank's group, packed anew each epoch."""
        dataset = self.train_dataset
        if dataset is None:
            raise ValueError("training needs a train_dataset of documents")
        return self._loader(dataset, training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Batches of evaluation documents, in the same packs each time."""
        given = self.eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = given[eval_dataset]
        chosen = given if eval_dataset is None else eval_dataset
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset of documents")
        return self._loader(chosen, training=False)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As `get_eval_dataloader`."""
        return self._loader(test_dataset, training=False)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; a resumed run takes its attention name from the checkpoint's arguments.

        Raises:
            ValueError: where a resumed run would skip other data than the checkpoint's run took;
                see `resume`.
        """
        if self.train_dataset is not None:
            self.args.longctx_train_data = self.longctx_loaders.fingerprint(self.train_dataset)
        if resume_from_checkpoint:
            refuse_sharded(self, checkpoint=resume_from_checkpoint)
            kept = arguments_of(resume_from_checkpoint, output_dir=self.args.output_dir)
            if kept is not None:
                self._restore_name(kept, source="the checkpoint")
                stream = isinstance(self.longctx_sampler, PackStream)
                refuse_other_data(kept, self.args, checkpoint=resume_from_checkpoint, stream=stream)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _restore_name(self, kept: Any, *, source: str) -> None:
        """Run a model without one of our names under the one that `kept` holds, if it does."""
        if self.longctx_attention not in NAMES and restore_name(self.model, kept, source=source):
            self._adopt()

    def _bind(self, inputs: dict[str, Any]) -> LongCtxBatch:
        """Tie a batch to this process, and compare its plan across the group."""
        batch: LongCtxBatch | None = inputs.get(KEY)
        if batch is None:
            raise ValueError(
                f"a batch without {KEY!r} reached the model: it did not come from this trainer's "
                "data loaders; pass documents as train_dataset and leave data_collator out"
            )
        refuse_longer(batch.layout.lengths.tolist(), limit=self._position_limit)
        if self.longctx_group.groups > 1 and batch.stream:  # a map-style set was compared whole
            self.longctx_loaders.compare_rows(batch.stream, name="the stream")
        batch.runtime = self.longctx_runtime
        if self.longctx_runtime.channel is not None:
            kinds = set(layer_kinds(self.model.config))
            digest = batch.digest(self.longctx_attention, kinds)
            self.longctx_runtime.channel.agree(digest, what="the plan of a batch")
        return batch

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """One micro-batch, with this process's channel bound to it."""
        batch = self._bind(inputs)
        kinds = layer_kinds(self.model.config)
        self._report.add(batch, algorithm=self.longctx_attention, kinds=kinds)
        self._watched = watched = WatchedStep.begin(self, inputs)
        try:
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
            watched.end()
        finally:
            self._watched = None
        return loss

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Targets of a window over all trainers, at least 1: none at all gives loss 0, not NaN."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return torch.clamp(count, min=1) if isinstance(count, Tensor) else count

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; what it exchanges is not in the log of training steps."""
        before = self._exchanged()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._logged += self._exchanged() - before

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the balance, bytes and waiting time of the steps since the last log."""
        if "loss" in logs and self._report.budget:  # tokens may be 0: a group had filler only
            report = self._report.of_all_groups(self.accelerator, ranks=self.longctx_group.size)
            self._spanning += report.spanning
            logs = {**logs, **report.logs(), **self._moved()}
            self._report = StepReport()
        super().log(logs, *args, **kwargs)

    def _exchanged(self) -> Tensor:
        """Bytes that this rank has sent and seconds that it has waited, float64 `[2]`."""
        runtime = self.longctx_runtime
        return torch.tensor([runtime.sent_bytes, runtime.account.waited], dtype=torch.float64)

    def _moved(self) -> dict[str, float]:
        """Bytes sent by all trainers and the longest wait of any, since the last log."""
        change, self._logged = self._exchanged() - self._logged, self._exchanged()
        rows = self.accelerator.gather(change[None].to(self.accelerator.device))
        return {
            "longctx_bytes_moved": int(rows[:, 0].sum()),
            "longctx_wait_seconds": round(float(rows[:, 1].max()), 4),
        }

    def longctx_summary(self) -> dict[str, Any]:
        """What the run did: see `training.report.summary`."""
        spanning = self._spanning + self._report.spanning
        return summary(self.state.log_history, ranks=self.longctx_group.size, spanning=spanning)


class LongCtxTrainer(LongCtxTrainerMixin, Trainer):
    """`transformers.Trainer` over batches that a group of ranks shares."""
