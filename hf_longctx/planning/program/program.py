"""Hold one rank's part of a plan as data: phases of operations over named blocks.

A program names *arrays* (rows of one kind), says which tokens their rows hold, and lists forward
and backward phases of operations on *blocks* of them. One phase is one autograd node. The executor,
the checker, the counters and the predictor read the same program. It is kept as int32 columns, of
which objects are views, and travels to servers as one run of int32 with a hash by which both ends
know it.

Layer: planning. Letters: T rows, H query heads, K key/value heads, D head size, V value head size.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property, wraps
from itertools import chain
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from .operations import Block, Op, Phases, Table, decode


class Field(NamedTuple):
    """One tensor of an array, `[rows, heads, width]`.

    `heads` is H, K or 1; `width` is D, V, 1 or N (rows of a state). `wide` fields are float32 or
    wider, others of the model's dtype.
    """

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
    "state": (Field("state", "H", "V", True),),
    "decay": (Field("decay", "K", "1", True),),
    "delta": (
        Field("grad_out", "H", "V"), Field("delta", "H", "1", True), Field("lse", "H", "1", True),
    ),
    "matrix": (Field("decay", "K", "N", True),),
    "x": (Field("x", "1", "D"),),
    "dx": (Field("dx", "1", "D", True),),
}  # fmt: skip


class HomeArray(IntEnum):
    """Numbers of the arrays that hold a rank's own rows: the first of an attention program."""

    Q = 0
    KV = 1
    OUT = 2
    GRAD = 3
    DQ = 4
    DKV = 5

    @property
    def kind(self) -> str:
        """Its kind, one of `KINDS`."""
        return self.name.lower()


class ScanArray(IntEnum):
    """Numbers of the arrays that a rank gives and gets: the first of a scan program.

    Forward reads E and M of the rank's tokens and fills the state that enters. Backward reads G,
    the gradient of the entering state, and M^T, and fills the gradient of the state that leaves.
    """

    SUMMARY = 0
    DECAY = 1
    ENTERING = 2
    GRAD = 3
    DECAY_T = 4
    LEAVING_GRAD = 5


