"""A layout -> items, the units that a balanced plan moves, and what each costs.

Floor: plan. An *item* pairs rows of one document: pair x is rows (head + x, tail - 1 - x). Without
a window every pair of an item costs the same, so cutting pairs off the inner end moves the most
work per key. That holds for bidirectional documents too, whose rows all cost the document's length.
"""

import numpy as np

from .cost import LayerKind
from .layout import Layout
from .measured import CostTable

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


def runs(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 `[runs]`: item, first row and end of each run of rows; of an item, its head rows and
    its tail rows, or one run where they touch."""
    _, head, tail, first, last, middle, _, _ = table.T
    split = tail - last - (head + last) > middle
    item = np.arange(len(table))
    start = np.concatenate([head + first, (tail - last)[split]])
    stop = np.concatenate([np.where(split, head + last, tail - first), (tail - first)[split]])
    item = np.concatenate([item, item[split]])
    held = start < stop
    return item[held], start[held], stop[held]


def work(
    table: np.ndarray, *, layout: Layout, kind: LayerKind, costs: CostTable | None = None
) -> np.ndarray:
    """Score entries of each item, or its seconds by a table."""
    item, start, stop = runs(table)
    length = layout.lengths[table[item, DOCUMENT]]
    each = cost(start, stop, length=length, kind=kind, costs=costs)
    return np.bincount(item, weights=each, minlength=len(table))


def cost(
    start: np.ndarray,
    stop: np.ndarray,
    *,
    length: np.ndarray,
    kind: LayerKind,
    costs: CostTable | None,
) -> np.ndarray:
    """Score entries of tasks of query rows `[start, stop)`, or their seconds by a table."""
    entries = kind.entries(start, stop, length=length)
    if costs is None:
        return entries
    low, high = kind.keys_seen_by(start, stop, length=length)
    return costs.seconds(stop - start, high - low, entries)


def cost_over(
    start: np.ndarray,
    stop: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    *,
    length: np.ndarray,
    kind: LayerKind,
    costs: CostTable | None,
) -> np.ndarray:
    """As `cost`, of query rows `[start, stop)` with keys `[low, high)` alone."""
    entries = kind.entries_over(start, stop, low, high, length=length)
    return entries if costs is None else costs.seconds(stop - start, high - low, entries)
