"""Check what a Trainer brings that no flag shows: its collator, its class, its loss, its positions.

Documents are packed and cut by hf_longctx, so a collator that only pads has nothing left to do, and
data loaders of the class's own would never be called. A step or a loss of its own may leave out the
loss, the count or the labels that the ranks agreed on; that shows only while a step runs.
Layer: training.
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

_LANGUAGE_MODELLING = stock.DataCollatorForLanguageModeling
_GIVEN = (_LANGUAGE_MODELLING, stock.DataCollatorForSeq2Seq, stock.DataCollatorWithFlattening)
_PADDING = (*_GIVEN, stock.DataCollatorWithPadding, stock.DefaultDataCollator)
_POSITION_OFFSETS = range(3)  # OPT and BART keep their tables' first two rows for padding
_LOADERS = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler",
    "_get_eval_sampler",
)  # fmt: skip


def validate_collator(collator: Any) -> int | None:
    """Check that a collator can be left out.

    Args:
        collator: A Trainer's `data_collator`: the user's, or the Trainer's own.

    Returns:
        The id that is no target in rows without labels: language-modelling collators leave the pad
        token out of the loss. `None` if there is none.

    Raises:
        ValueError: The collator may do more than pad or flatten.
    """
    of = type(collator)  # the exact class: a subclass may do anything
    from_trl = of.__module__.startswith("trl.") and of.__name__ == _LANGUAGE_MODELLING.__name__
    pads = collator is stock.default_data_collator or of in _PADDING or from_trl
    if not pads or getattr(collator, "mlm", False):
        name = getattr(collator, "__name__", of.__name__)
        raise ValueError(COLLATOR.message(f"data_collator={name}"))
    if of is not _LANGUAGE_MODELLING:
        return None
    ignored: int | None = getattr(collator.tokenizer, "pad_token_id", None)
    return ignored


def log_unused_collator(collator: Any, *, ignore_id: int | None) -> None:
    """Log that a collator is not used, if it is not one that Trainer chooses by itself."""
    if type(collator) in _GIVEN:
        logger.info(
            "data_collator=%s is left out: documents are packed without padding%s",
            type(collator).__name__,
            "" if ignore_id is None else f"; as with it, id {ignore_id} (pad) is no target",
        )


def validate_collator_targets(collator: Any, columns: Collection[str]) -> None:
    """Raise for columns of targets that a collator would have replaced.

    Args:
        collator: The Trainer's.
        columns (`Collection[str]`): Of a data set.

    Raises:
        ValueError: Names collator and columns.
    """
    if type(collator) is _LANGUAGE_MODELLING:
        found = sorted({"labels", *MASKS} & {*columns})
        if found:
            raise ValueError(
                "data_collator=DataCollatorForLanguageModeling makes labels of input_ids, whatever "
                f"{found} say; drop those columns to train on all tokens, or leave the collator out"
            )


def position_limit(model: Any) -> int | None:
    """Return how many positions a model has a table for; `None` if it computes them (rotary).

    Args:
        model: A Transformers model. A table is a parameter or buffer with `max_position_embeddings`
            rows whose name contains `pos` or `wpe`.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    for name, table in (*model.named_parameters(), *model.named_buffers()):
        named = "pos" in name.lower() or "wpe" in name
        if named and table.dim() == 2 and len(table) - limit in _POSITION_OFFSETS:
            return int(limit)
    return None


def validate_positions(documents: Iterable[int], *, limit: int | None) -> None:
    """Raise for documents that a model has no positions for.

    Args:
        documents (`Iterable[int]`): Tokens of each, as cut for batches.
        limit (`int`, *optional*): What `position_limit` returned.

    Raises:
        ValueError: Names both lengths.
    """
    longest = 0 if limit is None else max(documents, default=0)
    if limit is not None and longest > limit:
        raise ValueError(
            f"a document of {longest} tokens is longer than the model's table of {limit} positions "
            f"(max_position_embeddings); cut documents to {limit} tokens, or use a model with "
            "rotary positions"
        )


def validate_loaders(trainer: Any, *, mixin: type) -> None:
    """Raise for a class whose own data loaders or samplers the mixin would replace.

    Args:
        trainer: A Trainer.
        mixin (`type`): The class whose methods come first.

    Raises:
        ValueError: Names the method and the remedy.
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


def validate_loss(trainer: Any) -> None:
    """Raise for a Trainer whose loss is not known to be a sum over tokens.

    Known are the loss of Transformers' `Trainer`, and that of TRL's `SFTTrainer` with
    `loss_type="nll"`.

    Raises:
        ValueError: Names the class or the argument, the rule and the remedy.
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
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise ValueError(
            "compute_loss_func would see one rank's labels and shift them again; leave it out "
            "and use the model's own loss"
        )


@dataclass(slots=True)
class GuardedStep:
    """Checks during one step that a Trainer's own code uses the batch and the loss as they are.

    Args:
        trainer (`str`): Name of the Trainer's class.
        given (`dict[str, Tensor]`): What the ranks agreed on, as the loader made it.
        losses (`int`): How often the loss was computed from it.
    """

    trainer: str
    given: dict[str, Tensor]
    losses: int = 0

    @classmethod
    def begin(cls, trainer: Any, inputs: dict[str, Any]) -> "GuardedStep":
        """Keep copies of what must not change."""
        names = ("input_ids", "labels", "shift_labels")
        return cls(type(trainer).__name__, {name: inputs[name].clone() for name in names})

    def check_loss(self, inputs: dict[str, Any], *, count: Any) -> None:
        """Check the inputs from which a loss over `count` targets is about to be computed.

        Raises:
            ValueError: They are not those that the ranks agreed on.
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
        """Check, at the end of the step, that the loss was computed at all.

        Raises:
            ValueError: The step used another loss.
        """
        if not self.losses:
            raise ValueError(
                f"{self.trainer} has a step of its own that does not call compute_loss, so its "
                "loss is no mean over all trainers' targets; let it call super(), or leave it out"
            )
