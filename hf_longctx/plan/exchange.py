"""Balanced tasks -> one rank's program: queries and keys to the servers, results home, and back.

Floor: plan. Forward: home sends query rows and the keys its peers need, once per (owner, server);
servers attend and return (out, lse). Backward resends them with the gradient (home keeps q, k, v,
out and lse, a server keeps nothing), and servers return dq and one summed dkv per owner.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..intervals import Range, intersect, union
from .cost import LayerKind
from .distca import Task
from .layout import Layout, Placed
from .program import (
    HOME,
    Attend,
    AttendGrad,
    Block,
    Fold,
    Held,
    Op,
    Post,
    Program,
    Wait,
)

_Q, _KV, _OUT, _GRAD, _DQ, _DKV = range(6)  # arrays of a rank's own rows, as HOME names them
_IN, _BACK = 0, 1  # tags: to the servers, and home


@dataclass(frozen=True, slots=True)
class _Context:
    """The keys `[start, stop)` of `document` that one server gathers into one run of rows."""

    document: int
    start: int
    stop: int


class ExchangePlan:
    """What every rank sends and computes, for one layer kind.

    Args:
        layout (`Layout`): Where the tokens lie.
        tasks (`Iterable[Task]`): The balanced tasks of all ranks, by server, document and row.
        kind (`LayerKind`): What its rows see bounds the keys a task needs.
        processes (`int`, *optional*): Ranks and extra servers; the ranks alone by default.
    """

    def __init__(
        self,
        layout: Layout,
        tasks: Iterable[Task],
        *,
        kind: LayerKind,
        processes: int | None = None,
    ) -> None:
        self.layout, self.kind = layout, kind
        self.processes = processes or layout.ranks
        self.pieces: dict[tuple[int, int], list[Placed]] = {}  # by rank and document, in order
        for segment in layout.segments:
            self.pieces.setdefault((segment.rank, segment.document), []).append(segment)
        self.served: dict[int, list[Task]] = {}
        self.moved: dict[int, list[Task]] = {}  # by home
        for task in tasks:
            self.served.setdefault(task.server, []).append(task)
            if task.server != task.home:
                self.moved.setdefault(task.home, []).append(task)
        self.contexts = {s: self._gathered(s) for s in self.served}

    def _gathered(self, server: int) -> tuple[_Context, ...]:
        """Key runs that `server` must gather: all it needs but does not hold in one piece."""
        needed: dict[int, list[Range]] = {}
        for task in self.served[server]:
            keys = self._keys(task)
            if self._local(server, task.document, keys) is None:
                needed.setdefault(task.document, []).append(keys)
        return tuple(_Context(d, *run) for d in sorted(needed) for run in union(needed[d]))

    def _keys(self, task: Task) -> Range:
        length = int(self.layout.lengths[task.document])
        return self.kind.keys_seen((task.start, task.stop), length=length)

    def _local(self, rank: int, document: int, tokens: Range) -> int | None:
        """The row of `rank` where `tokens` begin, if it holds them in one run."""
        for s in self.pieces.get((rank, document), ()):
            if s.start <= tokens[0] and tokens[1] <= s.stop:
                return s.row + tokens[0] - s.start
        return None

    def _keys_sent(self, owner: int, server: int) -> list[tuple[int, Range]]:
        """Key runs that travel from `owner` to `server`, in the order of the server's rows."""
        runs = []
        for c in self.contexts.get(server, ()):
            for s in self.pieces.get((owner, c.document), ()):
                common = intersect((s.start, s.stop), (c.start, c.stop))
                if common:
                    runs.append((c.document, common))
        return runs

    def _home_rows(self, rank: int, document: int, tokens: Range, array: int) -> Block:
        row = self._local(rank, document, tokens)
        assert row is not None, (rank, document, tokens)
        return Block(array, row, row + tokens[1] - tokens[0])

    def program(self, rank: int) -> Program:
        """The program of one rank."""
        return _RankProgram(self, rank).build()


