"""A layout -> balanced attention tasks: who computes which query rows.

Floor: plan. Core attention disaggregation, arXiv 2510.18121, section 4.2, with the head-tail items
of appendix B. A task is a run of query rows with every key that they see; each row has one
producer, so no softmax is merged.

An *item* pairs rows of one document: pair x is rows (head + x, tail - 1 - x). Without a window
every pair of an item costs the same, so cutting pairs off the inner end moves the most work per
key. That holds for bidirectional documents too, whose rows all cost the document's length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .cost import GRANULE, LayerKind
from .layout import Layout


class Task(NamedTuple):
    """Query rows `[start, stop)` of `document`, held by `home`, computed by `server`.

    Servers are numbered after the ranks: a rank that serves in place is its own number, the first
    extra server is `layout.ranks`.
    """

    document: int
    start: int
    stop: int
    home: int
    server: int


_DOCUMENT, _HEAD, _TAIL, _FIRST, _LAST, _MIDDLE, _HOME, _SERVER = range(8)


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


def _work(table: np.ndarray, layout: Layout, kind: LayerKind) -> np.ndarray:
    """Score entries of each item."""
    length = layout.lengths[table[:, _DOCUMENT]]
    head, tail, first, last = (table[:, c] for c in (_HEAD, _TAIL, _FIRST, _LAST))
    head_rows = kind.entries(head + first, head + last, length=length)
    tail_rows = kind.entries(tail - last, tail - first, length=length)
    middle = kind.entries(head + last, head + last + table[:, _MIDDLE], length=length)
    return head_rows + tail_rows + middle


def balance(
    layout: Layout, *, kind: LayerKind, tolerance: float, speeds: Sequence[float] = ()
) -> np.ndarray:
    """Move items between servers until each is within `tolerance` of its share of the work.

    Args:
        layout (`Layout`): Where the tokens lie; each rank first serves its own rows.
        kind (`LayerKind`): What a row sees, and its widths, which weigh a move's bytes.
        tolerance (`float`): Allowed excess over a share, as a fraction; `inf` moves nothing.
        speeds (`Sequence[float]`, *optional*): How fast each extra server is beside a rank, whose
            speed is 1; shares are in proportion.

    Returns:
        int64 item table as `items` gives it, with servers assigned.
    """
    table = items(layout)
    work = _work(table, layout, kind)
    speed = np.concatenate([np.ones(layout.ranks), speeds])
    load = np.bincount(table[:, _SERVER], weights=work, minlength=len(speed))
    share = load.sum() * speed / speed.sum()
    # A step lasts as long as its busiest server: once that is near its share, moves only cost
    # bytes.
    for receiver in np.argsort(load - share, kind="stable").tolist():
        while (load - (1 + tolerance) * share).max() > 0 and (
            load[receiver] < (1 - tolerance) * share[receiver]
        ):
            moved = _move(table, work, load, share, share, load > share, receiver, layout, kind)
            if moved is None:
                break
            table, work = moved
    # A donor may be left alone far above its share: first without lifting a receiver above its
    # own, then, where that leaves no room for a granule, up to the tolerance.
    for ceiling in (share, (1 + tolerance) * share):
        while (load - (1 + tolerance) * share).max() > 0:
            donors = np.arange(len(load)) == (load / share).argmax()
            receiver = int((load / share).argmin())
            moved = _move(table, work, load, share, ceiling, donors, receiver, layout, kind)
            if moved is None:
                break
            table, work = moved
    return table


def _move(
    table: np.ndarray,
    work: np.ndarray,
    load: np.ndarray,
    share: np.ndarray,
    ceiling: np.ndarray,
    donors: np.ndarray,
    receiver: int,
    layout: Layout,
    kind: LayerKind,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Make the move to `receiver` with the most work per byte; `None` when there is none.

    `load` is updated in place; donors stay above their share and the receiver below its `ceiling`.
    Bytes of n pairs: 2n query rows and the keys up to the last row moved, or all where rows see
    later ones.
    """
    candidates = np.flatnonzero(donors[table[:, _SERVER]])
    if not len(candidates):
        return None
    rows, total = table[candidates], work[candidates]
    surplus = (load - share)[rows[:, _SERVER]]
    limit = np.minimum(total, np.minimum(surplus, ceiling[receiver] - load[receiver]))
    pairs = rows[:, _LAST] - rows[:, _FIRST]
    whole = limit >= total
    per_pair = np.maximum(total / np.maximum(pairs, 1), 1)
    taken = np.where(whole, pairs, np.floor(limit / per_pair).astype(np.int64) // GRANULE * GRANULE)
    keys = np.minimum(rows[:, _TAIL] - rows[:, _LAST] + taken, rows[:, _TAIL])
    if not kind.causal:
        keys = layout.lengths[rows[:, _DOCUMENT]].astype(np.int64)
    if kind.window:
        keys = np.minimum(keys, 2 * taken + (2 if kind.causal else 4) * kind.window)
    volume = 2 * taken * kind.query_width + keys * kind.key_value_width
    gain = np.where(taken + whole > 0, taken * per_pair / np.maximum(volume, 1), -1.0)
    best = int(np.argmax(gain))
    if gain[best] <= 0:
        return None
    item, n = int(candidates[best]), int(taken[best])
    donor = int(table[item, _SERVER])
    if whole[best]:
        table[item, _SERVER] = receiver
        gone = work[item]
    else:
        moved = table[item].copy()
        moved[_FIRST], moved[_SERVER] = moved[_LAST] - n, receiver
        table[item, _LAST] -= n
        table[item, _MIDDLE] = 0
        table = np.concatenate([table, moved[None]])
        gone = _work(moved[None], layout, kind)[0]
        work = np.concatenate([work, [gone]])
        work[item] -= gone
    load[donor] -= gone
    load[receiver] += gone
    return table, work


def tasks(table: np.ndarray) -> np.ndarray:
    """int32 `[tasks, 5]`: the fields of `Task`, by server, document and row.

    An item gives its head rows and its tail rows, or one task where they touch.
    """
    document, head, tail, first, last, middle, home, server = table.T
    split = tail - last - (head + last) > middle
    outer = (document, head + first, np.where(split, head + last, tail - first), home, server)
    inner = (document, tail - last, tail - first, home, server)
    rows = np.concatenate([np.stack(outer, axis=1), np.stack(inner, axis=1)[split]])
    rows = rows[rows[:, 1] < rows[:, 2]]
    return rows[np.lexsort(rows.T[[1, 0, 4]])].astype(np.int32)
