"""Plan the scan of recurrent states over ranks, and the halos of short convolutions.

The layout is contiguous. A run of tokens is an affine map of one small state, `S_out = M S_in + E`.
A rank gives E of its last segment, and needs the state that enters its first: what the ranks before
it that share that document make of it. Documents break the scan: only a rank whose single segment
comes from before and goes on composes (it is *through*); all others send without waiting, and ranks
that share no document exchange nothing. Backward is the mirror: G, the gradient of the entering
state from the rank's own outputs, goes back in place of E, with M^T.

Schedules: `chain` (All-Scan, ZeCO, arXiv 2507.01004) passes S on, cut into pieces, one of which is
sent while the next arrives; `serial` (LASP-1, arXiv 2404.02882) waits before anything else;
`allgather` (LASP-2, arXiv 2502.07563) sends every (M, E) to every later rank; `tree` doubles the
window that a rank knows in each step (Hillis and Steele 1986).

A short convolution needs, for the first tokens of a rank, the `width` rows before them in their
document: the *halo*. It comes in one message from the rank before, or from several where shards are
shorter than that; nothing comes across a document's start. The gradients of the halo return the
same way, and are added in rank order. Layer: planning. Letters: N rows of a state, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..layouts.layout import Layout
from ..program.builder import ProgramBuilder
from ..program.operations import Block, Fold, Message, Op, Phases, Post, Wait
from ..program.program import TRANSIENT, Program, ScanArray

SCHEDULES = ("chain", "tree", "allgather", "serial")
DECAYS = {"head": "decay", "row": "decay", "matrix": "matrix"}  # one factor per -> kind of array
# Arrays after those of `ScanArray`: what leaves, the M known so far, and what arrives.
_SENT, _SENT_DECAY, _WINDOW, _CAME, _CAME_DECAY = range(TRANSIENT, TRANSIENT + 5)
_LEAVES = (_SENT, _SENT_DECAY)


class State(NamedTuple):
    """What a layer carries from token to token: rows N of a head's state, and what M holds: one
    factor per `head` or `row`, or a `matrix`."""

    rows: int
    decay: str

    @property
    def decay_rows(self) -> int:
        """Rows of an array of M."""
        return 1 if self.decay == "head" else self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlace:
    """The ranks that share the documents at a rank's two ends, in rank order.

    Args:
        before (`tuple[int, ...]`): Earlier ranks with tokens of its first document.
        after (`tuple[int, ...]`): Later ranks with tokens of its last document.
        through (`bool`): One document comes from before and goes on.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    through: bool


def chain_place(layout: Layout, rank: int) -> ChainPlace:
    """Return which ranks are before and after a rank in the scan.

    Raises:
        ValueError: on a layout in which ranks do not hold the documents end to end.
    """
    ranks, _, documents, starts, stops = layout.columns.T
    follows = (documents[1:] == documents[:-1]) & (starts[1:] == stops[:-1])
    if not (follows | (documents[1:] > documents[:-1])).all():
        raise ValueError(
            "states pass from rank to rank only where shards lie end to end; use "
            "longctx_layout=contiguous"
        )
    own = documents[layout.within(rank)]
    if not len(own):
        return ChainPlace(before=(), after=(), through=False)
    before = ranks[(documents == own[0]) & (ranks < rank)]
    after = ranks[(documents == own[-1]) & (ranks > rank)]
    through = len(own) == 1 and len(before) > 0 and len(after) > 0
    return ChainPlace(before=tuple(before.tolist()), after=tuple(after.tolist()), through=through)


