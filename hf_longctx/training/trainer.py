"""`Trainer` over batches that a group of ranks shares: a cooperative mixin and a ready class.

Floor: training. The mixin builds the data loaders (documents in, packs out), binds this process's
channel to each batch, and weighs the evaluation loss by tokens. Trainer's own loss arithmetic is
exact here: every rank gives `labels` and `shift_labels` of different tokens, and the count is
global.
"""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from ..attention.kinds import layer_kinds
from ..data.batch import KEY, LongCtxBatch
from ..data.sampler import GroupBatchSampler
from ..support import NAMES, refuse_arguments, refuse_model
from ..support.probed import COLLATOR
from .callback import LongCtxCallback
from .groups import find_group, join
from .loaders import Loaders
from .loss import TokenWeightedLoss
from .positions import refuse_longer_than_positions
from .probe import probe
from .report import StepReport, summary

logger = logging.getLogger(__name__)
_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it


class LongCtxTrainerMixin(_Base):
    """Makes a Trainer whose loss is a sum over tokens run on shared batches.

    Put it before the Trainer: `class MyTrainer(LongCtxTrainerMixin, Trainer)`. The model carries
    one of our attention names; data sets hold documents (`input_ids`, optional `labels`), not
    batches.

    Raises:
        ValueError: at construction, for anything that would not be exact; see `support`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_collator(args, kwargs)
        super().__init__(*args, **kwargs)
        if type(self).compute_loss is not Trainer.compute_loss:
            raise ValueError(
                f"{type(self).__name__}.compute_loss is overridden: it would see one rank's labels "
                "and count; leave it out and use the model's own loss"
            )
        if self.compute_metrics is not None or self.preprocess_logits_for_metrics is not None:
            raise ValueError(
                "compute_metrics would see one rank's rows in layout order, with labels of other "
                "documents beside them; leave it out and use eval_loss"
            )
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func would see one rank's labels and shift them again; leave it out "
                "and use the model's own loss"
            )
        if not hasattr(self.args, "longctx_max_tokens_per_rank"):
            raise ValueError(
                f"args is a {type(self.args).__name__} without longctx_* fields; use "
                "LongCtxTrainingArguments"
            )
        refuse_arguments(self.args)
        self.longctx_group = find_group(self.args)
        self.longctx_loaders = Loaders(
            self.args,
            self.longctx_group,
            accelerator=self.accelerator,
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
        )
        self._report = StepReport()
        self._spanning = 0
        self._logged = torch.zeros(2, dtype=torch.float64)  # `_exchanged` at the last log
        self._evaluated: TokenWeightedLoss | None = None
        if self.longctx_attention in NAMES:
            self._adopt()
        else:
            self._restore_name(self.args, source="the training arguments")
        self._check_data()
        self.longctx_runtime = join(self.longctx_group)
        self.add_callback(LongCtxCallback(self))

    @property
    def longctx_attention(self) -> str:
        """The model's attention name."""
        return str(self.model.config._attn_implementation)

    def _adopt(self) -> None:
        """Refuse or accept the model under its name; keep the name for a resume."""
        refuse_model(self.model.config, name=self.longctx_attention)
        if not getattr(self, "model_accepts_loss_kwargs", True):
            raise ValueError(
                f"{type(self.model).__name__} does not take num_items_in_batch, so its loss cannot "
                "be a mean over all trainers' tokens; use a model whose loss takes it"
            )
        probe(self.model, name=self.longctx_attention)
        if hasattr(self.args, "longctx_attention"):
            self.args.longctx_attention = self.longctx_attention

    def _check_data(self) -> None:
        """Scan and pack the data sets now, so that what is wrong with them shows before a step."""
        self.longctx_sampler: GroupBatchSampler | None = None
        if self.train_dataset is not None:
            self.longctx_sampler = self.longctx_loaders.sampler(self.train_dataset, training=True)
            refuse_longer_than_positions(self.model, self.longctx_sampler.packs)
        given = self.eval_dataset
        for dataset in given.values() if isinstance(given, dict) else [given]:
            if dataset is not None:
                sampler = self.longctx_loaders.sampler(dataset, training=False)
                refuse_longer_than_positions(self.model, sampler.packs)

    def _loader(self, dataset: Any, *, training: bool) -> DataLoader[Any]:
        if self.longctx_attention not in NAMES:
            raise ValueError(
                f"the model runs attn_implementation={self.longctx_attention!r}; load it with one "
                f"of {NAMES}, or resume from a checkpoint of such a run"
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
        """Train; a resumed run takes its attention name from the checkpoint's arguments."""
        if resume_from_checkpoint and self.longctx_attention not in NAMES:
            last = resume_from_checkpoint is True
            checkpoint = (
                get_last_checkpoint(self.args.output_dir) if last else resume_from_checkpoint
            )
            path = os.path.join(str(checkpoint), "training_args.bin")
            if os.path.isfile(path):
                self._restore_name(torch.load(path, weights_only=False), source=path)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _restore_name(self, kept: Any, *, source: str) -> None:
        """Run under the attention name that the arguments of an earlier run hold, if they do."""
        name = getattr(kept, "longctx_attention", None)
        if name:
            logger.warning("resuming with attn_implementation=%r from %s", name, source)
            self.model.set_attn_implementation(name)
            self._adopt()

    def _bind(self, inputs: dict[str, Any]) -> LongCtxBatch:
        """Tie a batch to this process, and compare its plan across the group."""
        batch: LongCtxBatch | None = inputs.get(KEY)
        if batch is None:
            raise ValueError(
                f"a batch without {KEY!r} reached the model: it did not come from this trainer's "
                "data loaders; pass documents as train_dataset and leave data_collator out"
            )
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
        return super().training_step(model, inputs, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Targets of a window over all trainers, at least 1: none at all gives loss 0, not NaN."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        if self._evaluated is not None:
            self._evaluated.count(count)
        return torch.clamp(count, min=1) if isinstance(count, Tensor) else count

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """One evaluation batch; its loss is kept with its number of targets."""
        self._bind(inputs)
        found = super().prediction_step(model, inputs, *args, **kwargs)
        if self._evaluated is not None and found[0] is not None:
            self._evaluated.add(found[0])
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with a loss that is the mean over all targets of the set."""
        self._evaluated, before = TokenWeightedLoss(), self._exchanged()
        try:
            output = super().evaluation_loop(*args, **kwargs)
            key = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
            if key in output.metrics:
                output.metrics[key] = self._evaluated.mean(self.accelerator)
        finally:
            self._evaluated = None
            self._logged += self._exchanged() - before  # the log is about training steps
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the balance, bytes and waiting time of the steps since the last log."""
        if "loss" in logs and self._report.budget:  # tokens may be 0: a group had filler only
            self._spanning += self._report.spanning
            logs = {**logs, **self._report.logs(), **self._moved()}
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


def _refuse_collator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a collator of the user's; later on it cannot be told from Trainer's own."""
    collator = kwargs.get("data_collator", args[2] if len(args) > 2 else None)
    if collator is not None:
        raise ValueError(COLLATOR.message(f"data_collator={type(collator).__name__}"))


class LongCtxTrainer(LongCtxTrainerMixin, Trainer):
    """`transformers.Trainer` over batches that a group of ranks shares."""
