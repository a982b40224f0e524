"""A model with a table of positions, and packs -> a refusal of documents longer than the table.

Floor: training.
"""

from collections.abc import Iterable
from typing import Any

from ..data.packing import Pack

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


def refuse_longer_than_positions(model: Any, packs: Iterable[Pack]) -> None:
    """Refuse packs with a document that a model has no positions for.

    Args:
        model: A Transformers model.
        packs (`Iterable[Pack]`): Documents, as they are cut for batches.

    Raises:
        ValueError: naming both lengths.
    """
    limit = position_limit(model)
    if limit is None:
        return
    longest = max((piece.stop - piece.start for pack in packs for piece in pack), default=0)
    if longest > limit:
        raise ValueError(
            f"a document of {longest} tokens is longer than the model's table of {limit} positions "
            f"(max_position_embeddings); cut documents to {limit} tokens, or use a model with "
            "rotary positions"
        )
