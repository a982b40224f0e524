"""Ranks in document order -> the chain scan of linear-attention states (All-Scan).

Floor: plan. Source: ZeCO, arXiv 2507.01004. A run of tokens is an affine map of one small state:
`S_out = M S_in + E`. The state passes from rank to rank in `pieces` head groups, so that a rank
forwards one while the next arrives; a rank where a document starts (M = 0) does not wait.
Backward is the mirror: the gradient of the entering state passes from rank r to r - 1.

The layer fills E and M in `SUMMARY` and takes the entering state in `EMIT`. In backward it fills M
and G, the entering state's gradient from its own outputs, in `GRAD_SUMMARY`, and takes the leaving
state's gradient in `GRAD_EMIT`. What enters the first rank, and the last in backward, is zero.
"""

from collections.abc import Sequence

from .program import Block, Fold, Local, Op, Post, Program, Wait

SUMMARY, EMIT, GRAD_SUMMARY, GRAD_EMIT = range(4)  # the layer's own steps
# Arrays. H_IN is the gradient of the state that leaves the rank, H_OUT of the one that enters it.
E_, M_, ENTERING, LEAVING, G_, H_IN, H_OUT = range(7)


def program(*, rank: int, cut: Sequence[bool], heads: int, pieces: int) -> Program:
    """One rank's chain scan: state arrays of one row, cut into `pieces` groups of heads.

    Args:
        rank (`int`): This rank.
        cut (`Sequence[bool]`): For each rank, whether a document starts at or inside its shard.
        heads (`int`): Heads of the state; `pieces` must divide them.
        pieces (`int`): Head groups that travel one after another.

    Raises:
        ValueError: when `pieces` does not divide `heads`.
    """
    if pieces < 1 or heads % pieces:
        raise ValueError(f"pieces={pieces} must divide heads={heads}; use a divisor of the heads")
    width = heads // pieces
    ranks = len(cut)

    def block(array: int, piece: int) -> Block:
        return Block(array, 0, 1, piece * width, width)

    def chain(
        entering: int,
        leaving: int,
        own: int,
        before: int,
        after: int,
        tag: int,
        steps: tuple[int, int],
    ) -> tuple[tuple[Op, ...], ...]:
        source, target = 0 <= before < ranks, 0 <= after < ranks
        ops: list[Op] = [Local(steps[0], Block(own, 0, 1))]
        for piece in range(pieces if source else 0):
            ops.append(Post(tag + piece, (), ((before, (block(entering, piece),)),)))
        late: list[Op] = []
        for piece in range(pieces):
            passes = source and not cut[rank]
            arrived: list[Op] = [Wait(tag + piece)] if source else []
            if passes:
                ops += arrived
            else:
                late += arrived
            if target:
                out, e = block(leaving, piece), block(own, piece)
                parts = (e, block(M_, piece), block(entering, piece)) if passes else (e,)
                ops.append(Fold(out, parts, "affine" if passes else "cat"))
                ops.append(Post(tag + pieces + piece, ((after, (out,)),), ()))
                late.append(Wait(tag + pieces + piece))
        return ((*ops, *late, Local(steps[1], Block(entering, 0, 1))),)

    return Program.build(
        arrays=[("state", 1), ("decay", 1), *[("state", 1)] * 5],
        held=(),
        forward=chain(ENTERING, LEAVING, E_, rank - 1, rank + 1, 0, (SUMMARY, EMIT)),
        backward=chain(H_IN, H_OUT, G_, rank + 1, rank - 1, 0, (GRAD_SUMMARY, GRAD_EMIT)),
    )