def scan_program(
    layout: Layout, *, rank: int, state: State, schedule: str, pieces: int = 1
) -> Program | None:
    """Return one rank's scan; `None` where it shares no document.

    Args:
        layout (`Layout`): Contiguous.
        rank (`int`): This rank.
        state (`State`): Rows and decay.
        schedule (`str`): One of `SCHEDULES`, the same on all ranks.
        pieces (`int`, *optional*, defaults to 1): Groups of heads, or of value columns, that pass a
            `chain` one after another; the same on all ranks.

    Raises:
        ValueError: on a schedule that is not built, pieces of another than a chain, or a layout
            that is not contiguous.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"longctx_scan={schedule!r} is not built yet; use one of {SCHEDULES}")
    if pieces < 1 or (pieces > 1 and schedule != "chain"):
        raise ValueError(f"pieces={pieces} of {schedule!r}: only a chain is cut; use 1 piece")
    place = chain_place(layout, rank)
    if not place.before and not place.after:
        return None
    earlier, later, through = place.before, place.after, place.through
    a = ScanArray
    forward = _Direction(state, a.SUMMARY, a.DECAY, a.ENTERING, earlier, later, through, pieces)
    backward = _Direction(
        state, a.GRAD, a.DECAY_T, a.LEAVING_GRAD, later[::-1], earlier[::-1], through, pieces
    )
    gathered = max(len(earlier), len(later)) if schedule == "allgather" else 1
    one, decay = ("state", state.rows), (DECAYS[state.decay], state.decay_rows)
    builder = ProgramBuilder(layout, rank=rank, own=(), head_groups=pieces if pieces > 1 else 0)
    for kind, rows in (*(one, decay, one) * 2, one, decay, decay):
        builder.array(kind, rows)
    for kind, rows in (one, decay):
        builder.array(kind, gathered * rows)
    return builder.build(getattr(forward, schedule)(), getattr(backward, schedule)())


@dataclass(frozen=True)
class _Direction:
    """One direction of one rank's scan; each schedule is a method that returns its phases.

    Args:
        state (`State`): Rows and decay.
        own, decay, result (`int`): Arrays of (E, M), or (G, M^T), and of what arrives.
        before (`Sequence[int]`): The ranks that the result comes from, the nearest last.
        after (`Sequence[int]`): Those that it goes to, the nearest first.
        through (`bool`): One document comes from before and goes on.
        pieces (`int`): Pieces of a chain.
    """

    state: State
    own: int
    decay: int
    result: int
    before: Sequence[int]
    after: Sequence[int]
    through: bool
    pieces: int

    def _of(self, array: int, number: int = 0, *, piece: int = -1) -> Block:
        """Return the `number`-th state or decay of an array: a piece of it, or all."""
        decays = (self.decay, _WINDOW, _SENT_DECAY, _CAME_DECAY)
        rows = self.state.decay_rows if array in decays else self.state.rows
        heads = (piece, 1) if piece >= 0 and self.pieces > 1 else (0, 0)
        return Block(array, number * rows, (number + 1) * rows, *heads)

    def _pair(self, arrays: tuple[int, int], *, more: bool) -> tuple[Block, ...]:
        """Return a state, and with `more` its M."""
        return tuple(self._of(array) for array in arrays[: 1 + more])

    def _receives(self) -> list[Op]:
        return [
            Post(p, (), ((self.before[-1], (self._of(self.result, piece=p),)),))
            for p in range(self.pieces if self.before else 0)
        ]

    def _passes(self, piece: int) -> list[Op]:
        """Send a piece of the state that leaves."""
        leaves, ops = self._of(self.own, piece=piece), list[Op]()
        if self.through:
            parts = [self._of(array, piece=piece) for array in (self.own, self.decay, self.result)]
            leaves = self._of(_SENT, piece=piece)
            ops.append(Fold(leaves, tuple(parts), "affine"))
        return [*ops, Post(self.pieces + piece, ((self.after[0], (leaves,)),), ())]

    def chain(self) -> Phases:
        """Pass each piece on as it arrives; what needs none of them leaves first."""
        ops, arrived = self._receives(), [Wait(p) for p in range(self.pieces if self.before else 0)]
        if self.after:
            for piece in range(self.pieces):
                ops += [arrived[piece]] if self.through else []
                ops += self._passes(piece)
        ops += [] if self.through else arrived
        left = [Wait(self.pieces + p) for p in range(self.pieces if self.after else 0)]
        return ((*ops, *left),)

    def serial(self) -> Phases:
        """Receive in a first phase; the layer's work, and all that leaves, come after it."""
        receives = self._receives()
        first = (*receives, *([Wait(0)] if receives else []))
        return (first, (*self._passes(0), Wait(1)) if self.after else ())

    def allgather(self) -> Phases:
        """Send every (E, M) to every later rank; of the first of a chain E alone."""
        pair = self._pair((self.own, self.decay), more=self.through)
        sends = tuple((peer, pair) for peer in self.after)
        recvs: list[Message] = []
        for number, peer in enumerate(self.before):
            came = [self._of(array, number) for array in (_CAME, _CAME_DECAY)]
            recvs.append((peer, came[: 1 + (number > 0)]))
        ops: list[Op] = [Post(0, sends, tuple(recvs)), Wait(0)]
        result = self._of(self.result)
        for number in range(len(self.before)):
            came = [self._of(array, number) for array in (_CAME, _CAME_DECAY)]
            parts, how = ((*came, result), "affine") if number else ((came[0],), "cat")
            ops.append(Fold(result, parts, how))
        return (tuple(ops),)

    def _compose(
        self, into: tuple[int, int], later: tuple[int, int], earlier: tuple[int, int], *, more: bool
    ) -> list[Op]:
        """Set `into` to the map of `later` after `earlier`; its M only with `more`."""
        parts = [self._of(array) for array in (*later, earlier[0])]
        made: list[Op] = [Fold(self._of(into[0]), tuple(parts), "affine")]
        if more:
            parts = [self._of(later[1]), self._of(earlier[1])]
            made.append(Fold(self._of(into[1]), tuple(parts), "product"))
        return made

    def tree(self) -> Phases:
        """Double the known window in each step.

        Step j brings the window of the rank 2**j before, which is composed with what is known: the
        result and, until that reaches back to the document's start, its M in `_WINDOW`.
        """
        ops: list[Op] = []
        behind, ahead = len(self.before), len(self.after)
        steps = max(behind, ahead).bit_length()
        if ahead and not self.through:  # the first of its chain needs nothing: it sends E at once
            own, to = (self._of(self.own),), (2**j - 1 for j in range(ahead.bit_length()))
            ops.append(Post(steps, tuple((self.after[each], own) for each in to), ()))
        mine, known, came = (self.own, self.decay), (self.result, _WINDOW), (_CAME, _CAME_DECAY)
        for step in range(steps):
            distance, sends, recvs = 2**step, list[Message](), list[Message]()
            bounded, more = distance <= behind, 2 * distance <= behind
            if self.through and distance <= ahead:
                if step:
                    ops += self._compose(_LEAVES, mine, known, more=bounded)
                pair = _LEAVES if step else mine
                sends.append((self.after[distance - 1], self._pair(pair, more=bounded)))
            if bounded:
                into = came if step else known
                recvs.append((self.before[-distance], self._pair(into, more=more)))
            if sends or recvs:
                ops += [Post(step, tuple(sends), tuple(recvs)), Wait(step)]
            if recvs and step:
                ops += self._compose(known, known, came, more=more)
        return ((*ops, *([Wait(steps)] if ahead and not self.through else [])),)


