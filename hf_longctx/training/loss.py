"""Which losses may be shared by ranks, and evaluation batches' losses -> the loss of the whole set.

Floor: training. Trainer averages batch means, which favours batches with few targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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


def refuse_other_losses(trainer: Any) -> None:
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
