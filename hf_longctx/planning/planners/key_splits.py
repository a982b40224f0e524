"""Balanced tasks -> those whose keys are cut, so that queries travel to keys where that is cheaper.

Layer: planning. A few rows at the end of a long document would draw its whole prefix to their server.
Where it moves fewer bytes, the owner of a run of keys attends to them for these rows instead, as
long as it has less to do than the busiest process, and the partials are merged at home. A *loan*
says so of one task; a *share* is what is then computed where: a task, or some of its keys.
"""

from typing import NamedTuple

import numpy as np

from ..layouts.cost import CostTable, LayerKind
from ..layouts.intervals import subtract
from ..layouts.layout import Layout
from .rebalance import cost, cost_over

# Elements that a lent row moves, forward and backward, in bf16, whose partials and gradients are
# wide and count twice: q and out, then q, grad_out and dq. Of a key: kv, then kv and dkv.
_ROW, _KEY = 1 + 2 + 1 + 1 + 2, 1 + 1 + 2
_PAYS = 0.8  # what a loan may move of what it saves; log-sum-exps and deltas are not counted


NO_SPLITS = np.zeros((0, 4), np.int32)


class KeySplit(NamedTuple):
    """Keys `[low, high)` of a task (its row in the table) are attended to by `server`."""

    task: int
    server: int
    low: int
    high: int


class Assignment(NamedTuple):
    """Rows `[start, stop)` of `document`, held by `home`, over its keys `[low, high)`, computed by
    `server`; `cut` says that the rows see other keys elsewhere. It travels in `part` of what the
    server waits for."""

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
    """Choose loans that save bytes and leave the busiest process the busiest.

    Args:
        layout (`Layout`): Where the tokens lie.
        tasks (`np.ndarray`): int32 `[tasks, 5]`, the fields of `distca.Task`.
        kind (`LayerKind`): What rows see, and the widths that weigh bytes.
        speeds (`tuple[float, ...]`, *optional*): Of each extra server, beside a rank's 1.
        costs (`CostTable`, *optional*): Work is seconds by it; score entries without.

    Returns:
        int32 `[loans, 4]`: the fields of `KeySplit`.
    """
    task, segment, low, high = _reads(layout, tasks, kind)
    document, start, stop, home, server = tasks.astype(np.int64).T
    owner = layout.columns[:, 0].astype(np.int64)
    length = layout.lengths.astype(np.int64)[document]
    speed = np.concatenate([np.ones(layout.ranks), speeds])
    each = cost(start, stop, length=length, kind=kind, costs=costs)
    load = np.bincount(server, each, len(speed))
    slack = (load / speed).max() * speed - load

    # Keys travel once for all tasks of a server that read them: such reads are lent together.
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
    visits = rows * ((home[task] != owner[segment]) * _ROW + (home[task] != server[task]))
    saved = keys.sum(0) * _KEY * kind.key_value_width
    spent = np.bincount(of, visits, len(together)) * kind.query_width
    lent = np.zeros(len(together), bool)
    for at in np.argsort(spent - saved, kind="stable").tolist():
        if spent[at] > _PAYS * saved[at]:
            continue
        if work[at] <= slack[to[at]]:
            lent[at] = True
            slack[to[at]] -= work[at]
            slack[source[at]] += work[at]
    chosen = lent[of]
    loans = np.stack([task, owner[segment], low, high], axis=1)[chosen]
    return loans[np.lexsort(loans.T[[2, 0]])].astype(np.int32)


def _reads(
    layout: Layout, tasks: np.ndarray, kind: LayerKind
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Which task reads keys `[low, high)` of which segment, held by another than its server.

    Tasks whose server holds all their keys in one run read nothing.
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
    layout: Layout, tasks: np.ndarray, loans: np.ndarray, *, kind: LayerKind
) -> np.ndarray:
    """int64 `[shares, 8]`: the fields of `Assignment` but `part`, by server, document, row and key."""
    tasks = tasks.astype(np.int64)
    keys = kind.keys_seen_by(*tasks[:, 1:3].T, length=layout.lengths[tasks[:, 0]])
    table = np.column_stack([tasks, *keys, np.zeros(len(tasks), np.int64)])
    lent: dict[int, list[KeySplit]] = {}
    for row in loans.tolist():
        lent.setdefault(row[0], []).append(KeySplit(*row))
    cut = []
    for task, given in lent.items():
        whole = Assignment(*table[task].tolist())
        kept = subtract((whole.low, whole.high), [(loan.low, loan.high) for loan in given])
        cut += [whole._replace(low=low, high=high, cut=1) for low, high in kept]
        cut += [
            whole._replace(server=loan.server, low=loan.low, high=loan.high, cut=1)
            for loan in given
        ]
    rest = np.delete(table, list(lent), axis=0)
    rows = np.concatenate(
        [rest, np.asarray([share[:-1] for share in cut], np.int64).reshape(-1, 8)]
    )
    return rows[np.lexsort(rows.T[[5, 1, 0, 4]])]
