"""Losses of evaluation batches -> their mean over all targets of the set.

Floor: training. Trainer averages batch means, which favours batches with few targets.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class TokenWeightedLoss:
    """Collects `(loss, targets)` of evaluation batches.

    A rank's loss is its sum over targets, divided by the step's global count and multiplied by the
    number of trainers, so the mean over trainers is the step's mean.
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def count(self, targets: Any) -> None:
        """Note the global number of targets of the batch to come."""
        self.counts.append(float(targets) if targets is not None else 0.0)

    def add(self, loss: Tensor) -> None:
        """Note a batch's loss on this rank."""
        self.losses.append(loss.detach().double())

    def mean(self, accelerator: Any) -> float:
        """The loss per target over all batches and trainers; a collective call."""
        assert len(self.losses) == len(self.counts), (len(self.losses), len(self.counts))
        if not self.losses:
            return 0.0
        weights = torch.tensor(self.counts, dtype=torch.float64, device=self.losses[0].device)
        # a batch without targets was divided by 1, and its loss is 0
        total = (torch.stack(self.losses) * weights.clamp(min=1)).sum()
        return float(accelerator.gather(total[None]).mean() / weights.sum().clamp(min=1))
