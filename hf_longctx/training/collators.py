"""A collator of the user's -> nothing where it only pads or flattens, a refusal where it does more.

Floor: training. Documents are packed and cut by our own collator, so one that pads has nothing left
to do; what it says of labels is kept.
"""

import logging
from collections.abc import Collection
from typing import Any

from transformers.data import data_collator as stock

from ..data.documents import MASKS
from ..support.probed import COLLATOR

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


def say_left_out(collator: Any, *, ignore_id: int | None) -> None:
    """Log what becomes of a collator that is not the one Trainer takes by itself."""
    if type(collator) in _PADDING[:3]:
        logger.info(
            "data_collator=%s is left out: documents are packed without padding%s",
            type(collator).__name__,
            "" if ignore_id is None else f"; as with it, id {ignore_id} (pad) is no target",
        )


def refuse_other_targets(collator: Any, columns: Collection[str]) -> None:
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
