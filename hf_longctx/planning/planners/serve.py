"""Tasks and what they need sent -> phases, whose exchanges may hide behind the tasks.

Layer: planning. Head groups, and parts of rows within each, travel one behind the other: all are posted
at the start, a server attends to one while the next ones travel, and sends its results at once,
into receives that wait for them. Tasks that need no arrival stand between the groups: the first
hide the first arrival, the last ones hide how the last results travel home.

What a process sends, computes and gives back -> its program: start, serve and collect. Forward: home sends query rows and keys; servers attend and return (out, lse), which
home merges where a row's keys were cut. Backward resends them with the gradient (home keeps q, k,
v, out and lse, a server keeps nothing), and servers return dq and one summed dkv per owner. In
place of out, backward sends delta, the sum of grad_out * out: a number per head instead of a row.

`pipeline` puts these in order.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..layouts.intervals import Range
from ..program.operations import (
    ALL_HEADS,
    Attend,
    AttendGrad,
    Block,
    Fold,
    HeadRange,
    Op,
    Phases,
    Post,
    Wait,
)
from ..program.program import HOME, Held, Program
from .exchange import Context, ExchangePlan
from .key_splits import Assignment

_IN, _BACK, _DUE = range(3)  # exchanges of a part: to servers, results that leave, and come
Messages = dict[int, list[Block]]  # by peer
Sides = tuple[Messages, Messages]  # sent, received
Steps = tuple[Sequence[Op], Sequence[Op], Sequence[Op]]  # first, before sends, once results came
Part = tuple[Sides, Sequence[Op], Sides]  # what its tasks need, they, and what comes of them


def phases(
    steps: Steps, ready: Sequence[Op], parts: Sequence[Part], *, groups: Sequence[HeadRange]
) -> Phases:
    """Three phases (start, serve and collect), or one where nothing leaves or arrives.

    Args:
        steps (`Steps`): Folds beside the tasks.
        ready (`Sequence[Op]`): Tasks that need no arrival.
        parts (`Sequence[Part]`): Those that do, in the order in which they travel.
        groups (`Sequence[Heads]`): Head groups that travel apart; one part goes with one group.
    """
    first, prepare, finish = steps
    moves = [side for request, _, answer in parts for side in (*request, *answer)]
    if not any(blocks for side in moves for blocks in side.values()):
        return ((*first, *ready, *(op for _, tasks, _ in parts for op in tasks), *finish),)
    if len(groups) == 1:
        ((request, waiting, answer),) = parts
        ask, asked = _exchange(_IN, ALL_HEADS, request)
        give, given = _exchange(_BACK, ALL_HEADS, answer)
        serve = (*ready, *asked, *waiting, *give)
        return ((*first, *prepare, *ask), serve, (*given, *finish))
    return _in_groups(steps, ready, parts, groups)


def _in_groups(
    steps: Steps, ready: Sequence[Op], parts: Sequence[Part], groups: Sequence[HeadRange]
) -> Phases:
    first, prepare, finish = steps
    start, serve, collect = list(first), list[Op](), list[Op]()
    receive, left = list[Op](), list[Op]()
    if not any(tasks for _, tasks, _ in parts):  # nothing to stand between
        serve, ready = list(ready), ()
    for number, heads in enumerate(groups):
        local, last = _of(heads, ready), number == len(groups) - 1
        start += _of(heads, prepare)
        serve += [] if last else local
        for part, (request, tasks, answer) in enumerate(parts):
            tag = 3 * (number * len(parts) + part)
            ask, asked = _exchange(tag + _IN, heads, request)
            give, given = _exchange(tag + _BACK, heads, (answer[0], {}))
            due, came = _exchange(tag + _DUE, heads, ({}, answer[1]))
            start += ask
            receive += due
            serve += [*asked, *_of(heads, tasks), *give]
            collect += came
            left += given
        serve += local if last else []
        collect += _of(heads, finish)
    return ((*start, *receive), tuple(serve), (*collect, *left))


def _exchange(tag: int, heads: HeadRange, sides: Sides) -> tuple[list[Op], list[Op]]:
    """How an exchange starts and ends, for some heads; nothing where nothing moves."""
    pack = [
        tuple(
            (peer, tuple(_some(heads, b) for b in blocks))
            for peer, blocks in side.items()
            if blocks
        )
        for side in sides
    ]
    return ([Post(tag, pack[0], pack[1])], [Wait(tag)]) if any(pack) else ([], [])


def _some(heads: HeadRange, block: Block) -> Block:
    return block._replace(head=heads[0], heads=heads[1])


def _of(heads: HeadRange, ops: Iterable[Op]) -> list[Op]:
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


_Q, _KV, _OUT, _GRAD, _DQ, _DKV = range(6)  # arrays of a rank's own rows, as HOME names them


def program(
    plan: ExchangePlan, *, rank: int, groups: Sequence[HeadRange] = (ALL_HEADS,)
) -> Program:
    """The program of one rank or extra server, whose exchanges travel in groups of heads."""
    return _ServeProgram(plan, rank, groups).build()


class _ServeProgram:
    """Builds one program: lays out its arrays, then lists the phases."""

    def __init__(self, plan: ExchangePlan, rank: int, groups: Sequence[HeadRange]) -> None:
        self.plan, self.rank, self.groups = plan, rank, groups
        rows = plan.layout.rows(rank)
        self.arrays: list[tuple[str, int]] = [(kind, rows) for kind in HOME]
        held = plan.layout.of_rank(rank)
        self.held = [Held(array, s.row, *s[2:]) for array in range(len(HOME)) for s in held]
        self.peers = [p for p in range(plan.processes) if p != rank]
        self.contexts = plan.contexts.get(rank, ())
        self.first_row: dict[Context, int] = {}
        self.context, self.context_grad = self._gather_array("kv"), self._gather_array("dkv")

        served = plan.served.get(rank, ())
        own = [s for s in served if s.home == rank]
        self.guests = [s for s in served if s.home != rank]
        self.mine = plan.moved.get(rank, [])  # and computed elsewhere
        self.leaves: dict[tuple[int, int], list[Assignment]] = defaultdict(list)  # by peer and part
        self.visits: dict[tuple[int, int], list[Assignment]] = defaultdict(list)
        for share in self.mine:
            self.leaves[share.server, share.part].append(share)
        for share in self.guests:
            self.visits[share.home, share.part].append(share)
        self.parts = range(plan.parts)
        self.cut = plan.cut.get(rank, [])
        at_home = [s for s in (*own, *self.mine) if not s.cut]
        # Where each share's rows stand. Results of cut ones are partials until they are merged.
        self.q = self._new_rows("q", self.guests) | self._own_rows(_Q, (*own, *self.mine))
        self.out = self._own_rows(_OUT, at_home) | self._new_rows("part", self.cut)
        self.out |= self._new_rows("out", [s for s in self.guests if not s.cut])
        self.out |= self._new_rows("part", [s for s in self.guests if s.cut])
        self.grad = self._own_rows(_GRAD, own)
        self.grad |= self._new_rows("delta", self.guests) | self._new_rows("delta", self.mine)
        self.dq = self._own_rows(_DQ, (*own, *at_home)) | self._new_rows("dq", self.guests)
        self.dq |= self._new_rows("dq", [s for s in self.mine if s.cut])
        self.sums = {p: self._summed(p) for p in self.peers}

    def _gather_array(self, kind: str) -> int:
        row = 0
        for c in self.contexts:
            self.held.append(Held(len(self.arrays), row, c.document, c.start, c.stop))
            self.first_row[c] = row
            row += c.stop - c.start
        self.arrays.append((kind, row))
        return len(self.arrays) - 1

    def _new_rows(self, kind: str, shares: Sequence[Assignment]) -> dict[Assignment, Block]:
        """The rows of shares, one after another in a new array."""
        array, row, blocks = len(self.arrays), 0, {}
        for share in shares:
            stop = row + share.stop - share.start
            self.held.append(Held(array, row, share.document, share.start, share.stop))
            blocks[share], row = Block(array, row, stop), stop
        self.arrays.append((kind, row))
        return blocks

    def _own_rows(self, array: int, shares: Sequence[Assignment]) -> dict[Assignment, Block]:
        """The rows of shares among the rank's own."""
        return {s: self._home_rows(s.document, (s.start, s.stop), array) for s in shares}

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

    def _leaving(self, rows: Mapping[Assignment, Block], peer: int, part: int) -> list[Block]:
        """Rows of own shares that `peer` computes."""
        return [rows[s] for s in self.leaves[peer, part]]

    def _visiting(self, rows: Mapping[Assignment, Block], peer: int, part: int) -> list[Block]:
        """Rows of `peer`'s shares that are computed here."""
        return [rows[s] for s in self.visits[peer, part]]

    def _keys_out(self, array: int, peer: int, part: int) -> list[Block]:
        runs = self.plan.keys_of(self.rank, peer, part)
        return [self._home_rows(d, run, array) for d, run in runs]

    def _keys_in(self, array: int, peer: int, part: int, *, last: bool = False) -> list[Block]:
        runs = self.plan.keys_of(peer, self.rank, part, last=last)
        return [self._context_rows(d, run, array) for d, run in runs]

    def _own_keys(self, own: int, context: int) -> list[tuple[Block, Block]]:
        """Own rows that stand in the context too, as (own rows, rows of the context)."""
        runs = self.plan.keys_sent(self.rank, self.rank)
        return [(self._home_rows(d, r, own), self._context_rows(d, r, context)) for d, r in runs]

    def _tasks(self, *, backward: bool) -> tuple[list[Op], list[list[Op]]]:
        """The rank's tasks: those it can start at once, and by part those that wait."""
        ready: list[Op] = []
        waiting: list[list[Op]] = [[] for _ in self.parts]
        # Cut ones stand together, so that kernel calls on equal arrays fuse.
        for share in sorted(self.plan.served.get(self.rank, ()), key=lambda s: s.cut):
            keys = share.low, share.high
            local = self.plan.local(self.rank, share.document, keys)
            if local is not None:
                kv, dkv = (Block(a, local, local + keys[1] - keys[0]) for a in (_KV, _DKV))
            else:
                pair = (self.context, self.context_grad)
                kv, dkv = (self._context_rows(share.document, keys, a) for a in pair)
            op = (
                AttendGrad(self.q[share], kv, self.grad[share], self.dq[share], dkv)
                if backward
                else Attend(self.q[share], kv, self.out[share])
            )
            at_once = share.home == self.rank and local is not None
            (ready if at_once else waiting[share.part]).append(op)
        return ready, waiting

    def build(self) -> Program:
        """Three phases, or one where nothing leaves or arrives."""
        gather: list[Op] = [
            Fold(there, (here,), "cat") for here, there in self._own_keys(_KV, self.context)
        ]
        forward = self._phases((gather, [], self._merged()), backward=False)

        own_grad = self._own_rows(_GRAD, self.mine)
        deltas: list[Op] = [Fold(self.grad[s], (own_grad[s],), "delta") for s in self.mine]
        by_rank = {p: [pair for part in self.sums[p] for pair in part] for p in self.peers}
        by_rank[self.rank] = self._own_keys(_DKV, self.context_grad)
        pairs = [pair for rank in sorted(by_rank) for pair in by_rank[rank]]
        own_dq = self._own_rows(_DQ, self.cut)
        pairs += [(own_dq[s], self.dq[s]) for s in self.cut if s.server != self.rank]
        fold: list[Op] = [Fold(into, (part,), "sum") for into, part in pairs]
        backward = self._phases((gather, deltas, fold), backward=True)
        return Program.build(arrays=self.arrays, held=self.held, forward=forward, backward=backward)

    def _merged(self) -> list[Op]:
        """How partials of cut tasks become the output of their rows, in the order of their keys."""
        by_rows: dict[tuple[int, int, int], list[Assignment]] = {}
        for share in sorted(self.cut, key=lambda s: s.low):
            by_rows.setdefault(share[:3], []).append(share)
        return [
            Fold(
                self._home_rows(document, (start, stop), _OUT),
                tuple(self.out[share] for share in parts),
                "lse",
            )
            for (document, start, stop), parts in by_rows.items()
        ]

    def _summed(self, peer: int) -> list[list[tuple[Block, Block]]]:
        """By part: (own dkv rows, the rows of a new array that hold what `peer` sends for them)."""
        parts, row, array = list[list[tuple[Block, Block]]](), 0, len(self.arrays)
        for part in self.parts:
            parts.append([])
            for document, run in self.plan.keys_of(self.rank, peer, part, last=True):
                stop = row + run[1] - run[0]
                self.held.append(Held(array, row, document, *run))
                into = self._home_rows(document, run, _DKV)
                parts[-1].append((into, Block(array, row, stop)))
                row = stop
        if row:
            self.arrays.append(("dkv", row))
        return parts

    def _request(self, part: int, *, backward: bool) -> Sides:
        """What a server must have to attend to a part."""
        sends: Messages = {}
        recvs: Messages = {}
        for p in self.peers:
            kinds = (self.grad, self.q) if backward else (self.q,)
            sends[p] = [b for rows in kinds for b in self._leaving(rows, p, part)]
            recvs[p] = [b for rows in kinds for b in self._visiting(rows, p, part)]
            sends[p] += self._keys_out(_KV, p, part)
            recvs[p] += self._keys_in(self.context, p, part)
        return sends, recvs

    def _answer(self, part: int, *, backward: bool) -> Sides:
        """What a server has once it has attended to a part."""
        rows = self.dq if backward else self.out
        sends = {p: self._visiting(rows, p, part) for p in self.peers}
        recvs = {p: self._leaving(rows, p, part) for p in self.peers}
        for p in self.peers if backward else ():
            sends[p] += self._keys_in(self.context_grad, p, part, last=True)
            recvs[p] += [block for _, block in self.sums[p][part]]
        return sends, recvs

    def _phases(self, steps: Steps, *, backward: bool) -> Phases:
        ready, waiting = self._tasks(backward=backward)
        requests = [self._request(part, backward=backward) for part in self.parts]
        answers = [self._answer(part, backward=backward) for part in self.parts]
        return phases(
            steps, ready, list(zip(requests, waiting, answers, strict=True)), groups=self.groups
        )
