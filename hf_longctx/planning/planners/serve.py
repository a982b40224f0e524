"""Turn an exchange plan into the program of each process: start, serve and collect.

Forward: home sends query rows and keys; servers attend and return (out, lse), which home merges
where a row's keys were cut. Backward resends them with the gradient: home keeps q, k, v, out and
lse, a server keeps nothing. Servers return dq, and one summed dkv per owner. In place of out,
backward sends delta, the sum of grad_out * out: a number per head instead of a row.

Where exchanges overlap, head groups, and parts of rows within each, travel one behind the other.
All are posted at the start. A server attends to one while the next ones travel, and sends its
results at once, into receives that wait for them. Tasks that need no arrival run between the
groups: the first ones hide the first arrival, the last ones how the last results travel home.
Layer: planning.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..layouts.intervals import Range
from ..program.builder import ProgramBuilder, post
from ..program.operations import (
    ALL_HEADS,
    Attend,
    AttendGrad,
    Block,
    Fold,
    HeadRange,
    Op,
    Phases,
    Wait,
    map_blocks,
)
from ..program.program import HomeArray, Program
from .exchange import Context, ExchangePlan
from .key_splits import Assignment

_IN, _BACK, _DUE = range(3)  # exchanges of a part: to servers, results that leave, and come
Messages = dict[int, list[Block]]  # by peer
Sides = tuple[Messages, Messages]  # sent, received
Steps = tuple[Sequence[Op], Sequence[Op], Sequence[Op]]  # first, before sends, once results came
Part = tuple[Sides, Sequence[Op], Sides]  # what its tasks need, they, and their results


def phases(
    steps: Steps, ready: Sequence[Op], parts: Sequence[Part], *, groups: Sequence[HeadRange]
) -> Phases:
    """Return three phases (start, serve and collect), or one where nothing is exchanged.

    Args:
        steps (`Steps`): Folds beside the tasks.
        ready (`Sequence[Op]`): Tasks that need no arrival.
        parts (`Sequence[Part]`): Those that do, in the order in which they travel.
        groups (`Sequence[HeadRange]`): Head groups that travel apart. With one group there is one
            part.
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
    if not any(tasks for _, tasks, _ in parts):  # no arrivals to run ready tasks between
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
        # After the last group's sends: these tasks hide how its results travel home.
        serve += local if last else []
        collect += _of(heads, finish)
    return ((*start, *receive), tuple(serve), (*collect, *left))


def _exchange(tag: int, heads: HeadRange, sides: Sides) -> tuple[list[Op], list[Op]]:
    """Return how an exchange starts and ends, for some heads; nothing where nothing moves."""
    sent, received = (side.items() for side in sides)
    exchange = post(tag, sent, received)
    if not exchange.sends and not exchange.recvs:
        return [], []
    return _of(heads, [exchange]), [Wait(tag)]


def _of(heads: HeadRange, ops: Iterable[Op]) -> list[Op]:
    """Return operations on all heads as those on some of them."""
    head, count = heads
    return [map_blocks(op, lambda b: b._replace(head=head, heads=count)) for op in ops]


def program(
    plan: ExchangePlan, *, rank: int, groups: Sequence[HeadRange] = (ALL_HEADS,)
) -> Program:
    """Return the program of one rank or extra server, which exchanges group of heads by group."""
    return _ServeProgram(plan, rank, groups).build()


