"""A contiguous layout -> the rows that a short convolution needs of the ranks before.

Floor: plan. The first tokens of a rank need the `width` rows before them in their document. They
come in one message from the rank before, or from several where shards are shorter than that; none
come across a document's start. Their gradients return the same way, and are added in rank order.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .layout import Layout
from .program import Block, Fold, Message, Post, Program, Wait
from .scan import place

# A rank's last rows, at most `width`, and those before its first; both gradients; what returns.
TAIL, HALO, TAIL_GRAD, HALO_GRAD, RETURNED = range(5)


class _Share(NamedTuple):
    """`rows` rows that one rank gives another: where in its tail, and where in the other's halo."""

    giver: int
    rows: int
    tail: int
    halo: int

    def at(self, array: int) -> Block:
        """The rows in an array of tails or halos."""
        first = self.tail if array in (TAIL, TAIL_GRAD) else self.halo
        return Block(array, first, first + self.rows)


def program(layout: Layout, *, rank: int, width: int) -> Program | None:
    """One rank's exchange of halos; `None` where it gives and needs none.

    `TAIL` holds the rank's last `min(width, rows)` rows, `HALO` the `width` rows before its first,
    of which those of other documents are left as they are.

    Args:
        layout (`Layout`): Contiguous.
        rank (`int`): This rank.
        width (`int`): Rows that a token needs before its own: taps less one.

    Raises:
        ValueError: on a layout that is not contiguous.
    """
    needs, gives = list(_needs(layout, rank, width)), list[tuple[int, _Share]]()
    for peer in place(layout, rank).after:
        asked = [share for share in _needs(layout, peer, width) if share.giver == rank]
        if not asked:
            break  # those further away ask for nothing either
        gives.append((peer, asked[0]))
    if not needs and not gives:
        return None
    sends: list[Message] = [(peer, (share.at(TAIL),)) for peer, share in gives]
    recvs: list[Message] = [(share.giver, (share.at(HALO),)) for share in needs]
    back: list[Message] = [(share.giver, (share.at(HALO_GRAD),)) for share in needs]
    returned, due, sums = 0, list[Message](), list[Fold]()
    for peer, share in gives:
        block = Block(RETURNED, returned, returned + share.rows)
        due.append((peer, (block,)))
        sums.append(Fold(share.at(TAIL_GRAD), (block,), "sum"))
        returned += share.rows
    tail = min(width, layout.rows(rank))
    return Program.build(
        arrays=[("x", tail), ("x", width), ("dx", tail), ("dx", width), ("dx", returned)],
        held=(),
        forward=((Post(0, tuple(sends), tuple(recvs)), Wait(0)),),
        backward=((Post(0, tuple(back), tuple(due)), Wait(0), *sums),),
    )


def _needs(layout: Layout, rank: int, width: int) -> Iterator[_Share]:
    """What a rank needs of the ranks before, the nearest first."""
    for giver in place(layout, rank).before[::-1]:
        held, first = layout.of_rank(giver)[-1], layout.of_rank(rank)[0]
        start = max(held.start, first.start - width)
        if start >= held.stop:
            return
        rows, tail = held.stop - start, min(width, layout.rows(giver))
        yield _Share(giver, rows, tail - rows, width - (first.start - start))
