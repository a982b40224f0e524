"""What a Trainer's class overrides -> a refusal of what shared batches would pass by or falsify.

Floor: training. Getters of data loaders would never be called; a step of the class's own may leave
out the loss, the count or the labels that ranks agreed on, which shows only while it runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LOADERS = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler",
    "_get_eval_sampler",
)  # fmt: skip
_AGREED = ("input_ids", "labels", "shift_labels")


def refuse_shadowed_loaders(trainer: Any, *, mixin: type) -> None:
    """Refuse a class whose own data loaders or samplers the mixin would replace.

    Args:
        trainer: A Trainer.
        mixin (`type`): The class whose methods come first.

    Raises:
        ValueError: naming the method and the remedy.
    """
    order = type(trainer).__mro__
    for of in order[order.index(mixin) + 1 :]:
        if of.__module__.partition(".")[0] in ("transformers", "trl", __name__.partition(".")[0]):
            continue
        for name in _LOADERS:
            if name in vars(of):
                raise ValueError(
                    f"{of.__name__}.{name} is overridden, but hf_longctx packs batches and cuts "
                    "them over ranks, so it would never be called; leave it out and pass documents "
                    "as train_dataset and eval_dataset"
                )


@dataclass(slots=True)
class WatchedStep:
    """The step under way: what its batch held, and how often its loss was asked for.

    Args:
        trainer (`str`): Name of the Trainer's class.
        given (`dict[str, Tensor]`): The batch as the loader made it.
        losses (`int`): Losses that were computed from it.
    """

    trainer: str
    given: dict[str, Tensor]
    losses: int = 0

    @classmethod
    def begin(cls, trainer: Any, inputs: dict[str, Any]) -> "WatchedStep":
        """Keep what must not change."""
        given = {name: inputs[name].clone() for name in _AGREED}
        return cls(type(trainer).__name__, given)

    def see(self, inputs: dict[str, Any], *, count: Any) -> None:
        """Note that the loss of `inputs` over `count` targets is asked for.

        Raises:
            ValueError: where they are not those that the ranks agreed on.
        """
        for name, values in self.given.items():
            found = inputs.get(name)
            if not isinstance(found, Tensor) or not torch.equal(values.to(found.device), found):
                raise ValueError(
                    f"{self.trainer} changed {name} of a batch, whose targets are counted and "
                    "shifted already; change documents before training, in their labels"
                )
        if count is None:
            raise ValueError(
                f"{self.trainer} gave its loss no num_items_in_batch, so ranks with few targets "
                "would weigh as much as others; leave its own get_batch_samples or step out"
            )
        self.losses += 1

    def end(self) -> None:
        """The step is over.

        Raises:
            ValueError: where it used another loss.
        """
        if not self.losses:
            raise ValueError(
                f"{self.trainer} has a step of its own that does not call compute_loss, so its "
                "loss is no mean over all trainers' targets; let it call super(), or leave it out"
            )
