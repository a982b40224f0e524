"""Evaluate a model on shared batches, as if each document were evaluated alone.

Trainer averages batch means, which favours batches with few targets; here the loss is the mean over
all targets of the set. What ranks predict for their tokens is joined to predictions and labels of
whole documents, of which metrics are computed. `EvaluationMixin` is part of `LongCtxTrainerMixin`.
The number of targets comes from the batch and not from the Trainer, since some Trainers count one
rank's targets, or none, outside training.

Layer: training. Letters: T tokens of this rank, V size of a token's prediction (the vocabulary, for
logits), D documents of the data set, S tokens of the longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from ..data.batch import LongCtxBatch
from ..data.documents import IGNORE
from .checks import GuardedStep


@dataclass(slots=True)
class TokenWeightedLoss:
    """Collects the losses of evaluation batches and their numbers of targets.

    A rank's loss is its sum over targets, divided by the batch's global count and multiplied by the
    number of trainers. So the mean over trainers is the batch's mean.
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, *, targets: Tensor) -> None:
        """Add a batch: its loss on this rank, and its number of targets on all trainers."""
        self.losses.append(loss.detach().double())
        self.counts.append(targets)

    def weigh(self, values: Sequence[float]) -> float:
        """Return the mean over all targets of a value that is a mean over each batch's targets."""
        weights = torch.stack(self.counts).double().cpu()
        return float((torch.tensor(values).double() * weights).sum() / weights.sum().clamp(min=1))

    def mean(self, accelerator: Any) -> float:
        """Return the loss per target over all batches and trainers; a collective call."""
        if not self.losses:
            return 0.0
        weights = torch.stack(self.counts).double()
        total = (torch.stack(self.losses) * weights).sum()
        return float(accelerator.gather(total[None]).mean() / weights.sum().clamp(min=1))


@dataclass(slots=True)
class DocumentRows:
    """Collects what all trainers predict, token by token, and joins it to whole documents.

    Every trainer ends up with all predictions, as under Trainer. Only one batch at a time is on the
    device.
    """

    places: list[np.ndarray] = field(default_factory=list)
    columns: list[tuple[np.ndarray, ...]] = field(default_factory=list)

    def add(self, batch: LongCtxBatch, *columns: Tensor, accelerator: Any) -> None:
        """Add one batch; a collective call.

        Args:
            batch (`LongCtxBatch`): Gives the documents that the tokens belong to.
            columns (`Tensor`): Each `[1, T, ...]`.
            accelerator: Gathers from all trainers.
        """
        device = columns[0].device
        places = torch.from_numpy(batch.places()).to(device)
        rows, *gathered = (
            _gather(values, accelerator, fill=-1 if i == 0 else 0)
            for i, values in enumerate((places, *(column[0] for column in columns)))
        )
        kept = rows[:, 0] >= 0  # -1 is filler, or what a rank with fewer tokens was padded with
        self.places.append(rows[kept])
        self.columns.append(tuple(values[kept] for values in gathered))

    def documents(self) -> tuple[np.ndarray, ...]:
        """Return each column as `[D, S, ...]` in the order of the data set, padded with -100.

        Fragments of a split document are put back where they were cut from. What truncation dropped
        is missing.
        """
        shape = np.max([rows.max(0) for rows in self.places], 0) + 1
        whole = [np.full((*shape, *c.shape[1:]), IGNORE, c.dtype) for c in self.columns[0]]
        for rows, columns in zip(self.places, self.columns, strict=True):
            for out, values in zip(whole, columns, strict=True):
                out[rows[:, 0], rows[:, 1]] = values
        return tuple(whole)


def _gather(rows: Tensor, accelerator: Any, *, fill: int) -> np.ndarray:
    """Gather `[rows of all trainers, ...]`; trainers with fewer rows are padded with `fill`."""
    if rows.dtype == torch.bfloat16:
        rows = rows.float()  # NumPy has no bfloat16
    padded = accelerator.pad_across_processes(rows, dim=0, pad_index=fill)
    gathered: np.ndarray = accelerator.gather(padded).cpu().numpy()
    return gathered


def preprocess(function: Callable[[Tensor, Tensor], Any], logits: Tensor, labels: Tensor) -> Tensor:
    """Apply `preprocess_logits_for_metrics` to a rank's logits.

    Args:
        function (`Callable`): The user's.
        logits (`Tensor`): `[1, T, V]`.
        labels (`Tensor`): int64 `[1, T]`, not shifted.

    Returns:
        `[1, T, ...]`.

    Raises:
        ValueError: A token's result depends on other tokens, which may belong to another document
            or be on another rank.
    """
    found = function(logits, labels)
    rows = logits.shape[1]
    # Again on at most 64 tokens, back to front: a function that shifts or sums over tokens would
    # give other results.
    some = slice(0, min(64, (rows + 1) // 2))
    again = function(logits[:, some].flip(1), labels[:, some].flip(1))
    if isinstance(found, Tensor) and found.shape[:2] == (1, rows):
        few, same = found[:, some].flip(1).double(), again.double()
        if few.shape == same.shape and torch.allclose(few, same, 1e-4, 1e-6, equal_nan=True):
            return found
    got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"preprocess_logits_for_metrics made {got} of logits {tuple(logits.shape)}: a rank holds "
        "parts of several documents, so it must return [1, tokens, ...] and treat each token by "
        "itself; shift and sum in compute_metrics, where documents are whole"
    )


_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it


class EvaluationMixin(_Base):
    """Evaluates a Trainer's model on shared batches, as if each document were evaluated alone."""

    _losses: TokenWeightedLoss | None = None  # of the evaluation under way
    _rows: DocumentRows | None = None  # also of that, if predictions are wanted
    _targets: Tensor | None = None  # of the evaluation batch under way, over all trainers
    _guarded_step: GuardedStep | None = None  # the step under way

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the Trainer's loss; in evaluation over the targets of all trainers."""
        if self._targets is not None:
            num_items_in_batch = self._targets.clamp(min=1)  # none at all gives loss 0, not NaN
        if self._guarded_step is not None:
            self._guarded_step.check_loss(inputs, count=num_items_in_batch)
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
        """Run one evaluation batch, and keep its loss, targets and predictions."""
        # They are kept for `evaluation_loop`: the Trainer's own would join predictions by batch.
        batch, rows = self._bind(inputs), self._rows
        self._targets = self.accelerator.gather(inputs["shift_labels"].ne(IGNORE).sum()[None]).sum()
        self._guarded_step = step = GuardedStep.begin(self, inputs)
        try:
            found = super().prediction_step(
                model, inputs, prediction_loss_only and rows is None, ignore_keys
            )
            step.end()
        finally:
            targets, self._targets, self._guarded_step = self._targets, None, None
        loss, logits, _ = found
        if self._losses is not None and loss is not None:
            self._losses.add(loss, targets=targets)
        if rows is None:
            return found
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"{type(self.model).__name__} gave {type(logits).__name__} as predictions, but "
                "only logits can be joined by document; name its other outputs in ignore_keys"
            )
        labels = inputs["labels"]
        if self.preprocess_logits_for_metrics is not None:
            logits = preprocess(self.preprocess_logits_for_metrics, logits, labels)
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
        """Evaluate a set: the loss is the mean over its targets, predictions are of documents.

        Predictions and labels are in the order of the data set, the same on every rank.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        extra = getattr(self, "_metrics", {}).get("eval", {})  # what TRL logs beside the loss
        extra.clear()  # TRL's `predict` does not clear it
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
        """Add predictions and labels of whole documents, and their metrics, to an output."""
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