class HaloArray(IntEnum):
    """Numbers of the arrays of a halo program, whose rows are those of a short convolution's input.

    A tail holds the rank's last rows, at most `width`; a halo the `width` rows before its first.
    `RETURNED` receives gradients of rows that others took from the tail.
    """

    TAIL = 0
    HALO = 1
    TAIL_GRAD = 2
    HALO_GRAD = 3
    RETURNED = 4


class _HaloRows(NamedTuple):
    """`rows` rows of one rank for another: at `tail` in its tail, at `halo` in the other's."""

    giver: int
    rows: int
    tail: int
    halo: int

    def at(self, array: int) -> Block:
        """Return the rows in an array of tails or halos."""
        of_tail = array in (HaloArray.TAIL, HaloArray.TAIL_GRAD)
        first = self.tail if of_tail else self.halo
        return Block(array, first, first + self.rows)


def halo_program(layout: Layout, *, rank: int, width: int) -> Program | None:
    """Return one rank's exchange of halos; `None` where it gives and needs none.

    Rows of the halo that belong to other documents are left as they are.

    Args:
        layout (`Layout`): Contiguous.
        rank (`int`): This rank.
        width (`int`): Rows that a token needs before its own: taps less one.

    Raises:
        ValueError: on a layout that is not contiguous.
    """
    needs, gives = list(_needs(layout, rank, width)), list[tuple[int, _HaloRows]]()
    for peer in chain_place(layout, rank).after:
        asked = [rows for rows in _needs(layout, peer, width) if rows.giver == rank]
        if not asked:
            break  # those further away ask for nothing either
        gives.append((peer, asked[0]))
    if not needs and not gives:
        return None
    sends: list[Message] = [(peer, (rows.at(HaloArray.TAIL),)) for peer, rows in gives]
    recvs: list[Message] = [(rows.giver, (rows.at(HaloArray.HALO),)) for rows in needs]
    back: list[Message] = [(rows.giver, (rows.at(HaloArray.HALO_GRAD),)) for rows in needs]
    returned, due, sums = 0, list[Message](), list[Fold]()
    for peer, rows in gives:
        block = Block(HaloArray.RETURNED, returned, returned + rows.rows)
        due.append((peer, (block,)))
        sums.append(Fold(rows.at(HaloArray.TAIL_GRAD), (block,), "sum"))
        returned += rows.rows
    builder, tail = ProgramBuilder(layout, rank=rank, own=()), min(width, layout.rows(rank))
    for kind, size in (("x", tail), ("x", width), ("dx", tail), ("dx", width), ("dx", returned)):
        builder.array(kind, size)
    forward = Post(0, tuple(sends), tuple(recvs)), Wait(0)
    return builder.build([forward], [(Post(0, tuple(back), tuple(due)), Wait(0), *sums)])


def _needs(layout: Layout, rank: int, width: int) -> Iterator[_HaloRows]:
    """Yield what a rank needs of the ranks before, the nearest first."""
    for giver in chain_place(layout, rank).before[::-1]:
        held, first = layout.of_rank(giver)[-1], layout.of_rank(rank)[0]
        start = max(held.start, first.start - width)
        if start >= held.stop:
            return
        rows, tail = held.stop - start, min(width, layout.rows(giver))
        yield _HaloRows(giver, rows, tail - rows, width - (first.start - start))