# From this number on arrays are transient, in programs of attention as of scans: they live within
# one direction of one layer.
TRANSIENT = 6


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
        held: Sequence[Held] | Sequence[np.ndarray],
        forward: Sequence[Iterable[Op]],
        backward: Sequence[Iterable[Op]],
        head_groups: int = 0,
    ) -> "Program":
        """Encode operations as columns.

        Operations are read once, forward before backward. `arrays` and `held` (rows, or tables of
        rows) are read after them, as reading operations may add arrays.
        """
        kinds, table = list(KINDS), Table()
        for direction, phases in enumerate((forward, backward)):
            for phase, operations in enumerate(phases):
                for op in operations:
                    table.add(direction, phase, op)
        return cls(
            _columns([(kinds.index(kind), rows) for kind, rows in arrays], 2),
            _columns(held, 5),
            np.asarray(table.ops).reshape(-1, 6),
            np.asarray(table.blocks).reshape(-1, 8),
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
        """What the rows of each array hold, by row."""
        runs: dict[int, list[Held]] = {a: [] for a in range(len(self.arrays))}
        for row in self.held.tolist():
            runs[row[0]].append(Held(*row))
        return {a: tuple(sorted(held, key=lambda h: h.row)) for a, held in runs.items()}

    def tokens(self, block: Block) -> tuple[tuple[int, int, int], ...]:
        """Return the `(document, start, stop)` that a block's rows hold, in row order."""
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

    def task(self, block: Block) -> tuple[int, int, int]:
        """Return the `(document, start, stop)` that a task takes a block's rows for.

        These are consecutive tokens that end with the block's last one. The rows before the last
        run may hold other tokens of the document, if the mask hides none of them.
        """
        document, _, stop = self.tokens(block)[-1]
        return document, stop - (block.stop - block.start), stop

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
                phases[row[1]].append(decode(row[2:], of_code))
        return tuple(map(tuple, phases))

    def operations(self, *, backward: bool) -> Iterator[Op]:
        """Yield the operations of all phases of one direction."""
        return chain.from_iterable(self.backward if backward else self.forward)

    def relayed(self, *, backward: bool) -> frozenset[int]:
        """Return the tags of the exchanges of one direction that relays pass on."""
        after = self.ops[self.ops[:, 0] == int(backward), 4]
        return frozenset(after[after >= 0].tolist())

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What `kept_with_program` functions made of this program."""
        return {}

    def to_json(self) -> dict[str, list[Any]]:
        """Return a plain form that can be kept, compared and read back."""
        return {name: getattr(self, name).tolist() for name in _COLUMN_WIDTHS}

    @classmethod
    def from_json(cls, kept: dict[str, list[Any]]) -> "Program":
        """Read the program that `to_json` wrote."""
        return cls(*(_columns(kept[name], width) for name, width in _COLUMN_WIDTHS.items()))

    def __str__(self) -> str:
        return json.dumps(self.to_json())


_P = ParamSpec("_P")
_T = TypeVar("_T")


def kept_with_program(
    function: Callable[Concatenate[Program, _P], _T],
) -> Callable[Concatenate[Program, _P], _T]:
    """Memoise a pure function of a program on the program, so that both are freed at once."""

    @wraps(function)
    def memoised(program: Program, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = function.__qualname__, args, *kwargs.items()  # programs are pickled: no function
        if key not in program.derived:
            program.derived[key] = function(program, *args, **kwargs)
        found: _T = program.derived[key]
        return found

    return memoised


_COLUMN_WIDTHS = {"arrays": 2, "held": 5, "ops": 6, "blocks": 8, "phases": 0, "head_groups": 0}


def _columns(rows: Sequence[Any], width: int) -> np.ndarray:
    tables = len(rows) and isinstance(rows[0], np.ndarray)
    columns = np.asarray(np.concatenate(rows) if tables else rows, np.int32)
    return columns.reshape(len(columns), width) if width else columns  # raises on another width


FORMAT = 2  # of the columns and their meaning: a server of another format is not admitted


@dataclass(frozen=True, slots=True, eq=False)
class WireProgram:
    """A program as it is sent to a server.

    Args:
        columns (`np.ndarray`): int32: rows and width of each column (0 for one without), then all.
        digest (`int`): A stable hash of them, as a non-negative int64.
        exchanges (`bool`): Whether anything leaves or arrives in it.
    """

    columns: np.ndarray
    digest: int
    exchanges: bool


@kept_with_program
def pack(program: Program) -> WireProgram:
    """Encode a program for the wire."""
    columns = [np.asarray(getattr(program, f.name), np.int32) for f in fields(program)]
    shapes = [(len(c), c.shape[1] if c.ndim > 1 else 0) for c in columns]
    run = np.concatenate([np.ravel(shapes).astype(np.int32), *map(np.ravel, columns)])
    hashed = hashlib.blake2b(run.astype("<i4").tobytes(), digest_size=8).digest()
    peers = program.blocks[:, 2]  # -1 outside of messages
    return WireProgram(run, int.from_bytes(hashed, "little") >> 1, bool((peers >= 0).any()))


def unpack(columns: np.ndarray) -> Program:
    """Decode the program that `WireProgram.columns` hold."""
    names = fields(Program)
    shapes = columns[: 2 * len(names)].reshape(-1, 2)
    sizes = shapes[:, 0] * np.maximum(shapes[:, 1], 1)
    parts = np.split(columns[2 * len(names) :], np.cumsum(sizes)[:-1])
    return Program(
        *(p.reshape(-1, w) if w else p for p, (_, w) in zip(parts, shapes.tolist(), strict=True))
    )
