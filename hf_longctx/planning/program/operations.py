"""What a program does, operation by operation, and their int32 columns.

Layer: planning. An operation names *blocks*: rows of arrays. The columns are those of `Program`.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

FOLDS = ("cat", "sum", "lse", "affine", "delta", "product")


class Block(NamedTuple):
    """Rows `[start, stop)`, and head groups `[head, head + heads)` of them; 0 for every head."""

    array: int
    start: int
    stop: int
    head: int = 0
    heads: int = 0


class BlockColumns(Sequence[Block]):
    """Many blocks of one array, for `Program.build`; views are made where they are read.

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


Message = tuple[int, Sequence[Block]]  # peer, blocks: one message per peer


class Post(NamedTuple):
    """Start an exchange: post the receives, then send. Never blocks.

    With `after`, the tag of an exchange that is posted and not yet waited for, it is a *relay*: its
    sends, of blocks which that one receives, leave as soon as they have arrived, wherever the
    program is by then. `channel`: each has messages, and links where they differ, of its own.
    """

    tag: int
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    after: int = -1
    channel: int = 0


class Wait(NamedTuple):
    """The only operation that blocks: the exchange `tag` has arrived and its blocks are filled."""

    tag: int


class Attend(NamedTuple):
    """`into` = the partial (out, lse) of rows `q` over keys `kv`, masked by position; see
    `Program.task`."""

    q: Block
    kv: Block
    into: Block


class AttendGrad(NamedTuple):
    """Add one task's gradients to `dq` and `dkv`; `grad` holds the final out (or delta) and lse."""

    q: Block
    kv: Block
    grad: Block
    dq: Block
    dkv: Block


class Fold(NamedTuple):
    """Combine `parts` into `into`, in their order: `cat` copies them end to end, `sum` adds each to
    what stands there, `lse` merges partials, `affine` forms E + M S of (E, M, S), `product` M2 M1
    of (M2, M1), `delta` replaces the out of a gradient's rows by delta, the sum of grad_out * out
    over a head."""

    into: Block
    parts: tuple[Block, ...]
    how: str


class Local(NamedTuple):
    """A step of the layer's own, without exchange, on the array of `into`."""

    step: int
    into: Block


Op = Post | Wait | Attend | AttendGrad | Fold | Local
Phases = tuple[tuple[Op, ...], ...]
CODES = {op: code for code, op in enumerate((Post, Wait, Attend, AttendGrad, Fold, Local))}


Encoded = list[tuple[int, int, Block]]  # role, peer, block


class Table:
    """Rows of a program's operations and of their blocks, end to end: large programs have more of
    them than Python's collector should look through."""

    def __init__(self) -> None:
        self.ops, self.blocks, self._count = array("i"), array("i"), 0

    def add(self, direction: int, phase: int, op: Op) -> None:
        """Encode an operation."""
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
            case Local(number, into):
                self._block(0, into)
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
    """The operation of a row (code, number, after, channel), with its blocks."""
    number, after, channel = row[1:]
    code: Callable[..., Any] = tuple(CODES)[row[0]]
    if code is Post:
        return Post(number, _messages(blocks, 0), _messages(blocks, 1), after, channel)
    if code is Wait:
        return Wait(number)
    if code is Fold:
        into, *parts = (block for _, _, block in blocks)
        return Fold(into, tuple(parts), FOLDS[number])
    if code is Local:
        return Local(number, blocks[0][2])
    return code(*(block for _, _, block in blocks))