class _ServeProgram:
    """Place the rows of every assignment of one process in arrays, then list its phases."""

    def __init__(self, plan: ExchangePlan, rank: int, groups: Sequence[HeadRange]) -> None:
        self.plan, self.rank, self.groups = plan, rank, groups
        self.builder = ProgramBuilder(plan.layout, rank=rank)
        self.peers = [p for p in range(plan.processes) if p != rank]
        contexts = plan.contexts.get(rank, ())
        tokens = [(c.document, c.start, c.stop) for c in contexts]
        self.context, self.context_grad = (
            dict(zip(contexts, self.builder.packed(kind, tokens), strict=True))
            for kind in ("kv", "dkv")
        )
        served = plan.served.get(rank, ())
        own = [a for a in served if a.home == rank]
        remote = [a for a in served if a.home != rank]
        self.moved = plan.moved.get(rank, [])  # own rows that others compute
        self.sent: dict[tuple[int, int], list[Assignment]] = defaultdict(list)  # by peer and part
        self.received: dict[tuple[int, int], list[Assignment]] = defaultdict(list)
        for a in self.moved:
            self.sent[a.server, a.part].append(a)
        for a in remote:
            self.received[a.home, a.part].append(a)
        self.parts = range(plan.parts)
        self.cut = plan.cut.get(rank, [])
        in_place = [a for a in (*own, *self.moved) if not a.cut]
        # Results of cut assignments are partials in arrays of their own until they are merged.
        self.q = self._new("q", remote) | self._own(HomeArray.Q, (*own, *self.moved))
        self.out = self._own(HomeArray.OUT, in_place) | self._new("part", self.cut)
        self.out |= self._new("out", [a for a in remote if not a.cut])
        self.out |= self._new("part", [a for a in remote if a.cut])
        self.grad = self._own(HomeArray.GRAD, own)
        self.grad |= self._new("delta", remote) | self._new("delta", self.moved)
        self.dq = self._own(HomeArray.DQ, (*own, *in_place)) | self._new("dq", remote)
        self.dq |= self._new("dq", [a for a in self.moved if a.cut])
        self.sums = {p: self._summed(p) for p in self.peers}

    def _new(self, kind: str, assigned: Sequence[Assignment]) -> dict[Assignment, Block]:
        """Add an array with the rows of assignments, end to end."""
        runs = [(a.document, a.start, a.stop) for a in assigned]
        return dict(zip(assigned, self.builder.packed(kind, runs), strict=True))

    def _own(self, array: int, assigned: Sequence[Assignment]) -> dict[Assignment, Block]:
        """Find the rows of assignments among the rank's own."""
        return {a: self._own_rows(a.document, (a.start, a.stop), array) for a in assigned}

    def _own_rows(self, document: int, tokens: Range, array: int) -> Block:
        row = self.plan.local(self.rank, document, tokens)
        assert row is not None, (self.rank, document, tokens)
        return Block(array, row, row + tokens[1] - tokens[0])

    def _gathered(self, context: Mapping[Context, Block], document: int, tokens: Range) -> Block:
        """Find tokens among the gathered keys, or in the array of their gradients."""
        for c, block in context.items():
            if c.document == document and c.start <= tokens[0] and tokens[1] <= c.stop:
                row = block.start + tokens[0] - c.start
                return Block(block.array, row, row + tokens[1] - tokens[0])
        raise AssertionError((self.rank, document, tokens))

    def _gathered_own(
        self, array: int, context: Mapping[Context, Block]
    ) -> list[tuple[Block, Block]]:
        """Pair own rows that are gathered too with where they are gathered."""
        return [
            (self._own_rows(document, run, array), self._gathered(context, document, run))
            for document, run in self.plan.keys_sent(self.rank, self.rank)
        ]

    def _summed(self, peer: int) -> list[list[tuple[Block, Block]]]:
        """Pair, by part, own dkv rows with those of a new array that receives `peer`'s sums."""
        runs = [self.plan.keys_of(self.rank, peer, part, last=True) for part in self.parts]
        tokens = [(document, *run) for of_part in runs for document, run in of_part]
        came = iter(self.builder.packed("dkv", tokens))
        return [
            [(self._own_rows(d, run, HomeArray.DKV), next(came)) for d, run in of_part]
            for of_part in runs
        ]

    def _tasks(self, *, backward: bool) -> tuple[list[Op], list[list[Op]]]:
        """Return the tasks that can start at once, and by part those that wait for arrivals."""
        ready: list[Op] = []
        waiting: list[list[Op]] = [[] for _ in self.parts]
        # Cut ones come together, so that kernel calls on equal arrays fuse.
        for a in sorted(self.plan.served.get(self.rank, ()), key=lambda a: a.cut):
            keys = a.low, a.high
            local = self.plan.local(self.rank, a.document, keys) is not None
            if local:
                kv, dkv = (
                    self._own_rows(a.document, keys, array)
                    for array in (HomeArray.KV, HomeArray.DKV)
                )
            else:
                kv, dkv = (
                    self._gathered(context, a.document, keys)
                    for context in (self.context, self.context_grad)
                )
            op = (
                AttendGrad(self.q[a], kv, self.grad[a], self.dq[a], dkv)
                if backward
                else Attend(self.q[a], kv, self.out[a])
            )
            (ready if a.home == self.rank and local else waiting[a.part]).append(op)
        return ready, waiting

    def build(self) -> Program:
        """Return the program: three phases each way, or one where nothing is exchanged."""
        gather: list[Op] = [
            Fold(there, (here,), "cat")
            for here, there in self._gathered_own(HomeArray.KV, self.context)
        ]
        forward = self._phases((gather, [], self._merged()), backward=False)

        own_grad = self._own(HomeArray.GRAD, self.moved)
        deltas: list[Op] = [Fold(self.grad[a], (own_grad[a],), "delta") for a in self.moved]
        # Gradients are added in rank order, whatever arrives first: results are reproducible.
        by_rank = {p: [pair for part in self.sums[p] for pair in part] for p in self.peers}
        by_rank[self.rank] = self._gathered_own(HomeArray.DKV, self.context_grad)
        pairs = [pair for rank in sorted(by_rank) for pair in by_rank[rank]]
        own_dq = self._own(HomeArray.DQ, self.cut)
        pairs += [(own_dq[a], self.dq[a]) for a in self.cut if a.server != self.rank]
        fold: list[Op] = [Fold(into, (part,), "sum") for into, part in pairs]
        backward = self._phases((gather, deltas, fold), backward=True)
        return self.builder.build(forward, backward)

    def _merged(self) -> list[Op]:
        """Merge partials into the output of their rows, in the order of their keys."""
        by_rows: dict[tuple[int, int, int], list[Assignment]] = {}
        for a in sorted(self.cut, key=lambda a: a.low):
            by_rows.setdefault(a[:3], []).append(a)
        return [
            Fold(
                self._own_rows(document, (start, stop), HomeArray.OUT),
                tuple(self.out[a] for a in parts),
                "lse",
            )
            for (document, start, stop), parts in by_rows.items()
        ]

    def _request(self, part: int, *, backward: bool) -> Sides:
        """Return what servers must have to attend to a part."""
        sends: Messages = {}
        recvs: Messages = {}
        kinds = (self.grad, self.q) if backward else (self.q,)
        for p in self.peers:
            sends[p] = [rows[a] for rows in kinds for a in self.sent[p, part]]
            recvs[p] = [rows[a] for rows in kinds for a in self.received[p, part]]
            keys = self.plan.keys_of(self.rank, p, part)
            sends[p] += [self._own_rows(d, run, HomeArray.KV) for d, run in keys]
            keys = self.plan.keys_of(p, self.rank, part)
            recvs[p] += [self._gathered(self.context, d, run) for d, run in keys]
        return sends, recvs

    def _answer(self, part: int, *, backward: bool) -> Sides:
        """Return what servers send back once they have attended to a part."""
        rows = self.dq if backward else self.out
        sends = {p: [rows[a] for a in self.received[p, part]] for p in self.peers}
        recvs = {p: [rows[a] for a in self.sent[p, part]] for p in self.peers}
        for p in self.peers if backward else ():
            keys = self.plan.keys_of(p, self.rank, part, last=True)
            sends[p] += [self._gathered(self.context_grad, d, run) for d, run in keys]
            recvs[p] += [block for _, block in self.sums[p][part]]
        return sends, recvs

    def _phases(self, steps: Steps, *, backward: bool) -> Phases:
        ready, waiting = self._tasks(backward=backward)
        requests = [self._request(part, backward=backward) for part in self.parts]
        answers = [self._answer(part, backward=backward) for part in self.parts]
        parts = list(zip(requests, waiting, answers, strict=True))
        return phases(steps, ready, parts, groups=self.groups)
