"""Define the operations of a program and encode them as int32 columns.

An operation names *blocks*: rows of numbered arrays, all heads of them or some. Operations are
plain tuples, so that planners, the checker, the counters and the executor read the same thing; the
columns are those of `Program`. Layer: planning.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

FOLDS = ("cat", "sum", "lse", "affine", "delta", "product")
HeadRange = tuple[int, int]  # first head group, and how many; see `counts.heads_in`
ALL_HEADS: HeadRange = (0, 0)


class Block(NamedTuple):
    """Rows `[start, stop)` of an array, and head groups `[head, head + heads)` of them.

    `heads` 0 means every head.
    """

    array: int
    start: int
    stop: int
    head: int = 0
    heads: int = 0


class BlockColumns(Sequence[Block]):
    """Many blocks of one array, as columns: a ring's program has too many for objects.

    Args:
        array (`int`): The array.
        starts, stops (`np.ndarray`): int64 `[blocks]`: their rows.
    """

    def __init__(self, array: int, starts: np.ndarray, stops: np.ndarray) -> None:
        self.array, self.starts, self.stops = array, starts, stops

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> Block: ...

    @overload
    def __getitem__(self, at: slice) -> "BlockColumns": ...

    def __getitem__(self, at: int | slice) -> "Block | BlockColumns":
        if isinstance(at, slice):
            return BlockColumns(self.array, self.starts[at], self.stops[at])
        return Block(self.array, int(self.starts[at]), int(self.stops[at]))

    def __iter__(self) -> Iterator[Block]:
        for rows in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            yield Block(self.array, *rows)


Message = tuple[int, Sequence[Block]]  # peer, blocks: one message per peer


class Post(NamedTuple):
    """Start an exchange: post its receives, then send. Never blocks.

    Args:
        tag (`int`): Number of the exchange, by which it is waited for.
        sends, recvs (`tuple[Message, ...]`): Blocks to and from each peer.
        after (`int`): The tag of an exchange under way. This one is then a *relay*: its sends, of
            blocks which that one receives, leave as soon as they have arrived. -1 for none.
        channel (`int`): Messages of different channels do not order each other, and may go over
            different links.
    """

    tag: int
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    after: int = -1
    channel: int = 0


class Wait(NamedTuple):
    """Block until the exchange `tag` has arrived and left. No other operation blocks."""

    tag: int


class Attend(NamedTuple):
    """Set `into` to the partial (out, lse) of rows `q` over keys `kv`.

    The mask follows from positions; see `Program.task`.
    """

    q: Block
    kv: Block
    into: Block


class AttendGrad(NamedTuple):
    """Add one task's gradients to `dq` and `dkv`.

    `grad` holds the gradient of the final out, that out (or delta) and its lse.
    """

    q: Block
    kv: Block
    grad: Block
    dq: Block
    dkv: Block


class Fold(NamedTuple):
    """Combine `parts`, in their order, into `into`.

    `how` is one of `FOLDS`: `cat` copies them end to end; `sum` adds each to what is there; `lse`
    merges partials; `affine` forms E + M S of (E, M, S); `product` forms M2 M1 of (M2, M1);
    `delta` copies a gradient's rows with delta, the sum of grad_out * out over a head, for out.
    """

    into: Block
    parts: tuple[Block, ...]
    how: str


Op = Post | Wait | Attend | AttendGrad | Fold
Phases = tuple[tuple[Op, ...], ...]
CODES = {op: code for code, op in enumerate((Post, Wait, Attend, AttendGrad, Fold))}


def map_blocks(op: Op, change: Callable[[Block], Block]) -> Op:
    """Return the operation with every block changed."""
    match op:
        case Post():
            sends, recvs = (
                tuple((peer, tuple(map(change, blocks))) for peer, blocks in side)
                for side in (op.sends, op.recvs)
            )
            return op._replace(sends=sends, recvs=recvs)
        case Wait():
            return op
        case Fold(into, parts, how):
            return Fold(change(into), tuple(map(change, parts)), how)
        case _:
            return type(op)(*map(change, op))


def blocks_of(op: Op) -> tuple[Block, ...]:
    """Return every block that an operation reads or writes."""
    match op:
        case Post(_, sends, recvs, _, _):
            return tuple(b for _, blocks in (*sends, *recvs) for b in blocks)
        case Fold(into, parts, _):
            return (into, *parts)
        case Wait(_):
            return ()
        case _:
            return tuple(op)


Encoded = list[tuple[int, int, Block]]  # role, peer, block


class Table:
    """Rows of a program's operations and of their blocks, end to end.

    Arrays of numbers, as the largest programs have more operations than Python's garbage collector
    should look through.
    """

    def __init__(self) -> None:
        self.ops, self.blocks, self._count = array("i"), array("i"), 0

    def add(self, direction: int, phase: int, op: Op) -> None:
        """Encode one operation."""
        number, after, channel = 0, -1, 0
        match op:
            case Post(number, sends, recvs, after, channel):
                for role, messages in enumerate((sends, recvs)):
                    for peer, blocks in messages:
                        self._message(role, peer, blocks)
            case Wait(number):
                pass
            case Fold(into, parts, how):
                number = FOLDS.index(how)
                self._block(0, into)
                for part in parts:
                    self._block(1, part)
            case _:
                for role, block in enumerate(op):
                    self._block(role, block)
        self.ops.extend((direction, phase, CODES[type(op)], number, after, channel))
        self._count += 1

    def _block(self, role: int, block: Block, peer: int = -1) -> None:
        self.blocks.extend((self._count, role, peer, *block))

    def _message(self, role: int, peer: int, blocks: Sequence[Block]) -> None:
        if isinstance(blocks, BlockColumns):
            rows = np.zeros((len(blocks), 8), np.int32)
            rows[:, :4] = self._count, role, peer, blocks.array
            rows[:, 4], rows[:, 5] = blocks.starts, blocks.stops
            self.blocks.frombytes(rows.tobytes())
        else:
            for block in blocks:
                self._block(role, block, peer)


def _messages(blocks: Encoded, role: int) -> tuple[Message, ...]:
    by_peer: dict[int, list[Block]] = {}
    for of_role, peer, block in blocks:
        if of_role == role:
            by_peer.setdefault(peer, []).append(block)
    return tuple((peer, tuple(of_peer)) for peer, of_peer in by_peer.items())


def decode(row: Sequence[int], blocks: Encoded) -> Op:
    """Return the operation of a row (code, number, after, channel) and its blocks."""
    code, number, after, channel = row
    kind: Callable[..., Any] = tuple(CODES)[code]
    if kind is Post:
        return Post(number, _messages(blocks, 0), _messages(blocks, 1), after, channel)
    if kind is Wait:
        return Wait(number)
    if kind is Fold:
        into, *parts = (block for _, _, block in blocks)
        return Fold(into, tuple(parts), FOLDS[number])
    return kind(*(block for _, _, block in blocks))
