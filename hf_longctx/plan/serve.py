"""What a process sends, computes and gives back -> its program: start, serve and collect.

Floor: plan. Forward: home sends query rows and keys; servers attend and return (out, lse), which
home merges where a row's keys were cut. Backward resends them with the gradient (home keeps q, k,
v, out and lse, a server keeps nothing), and servers return dq and one summed dkv per owner. In
place of out, backward sends delta, the sum of grad_out * out: a number per head instead of a row.

Head groups travel one behind the other: all are posted at the start, a server attends to one while
the next ones travel, and sends its results at once, into receives that wait for them. Tasks that
need no arrival stand between the groups: the first hide the first arrival, the last ones hide how
the last results travel home.
"""

from collections.abc import Iterable, Mapping, Sequence

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
from .subranges import Share

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

    def _gather_array(self, kind: str) -> int:
        row = 0
        for c in self.contexts:
            self.held.append(Held(len(self.arrays), row, c.document, c.start, c.stop))
            self.first_row[c] = row
            row += c.stop - c.start
        self.arrays.append((kind, row))
        return len(self.arrays) - 1

    def _new_rows(self, kind: str, shares: Sequence[Share]) -> dict[Share, Block]:
        """The rows of shares, one after another in a new array."""
        array, row, blocks = len(self.arrays), 0, {}
        for share in shares:
            stop = row + share.stop - share.start
            self.held.append(Held(array, row, share.document, share.start, share.stop))
            blocks[share], row = Block(array, row, stop), stop
        self.arrays.append((kind, row))
        return blocks

    def _own_rows(self, array: int, shares: Sequence[Share]) -> dict[Share, Block]:
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

    def _leaving(self, rows: Mapping[Share, Block], peer: int) -> list[Block]:
        """Rows of own shares that `peer` computes."""
        return [rows[s] for s in self.mine if s.server == peer]

    def _visiting(self, rows: Mapping[Share, Block], peer: int) -> list[Block]:
        """Rows of `peer`'s shares that are computed here."""
        return [rows[s] for s in self.guests if s.home == peer]

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
            (ready if share.home == self.rank and local is not None else waiting).append(op)
        return ready, waiting

    def build(self) -> Program:
        """Three phases, or one where nothing leaves or arrives."""
        gather: list[Op] = [
            Fold(there, (here,), "cat")
            for here, there in zip(
                self._keys_out(_KV, self.rank), self._keys_in(self.context, self.rank), strict=True
            )
        ]
        sends = {p: self._leaving(self.q, p) + self._keys_out(_KV, p) for p in self.peers}
        recvs = {p: self._visiting(self.q, p) + self._keys_in(self.context, p) for p in self.peers}
        results = {p: self._visiting(self.out, p) for p in self.peers}
        due = {p: self._leaving(self.out, p) for p in self.peers}
        steps = [gather, [], self._merged()]
        forward = self._phases(steps, (sends, recvs), (results, due), backward=False)

        own_grad = self._own_rows(_GRAD, self.mine)
        deltas: list[Op] = [Fold(self.grad[s], (own_grad[s],), "delta") for s in self.mine]
        sends = {p: self._leaving(self.grad, p) + sends[p] for p in self.peers}
        recvs = {p: self._visiting(self.grad, p) + recvs[p] for p in self.peers}
        sums = {p: self._summed(p) for p in self.peers}
        results = {
            p: self._visiting(self.dq, p) + self._keys_in(self.context_grad, p) for p in self.peers
        }
        due = {p: self._leaving(self.dq, p) + [part for _, part in sums[p]] for p in self.peers}
        own = self._keys_out(_DKV, self.rank), self._keys_in(self.context_grad, self.rank)
        sums[self.rank] = list(zip(*own, strict=True))
        pairs = [pair for rank in sorted(sums) for pair in sums[rank]]
        own_dq = self._own_rows(_DQ, self.cut)
        pairs += [(own_dq[s], self.dq[s]) for s in self.cut if s.server != self.rank]
        fold: list[Op] = [Fold(into, (part,), "sum") for into, part in pairs]
        steps = [gather, deltas, fold]
        backward = self._phases(steps, (sends, recvs), (results, due), backward=True)
        return Program.build(arrays=self.arrays, held=self.held, forward=forward, backward=backward)

    def _merged(self) -> list[Op]:
        """How partials of cut tasks become the output of their rows, in the order of their keys."""
        by_rows: dict[tuple[int, int, int], list[Share]] = {}
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
    return ([Post(tag, pack[0], pack[1])], [Wait(tag)]) if any(pack) else ([], [])


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
