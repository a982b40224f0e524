"""Count what a program sends and holds, in bytes, and the heads that its blocks name.

The executor must be found to have sent just these bytes. A program counts heads in equal groups of
query heads: as many as there are key/value heads, or more, several of which then have a key/value
head in common. Layer: planning. Letters: H query heads, K key/value heads.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..layouts.levels import Levels
from .operations import Block, HeadRange, Post, Wait, blocks_of
from .program import KINDS, TRANSIENT, Program, kept_with_program


def heads_in(heads: HeadRange, *, groups: int, of: int) -> tuple[int, int]:
    """Return the heads `[first, stop)` of a field that belong to some head groups.

    Args:
        heads (`HeadRange`): First group, and how many; all where that is 0.
        groups (`int`): Head groups altogether.
        of (`int`): H or K, heads of the field.
    """
    first, count = heads
    return (first * of // groups, -(-(first + count) * of // groups)) if count else (0, of)


@kept_with_program
def kept_heads(program: Program) -> tuple[HeadRange, ...]:
    """Return the head groups that each array keeps: those that blocks name; all of own rows."""
    array, _, _, head, heads = program.blocks[:, 3:].T
    arrays = len(program.arrays)
    first, stop = np.full(arrays, np.iinfo(np.int32).max), np.zeros(arrays, np.int32)
    np.minimum.at(first, array, head)
    np.maximum.at(stop, array, head + heads)
    whole = np.arange(arrays) < TRANSIENT
    whole[array[heads == 0]] = True
    first[whole | (stop == 0)] = stop[whole] = 0
    return tuple(zip(first.tolist(), (stop - first).tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Sizes of one layer's rows.

    Args:
        heads (`int`): Query heads, H.
        kv_heads (`int`): Key/value heads, K.
        head_dim (`int`): Query and key head size, D.
        value_dim (`int`): Value head size, V.
        state (`int`): Rows of one head's state, N.
        itemsize (`int`): Bytes of the model's dtype.
        wide_itemsize (`int`): Bytes of accumulators and lse: 4, or 8 for float64 models.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    state: int = 0
    itemsize: int = 4
    wide_itemsize: int = 4

    def row(self, kind: str, *, heads: HeadRange = (0, 0), groups: int = 0) -> int:
        """Count the bytes of a row of an array of `kind`, for some of its head groups.

        `groups` is their number altogether; 0 for one per key/value head.
        """
        sizes = {"H": self.heads, "K": self.kv_heads, "1": 1}
        widths = {"D": self.head_dim, "V": self.value_dim, "N": self.state, "1": 1}
        total = 0
        for field in KINDS[kind]:
            size = self.wide_itemsize if field.wide else self.itemsize
            of = sizes[field.heads]
            first, stop = heads_in(heads, groups=groups or self.kv_heads, of=of)
            total += (stop - first) * widths[field.width] * size
        return total


def block_bytes(program: Program, block: Block, widths: Widths) -> int:
    """Count the bytes of a block."""
    return (block.stop - block.start) * _row(program, block.array, block[3:], widths)


def _row(program: Program, array: int, heads: HeadRange, widths: Widths) -> int:
    groups = int(program.head_groups[0])
    return widths.row(program.kinds[array], heads=heads, groups=groups)


def sent_by_channel(program: Program, widths: Widths, *, backward: bool) -> dict[int, Counter[int]]:
    """Count the bytes that a rank sends in one direction, by channel and peer."""
    total: dict[int, Counter[int]] = {}
    for op in program.operations(backward=backward):
        if isinstance(op, Post):
            for peer, blocks in op.sends:
                size = sum(block_bytes(program, b, widths) for b in blocks)
                total.setdefault(op.channel, Counter())[peer] += size
    return total


def sent(program: Program, widths: Widths, *, backward: bool) -> Counter[int]:
    """Count the bytes that a rank sends in one direction, by peer."""
    return sum(sent_by_channel(program, widths, backward=backward).values(), Counter())


def sent_by_level(
    program: Program, widths: Widths, *, rank: int, levels: Levels, backward: bool
) -> Counter[int]:
    """Count the bytes that a rank sends in one direction, by level; the outermost is 0."""
    return by_level(sent(program, widths, backward=backward), rank=rank, levels=levels)


def by_level(sent: Mapping[int, int], *, rank: int, levels: Levels) -> Counter[int]:
    """Sum the bytes that a rank sends to each peer by the level whose link they cross."""
    total: Counter[int] = Counter()
    for peer, size in sent.items():
        total[levels.crosses(rank, peer)] += size
    return total


def sent_in_layer(program: Program, widths: Widths) -> int:
    """Count the bytes that a rank sends in the forward and backward of one layer."""
    return sum(sum(sent(program, widths, backward=b).values()) for b in (False, True))


@kept_with_program
def lifetimes(program: Program, *, backward: bool) -> dict[int, tuple[int, int]]:
    """Return the first and last operation of a direction that touches each array.

    A post copies what it sends; only what it receives is touched again by its wait. A relay copies
    what it sends before the exchange that it passes on is waited for.
    """
    spans: dict[int, tuple[int, int]] = {}
    posted: dict[int, Post] = {}
    for number, op in enumerate(program.operations(backward=backward)):
        if isinstance(op, Post):
            posted[op.tag] = op._replace(sends=())
        # A wait touches what its exchange receives.
        for block in blocks_of(posted[op.tag] if isinstance(op, Wait) else op):
            first, _ = spans.get(block.array, (number, number))
            spans[block.array] = (first, number)
    return spans


def peak_bytes(program: Program, widths: Widths, *, backward: bool) -> int:
    """Return the largest sum of live transient arrays in one direction, in bytes."""
    changes: Counter[int] = Counter()
    kept = kept_heads(program)
    for array, (first, last) in lifetimes(program, backward=backward).items():
        if array >= TRANSIENT:
            size = program.rows[array] * _row(program, array, kept[array], widths)
            changes[first] += size
            changes[last + 1] -= size
    live = peak = 0
    for number in sorted(changes):
        live += changes[number]
        peak = max(peak, live)
    return peak


def message_peak_bytes(program: Program, widths: Widths, *, backward: bool) -> int:
    """Return the largest sum of messages posted and not waited for, both ways, in bytes.

    What a post sends to several peers is one message.
    """
    posted: dict[int, int] = {}
    peak = 0
    for op in program.operations(backward=backward):
        if isinstance(op, Post):
            made = [*{blocks for _, blocks in op.sends}, *(blocks for _, blocks in op.recvs)]
            posted[op.tag] = sum(block_bytes(program, b, widths) for m in made for b in m)
            peak = max(peak, sum(posted.values()))
        elif isinstance(op, Wait):
            del posted[op.tag]
    return peak
