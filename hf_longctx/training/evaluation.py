"""Evaluation batches that a group of ranks shares -> loss, predictions and metrics of a whole set.

Floor: training. A mixin, part of `LongCtxTrainerMixin`. The number of targets comes from the batch
and not from the Trainer below, since some count one rank's, or none, outside training.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from ..data.targets import IGNORE
from .loss import TokenWeightedLoss
from .overrides import WatchedStep
from .predictions import DocumentRows, process

_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it


class EvaluationMixin(_Base):
    """Evaluates a Trainer's model on shared batches, as if each document were evaluated alone."""

    _losses: TokenWeightedLoss | None = None  # of the evaluation that runs
    _rows: DocumentRows | None = None  # of the evaluation that runs, where predictions are wanted
    _targets: Tensor | None = None  # of the evaluation batch that runs, over all trainers
    _watched: WatchedStep | None = None  # the step that runs

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's own; in evaluation a sum over the targets of all trainers, always."""
        if self._targets is not None:
            num_items_in_batch = self._targets.clamp(min=1)  # none at all gives loss 0, not NaN
        if self._watched is not None:
            self._watched.see(inputs, count=num_items_in_batch)
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """One evaluation batch; its loss, targets and predictions are kept for `evaluation_loop`,
        which leaves the Trainer below it the loss alone."""
        batch, rows = self._bind(inputs), self._rows
        self._targets = self.accelerator.gather(inputs["shift_labels"].ne(IGNORE).sum()[None]).sum()
        self._watched = watched = WatchedStep.begin(self, inputs)
        try:
            found = super().prediction_step(
                model, inputs, prediction_loss_only and rows is None, ignore_keys
            )
            watched.end()
        finally:
            targets, self._targets, self._watched = self._targets, None, None
        loss, logits, _ = found
        if self._losses is not None and loss is not None:
            self._losses.add(loss, targets=targets)
        if rows is None:
            return found
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"{type(self.model).__name__} gave {type(logits).__name__} as predictions, but "
                "only logits can be put together; name its other outputs in ignore_keys"
            )
        labels = inputs["labels"]
        if self.preprocess_logits_for_metrics is not None:
            logits = process(self.preprocess_logits_for_metrics, logits, labels)
        rows.add(batch, logits, labels, inputs["input_ids"], accelerator=self.accelerator)
        return loss, None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As Trainer's, with a loss that is the mean over all targets of the set, and predictions
        and labels of whole documents in the order of the data set, the same on every rank."""
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        extra = getattr(self, "_metrics", {}).get("eval", {})  # what TRL logs beside the loss
        extra.clear()  # TRL's `predict` leaves its own
        self._losses = losses = TokenWeightedLoss()
        self._rows = rows = None if prediction_loss_only else DocumentRows()
        try:
            output = super().evaluation_loop(
                dataloader, description, True, ignore_keys, metric_key_prefix
            )
            key = f"{metric_key_prefix}_loss"
            if key in output.metrics:
                output.metrics[key] = losses.mean(self.accelerator)
            for name, values in extra.items():
                if len(values) == len(losses.counts):
                    extra[name] = [losses.weigh(values)]
        finally:
            self._losses = self._rows = None
        return output if rows is None else self._with_documents(output, rows, metric_key_prefix)

    def _with_documents(
        self, output: EvalLoopOutput, rows: DocumentRows, prefix: str
    ) -> EvalLoopOutput:
        """The output with whole documents, and the metrics of them."""
        predictions, labels, inputs = rows.documents()
        found = {}
        if self.compute_metrics is not None:
            wanted = "inputs" in self.args.include_for_metrics
            given = EvalPrediction(predictions, labels, inputs=inputs if wanted else None)
            found = denumpify_detensorize(self.compute_metrics(given))
        named = {
            key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value
            for key, value in found.items()
        }
        return output._replace(
            predictions=predictions,
            label_ids=labels,
            metrics={**output.metrics, **named},
            num_samples=len(predictions),
        )
