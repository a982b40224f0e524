"""Evaluation over batches that a group of ranks shares -> the loss of the whole set.

Floor: training. A mixin, part of `LongCtxTrainerMixin`. The number of targets comes from the batch
and not from the Trainer below, since some count one rank's, or none, outside training.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import Trainer

from ..data.targets import IGNORE
from .loss import TokenWeightedLoss

_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it


class EvaluationMixin(_Base):
    """Evaluates a Trainer's model on shared batches; the loss is a mean over all targets."""

    _evaluated: TokenWeightedLoss | None = None  # of the evaluation that runs
    _targets: Tensor | None = None  # of the evaluation batch that runs, over all trainers

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's own; in evaluation a sum over the targets of all trainers, always."""
        if self._targets is not None:
            num_items_in_batch = self._targets.clamp(min=1)  # none at all gives loss 0, not NaN
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """One evaluation batch; its loss is kept with its number of targets."""
        self._bind(inputs)
        mine = inputs["shift_labels"].ne(IGNORE).sum()
        self._targets = self.accelerator.gather(mine[None]).sum()
        try:
            found = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            targets, self._targets = self._targets, None
        if self._evaluated is not None and found[0] is not None:
            self._evaluated.add(found[0], targets=targets)
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with a loss that is the mean over all targets of the set."""
        self._evaluated = TokenWeightedLoss()
        try:
            output = super().evaluation_loop(*args, **kwargs)
            key = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
            if key in output.metrics:
                output.metrics[key] = self._evaluated.mean(self.accelerator)
        finally:
            self._evaluated = None
        return output