class _RankProgram:
    """Builds one rank's program: lays out its arrays, then lists the phases."""

    def __init__(self, plan: ExchangePlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        rows = plan.layout.rows(rank)
        self.arrays: list[tuple[str, int]] = [(kind, rows) for kind in HOME]
        own = plan.layout.of_rank(rank)
        self.held = [Held(array, s.row, *s[2:]) for array in range(len(HOME)) for s in own]
        self.contexts = plan.contexts.get(rank, ())
        self.first_row: dict[_Context, int] = {}
        self.foreign = [t for t in plan.served.get(rank, ()) if t.home != rank]
        self.mine = plan.moved.get(rank, [])
        self.context, self.context_grad = self._gather_array("kv"), self._gather_array("dkv")
        self.visit = {kind: self._task_array(kind) for kind in ("q", "out", "grad", "dq")}
        self.peers = [p for p in range(plan.processes) if p != rank]

    def _gather_array(self, kind: str) -> int:
        row = 0
        for c in self.contexts:
            self.held.append(Held(len(self.arrays), row, c.document, c.start, c.stop))
            self.first_row[c] = row
            row += c.stop - c.start
        self.arrays.append((kind, row))
        return len(self.arrays) - 1

    def _task_array(self, kind: str) -> int:
        row = 0
        for task in self.foreign:
            self.held.append(Held(len(self.arrays), row, *task[:3]))
            row += task.stop - task.start
        self.arrays.append((kind, row))
        return len(self.arrays) - 1

    def _context_rows(self, document: int, tokens: Range, array: int) -> Block:
        for c in self.contexts:
            if c.document == document and c.start <= tokens[0] and tokens[1] <= c.stop:
                row = self.first_row[c] + tokens[0] - c.start
                return Block(array, row, row + tokens[1] - tokens[0])
        raise AssertionError((self.rank, document, tokens))

    def _visiting(self, array: int, peer: int) -> list[Block]:
        """Rows of a task array that belong to `peer`'s tasks."""
        row, blocks = 0, []
        for task in self.foreign:
            stop = row + task.stop - task.start
            if task.home == peer:
                blocks.append(Block(array, row, stop))
            row = stop
        return blocks

    def _leaving(self, array: int, peer: int) -> list[Block]:
        """Own rows of the tasks that `peer` computes."""
        return [
            self.plan._home_rows(self.rank, t.document, (t.start, t.stop), array)
            for t in self.mine
            if t.server == peer
        ]

    def _keys_out(self, array: int, peer: int) -> list[Block]:
        runs = self.plan._keys_sent(self.rank, peer)
        return [self.plan._home_rows(self.rank, d, run, array) for d, run in runs]

    def _keys_in(self, array: int, peer: int) -> list[Block]:
        runs = self.plan._keys_sent(peer, self.rank)
        return [self._context_rows(d, run, array) for d, run in runs]

    def _post(self, tag: int, sends: dict[int, list[Block]], recvs: dict[int, list[Block]]) -> Post:
        pack = [tuple((p, tuple(b)) for p, b in side.items() if b) for side in (sends, recvs)]
        return Post(tag, pack[0], pack[1])

    def _tasks(self, *, backward: bool) -> tuple[list[Op], list[Op]]:
        """The rank's tasks: those it can start at once, and those that wait for an arrival."""
        ready: list[Op] = []
        waiting: list[Op] = []
        row = 0
        for task in self.plan.served.get(self.rank, ()):
            own = task.home == self.rank
            if own:
                at = self.plan._local(self.rank, task.document, (task.start, task.stop))
                assert at is not None, task
            else:
                at, row = row, row + task.stop - task.start
            home = {"q": _Q, "out": _OUT, "grad": _GRAD, "dq": _DQ} if own else self.visit
            q, out, grad, dq = (Block(a, at, at + task.stop - task.start) for a in home.values())
            keys = self.plan._keys(task)
            local = self.plan._local(self.rank, task.document, keys)
            if local is not None:
                kv, dkv = (Block(a, local, local + keys[1] - keys[0]) for a in (_KV, _DKV))
            else:
                pair = (self.context, self.context_grad)
                kv, dkv = (self._context_rows(task.document, keys, a) for a in pair)
            op = AttendGrad(q, kv, grad, dq, dkv) if backward else Attend(q, kv, out)
            (ready if own and local is not None else waiting).append(op)
        return ready, waiting

    def build(self) -> Program:
        """Three phases (start, serve, collect), or one where nothing leaves or arrives."""
        gather: list[Op] = [
            Fold(there, (here,), "cat")
            for here, there in zip(
                self._keys_out(_KV, self.rank), self._keys_in(self.context, self.rank), strict=True
            )
        ]
        q, out, grad, dq = self.visit.values()

        start = self._post(
            _IN,
            {p: self._leaving(_Q, p) + self._keys_out(_KV, p) for p in self.peers},
            {p: self._visiting(q, p) + self._keys_in(self.context, p) for p in self.peers},
        )
        back = self._post(
            _BACK,
            {p: self._visiting(out, p) for p in self.peers},
            {p: self._leaving(_OUT, p) for p in self.peers},
        )
        restart = self._post(
            _IN,
            {p: [*self._leaving(_GRAD, p), *(b for m in start.sends if m[0] == p for b in m[1])]
             for p in self.peers},
            {p: [*self._visiting(grad, p), *(b for m in start.recvs if m[0] == p for b in m[1])]
             for p in self.peers},
        )  # fmt: skip
        sums = {p: self._summed(p) for p in self.peers}
        back_grad = self._post(
            _BACK,
            {p: self._visiting(dq, p) + self._keys_in(self.context_grad, p) for p in self.peers},
            {p: self._leaving(_DQ, p) + [part for _, part in sums[p]] for p in self.peers},
        )
        own = zip(
            self._keys_out(_DKV, self.rank),
            self._keys_in(self.context_grad, self.rank),
            strict=True,
        )
        sums[self.rank] = list(own)
        fold: list[Op] = [Fold(i, (p,), "sum") for r in sorted(sums) for i, p in sums[r]]
        forward = self._phases(gather, start, back, [], backward=False)
        backward = self._phases(gather, restart, back_grad, fold, backward=True)
        return Program.build(arrays=self.arrays, held=self.held, forward=forward, backward=backward)

    def _summed(self, peer: int) -> list[tuple[Block, Block]]:
        """(own dkv rows, the rows of a new array that hold what `peer` sends for them)."""
        pairs, row = [], 0
        array = len(self.arrays)
        for document, run in self.plan._keys_sent(self.rank, peer):
            stop = row + run[1] - run[0]
            self.held.append(Held(array, row, document, *run))
            into = self.plan._home_rows(self.rank, document, run, _DKV)
            pairs.append((into, Block(array, row, stop)))
            row = stop
        if pairs:
            self.arrays.append(("dkv", row))
        return pairs

    def _phases(
        self, gather: list[Op], start: Post, back: Post, fold: list[Op], *, backward: bool
    ) -> tuple[tuple[Op, ...], ...]:
        ready, waiting = self._tasks(backward=backward)
        busy = [bool(post.sends or post.recvs) for post in (start, back)]
        if not any(busy):
            return ((*gather, *ready, *waiting, *fold),)
        ask: list[Op] = [start] if busy[0] else []
        asked: list[Op] = [Wait(_IN)] if busy[0] else []
        give: list[Op] = [back] if busy[1] else []
        given: list[Op] = [Wait(_BACK)] if busy[1] else []
        serve = (*ready, *asked, *waiting, *give)
        return ((*gather, *ask), serve, (*given, *fold))
