"""A layout -> ring attention: keys and values travel once around, queries stay.

Floor: plan. Source: arXiv 2310.01889. In hop h rank r works on the chunk of rank r - h while the
next one travels; a receive is posted one hop ahead. Of a chunk only those rows travel on that some
later rank of the way sees. In backward a chunk's gradient travels one hop behind it, and goes home
from the last rank that adds to it, which half of the home's own work hides. However many ranks
there are, one holds three visiting chunks of keys and values (worked on, coming, expected), and in
backward three of gradients and what has come home of its own. Letters: R ranks.
"""

from .cost import LayerKind
from .demand import Demand, Rows, common, without
from .layout import Layout
from .program import Message, Op, Program, Wait
from .visits import DKV, DQ, GRAD, KV, Q, Run, Stand, Visits, post


def program(layout: Layout, *, rank: int, kind: LayerKind) -> Program:
    """The program of one rank, one phase in each direction."""
    return _Ring(layout, rank, kind).build()


class _Ring:
    def __init__(self, layout: Layout, rank: int, kind: LayerKind) -> None:
        self.layout, self.rank, self.kind = layout, rank, kind
        self.ranks = layout.ranks
        self.visits = Visits(layout, rank=rank, kind=kind)
        self.after = (rank + 1) % self.ranks
        self.before = (rank - 1) % self.ranks
        self.hops = range(1, self.ranks)
        self._measure()
        held = {h: Stand(layout, [(self._owner(h), rows)]) for h, rows in self.visiting.items()}
        self.stands = {0: self.visits.home} | held
        self.kv = {0: KV} | {h: self.visits.array("kv", s) for h, s in held.items()}

    def _owner(self, hop: int) -> int:
        return (self.rank - hop) % self.ranks

    def _measure(self) -> None:
        """By hop: the rows of the chunk that visit, go on, and whose gradients come, go on and go
        home; and the own rows whose gradients come home."""
        later, last = self._demand(self.rank), self._demand()
        own_later = self._demand()
        self.visiting: dict[int, Rows] = {}
        leaving: dict[int, Rows] = {}
        wanted: dict[int, Rows] = {self.ranks: ()}
        for h in reversed(self.hops):
            owner = self._owner(h)
            self.visiting[h], leaving[h] = later.of(owner), last.of(owner)
            own_later.add((self.rank + h) % self.ranks)
            wanted[h] = own_later.of(self.rank)
            later.add(owner)
            last.add(owner)
        leaving[0] = last.of(self.rank) if self.ranks > 1 else ()
        self.visiting = dict(sorted(self.visiting.items()))
        self.leaving = leaving
        earlier, until = self._demand(self.rank), self._demand()
        own_earlier = self._demand()
        self.graded: dict[int, Rows] = {}
        self.coming: dict[int, Rows] = {}
        self.returned: dict[int, Rows] = {}
        for h in self.hops:
            owner = self._owner(h)
            self.graded[h] = common(earlier.of(owner), self.visiting[h])
            self.coming[h] = common(until.of(owner), self.visiting[h])
            own_earlier.add((self.rank + h) % self.ranks)
            touched = common(own_earlier.of(self.rank), wanted[h])
            self.returned[h] = without(touched, wanted[h + 1])
            earlier.add(owner)
            until.add(owner)

    def _demand(self, *ranks: int) -> Demand:
        return Demand(self.layout, self.kind, ranks)

    def _shift(self, hop: int) -> Op:
        """Send the chunk of a hop on, and take the one after the next; hop -1 only takes."""
        sends: list[Message] = []
        recvs: list[Message] = []
        if hop >= 0:
            blocks = self.stands[hop].blocks(self.kv[hop], self._owner(hop), self.leaving[hop])
            sends.append((self.after, blocks))
        if (taken := hop + 2) < self.ranks:
            stand, rows = self.stands[taken], self.visiting[taken]
            recvs.append((self.before, stand.blocks(self.kv[taken], self._owner(taken), rows)))
        self.taken[taken] = self.visits.tag()
        return post(self.taken[taken], sends, recvs, channel=0)

    def _keys(self, hop: int, *arrays: int) -> list[Run]:
        owner = self._owner(hop)
        return list(self.stands[hop].runs(arrays, owner, self.visits.needs(owner)))

    def _forward(self) -> list[Op]:
        self.taken: dict[int, int] = {}  # by hop: the tag under which its chunk comes
        ops: list[Op] = [self._shift(-1)] if self.ranks > 1 else []
        for hop in range(self.ranks):
            ops += [self._shift(hop)] if hop + 1 < self.ranks else []
            keys = self._keys(hop, self.kv[hop]) if hop else self.visits.own(KV)
            ops += self.visits.attend(keys, first=not hop)
            ops += [Wait(self.taken[hop + 1])] if hop + 1 < self.ranks else []
        if self.ranks > 1:
            ops.append(Wait(self.taken[self.ranks]))
        return ops

    def _backward(self) -> list[Op]:
        self.taken = {}
        first, second = self.visits.own_halves()
        if self.ranks == 1:
            return [*first, *second]
        self.grads = {h: Stand(self.layout, [(self._owner(h), r)]) for h, r in self.graded.items()}
        self.came = {h: Stand(self.layout, [(self._owner(h), r)]) for h, r in self.coming.items()}
        homes = {h: Stand(self.layout, [(self.rank, r)]) for h, r in self.returned.items()}
        self.dkv = {h: self.visits.array("dkv", stand) for h, stand in self.grads.items()}
        self.arrived = {h: self.visits.array("dkv", stand) for h, stand in self.came.items()}
        self.homes = {h: self.visits.array("dkv", stand) for h, stand in homes.items()}
        self.sent: dict[int, int] = {}  # by hop: the tag under which the chunk's gradient goes
        ops: list[Op] = [self._shift(-1), self._shift(0), self._return(0)]
        ops += [*first, Wait(self.taken[1])]
        for hop in self.hops:
            ops += [self._shift(hop)] if hop + 1 < self.ranks else []
            queries = self.visits.own(Q, GRAD, DQ)
            kv, dkv = self.kv[hop], self.dkv[hop]
            owner = self._owner(hop)
            grads = self.grads[hop].runs([dkv], owner, self.visits.needs(owner))
            keys = [
                (s, (*k, *g)) for (s, k), (_, g) in zip(self._keys(hop, kv), grads, strict=True)
            ]
            ops += self.visits.attend_grad(queries, keys)
            if hop > 1:
                ops.append(Wait(self.sent[hop - 2]))
                ops += self.visits.sum_into(dkv, self.grads[hop], self.arrived[hop], self.came[hop])
            ops.append(self._return(hop))
            ops.append(Wait(self.taken[hop + 1]))
        ops += second
        ops += [Wait(self.sent[hop]) for hop in range(max(self.ranks - 2, 0), self.ranks)]
        for hop in self.hops:
            ops += self.visits.sum_into(DKV, self.visits.home, self.homes[hop], homes[hop])
        return ops

    def _return(self, hop: int) -> Op:
        """Send a chunk's gradient on, and home what is whole; take that of the hop after the
        next, and the own rows that are whole at the same hop elsewhere."""
        sends: list[Message] = []
        recvs: list[Message] = []
        if hop:
            stand, array, owner = self.grads[hop], self.dkv[hop], self._owner(hop)
            on = common(self.graded[hop], self.leaving[hop])
            whole = without(self.graded[hop], self.leaving[hop])
            sends.append((self.after, stand.blocks(array, owner, on)))
            sends.append((owner, stand.blocks(array, owner, whole)))
            own = self.returned[hop]
            home = Stand(self.layout, [(self.rank, own)]).blocks(self.homes[hop], self.rank, own)
            recvs.append(((self.rank + hop) % self.ranks, home))
        if (taken := hop + 2) < self.ranks:
            rows, array = self.coming[taken], self.arrived[taken]
            blocks = self.came[taken].blocks(array, self._owner(taken), rows)
            recvs.append((self.before, blocks))
        self.sent[hop] = self.visits.tag()
        return post(self.sent[hop], sends, recvs, channel=0)

    def build(self) -> Program:
        return self.visits.program(self._forward(), self._backward())
