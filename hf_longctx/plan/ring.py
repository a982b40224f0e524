"""A layout -> ring attention: keys and values travel once around, queries stay.

Floor: plan. Source: arXiv 2310.01889. In hop h rank r works on the chunk of rank r - h while the
next one travels. In backward the chunk's gradient travels with it, one hop behind, and comes home.
"""

from collections import Counter

from ..intervals import intersect
from .cost import LayerKind
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

_Q, _KV, _OUT, _GRAD, _DQ, _DKV = range(6)


def program(layout: Layout, *, rank: int, kind: LayerKind) -> Program:
    """The program of one rank, one phase in each direction."""
    return _Ring(layout, rank, kind).build()


class _Ring:
    def __init__(self, layout: Layout, rank: int, kind: LayerKind) -> None:
        self.layout, self.rank, self.kind = layout, rank, kind
        self.ranks = layout.ranks
        self.arrays: list[tuple[str, int]] = []
        self.held: list[Held] = []
        for array_kind in HOME:
            self._array(array_kind, rank)
        hops = range(1, self.ranks)
        self.kv = {0: _KV} | {h: self._array("kv", self._owner(h)) for h in hops}
        self.dkv = {0: _DKV} | {h: self._array("dkv", self._owner(h)) for h in hops}
        self.arrived = {h: self._array("dkv", self._owner(h)) for h in (*hops, self.ranks)}
        self.total = self._array("part", rank)

    def _owner(self, hop: int) -> int:
        return (self.rank - hop) % self.ranks

    def _array(self, kind: str, owner: int) -> int:
        """An array with the rows of `owner`, in its order."""
        array = len(self.arrays)
        self.arrays.append((kind, self.layout.rows(owner)))
        self.held += [Held(array, s.row, *s[2:]) for s in self.layout.of_rank(owner)]
        return array

    def _tasks(self, hop: int) -> list[tuple[Placed, Placed]]:
        """(own segment, segment of the visiting chunk) with a key that some query of ours sees."""
        visiting: dict[int, list[Placed]] = {}
        for theirs in self.layout.of_rank(self._owner(hop)):
            visiting.setdefault(theirs.document, []).append(theirs)
        found = []
        for mine in self.layout.of_rank(self.rank):
            length = int(self.layout.lengths[mine.document])
            seen = self.kind.keys_seen((mine.start, mine.stop), length=length)
            for theirs in visiting.get(mine.document, ()):
                if intersect((theirs.start, theirs.stop), seen):
                    found.append((mine, theirs))
        return found

    def _attend(self, hop: int) -> list[Op]:
        """Attend to the visiting chunk, one partial per pair of segments, and merge into the total.

        Own keys come first, so the first partial of each own segment is the total itself. Partials
        of different segments share an array, so that their tasks fuse.
        """
        rounds: list[list[tuple[Placed, Placed]]] = []
        seen: Counter[Placed] = Counter()
        for mine, theirs in self._tasks(hop):
            if seen[mine] == len(rounds):
                rounds.append([])
            rounds[seen[mine]].append((mine, theirs))
            seen[mine] += 1
        ops: list[Op] = []
        for number, tasks in enumerate(rounds):
            direct = hop == 0 and number == 0
            part = self.total if direct else self._array("part", self.rank)
            ops += [
                Attend(_block(_Q, mine), _block(self.kv[hop], theirs), _block(part, mine))
                for mine, theirs in tasks
            ]
            for mine, _ in [] if direct else tasks:
                total = _block(self.total, mine)
                ops.append(Fold(total, (total, _block(part, mine)), "lse"))
        return ops

    def _attend_grad(self, hop: int) -> list[Op]:
        return [
            AttendGrad(
                _block(_Q, mine),
                _block(self.kv[hop], theirs),
                _block(_GRAD, mine),
                _block(_DQ, mine),
                _block(self.dkv[hop], theirs),
            )
            for mine, theirs in self._tasks(hop)
        ]

    def _shift(self, tag: int, sent: int, received: int) -> Post:
        """Send one array to the next rank and receive one from the previous; empty chunks stay."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        sends, recvs = self.arrays[sent][1], self.arrays[received][1]
        return Post(
            tag,
            ((after, (Block(sent, 0, sends),)),) if sends else (),
            ((before, (Block(received, 0, recvs),)),) if recvs else (),
        )

    def build(self) -> Program:
        forward: list[Op] = []
        backward: list[Op] = []
        last, grads = self.ranks - 1, self.ranks  # tags: hop h is h, the gradient of hop h R + h
        for hop in range(self.ranks):
            travel: list[Op] = []
            if hop < last:
                travel = [self._shift(hop, self.kv[hop], self.kv[hop + 1])]
            arrive: list[Op] = [Wait(hop)] if hop < last else []
            forward += [*travel, *self._attend(hop), *arrive]
            backward += [*travel, *self._attend_grad(hop)]
            if hop:
                mine, came = self.dkv[hop], self.arrived[hop]
                if hop > 1:
                    backward.append(Wait(grads + hop - 1))
                    backward += self._sum(came, mine)
                backward.append(self._shift(grads + hop, mine, self.arrived[hop + 1]))
            backward += arrive
        if self.ranks > 1:
            backward.append(Wait(grads + last))
            backward += self._sum(self.arrived[self.ranks], _DKV)
        rows = self.layout.rows(self.rank)
        forward.append(Fold(Block(_OUT, 0, rows), (Block(self.total, 0, rows),), "cat"))
        return Program.build(
            arrays=self.arrays,
            held=self.held,
            forward=(tuple(forward),),
            backward=(tuple(backward),),
        )

    def _sum(self, part: int, into: int) -> list[Op]:
        rows = self.arrays[part][1]
        return [Fold(Block(into, 0, rows), (Block(part, 0, rows),), "sum")] if rows else []


def _block(array: int, segment: Placed) -> Block:
    return Block(array, segment.row, segment.row + segment.stop - segment.start)
