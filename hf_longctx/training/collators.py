"""A collator of the user's -> nothing where it only pads or flattens, a refusal where it does more.

Floor: training. Documents are packed and cut by our own collator, so one that pads has nothing left
to do; what it says of labels is kept.
"""

import logging
from typing import Any

from transformers.data import data_collator as stock

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
    """Check that a collator can be left out, and say so.

    Args:
        collator: What the user passed as `data_collator`; `None` for nothing.

    Returns:
        The id that is no target in rows without labels: language-modelling collators leave the pad
        token out of the loss. `None` where there is none.

    Raises:
        ValueError: for a collator that may do more than pad.
    """
    if collator is None:
        return None
    if not _pads(collator):
        raise ValueError(COLLATOR.message(f"data_collator={_name(collator)}"))
    ignored: int | None = None
    if type(collator) is stock.DataCollatorForLanguageModeling:
        ignored = getattr(collator.tokenizer, "pad_token_id", None)
    logger.info(
        "data_collator=%s is left out: documents are packed without padding%s",
        _name(collator),
        "" if ignored is None else f"; as with it, id {ignored} (pad) is no target",
    )
    return ignored


def _pads(collator: Any) -> bool:
    if getattr(collator, "mlm", False):
        return False
    of = type(collator)
    from_trl = of.__module__.startswith("trl.") and of.__name__ == "DataCollatorForLanguageModeling"
    return collator is stock.default_data_collator or of in _PADDING or from_trl


def _name(collator: Any) -> str:
    return getattr(collator, "__name__", type(collator).__name__)
