"""Document lengths of a batch -> two layouts of nearly equal tokens, by whole documents.

Floor: plan. Each half is a layout of its own over all ranks, planned and balanced apart, so that
one half computes while the other's exchanges travel. A rank's rows are those of the first half,
then those of the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .layout import Layout, cut

SMALLEST = 1 / 4  # of a batch's tokens: a half below it hides too little of the other's exchanges


@dataclass(frozen=True, eq=False, slots=True)
class Halves:
    """A batch and its two halves.

    Args:
        whole (`Layout`): All documents, as they were numbered.
        parts (`tuple[Layout, Layout]`): The halves, each with documents of its own numbering.
    """

    whole: Layout
    parts: tuple[Layout, Layout]


def halve(lengths: Sequence[int], *, ranks: int, layout: str) -> Halves | None:
    """Cut documents over ranks as two halves; the same everywhere.

    The longest documents go first, each to the half with fewer tokens.

    Args:
        lengths (`Sequence[int]`): Tokens of each document, each at least 1.
        ranks (`int`): Ranks of the group.
        layout (`str`): How each half is cut; see `layout.cut`.

    Returns:
        The halves, on whose ranks token counts differ by at most one, together too; `None` where
        the smaller half would hold less than a quarter of the tokens, or less than one per rank.
    """
    documents: tuple[list[int], list[int]] = [], []
    tokens = [0, 0]
    for d in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        half = int(tokens[1] < tokens[0])
        documents[half].append(d)
        tokens[half] += lengths[d]
    if min(tokens) < max(ranks, SMALLEST * sum(tokens)):
        return None
    each = [sorted(of_half) for of_half in documents]
    first, second = (
        cut([lengths[d] for d in each[half]], ranks=ranks, layout=layout, odd=half * tokens[0])
        for half in range(2)
    )
    return Halves(_end_to_end(lengths, (first, second), each), (first, second))


def _end_to_end(
    lengths: Sequence[int], parts: Sequence[Layout], documents: Sequence[Sequence[int]]
) -> Layout:
    """One layout in which a rank's rows of each part lie one after the other."""
    columns, rows = [], np.zeros(parts[0].ranks, np.int32)
    for part, numbers in zip(parts, documents, strict=True):
        moved = part.columns.copy()
        moved[:, 1] += rows[moved[:, 0]]
        moved[:, 2] = np.asarray(numbers, np.int32)[moved[:, 2]]
        columns.append(moved)
        rows += np.asarray([part.rows(rank) for rank in range(part.ranks)], np.int32)
    joined = np.concatenate(columns)
    order = np.lexsort((joined[:, 1], joined[:, 0]))
    return Layout(np.asarray(lengths, np.int32), parts[0].ranks, joined[order])
