"""Which losses may be shared by ranks, and evaluation batches' losses -> the loss of the whole set.

Layer: training. Trainer averages batch means, which favours batches with few targets.

What ranks predict for their rows of a batch -> predictions and labels of whole documents. Letters: T rows of this rank, V what a row's prediction holds (for logits, the
vocabulary), D documents of the data set, S tokens of the longest.

Evaluation batches that a group of ranks shares -> loss, predictions and metrics of a whole set. A mixin, part of `LongCtxTrainerMixin`. The number of targets comes from the batch
and not from the Trainer below, since some count one rank's, or none, outside training.
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
from .checks import WatchedStep


@dataclass(slots=True)
class TokenWeightedLoss:
    """Collects losses and numbers of targets of evaluation batches.

    A rank's loss is its sum over targets, divided by the batch's global count and multiplied by the
    number of trainers, so the mean over trainers is the batch's mean.
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, *, targets: Tensor) -> None:
        """Note a batch's loss on this rank, and its targets on all trainers."""
        self.losses.append(loss.detach().double())
        self.counts.append(targets)

    def weigh(self, values: Sequence[float]) -> float:
        """The mean over all targets of something that is a mean over each batch's targets."""
        weights = torch.stack(self.counts).double().cpu()
        return float((torch.tensor(values).double() * weights).sum() / weights.sum().clamp(min=1))

    def mean(self, accelerator: Any) -> float:
        """The loss per target over all batches and trainers; a collective call."""
        if not self.losses:
            return 0.0
        weights = torch.stack(self.counts).double()
        total = (torch.stack(self.losses) * weights).sum()
        return float(accelerator.gather(total[None]).mean() / weights.sum().clamp(min=1))


def validate_loss(trainer: Any) -> None:
    """Refuse a Trainer whose `compute_loss` is not known to be a sum over tokens.

    Known are Transformers' own, and that of TRL's `SFTTrainer` with `loss_type="nll"`.

    Raises:
        ValueError: naming the class or the argument, the rule and the remedy.
    """
    owner = next(
        c
        for c in type(trainer).__mro__
        if "compute_loss" in vars(c) and not c.__module__.startswith(__package__)
    )
    origin = f"{owner.__module__.partition('.')[0]}.{owner.__name__}"
    if origin not in ("transformers.Trainer", "trl.SFTTrainer"):
        raise ValueError(
            f"{owner.__name__}.compute_loss is overridden: it would see one rank's labels and "
            "count; use the model's own loss, or trl.SFTTrainer with loss_type='nll'"
        )
    if getattr(trainer.args, "loss_type", "nll") != "nll":
        raise ValueError(
            f"loss_type={trainer.args.loss_type!r} is not tested across ranks; use loss_type='nll'"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}: the MoE auxiliary loss is no "
            "mean over tokens, so it cannot be summed over ranks; set router_aux_loss_coef=0.0"
        )


_CHECKED = 64  # rows; see `process`


@dataclass(slots=True)
class DocumentRows:
    """Collects the rows of evaluation batches from all trainers, and puts them where they belong.

    Every trainer ends up with all predictions, as under Trainer; only one batch at a time is on the
    device.
    """

    places: list[np.ndarray] = field(default_factory=list)
    columns: list[tuple[np.ndarray, ...]] = field(default_factory=list)

    def add(self, batch: LongCtxBatch, *columns: Tensor, accelerator: Any) -> None:
        """Note one batch; a collective call.

        Args:
            batch (`LongCtxBatch`): Says which documents the rows are of.
            columns (`Tensor`): Each `[1, T, ...]`, one row of it per token.
            accelerator: Gathers from all trainers.
        """
        device = columns[0].device
        places = torch.from_numpy(batch.places()).to(device)
        rows, *gathered = (
            _gather(values, accelerator, fill=-1 if i == 0 else 0)
            for i, values in enumerate((places, *(column[0] for column in columns)))
        )
        kept = rows[:, 0] >= 0  # neither filler nor what a shorter rank was padded with
        self.places.append(rows[kept])
        self.columns.append(tuple(values[kept] for values in gathered))

    def documents(self) -> tuple[np.ndarray, ...]:
        """Each column as `[D, S, ...]`, in the order of the data set, -100 after a document's end.

        Fragments of a split document stand where they were cut from; what truncation drops is left
        out.
        """
        shape = np.max([rows.max(0) for rows in self.places], 0) + 1
        whole = [np.full((*shape, *c.shape[1:]), IGNORE, c.dtype) for c in self.columns[0]]
        for rows, columns in zip(self.places, self.columns, strict=True):
            for out, values in zip(whole, columns, strict=True):
                out[rows[:, 0], rows[:, 1]] = values
        return tuple(whole)


def _gather(rows: Tensor, accelerator: Any, *, fill: int) -> np.ndarray:
    """`[rows of all trainers, ...]`; a trainer with fewer than others adds rows of `fill`."""
    if rows.dtype == torch.bfloat16:
        rows = rows.float()  # NumPy has no bfloat16
    padded = accelerator.pad_across_processes(rows, dim=0, pad_index=fill)
    gathered: np.ndarray = accelerator.gather(padded).cpu().numpy()
    return gathered


def process(function: Callable[[Tensor, Tensor], Any], logits: Tensor, labels: Tensor) -> Tensor:
    """Predictions that `preprocess_logits_for_metrics` makes of a rank's logits.

    Args:
        function (`Callable`): The user's.
        logits (`Tensor`): `[1, T, V]`.
        labels (`Tensor`): int64 `[1, T]`, not shifted.

    Returns:
        `[1, T, ...]`.

    Raises:
        ValueError: where a row of the result depends on other rows, which may be of another
            document, or be missing on this rank.
    """
    found = function(logits, labels)
    rows = logits.shape[1]
    # some of the rows, back to front: a function that shifts or sums over tokens shows itself
    some = slice(0, min(_CHECKED, (rows + 1) // 2))
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
