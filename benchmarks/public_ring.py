"""A layout -> ring attention as public implementations run it: a peer, not one of our algorithms.

Source: arXiv 2310.01889 in the zigzag form of zhuzilin/ring-flash-attention. Chunks
travel whole, R - 1 hops; in backward a chunk's float32 gradient sets out from its owner, one hop
behind the keys, and comes home after R hops. Both travel while the next chunk is worked on. Our own
`ring` sends only rows that are still to be seen, and gradients from where they begin to where they
end. Letters: R ranks.
"""

from hf_longctx.planning.layouts.layout import Layout
from hf_longctx.planning.planners.plan import Plan
from hf_longctx.planning.planners.remote_rows import (
    DKV,
    DQ,
    GRAD,
    KV,
    Q,
    RemoteRows,
    RowPlacement,
    Run,
    post,
)
from hf_longctx.planning.program.operations import Op, Wait
from hf_longctx.planning.program.program import Program


class PublicRing(Plan):
    """A plan of `ring` whose chunks and gradients travel whole."""

    def program(self, rank: int) -> Program:
        """The program of one rank; built at each call."""
        return _Ring(self, rank).build()


class _Ring:
    def __init__(self, plan: Plan, rank: int) -> None:
        layout = plan.layout
        self.rank, self.ranks = rank, layout.ranks
        self.visits = RemoteRows(layout, rank=rank, kind=plan.kind)
        self.after, self.before = (rank + 1) % self.ranks, (rank - 1) % self.ranks
        self.owners = [(rank - hop) % self.ranks for hop in range(self.ranks)]
        self.stands = [self.visits.home, *(_whole(layout, owner) for owner in self.owners[1:])]
        self.kv = [KV, *(self.visits.array("kv", stand) for stand in self.stands[1:])]

    def build(self) -> Program:
        return self.visits.program(self._forward(), self._backward())

    def _keys(self, hop: int, *arrays: int) -> list[Run]:
        owner, stand = self.owners[hop], self.stands[hop]
        return [run for _, rows in stand.parts for run in stand.runs(arrays, owner, rows)]

    def _pass_on(
        self, sent: tuple[RowPlacement, int], taken: tuple[RowPlacement, int]
    ) -> tuple[Op, Op]:
        """Send all rows of one array on while another comes in: the post and its wait."""
        blocks = [
            tuple(b for owner, rows in stand.parts for b in stand.blocks(array, owner, rows))
            for stand, array in (sent, taken)
        ]
        tag = self.visits.tag()
        messages = [(self.after, blocks[0])], [(self.before, blocks[1])]
        return post(tag, *messages, channel=0), Wait(tag)

    def _shift(self, hop: int) -> tuple[list[Op], list[Op]]:
        """Post and wait of the keys after those of a hop; nothing after the last."""
        if hop + 1 == self.ranks:
            return [], []
        held = list(zip(self.stands, self.kv, strict=True))
        posted, arrived = self._pass_on(held[hop], held[hop + 1])
        return [posted], [arrived]

    def _forward(self) -> list[Op]:
        ops: list[Op] = []
        for hop in range(self.ranks):
            posted, arrived = self._shift(hop)
            ops += [*posted, *self.visits.attend(self._keys(hop, self.kv[hop]), first=not hop)]
            ops += arrived
        return ops

    def _backward(self) -> list[Op]:
        ops: list[Op] = []
        stands = [*self.stands, self.visits.home]  # by hop: of the gradient that comes with it
        own, came = (
            [self.visits.array("dkv", stand) for stand in stands] for _ in ("added", "arrived")
        )
        under_way: list[Op] = []  # the wait for the gradient of a hop
        queries = self.visits.own(Q, GRAD, DQ)
        for hop in range(self.ranks):
            posted, arrived = self._shift(hop)
            keys = self._keys(hop, self.kv[hop], own[hop])
            ops += [*posted, *self.visits.attend_grad(queries, keys), *under_way]
            if hop:
                ops += self.visits.sum_into(own[hop], stands[hop], came[hop], stands[hop])
            after = stands[hop + 1], came[hop + 1]
            gone, home = self._pass_on((stands[hop], own[hop]), after)
            ops, under_way = [*ops, gone, *arrived], [home]
        ops += under_way
        return ops + self.visits.sum_into(DKV, self.visits.home, came[self.ranks], stands[-1])


def _whole(layout: Layout, owner: int) -> RowPlacement:
    rows = layout.rows(owner)
    return RowPlacement(layout, [(owner, ((0, rows),) if rows else ())])
