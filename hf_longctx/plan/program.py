"""One rank's part of a plan: phases of frozen operations over named blocks, kept as int32 columns.

Floor: plan. A program names *arrays* (rows of one kind), says which tokens their rows hold, and
lists forward and backward phases of operations on *blocks* of them. One phase is one autograd node.
The executor, the checker and the byte counter read the same program.

Letters: T rows, H query heads, K key/value heads, D head size, V value head size.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np


class Field(NamedTuple):
    """One tensor of an array: `[rows, heads, width]`, in the model's dtype or a wide one (float32
    or wider). `heads` is H, K or 1; `width` is D, V, 1 or S (elements of one head's state)."""

    name: str
    heads: str
    width: str
    wide: bool = False


KINDS: dict[str, tuple[Field, ...]] = {
    "q": (Field("q", "H", "D"),),
    "kv": (Field("k", "K", "D"), Field("v", "K", "V")),
    "out": (Field("out", "H", "V"), Field("lse", "H", "1", True)),
    "part": (Field("out", "H", "V", True), Field("lse", "H", "1", True)),
    "grad": (Field("grad_out", "H", "V"), Field("out", "H", "V"), Field("lse", "H", "1", True)),
    "dq": (Field("dq", "H", "D", True),),
    "dkv": (Field("dk", "K", "D", True), Field("dv", "K", "V", True)),
    "state": (Field("state", "H", "S", True),),
    "decay": (Field("decay", "H", "1", True),),
    "delta": (
        Field("grad_out", "H", "V"), Field("delta", "H", "1", True), Field("lse", "H", "1", True),
    ),
}  # fmt: skip
HOME = ("q", "kv", "out", "grad", "dq", "dkv")  # arrays 0..5 of an attention program: local rows
FOLDS = ("cat", "sum", "lse", "affine", "delta")


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
    """`into` = the partial (out, lse) of rows `q` over keys `kv`, masked by their positions."""

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
    what stands there, `lse` merges partials, `affine` forms E + M S of (E, M, S), `delta` replaces
    the out of a gradient's rows by delta, the sum of grad_out * out over a head."""

    into: Block
    parts: tuple[Block, ...]
    how: str


class Local(NamedTuple):
    """A step of the layer's own, without exchange, on the array of `into`."""

    step: int
    into: Block


Op = Post | Wait | Attend | AttendGrad | Fold | Local
Phases = tuple[tuple[Op, ...], ...]
_CODES = {op: code for code, op in enumerate((Post, Wait, Attend, AttendGrad, Fold, Local))}


class Held(NamedTuple):
    """Rows `[row, row + stop - start)` of `array` hold tokens `[start, stop)` of `document`."""

    array: int
    row: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's operations, as int32 columns with views.

    Args:
        arrays (`np.ndarray`): `[arrays, 2]`: kind (index into `KINDS`), rows.
        held (`np.ndarray`): `[runs, 5]`: the fields of `Held`.
        ops (`np.ndarray`): `[operations, 6]`: direction (0 forward, 1 backward), phase, code, the
            operation's number (tag, step or fold), and a post's `after` and `channel`.
        blocks (`np.ndarray`): `[blocks, 8]`: operation, role, peer, then the fields of `Block`.
        phases (`np.ndarray`): `[2]`: phases of forward and of backward.
        head_groups (`np.ndarray`): `[1]`: head groups in all; 0 for one per key/value head.
    """

    arrays: np.ndarray
    held: np.ndarray
    ops: np.ndarray
    blocks: np.ndarray
    phases: np.ndarray
    head_groups: np.ndarray

    @classmethod
    def build(
        cls,
        *,
        arrays: Sequence[tuple[str, int]],
        held: Sequence[Held],
        forward: Phases,
        backward: Phases,
        head_groups: int = 0,
    ) -> "Program":
        """Encode operations as columns."""
        kinds = list(KINDS)
        ops: list[tuple[int, ...]] = []
        blocks = _BlockTable()
        for direction, phases in enumerate((forward, backward)):
            for phase, operations in enumerate(phases):
                for op in operations:
                    number = blocks.add(len(ops), op)
                    route = (op.after, op.channel) if isinstance(op, Post) else (-1, 0)
                    ops.append((direction, phase, _CODES[type(op)], number, *route))
        return cls(
            _columns([(kinds.index(kind), rows) for kind, rows in arrays], 2),
            _columns(held, 5),
            _table(ops, 6),
            blocks.columns(),
            np.asarray([len(forward), len(backward)], np.int32),
            np.asarray([head_groups], np.int32),
        )

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each array."""
        kinds = list(KINDS)
        return tuple(kinds[kind] for kind in self.arrays[:, 0].tolist())

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of each array."""
        return tuple(self.arrays[:, 1].tolist())

    @cached_property
    def runs(self) -> dict[int, tuple[Held, ...]]:
        """What each array's rows hold, by row."""
        runs: dict[int, list[Held]] = {a: [] for a in range(len(self.arrays))}
        for row in self.held.tolist():
            runs[row[0]].append(Held(*row))
        return {a: tuple(sorted(held, key=lambda h: h.row)) for a, held in runs.items()}

    def tokens(self, block: Block) -> tuple[tuple[int, int, int], ...]:
        """The `(document, start, stop)` that a block's rows hold, in row order."""
        runs, found = self.runs[block.array], []
        first = bisect_right(runs, block.start, key=lambda run: run.row) - 1
        for run in runs[max(first, 0) :]:
            if run.row >= block.stop:
                break
            low = max(run.row, block.start)
            high = min(run.row + run.stop - run.start, block.stop)
            if low < high:
                found.append((run.document, run.start + low - run.row, run.start + high - run.row))
        return tuple(found)

    @cached_property
    def forward(self) -> Phases:
        """The forward phases."""
        return self._decode(0)

    @cached_property
    def backward(self) -> Phases:
        """The backward phases, in the order they run."""
        return self._decode(1)

    def _decode(self, direction: int) -> Phases:
        of_op: list[list[list[int]]] = [[] for _ in range(len(self.ops))]
        for row in self.blocks.tolist():
            of_op[row[0]].append(row[1:])
        phases: list[list[Op]] = [[] for _ in range(int(self.phases[direction]))]
        for row, blocks in zip(self.ops.tolist(), of_op, strict=True):
            if row[0] == direction:
                of_code = [(b[0], b[1], Block(*b[2:])) for b in blocks]
                phases[row[1]].append(_decode(row[2:], of_code))
        return tuple(map(tuple, phases))

    def relayed(self, *, backward: bool) -> frozenset[int]:
        """Tags of the exchanges of one direction that relays pass on."""
        after = self.ops[self.ops[:, 0] == int(backward), 4]
        return frozenset(after[after >= 0].tolist())

    def to_json(self) -> dict[str, list[Any]]:
        """A plain form that can be kept, diffed and read back."""
        return {name: getattr(self, name).tolist() for name in _COLUMN_WIDTHS}

    @classmethod
    def from_json(cls, kept: dict[str, list[Any]]) -> "Program":
        """The program that `to_json` wrote."""
        return cls(*(_columns(kept[name], width) for name, width in _COLUMN_WIDTHS.items()))

    def __str__(self) -> str:
        return json.dumps(self.to_json())


_COLUMN_WIDTHS = {"arrays": 2, "held": 5, "ops": 6, "blocks": 8, "phases": 0, "head_groups": 0}


def _columns(rows: Sequence[Sequence[int]] | np.ndarray, width: int) -> np.ndarray:
    columns = np.asarray(rows, np.int32)
    return columns.reshape(len(columns), width) if width else columns  # others are refused


def _table(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    """As `_columns`, of many rows that are known to have this width."""
    return np.fromiter(chain.from_iterable(rows), np.int32, len(rows) * width).reshape(-1, width)


_Encoded = list[tuple[int, int, Block]]  # role, peer, block


class _BlockTable:
    """Rows of a program's blocks, operation by operation."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._many: list[tuple[int, BlockColumns]] = []  # and where they begin

    def add(self, at: int, op: Op) -> int:
        """Encode the blocks of operation `at`; returns its number."""
        rows = self._rows
        match op:
            case Post():
                for role, messages in enumerate((op.sends, op.recvs)):
                    for peer, blocks in messages:
                        if isinstance(blocks, BlockColumns):
                            self._many.append((len(rows), blocks))
                            rows += [(at, role, peer, blocks.array, 0, 0, 0, 0)] * len(blocks)
                        else:
                            rows += [(at, role, peer, *block) for block in blocks]
                return op.tag
            case Wait(tag):
                return tag
            case Fold(into, parts, how):
                rows.append((at, 0, -1, *into))
                rows += [(at, 1, -1, *part) for part in parts]
                return FOLDS.index(how)
            case Local(step, into):
                rows.append((at, 0, -1, *into))
                return step
            case _:
                rows += [(at, role, -1, *block) for role, block in enumerate(op)]
                return 0

    def columns(self) -> np.ndarray:
        """int32 `[blocks, 8]`; see `Program`."""
        columns = _table(self._rows, 8)
        for begin, blocks in self._many:
            of_rows = columns[begin : begin + len(blocks)]
            of_rows[:, 4], of_rows[:, 5] = blocks.starts, blocks.stops
        return columns


def _messages(blocks: _Encoded, role: int) -> tuple[Message, ...]:
    by_peer: dict[int, list[Block]] = {}
    for of_role, peer, block in blocks:
        if of_role == role:
            by_peer.setdefault(peer, []).append(block)
    return tuple((peer, tuple(of_peer)) for peer, of_peer in by_peer.items())


def _decode(row: Sequence[int], blocks: _Encoded) -> Op:
    number, after, channel = row[1:]
    code: Callable[..., Any] = tuple(_CODES)[row[0]]
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
