"""A collator of the user's -> nothing where it only pads or flattens, a refusal where it does more.

Layer: training. Documents are packed and cut by our own collator, so one that pads has nothing left
to do; what it says of labels is kept.

A model with a table of positions, and documents -> a refusal of those longer than the table.

What a Trainer's class overrides -> a refusal of what shared batches would pass by or falsify. Getters of data loaders would never be called; a step of the class's own may leave
out the loss, the count or the labels that ranks agreed on, which shows only while it runs.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.data import data_collator as stock

from ..data.documents import MASKS
from ..support.trainer_rules import COLLATOR

logger = logging.getLogger(__name__)

_PADDING = (  # exact classes: a subclass may do anything
    stock.DataCollatorForLanguageModeling,
    stock.DataCollatorForSeq2Seq,
    stock.DataCollatorWithFlattening,
    stock.DataCollatorWithPadding,
    stock.DefaultDataCollator,
)


def leave_out(collator: Any) -> int | None:
    """Check that a collator can be left out.

    Args:
        collator: A Trainer's `data_collator`: the user's, or the Trainer's own.

    Returns:
        The id that is no target in rows without labels: language-modelling collators leave the pad
        token out of the loss. `None` where there is none.

    Raises:
        ValueError: for a collator that may do more than pad.
    """
    of = type(collator)
    from_trl = of.__module__.startswith("trl.") and of.__name__ == "DataCollatorForLanguageModeling"
    pads = collator is stock.default_data_collator or of in _PADDING or from_trl
    if not pads or getattr(collator, "mlm", False):
        name = getattr(collator, "__name__", of.__name__)
        raise ValueError(COLLATOR.message(f"data_collator={name}"))
    if of is not stock.DataCollatorForLanguageModeling:
        return None
    ignored: int | None = getattr(collator.tokenizer, "pad_token_id", None)
    return ignored


def log_left_out(collator: Any, *, ignore_id: int | None) -> None:
    """Log what becomes of a collator that is not the one Trainer takes by itself."""
    if type(collator) in _PADDING[:3]:
        logger.info(
            "data_collator=%s is left out: documents are packed without padding%s",
            type(collator).__name__,
            "" if ignore_id is None else f"; as with it, id {ignore_id} (pad) is no target",
        )


def validate_collator_targets(collator: Any, columns: Collection[str]) -> None:
    """Refuse columns of targets that a collator would have replaced.

    Args:
        collator: The Trainer's.
        columns (`Collection[str]`): Of a data set.

    Raises:
        ValueError: naming collator and columns.
    """
    if type(collator) is stock.DataCollatorForLanguageModeling:
        found = sorted({"labels", *MASKS} & {*columns})
        if found:
            raise ValueError(
                "data_collator=DataCollatorForLanguageModeling makes labels of input_ids, whatever "
                f"{found} say; drop those columns to train on all tokens, or leave the collator out"
            )


OFFSETS = range(3)  # OPT and BART keep their tables' first two rows for padding


def position_limit(model: Any) -> int | None:
    """Positions that a model has rows for; `None` where it computes them, as rotary models do.

    Args:
        model: A Transformers model. A table is a parameter or buffer with `max_position_embeddings`
            rows whose name speaks of positions.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    for name, table in (*model.named_parameters(), *model.named_buffers()):
        named = "pos" in name.lower() or "wpe" in name
        if named and table.dim() == 2 and len(table) - limit in OFFSETS:
            return int(limit)
    return None


def validate_positions(documents: Iterable[int], *, limit: int | None) -> None:
    """Refuse documents that a model has no positions for.

    Args:
        documents (`Iterable[int]`): Tokens of each, as cut for batches.
        limit (`int`, *optional*): What `position_limit` found.

    Raises:
        ValueError: naming both lengths.
    """
    longest = 0 if limit is None else max(documents, default=0)
    if limit is not None and longest > limit:
        raise ValueError(
            f"a document of {longest} tokens is longer than the model's table of {limit} positions "
            f"(max_position_embeddings); cut documents to {limit} tokens, or use a model with "
            "rotary positions"
        )


_LOADERS = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler",
    "_get_eval_sampler",
)  # fmt: skip
_AGREED = ("input_ids", "labels", "shift_labels")


def validate_loaders(trainer: Any, *, mixin: type) -> None:
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
