"""Plan `charm`: each row crosses a slow link once per domain that needs it, in pieces.

CHARM+ (arXiv 2611.05906) has published only its aim; the design is ours. A rank sends its keys and
values across a level to the rank of each other domain that has its place there. That rank passes
each piece on inside its domain, to those who see it. Pieces from other domains are attended to
between parts of the local work, in a fixed order, so that results do not depend on what arrives
first. In backward a domain sums a piece's gradient at the rank where the piece came in, and the sum
crosses back once. However many ranks there are, one holds three chunks per level: as much as
`_WINDOW` units.

With `queries`, backward brings queries and their output gradient to keys that stay, and returns the
gradient of the queries: fewer bytes where there are as many query heads as key/value heads.
Layer: planning.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from ..layouts.cost import LayerKind
from ..layouts.intervals import Ranges, common
from ..layouts.layout import Layout
from ..layouts.levels import Levels
from ..program.builder import BlockRun, RowPlacement, post
from ..program.operations import AttendGrad, Block, Fold, Op, Post, Wait
from ..program.program import HomeArray, Program
from .hierarchical_units import HierarchicalUnits, Transfer, Unit
from .remote_rows import RemoteRowsBuilder

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
    """Return the program of one rank, one phase in each direction.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): The layers it is for.
        levels (`Levels`): The nested domains; `(R,)` is flat.
        pieces (`int`, *optional*, defaults to 4): Parts in which rows cross a level, at least; see
            `HierarchicalUnits`.
        queries (`bool`, *optional*, defaults to `False`): In backward queries travel, and keys
            stay.
    """
    assert levels.ranks == layout.ranks, (levels, layout.ranks)
    builder = RemoteRowsBuilder(layout, rank=rank, kind=kind)
    keys = HierarchicalUnits(layout, kind, levels, rank=rank, pieces=pieces)

    def backward() -> Iterator[Op]:  # a generator: it starts once forward has all its arrays
        if not queries:
            yield from _Backward(builder, keys).ops()
            return
        moved = HierarchicalUnits(layout, kind, levels, rank=rank, pieces=pieces, queries=True)
        yield from _BackwardByQueries(builder, moved).ops()

    return builder.program(_Forward(builder, keys).ops(), backward())


class _UnitRows:
    """The rows that one unit brings to this rank, and the exchanges that bring them."""

    def __init__(self, unit: Unit, direction: "_Forward") -> None:
        builder = direction.builder
        self.unit = unit
        self.hops, self.placement = direction.units.hops(unit)
        self.arrays = tuple(builder.placed(kind, self.placement) for kind in direction.carried)
        self.posts: list[Post] = []
        for hop in self.hops:
            sends, recvs = (
                [(peer, direction.blocks(self, owner, rows)) for peer, owner, rows in transfers]
                for transfers in (hop.sends, hop.recvs)
            )
            after = self.posts[hop.after].tag if hop.after >= 0 else -1
            channel = 2 * hop.level
            self.posts.append(post(builder.tag(), sends, recvs, channel=channel, after=after))


class _Forward:
    """Post each unit ahead of its turn, wait for it and attend to its rows."""

    backward = False
    carried: tuple[str, ...] = ("kv",)
    own: tuple[int, ...] = (HomeArray.KV,)

    def __init__(self, builder: RemoteRowsBuilder, units: HierarchicalUnits) -> None:
        self.builder, self.units = builder, units

    def blocks(self, received: _UnitRows, owner: int, rows: Ranges) -> tuple[Block, ...]:
        """Return the blocks of rows that travel: of own arrays, or of those received."""
        if owner == self.builder.rank:
            placement, arrays = self.builder.home, self.own
        else:
            placement, arrays = received.placement, received.arrays
        return tuple(b for array in arrays for b in placement.blocks(array, owner, rows))

    def ops(self) -> Iterator[Op]:
        """Yield the operations of the direction: a generator, as few should stay in memory."""
        yield from self._opening()
        order = self.units.order(backward=self.backward)
        waiting = {unit.level: deque[Unit]() for unit in sorted(order)}  # the outermost goes first
        for unit in order:
            waiting[unit.level].append(unit)
        started: dict[Unit, _UnitRows] = {}

        def start(level: int) -> list[Op]:
            unit = waiting[level].popleft() if waiting[level] else None
            if unit is None or not self.units.moves(unit):
                return []
            started[unit] = received = _UnitRows(unit, self)
            return [op for op in received.posts if op.sends or op.recvs]

        nested = len(waiting) > 1
        for level in waiting:
            few = 1 if level == self.units.innermost else 2  # more would hold up the first work
            for _ in range(few if nested else _WINDOW):
                yield from start(level)
        yield from self._first()
        for level in waiting if nested else ():
            yield from start(level)
        for unit in order:
            if received := started.pop(unit, None):
                yield from (Wait(op.tag) for op in received.posts if op.sends or op.recvs)
                yield from self._work(received)
            else:
                yield from self._idle()
            yield from start(unit.level)  # on all ranks alike: messages keep their order
        yield from self._last()

    def _opening(self) -> list[Op]:
        """Return what precedes all sends."""
        return []

    def _first(self) -> list[Op]:
        """Return the work to do while the first units travel."""
        return self.builder.attend(self.builder.own(HomeArray.KV), first=True)

    def _work(self, received: _UnitRows) -> list[Op]:
        return self.builder.attend(self._needed(received, *received.arrays))

    def _idle(self) -> list[Op]:
        """Return what goes on in the place of a unit that brings nothing."""
        return []

    def _last(self) -> list[Op]:
        return []

    def _needed(self, received: _UnitRows, *arrays: int) -> list[BlockRun]:
        """Return the rows of a unit that this rank itself needs, with their block in each array."""
        return [
            run
            for owner, rows in received.placement.owned
            for run in received.placement.runs(
                arrays, owner, common(rows, self.units.needed(owner))
            )
        ]


class _Backward(_Forward):
    """Bring keys as in forward, and return their gradients the way that the keys came.

    A step of that return is taken amid each unit's work and after it, as an inner level sums what
    an outer one waits for.
    """

    backward = True
    returned = "dkv"
    own_returned = HomeArray.DKV

    def __init__(self, builder: RemoteRowsBuilder, units: HierarchicalUnits) -> None:
        super().__init__(builder, units)
        self._halves = builder.own_halves()
        self._returning: list[Iterator[list[Op]]] = []

    def _first(self) -> list[Op]:
        return [*self._halves[0]]

    def _work(self, received: _UnitRows) -> list[Op]:
        into = self.builder.placed(self.returned, received.placement)
        ops = self._amid(self._grads(received, into)) + self._turn()
        self._returning.append(self._return(received, into))
        return [*ops, *next(self._returning[-1])]

    def _idle(self) -> list[Op]:
        return self._turn() + self._turn()

    def _grads(self, received: _UnitRows, into: int) -> list[AttendGrad]:
        queries = self.builder.own(HomeArray.Q, HomeArray.GRAD, HomeArray.DQ)
        return self.builder.attend_grad(queries, self._needed(received, *received.arrays, into))

    def _last(self) -> list[Op]:
        ops = self._amid(self._halves[1])
        while self._returning:
            ops += self._turn()
        return ops

    def _amid(self, tasks: Sequence[AttendGrad]) -> list[Op]:
        """Return tasks with a step of the returns in the middle."""
        turn = self._turn()
        early, late = _halved(tasks) if turn else (tasks, ())
        return [*early, *turn, *late]

    def _turn(self) -> list[Op]:
        """Return the next step of every gradient on its way back, the oldest first."""
        ops: list[Op] = []
        for steps in list(self._returning):
            step = next(steps, None)
            if step is None:
                self._returning.remove(steps)
            ops += step or []
        return ops

    def _return(self, received: _UnitRows, array: int) -> Iterator[list[Op]]:
        """Yield, per turn, the operations that take a unit's gradients back.

        From the innermost level out, each rank sends the gradients of what it received to where
        that came from, and adds those that it gets for what it passed on.
        """
        builder, done = self.builder, list[Op]()
        outermost = received.unit.level
        for level in reversed(range(outermost, self.units.innermost + 1)):
            hops = [hop for hop in received.hops if hop.level == level]
            back: dict[int, list[Transfer]] = {}  # by peer: what its gradients are of
            for peer, owner, rows in sorted(p for hop in hops for p in hop.sends):
                back.setdefault(peer, []).append((peer, owner, rows))
            summands = {p: RowPlacement(builder.layout, [r[1:] for r in back[p]]) for p in back}
            parts = {p: builder.placed(self.returned, at) for p, at in summands.items()}
            sends = [
                (peer, received.placement.blocks(array, owner, rows))
                for peer, owner, rows in sorted(p for hop in hops for p in hop.recvs)
            ]
            recvs = [
                (p, summands[p].blocks(parts[p], owner, rows))
                for p in back
                for _, owner, rows in back[p]
            ]
            exchange = post(builder.tag(), sends, recvs, channel=2 * level + 1)
            moves = bool(exchange.sends or exchange.recvs)
            yield [*done, exchange] if moves else done
            if level < self.units.innermost:
                yield from ([],) * _SLOW_TURNS
            elif level == outermost:
                yield []  # nothing waits for it
            done = [Wait(exchange.tag)] if moves else []
            target, placement = array, received.placement
            if level == outermost:  # the rows that this rank sent were its own
                target, placement = self.own_returned, builder.home
            for p, summand in summands.items():
                done += builder.sum_into(target, placement, parts[p], summand)
        yield done


class _BackwardByQueries(_Backward):
    """Bring queries with what their gradient needs, and return it the way that they came."""

    carried = ("q", "delta")
    returned = "dq"
    own_returned = HomeArray.DQ

    def __init__(self, builder: RemoteRowsBuilder, units: HierarchicalUnits) -> None:
        super().__init__(builder, units)
        self.own = (HomeArray.Q, builder.own_array("delta"))

    def _opening(self) -> list[Op]:
        grad = Block(HomeArray.GRAD, 0, self.builder.home.rows)
        return [Fold(grad._replace(array=self.own[1]), (grad,), "delta")]

    def _grads(self, received: _UnitRows, into: int) -> list[AttendGrad]:
        queries = self._needed(received, *received.arrays, into)
        return self.builder.attend_grad(queries, self.builder.own(HomeArray.KV, HomeArray.DKV))


def _halved(tasks: Sequence[AttendGrad]) -> tuple[list[AttendGrad], list[AttendGrad]]:
    """Cut tasks in two lists of equal work; the task in the middle is cut by its queries."""
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
    """Return the task of some of its queries, if there are any."""
    q, grad, dq = (
        b._replace(start=b.start + start, stop=b.start + stop) for b in (task.q, task.grad, task.dq)
    )
    return [task._replace(q=q, grad=grad, dq=dq)] if start < stop else []
