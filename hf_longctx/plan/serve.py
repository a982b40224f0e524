"""What a process sends, computes and gives back -> its program: start, serve and collect.

Floor: plan. Forward: home sends query rows and keys; servers attend and return (out, lse). Backward
resends them with the gradient (home keeps q, k, v, out and lse, a server keeps nothing), and
servers return dq and one summed dkv per owner. In place of out, backward sends delta, the sum of
grad_out * out: a number per head instead of a row.

Head groups travel one behind the other: all are posted at the start, a server attends to one while
the next ones travel, and sends its results at once, into receives that wait for them. Tasks that
need no arrival stand between the groups: the first hide the first arrival, the last ones hide how
the last results travel home.
"""

from collections.abc import Iterable, Iterator, Sequence

from ..intervals import Range
from .exchange import Context, ExchangePlan
from .program import (
    HOME,
    Attend,
    AttendGrad,
    Block,
    Fold,
    Held,
    Op,
    Phases,
    Post,
    Program,
    Wait,
)

_Q, _KV, _OUT, _GRAD, _DQ, _DKV = range(6)  # arrays of a rank's own rows, as HOME names them
_IN, _BACK, _DUE = range(3)  # exchanges of a group: to servers, results that leave, and come
Heads = tuple[int, int]  # first key/value head and heads of a group; (0, 0) for all
ALL_HEADS: Heads = (0, 0)
_Messages = dict[int, list[Block]]  # by peer
_Sides = tuple[_Messages, _Messages]  # sent, received


def program(plan: ExchangePlan, *, rank: int, groups: Sequence[Heads] = (ALL_HEADS,)) -> Program:
    """The program of one rank or extra server, whose exchanges travel in groups of heads."""
    return _Builder(plan, rank, groups).build()


