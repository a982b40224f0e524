"""A layout and nested domains -> attention whose traffic crosses each slow link once, in pieces.

Layer: planning. CHARM+ (arXiv 2611.05906) has published its aim alone: the design is ours. A rank sends
its keys and values across a level to the rank of each other domain that has its place there, which
passes each piece on inside, to those who see it. Foreign pieces are attended to between parts of
the local work, in a fixed order, so that results do not depend on what arrives first. In backward a
domain sums a piece's gradient where the piece came in, and it goes back across once. However many
ranks there are, one holds three chunks a level, which `_WINDOW` units make up at most.

Under `queries`, backward brings queries and their output gradient to keys that stay, and takes the
queries' gradient back: fewer bytes where there are as many query heads as key/value heads.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from ..layouts.cost import LayerKind
from ..layouts.intervals import Ranges, common
from ..layouts.layout import Layout
from ..layouts.levels import Levels
from ..program.operations import AttendGrad, Block, Fold, Op, Post, Wait
from ..program.program import Program
from .hierarchical_units import HierarchicalUnits, Transfer, Unit
from .remote_rows import DKV, DQ, GRAD, KV, Q, RemoteRows, RowPlacement, Run, post

PIECES = 4
_SLOW_TURNS = 3  # that pass while a gradient is on a slow link: the work of two units with the last
_WINDOW = 3  # units under way at a level: the one worked on, and two that travel (inside, one)


def program(
    layout: Layout,
    *,
    rank: int,
    kind: LayerKind,
    levels: Levels,
    pieces: int = PIECES,
    queries: bool = False,
) -> Program:
    """The program of one rank, one phase in each direction.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): The layers it is for.
        levels (`Levels`): The nested domains; `(R,)` is flat.
        pieces (`int`, *optional*, defaults to 4): Parts in which rows cross a level, at least; see
            `crossings`.
        queries (`bool`, *optional*): In backward queries travel, and keys stay.
    """
    assert levels.ranks == layout.ranks, (levels, layout.ranks)
    visits = RemoteRows(layout, rank=rank, kind=kind)
    keys = HierarchicalUnits(layout, kind, levels, rank=rank, pieces=pieces)

    def backward() -> Iterator[Op]:  # begun once forward has all its arrays
        if not queries:
            yield from _Backward(visits, keys).ops()
            return
        moved = HierarchicalUnits(layout, kind, levels, rank=rank, pieces=pieces, queries=True)
        yield from _BackwardByQueries(visits, moved).ops()

    return visits.program(_Forward(visits, keys).ops(), backward())


class _Visit:
    """The rows of one unit on this rank: where they stand, and the exchanges that bring them."""

    def __init__(self, unit: Unit, direction: "_Forward") -> None:
        visits = direction.visits
        self.unit = unit
        self.hops, self.stand = direction.crossings.hops(unit)
        self.arrays = tuple(visits.array(kind, self.stand) for kind in direction.carried)
        self.posts: list[Post] = []
        for hop in self.hops:
            sends, recvs = (
                [(peer, direction.blocks(self, owner, rows)) for peer, owner, rows in parcels]
                for parcels in (hop.sends, hop.recvs)
            )
            after = self.posts[hop.after].tag if hop.after >= 0 else -1
            channel = 2 * hop.level
            self.posts.append(post(visits.tag(), sends, recvs, channel=channel, after=after))


class _Forward:
    """Units in order, each posted ahead, waited for and worked on."""

    backward = False
    carried: tuple[str, ...] = ("kv",)
    home: tuple[int, ...] = (KV,)

    def __init__(self, visits: RemoteRows, crossings: HierarchicalUnits) -> None:
        self.visits, self.crossings = visits, crossings

    def blocks(self, visit: _Visit, owner: int, rows: Ranges) -> tuple[Block, ...]:
        """Rows that travel, as they stand here: at home, or as guests."""
        if owner == self.visits.rank:
            stand, arrays = self.visits.home, self.home
        else:
            stand, arrays = visit.stand, visit.arrays
        return tuple(b for array in arrays for b in stand.blocks(array, owner, rows))

    def ops(self) -> Iterator[Op]:
        """All operations of the direction, as they are read: few stay in memory."""
        yield from self._opening()
        order = self.crossings.order(backward=self.backward)
        waiting = {unit.level: deque[Unit]() for unit in sorted(order)}  # the outermost goes first
        for unit in order:
            waiting[unit.level].append(unit)
        started: dict[Unit, _Visit] = {}

        def start(level: int) -> list[Op]:
            unit = waiting[level].popleft() if waiting[level] else None
            if unit is None or not self.crossings.moves(unit):
                return []
            started[unit] = visit = _Visit(unit, self)
            return [op for op in visit.posts if op.sends or op.recvs]

        nested = len(waiting) > 1
        for level in waiting:
            few = 1 if level == self.crossings.innermost else 2  # more would hold up the first work
            for _ in range(few if nested else _WINDOW):
                yield from start(level)
        yield from self._first()
        for level in waiting if nested else ():
            yield from start(level)
        for unit in order:
            if visit := started.pop(unit, None):
                yield from (Wait(op.tag) for op in visit.posts if op.sends or op.recvs)
                yield from self._work(visit)
            else:
                yield from self._idle()
            yield from start(unit.level)  # on all ranks alike: messages keep their order
        yield from self._last()

    def _opening(self) -> list[Op]:
        """Before anything is sent."""
        return []

    def _first(self) -> list[Op]:
        """While the first units travel."""
        return self.visits.attend(self.visits.own(KV), first=True)

    def _work(self, visit: _Visit) -> list[Op]:
        return self.visits.attend(self._guests(visit, *visit.arrays))

    def _idle(self) -> list[Op]:
        """What goes on where a unit brings nothing."""
        return []

    def _last(self) -> list[Op]:
        return []

    def _guests(self, visit: _Visit, *arrays: int) -> list[Run]:
        """The rows of a unit that this rank needs, with their block in each array."""
        return [
            run
            for owner, rows in visit.stand.parts
            for run in visit.stand.runs(arrays, owner, common(rows, self.crossings.needed(owner)))
        ]


class _Backward(_Forward):
    """Keys come as in forward, and their gradients go back the way that they came.

    A step of that is taken amid each unit's work and after it: an inner level sums what an outer
    one waits for.
    """

    backward = True
    returned = "dkv"
    home_returned = DKV

    def __init__(self, visits: RemoteRows, crossings: HierarchicalUnits) -> None:
        super().__init__(visits, crossings)
        self._halves = visits.own_halves()
        self._returning: list[Iterator[list[Op]]] = []

    def _first(self) -> list[Op]:
        return [*self._halves[0]]

    def _work(self, visit: _Visit) -> list[Op]:
        into = self.visits.array(self.returned, visit.stand)
        ops = self._amid(self._grads(visit, into)) + self._turn()
        self._returning.append(self._return(visit, into))
        return [*ops, *next(self._returning[-1])]

    def _idle(self) -> list[Op]:
        return self._turn() + self._turn()

    def _grads(self, visit: _Visit, into: int) -> list[AttendGrad]:
        keys = self._guests(visit, *visit.arrays, into)
        return self.visits.attend_grad(self.visits.own(Q, GRAD, DQ), keys)

    def _last(self) -> list[Op]:
        ops = self._amid(self._halves[1])
        while self._returning:
            ops += self._turn()
        return ops

    def _amid(self, tasks: Sequence[AttendGrad]) -> list[Op]:
        """Tasks with a turn amid them."""
        turn = self._turn()
        early, late = _halved(tasks) if turn else (tasks, ())
        return [*early, *turn, *late]

    def _turn(self) -> list[Op]:
        """The next step of every gradient on its way back, the oldest first."""
        ops: list[Op] = []
        for steps in list(self._returning):
            step = next(steps, None)
            if step is None:
                self._returning.remove(steps)
            ops += step or []
        return ops

    def _return(self, visit: _Visit, array: int) -> Iterator[list[Op]]:
        """Per turn, the operations that take a unit's gradients back: from the innermost level out,
        each rank sends what it received to where that came from, and adds what comes in."""
        done: list[Op] = []
        outermost = visit.unit.level
        for level in reversed(range(outermost, self.crossings.innermost + 1)):
            hops = [hop for hop in visit.hops if hop.level == level]
            back: dict[int, list[Transfer]] = {}
            for peer, owner, rows in sorted(p for hop in hops for p in hop.sends):
                back.setdefault(peer, []).append((peer, owner, rows))
            came = {p: RowPlacement(self.visits.layout, [r[1:] for r in back[p]]) for p in back}
            parts = {p: self.visits.array(self.returned, stand) for p, stand in came.items()}
            sends = [
                (peer, visit.stand.blocks(array, owner, rows))
                for peer, owner, rows in sorted(p for hop in hops for p in hop.recvs)
            ]
            recvs = [
                (p, came[p].blocks(parts[p], owner, rows))
                for p in back
                for _, owner, rows in back[p]
            ]
            exchange = post(self.visits.tag(), sends, recvs, channel=2 * level + 1)
            moves = bool(exchange.sends or exchange.recvs)
            yield [*done, exchange] if moves else done
            if level < self.crossings.innermost:
                yield from ([],) * _SLOW_TURNS
            elif level == outermost:
                yield []  # nothing waits for it
            done = [Wait(exchange.tag)] if moves else []
            for p, stand in came.items():
                at_home = level == outermost
                into = self.visits.home if at_home else visit.stand
                target = self.home_returned if at_home else array
                done += self.visits.sum_into(target, into, parts[p], stand)
        yield done


class _BackwardByQueries(_Backward):
    """Queries come with what their gradient needs, and this goes back the way that they came."""

    carried = ("q", "delta")
    returned = "dq"
    home_returned = DQ

    def __init__(self, visits: RemoteRows, crossings: HierarchicalUnits) -> None:
        super().__init__(visits, crossings)
        self.home = (Q, visits.array("delta", visits.home))

    def _opening(self) -> list[Op]:
        whole = Block(GRAD, 0, self.visits.home.rows)
        return [Fold(whole._replace(array=self.home[1]), (whole,), "delta")]

    def _grads(self, visit: _Visit, into: int) -> list[AttendGrad]:
        queries = self._guests(visit, *visit.arrays, into)
        return self.visits.attend_grad(queries, self.visits.own(KV, DKV))


def _halved(tasks: Sequence[AttendGrad]) -> tuple[list[AttendGrad], list[AttendGrad]]:
    """Tasks with as much work each, the one in the middle cut by its queries."""
    early, late = list[AttendGrad](), list[AttendGrad]()
    left = sum(_size(task) for task in tasks) // 2
    for task in tasks:
        rows = task.q.stop - task.q.start
        first = min(rows, left // (_size(task) // rows))
        early += _of_rows(task, 0, first)
        late += _of_rows(task, first, rows)
        left = max(left - _size(task), 0)
    return early, late


def _size(task: AttendGrad) -> int:
    return (task.q.stop - task.q.start) * (task.kv.stop - task.kv.start)


def _of_rows(task: AttendGrad, start: int, stop: int) -> list[AttendGrad]:
    """The task of some of its queries, if there are any."""
    q, grad, dq = (
        b._replace(start=b.start + start, stop=b.start + stop) for b in (task.q, task.grad, task.dq)
    )
    return [task._replace(q=q, grad=grad, dq=dq)] if start < stop else []
