"""A layout -> items, the units that a balanced plan moves, and what each costs.

Floor: plan. An *item* pairs rows of one document: pair x is rows (head + x, tail - 1 - x). Without
a window every pair of an item costs the same, so cutting pairs off the inner end moves the most
work per key. That holds for bidirectional documents too, whose rows all cost the document's length.
"""

import numpy as np

from .cost import LayerKind
from .layout import Layout

DOCUMENT, HEAD, TAIL, FIRST, LAST, MIDDLE, HOME, SERVER = range(8)  # columns of a table


def items(layout: Layout) -> np.ndarray:
    """int64 `[items, 8]`: document, head, tail, first pair, last pair, middle row?, home, server.

    Two equally long pieces of a document on one rank form one item (head rows, tail rows); every
    other piece is folded on itself, and an odd one keeps its middle row.
    """
    rank, _, document, start, stop = layout.columns.astype(np.int64).T  # by rank and document
    same = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
    runs = np.diff(np.flatnonzero(np.append(np.append(True, ~same), True)))  # pieces held together
    pieces = np.repeat(runs, runs)
    size = stop - start
    mirrored = same & (pieces[1:] == 2) & (size[1:] == size[:-1])
    head, tail = np.append(mirrored, False), np.append(False, mirrored)
    stop = np.where(head, np.append(stop[1:], 0), stop)
    pairs, middle = np.where(head, size, size // 2), np.where(head, 0, size % 2)
    table = np.stack([document, start, stop, 0 * size, pairs, middle, rank, rank], axis=1)
    return table[~tail]


def work(table: np.ndarray, *, layout: Layout, kind: LayerKind) -> np.ndarray:
    """Score entries of each item."""
    length = layout.lengths[table[:, DOCUMENT]]
    head, tail, first, last = (table[:, c] for c in (HEAD, TAIL, FIRST, LAST))
    head_rows = kind.entries(head + first, head + last, length=length)
    tail_rows = kind.entries(tail - last, tail - first, length=length)
    middle = kind.entries(head + last, head + last + table[:, MIDDLE], length=length)
    return head_rows + tail_rows + middle
