"""Plan `distca`: balance attention tasks over processes, whoever holds their rows.

Core attention disaggregation, arXiv 2510.18121, section 4.2, with the head-tail items of appendix
B. A task is a run of query rows with every key that they see; `key_splits` may then have another
process attend to some of its keys, whose partial is merged at home. Layer: planning.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..layouts.cost import CostTable, LayerKind
from ..layouts.intervals import touching
from ..layouts.layout import Layout
from .rebalance import DOCUMENT, HOME, SERVER, Rebalance, cost, runs

EXCESSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)  # over the tolerance, where nothing keeps within it


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


def balance(
    layout: Layout,
    *,
    kind: LayerKind,
    tolerance: float,
    speeds: Sequence[float] = (),
    linear: Sequence[float] = (),
    costs: CostTable | None = None,
) -> np.ndarray:
    """Move items between servers until each is within `tolerance` of its target work.

    Args:
        layout (`Layout`): Where the tokens lie; each rank first serves its own rows.
        kind (`LayerKind`): What a row sees, and its widths, which weigh a move's bytes.
        tolerance (`float`): Allowed excess over the target, as a fraction; `inf` moves nothing.
        speeds (`Sequence[float]`, *optional*): How fast each extra server is beside a rank, whose
            speed is 1; targets are in proportion.
        linear (`Sequence[float]`, *optional*): Other work of each process, in score entries (with
            `costs`, in seconds), beside which it does less attention; for a server, the time that
            it waits for ranks. None by default: ranks hold equally many tokens and are equally
            fast.
        costs (`CostTable`, *optional*): Balance seconds by it; by default score entries.

    Returns:
        int64 item table as `items` gives it, with servers assigned.
    """
    speed = np.concatenate([np.ones(layout.ranks), speeds])
    own = np.asarray(linear, np.float64) if len(linear) else np.zeros(len(speed))
    tables = [
        _balanced(Rebalance(layout, kind=kind, speed=speed, linear=own, costs=rates), tolerance)
        for rates in ([costs, costs.saturated()] if costs else [None])
    ]
    if len(tables) == 1:
        return tables[0]

    # Cuts and fusions change what pieces cost, so a greedy by flat rates may end better.
    def busiest(table: np.ndarray) -> float:
        document, start, stop, _, server = tasks(table).astype(np.int64).T
        each = cost(start, stop, length=layout.lengths[document], kind=kind, costs=costs)
        return float(((np.bincount(server, each, len(speed)) + own) / speed).max())

    return min(tables, key=busiest)


def _balanced(moves: Rebalance, tolerance: float) -> np.ndarray:
    """Return the item table once no move is left to make."""
    load, target = moves.load, moves.target
    allowed = (1 + tolerance) * target
    # A step lasts as long as its busiest server: once that is near its target, moves only cost
    # bytes.
    for receiver in np.argsort(load - target, kind="stable").tolist():
        lifted = float(target[receiver])
        while (load - allowed).max() > 0 and load[receiver] < (1 - tolerance) * lifted:
            if not moves.make(receiver, donors=load > target, floor=target, ceiling=lifted):
                break
    # One donor may still be far above its target: first without lifting a receiver above its own,
    # then, where that leaves no room for a granule, up to the tolerance. Where work comes in lumps
    # so large that this fails, whatever lowers the busiest server helps.
    rounds = [(target, target, False), (allowed, target, False)]
    rounds += [(allowed + excess * target, 0 * target, True) for excess in EXCESSES]
    for ceiling, floor, fine in rounds:
        while (load - np.maximum(ceiling, allowed)).max() > 0:
            donors = np.arange(len(load)) == (load / target).argmax()
            receiver = int((ceiling - load).argmax())
            lifted = float(ceiling[receiver])
            if not moves.make(receiver, donors=donors, floor=floor, ceiling=lifted, fine=fine):
                break
    return moves.table


def tasks(table: np.ndarray) -> np.ndarray:
    """Return int32 `[tasks, 5]`: the fields of `Task`, by server, document and row.

    An item gives its head rows and its tail rows, or one task where they touch; runs that touch and
    go from one home to one server are one task, which a kernel does faster.
    """
    item, start, stop = runs(table)
    columns = (table[item, DOCUMENT], start, stop, table[item, HOME], table[item, SERVER])
    rows = np.stack(columns, axis=1)
    rows = rows[np.lexsort(rows.T[[1, 0, 4]])]
    first, last = touching(rows[:, 1], rows[:, 2], *rows[:, [0, 3, 4]].T)
    merged = rows[first]
    merged[:, 2] = rows[last, 2]
    return merged.astype(np.int32)
