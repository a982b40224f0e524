"""A layout -> ring attention as public implementations run it: a peer, not one of our algorithms.

Source: arXiv 2310.01889 in the zigzag form of zhuzilin/ring-flash-attention. Chunks
travel whole, R - 1 hops; in backward a chunk's float32 gradient sets out from its owner, one hop
behind the keys, and comes home after R hops. Both travel while the next chunk is worked on. Our own
`ring` sends only rows that are still to be seen, and gradients from where they begin to where they
end. Letters: R ranks.
"""

from hf_longctx.planning.layouts.layout import Layout
from hf_longctx.planning.planners.plan import Plan
from hf_longctx.planning.planners.remote_rows import RemoteRowsBuilder
from hf_longctx.planning.program.builder import BlockRun, RowPlacement, post
from hf_longctx.planning.program.operations import Op, Wait
from hf_longctx.planning.program.program import HomeArray, Program


class PublicRing(Plan):
    """A plan of `ring` whose chunks and gradients travel whole."""

    def program(self, rank: int) -> Program:
        """The program of one rank; built at each call."""
        return _Ring(self, rank).build()


class _Ring:
    def __init__(self, plan: Plan, rank: int) -> None:
        layout = plan.layout
        self.rank, self.ranks = rank, layout.ranks
        self.builder = RemoteRowsBuilder(layout, rank=rank, kind=plan.kind)
        self.after, self.before = (rank + 1) % self.ranks, (rank - 1) % self.ranks
        self.owners = [(rank - hop) % self.ranks for hop in range(self.ranks)]
        others = [_all_rows(layout, owner) for owner in self.owners[1:]]
        self.placements = [self.builder.home, *others]
        self.kv: list[int] = [HomeArray.KV, *(self.builder.placed("kv", rows) for rows in others)]

    def build(self) -> Program:
        return self.builder.program(self._forward(), self._backward())

    def _keys(self, hop: int, *arrays: int) -> list[BlockRun]:
        owner, placement = self.owners[hop], self.placements[hop]
        return [run for _, rows in placement.owned for run in placement.runs(arrays, owner, rows)]

    def _pass_on(
        self, sent: tuple[RowPlacement, int], taken: tuple[RowPlacement, int]
    ) -> tuple[Op, Op]:
        """Send all rows of one array on while another comes in: the post and its wait."""
        blocks = [
            tuple(b for owner, rows in at.owned for b in at.blocks(array, owner, rows))
            for at, array in (sent, taken)
        ]
        tag = self.builder.tag()
        messages = [(self.after, blocks[0])], [(self.before, blocks[1])]
        return post(tag, *messages), Wait(tag)

    def _shift(self, hop: int) -> tuple[list[Op], list[Op]]:
        """Post and wait of the keys after those of a hop; nothing after the last."""
        if hop + 1 == self.ranks:
            return [], []
        held = list(zip(self.placements, self.kv, strict=True))
        posted, arrived = self._pass_on(held[hop], held[hop + 1])
        return [posted], [arrived]

    def _forward(self) -> list[Op]:
        ops: list[Op] = []
        for hop in range(self.ranks):
            posted, arrived = self._shift(hop)
            ops += [*posted, *self.builder.attend(self._keys(hop, self.kv[hop]), first=not hop)]
            ops += arrived
        return ops

    def _backward(self) -> list[Op]:
        ops: list[Op] = []
        # By hop, of the gradient that comes with it. After the last hop it is back home.
        placements = [*self.placements, self.builder.home]
        own, came = (
            [self.builder.placed("dkv", rows) for rows in placements] for _ in ("added", "arrived")
        )
        under_way: list[Op] = []  # the wait for the gradient of a hop
        queries = self.builder.own(HomeArray.Q, HomeArray.GRAD, HomeArray.DQ)
        for hop in range(self.ranks):
            posted, arrived = self._shift(hop)
            keys = self._keys(hop, self.kv[hop], own[hop])
            ops += [*posted, *self.builder.attend_grad(queries, keys), *under_way]
            if hop:
                ops += self.builder.sum_into(own[hop], placements[hop], came[hop], placements[hop])
            after = placements[hop + 1], came[hop + 1]
            gone, received = self._pass_on((placements[hop], own[hop]), after)
            ops, under_way = [*ops, gone, *arrived], [received]
        ops += under_way
        home = self.builder.home
        return ops + self.builder.sum_into(HomeArray.DKV, home, came[self.ranks], home)


def _all_rows(layout: Layout, owner: int) -> RowPlacement:
    rows = layout.rows(owner)
    return RowPlacement(layout, [(owner, ((0, rows),) if rows else ())])
