"""Split the keys of tasks between processes, so that queries travel to keys where that is cheaper.

A few rows at the end of a long document would draw its whole prefix to their server. Where it moves
fewer bytes, the owner of a run of keys attends to them for these rows instead, as long as it has
less to do than the busiest process, and the partials are merged at home. A *key split* says so of
one task; an *assignment* is what is then computed where: a task, or some of its keys.
Layer: planning.
"""

from typing import NamedTuple

import numpy as np

from ..layouts.cost import CostTable, LayerKind
from ..layouts.intervals import subtract
from ..layouts.layout import Layout
from .rebalance import cost, cost_over

# Elements that a query row moves, forward and backward, in bf16, whose partials and gradients are
# wide and count twice: q and out, then q, grad_out and dq. Of a key: kv, then kv and dkv.
_ROW, _KEY = 1 + 2 + 1 + 1 + 2, 1 + 1 + 2
_PAYS = 0.8  # a split may move so much of what it saves; lse and deltas are not counted

NO_SPLITS = np.zeros((0, 4), np.int32)


class KeySplit(NamedTuple):
    """Keys `[low, high)` of a task (its row in the table), which `server` attends to."""

    task: int
    server: int
    low: int
    high: int


class Assignment(NamedTuple):
    """Rows `[start, stop)` of `document`, held by `home`, over its keys `[low, high)`.

    `server` computes it. `cut` says that the rows see other keys elsewhere. It travels in `part` of
    what the server waits for.
    """

    document: int
    start: int
    stop: int
    home: int
    server: int
    low: int
    high: int
    cut: int
    part: int = 0


def split_keys(
    layout: Layout,
    tasks: np.ndarray,
    *,
    kind: LayerKind,
    speeds: tuple[float, ...] = (),
    costs: CostTable | None = None,
) -> np.ndarray:
    """Choose splits that save bytes and leave the busiest process the busiest.

    Args:
        layout (`Layout`): Where the tokens lie.
        tasks (`np.ndarray`): int32 `[tasks, 5]`, the fields of `distca.Task`.
        kind (`LayerKind`): What rows see, and the widths that weigh bytes.
        speeds (`tuple[float, ...]`, *optional*): Of each extra server, beside a rank's 1.
        costs (`CostTable`, *optional*): Work is seconds by it; score entries without.

    Returns:
        int32 `[splits, 4]`: the fields of `KeySplit`.
    """
    task, segment, low, high = _reads(layout, tasks, kind)
    document, start, stop, home, server = tasks.astype(np.int64).T
    owner = layout.columns[:, 0].astype(np.int64)
    length = layout.lengths.astype(np.int64)[document]
    speed = np.concatenate([np.ones(layout.ranks), speeds])
    each = cost(start, stop, length=length, kind=kind, costs=costs)
    load = np.bincount(server, each, len(speed))
    slack = (load / speed).max() * speed - load

    # Keys travel once for all tasks of a server that read them: such reads move together.
    together, of = np.unique(server[task] * len(owner) + segment, return_inverse=True)
    to, source = owner[together % len(owner)], together // len(owner)
    work = np.bincount(
        of,
        cost_over(start[task], stop[task], low, high, length=length[task], kind=kind, costs=costs),
    )
    keys = np.full((2, len(together)), np.iinfo(np.int64).min // 2)
    np.maximum.at(keys[0], of, -low)
    np.maximum.at(keys[1], of, high)
    rows = (stop - start)[task]
    travels = rows * ((home[task] != owner[segment]) * _ROW + (home[task] != server[task]))
    saved = keys.sum(0) * _KEY * kind.key_value_width
    spent = np.bincount(of, travels, len(together)) * kind.query_width
    moved = np.zeros(len(together), bool)
    for at in np.argsort(spent - saved, kind="stable").tolist():
        if spent[at] > _PAYS * saved[at]:
            continue
        if work[at] <= slack[to[at]]:
            moved[at] = True
            slack[to[at]] -= work[at]
            slack[source[at]] += work[at]
    splits = np.stack([task, owner[segment], low, high], axis=1)[moved[of]]
    return splits[np.lexsort(splits.T[[2, 0]])].astype(np.int32)


def _reads(
    layout: Layout, tasks: np.ndarray, kind: LayerKind
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return which task reads which keys of a segment that another than its server holds.

    Tasks whose server holds all their keys in one run read nothing.

    Returns:
        Each int64 `[reads]`: task, segment (its row in the layout), and the keys `[low, high)`.
    """
    first = np.concatenate([[0], np.cumsum(layout.lengths, dtype=np.int64)])
    owner, _, of_document, begin, end = layout.columns.astype(np.int64).T
    begin, end = first[of_document] + begin, first[of_document] + end
    order = np.argsort(begin)
    owner, begin, end = owner[order], begin[order], end[order]

    document, start, stop, _, server = tasks.astype(np.int64).T
    low, high = kind.keys_seen_by(start, stop, length=layout.lengths[document])
    low, high = first[document] + low, first[document] + high
    from_segment = np.searchsorted(begin, low, side="right") - 1
    gathered = (owner[from_segment] != server) | (end[from_segment] < high)
    segments = np.where(gathered, np.searchsorted(begin, high, side="left") - from_segment, 0)
    task = np.repeat(np.arange(len(tasks)), segments)
    segment = np.arange(len(task)) - np.repeat(np.cumsum(segments) - segments, segments)
    segment += from_segment[task]
    away = owner[segment] != server[task]
    task, segment = task[away], segment[away]
    offset = first[document[task]]
    low = np.maximum(begin[segment], low[task]) - offset
    high = np.minimum(end[segment], high[task]) - offset
    return task, order[segment], low, high


def assignments(
    layout: Layout, tasks: np.ndarray, splits: np.ndarray, *, kind: LayerKind
) -> np.ndarray:
    """Return int64 `[assignments, 8]`: the fields of `Assignment` but `part`.

    Sorted by server, document, row and key.
    """
    tasks = tasks.astype(np.int64)
    keys = kind.keys_seen_by(*tasks[:, 1:3].T, length=layout.lengths[tasks[:, 0]])
    table = np.column_stack([tasks, *keys, np.zeros(len(tasks), np.int64)])
    by_task: dict[int, list[KeySplit]] = {}
    for row in splits.tolist():
        by_task.setdefault(row[0], []).append(KeySplit(*row))
    cut: list[Assignment] = []
    for task, away in by_task.items():
        full = Assignment(*table[task].tolist())
        kept = subtract((full.low, full.high), [(s.low, s.high) for s in away])
        runs = [(full.server, low, high) for low, high in kept] + [s[1:] for s in away]
        cut += [full._replace(server=s, low=low, high=high, cut=1) for s, low, high in runs]
    rest = np.delete(table, list(by_task), axis=0)
    rows = np.concatenate([rest, np.asarray([a[:-1] for a in cut], np.int64).reshape(-1, 8)])
    return rows[np.lexsort(rows.T[[5, 1, 0, 4]])]