class _Builder:
    """Builds one program: lays out its arrays, then lists the phases."""

    def __init__(self, plan: ExchangePlan, rank: int, groups: Sequence[Heads]) -> None:
        self.plan, self.rank, self.groups = plan, rank, groups
        rows = plan.layout.rows(rank)
        self.arrays: list[tuple[str, int]] = [(kind, rows) for kind in HOME]
        own = plan.layout.of_rank(rank)
        self.held = [Held(array, s.row, *s[2:]) for array in range(len(HOME)) for s in own]
        self.contexts = plan.contexts.get(rank, ())
        self.first_row: dict[Context, int] = {}
        self.foreign = [t for t in plan.served.get(rank, ()) if t.home != rank]
        self.mine = plan.moved.get(rank, [])
        self.context, self.context_grad = self._gather_array("kv"), self._gather_array("dkv")
        self.visit = {k: self._task_array(k, self.foreign) for k in ("q", "out", "delta", "dq")}
        self.leaving_delta = self._task_array("delta", self.mine)
        self.peers = [p for p in range(plan.processes) if p != rank]

    def _gather_array(self, kind: str) -> int:
        row = 0
        for c in self.contexts:
            self.held.append(Held(len(self.arrays), row, c.document, c.start, c.stop))
            self.first_row[c] = row
            row += c.stop - c.start
        self.arrays.append((kind, row))
        return len(self.arrays) - 1

    def _task_array(self, kind: str, tasks: Sequence[tuple[int, ...]]) -> int:
        row = 0
        for document, start, stop, *_ in tasks:
            self.held.append(Held(len(self.arrays), row, document, start, stop))
            row += stop - start
        self.arrays.append((kind, row))
        return len(self.arrays) - 1

    def _home_rows(self, document: int, tokens: Range, array: int) -> Block:
        row = self.plan.local(self.rank, document, tokens)
        assert row is not None, (self.rank, document, tokens)
        return Block(array, row, row + tokens[1] - tokens[0])

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
            self._home_rows(t.document, (t.start, t.stop), array)
            for t in self.mine
            if t.server == peer
        ]

    def _deltas(self) -> Iterator[tuple[int, Fold]]:
        """For each task that another computes, its server and how what it sends is formed."""
        row = 0
        for task in self.mine:
            stop = row + task.stop - task.start
            own = self._home_rows(task.document, (task.start, task.stop), _GRAD)
            yield task.server, Fold(Block(self.leaving_delta, row, stop), (own,), "delta")
            row = stop

    def _keys_out(self, array: int, peer: int) -> list[Block]:
        runs = self.plan.keys_sent(self.rank, peer)
        return [self._home_rows(d, run, array) for d, run in runs]

    def _keys_in(self, array: int, peer: int) -> list[Block]:
        runs = self.plan.keys_sent(peer, self.rank)
        return [self._context_rows(d, run, array) for d, run in runs]

    def _tasks(self, *, backward: bool) -> tuple[list[Op], list[Op]]:
        """The rank's tasks: those it can start at once, and those that wait for an arrival."""
        ready: list[Op] = []
        waiting: list[Op] = []
        row = 0
        for task in self.plan.served.get(self.rank, ()):
            own = task.home == self.rank
            if own:
                at = self.plan.local(self.rank, task.document, (task.start, task.stop))
                assert at is not None, task
            else:
                at, row = row, row + task.stop - task.start
            arrays = (_Q, _OUT, _GRAD, _DQ) if own else self.visit.values()
            q, out, grad, dq = (Block(a, at, at + task.stop - task.start) for a in arrays)
            keys = self.plan.keys(task)
            local = self.plan.local(self.rank, task.document, keys)
            if local is not None:
                kv, dkv = (Block(a, local, local + keys[1] - keys[0]) for a in (_KV, _DKV))
            else:
                pair = (self.context, self.context_grad)
                kv, dkv = (self._context_rows(task.document, keys, a) for a in pair)
            op = AttendGrad(q, kv, grad, dq, dkv) if backward else Attend(q, kv, out)
            (ready if own and local is not None else waiting).append(op)
        return ready, waiting

    def build(self) -> Program:
        """Three phases, or one where nothing leaves or arrives."""
        q, out, delta, dq = self.visit.values()
        gather: list[Op] = [
            Fold(there, (here,), "cat")
            for here, there in zip(
                self._keys_out(_KV, self.rank), self._keys_in(self.context, self.rank), strict=True
            )
        ]
        sends = {p: self._leaving(_Q, p) + self._keys_out(_KV, p) for p in self.peers}
        recvs = {p: self._visiting(q, p) + self._keys_in(self.context, p) for p in self.peers}
        results = {p: self._visiting(out, p) for p in self.peers}
        due = {p: self._leaving(_OUT, p) for p in self.peers}
        forward = self._phases([gather, [], []], (sends, recvs), (results, due), backward=False)

        deltas = list(self._deltas())
        sends = {p: [f.into for s, f in deltas if s == p] + sends[p] for p in self.peers}
        recvs = {p: self._visiting(delta, p) + recvs[p] for p in self.peers}
        sums = {p: self._summed(p) for p in self.peers}
        results = {
            p: self._visiting(dq, p) + self._keys_in(self.context_grad, p) for p in self.peers
        }
        due = {p: self._leaving(_DQ, p) + [part for _, part in sums[p]] for p in self.peers}
        own = self._keys_out(_DKV, self.rank), self._keys_in(self.context_grad, self.rank)
        sums[self.rank] = list(zip(*own, strict=True))
        fold: list[Op] = [Fold(i, (p,), "sum") for r in sorted(sums) for i, p in sums[r]]
        prepare: list[Op] = [f for _, f in deltas]
        steps = [gather, prepare, fold]
        backward = self._phases(steps, (sends, recvs), (results, due), backward=True)
        return Program.build(arrays=self.arrays, held=self.held, forward=forward, backward=backward)

    def _summed(self, peer: int) -> list[tuple[Block, Block]]:
        """(own dkv rows, the rows of a new array that hold what `peer` sends for them)."""
        pairs, row = [], 0
        array = len(self.arrays)
        for document, run in self.plan.keys_sent(self.rank, peer):
            stop = row + run[1] - run[0]
            self.held.append(Held(array, row, document, *run))
            into = self._home_rows(document, run, _DKV)
            pairs.append((into, Block(array, row, stop)))
            row = stop
        if pairs:
            self.arrays.append(("dkv", row))
        return pairs

    def _phases(
        self,
        steps: Sequence[Sequence[Op]],
        request: _Sides,
        answer: _Sides,
        *,
        backward: bool,
    ) -> Phases:
        """Order one direction.

        Args:
            steps: What is done first, what before anything is sent, and what once results are here.
            request, answer: What is sent and received, to the servers and home.
            backward: Which direction.
        """
        first, prepare, finish = steps
        ready, waiting = self._tasks(backward=backward)
        if not any(blocks for side in (*request, *answer) for blocks in side.values()):
            return ((*first, *ready, *waiting, *finish),)
        if len(self.groups) == 1:
            ask, asked = _exchange(_IN, ALL_HEADS, request)
            give, given = _exchange(_BACK, ALL_HEADS, answer)
            serve = (*ready, *asked, *waiting, *give)
            return ((*first, *prepare, *ask), serve, (*given, *finish))
        return self._in_groups(steps, (ready, waiting), request, answer)

    def _in_groups(
        self,
        steps: Sequence[Sequence[Op]],
        tasks: tuple[Sequence[Op], Sequence[Op]],
        request: _Sides,
        answer: _Sides,
    ) -> Phases:
        """As `_phases`, with the heads in groups."""
        (first, prepare, finish), (ready, waiting) = steps, tasks
        start, serve, collect = list(first), list[Op](), list[Op]()
        receive, left = list[Op](), list[Op]()
        if not waiting:  # nothing to stand between
            serve, ready = list(ready), ()
        for number, heads in enumerate(self.groups):
            tag = 3 * number
            ask, asked = _exchange(tag + _IN, heads, request)
            give, given = _exchange(tag + _BACK, heads, (answer[0], {}))
            due, came = _exchange(tag + _DUE, heads, ({}, answer[1]))
            local = _of(heads, ready)
            start += [*_of(heads, prepare), *ask]
            receive += due
            ahead = number < len(self.groups) - 1
            serve += [*(local if ahead else ()), *asked, *_of(heads, waiting), *give]
            serve += () if ahead else local
            collect += [*came, *_of(heads, finish)]
            left += given
        return ((*start, *receive), tuple(serve), (*collect, *left))


def _exchange(tag: int, heads: Heads, sides: _Sides) -> tuple[list[Op], list[Op]]:
    """How an exchange starts and ends, for some heads; nothing where nothing moves."""
    pack = [
        tuple(
            (peer, tuple(_some(heads, b) for b in blocks))
            for peer, blocks in side.items()
            if blocks
        )
        for side in sides
    ]
    return ([Post(tag, *pack)], [Wait(tag)]) if any(pack) else ([], [])


def _some(heads: Heads, block: Block) -> Block:
    return block._replace(head=heads[0], heads=heads[1])


def _of(heads: Heads, ops: Iterable[Op]) -> list[Op]:
    """Tasks and folds of all heads, for some of them."""
    cut: list[Op] = []
    for op in ops:
        if isinstance(op, Fold):
            parts = tuple(_some(heads, part) for part in op.parts)
            cut.append(Fold(_some(heads, op.into), parts, op.how))
        elif isinstance(op, Attend):
            cut.append(Attend(*(_some(heads, block) for block in op)))
        elif isinstance(op, AttendGrad):
            cut.append(AttendGrad(*(_some(heads, block) for block in op)))
    return cut
