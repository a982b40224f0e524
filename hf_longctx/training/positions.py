"""A model with a table of positions, and documents -> a refusal of those longer than the table.

Floor: training.
"""

from collections.abc import Iterable
from typing import Any

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


def refuse_longer(documents: Iterable[int], *, limit: int | None) -> None:
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
