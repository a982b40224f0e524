"""One direction of a program -> its exchanges in order, with sizes, and the work between them.

Floor: plan. Read from columns: a program of a thousand ranks has too many blocks to look at each.
"""

from typing import NamedTuple

import numpy as np

from .cost import LayerKind
from .count import Widths
from .operations import CODES
from .program import Attend, AttendGrad, Post, Program, Wait


class Event(NamedTuple):
    """A post or a wait.

    Args:
        work (`float`): Score entries since the last event.
        tag (`int`): Of the exchange.
        posted (`bool`): Whether it is a post.
        after (`int`): The exchange that a relay passes on; -1 for others.
        messages (`tuple[tuple[int, int, float], ...]`): Of a post: 0 for one that is sent or 1 for
            one that comes, the peer, and its bytes.
    """

    work: float
    tag: int
    posted: bool
    after: int = -1
    messages: tuple[tuple[int, int, float], ...] = ()


def events(
    program: Program, *, kind: LayerKind, widths: Widths, backward: bool
) -> tuple[list[Event], float]:
    """The events of one direction, and the score entries that follow the last.

    Args:
        program (`Program`): One rank's program.
        kind (`LayerKind`): What a row sees.
        widths (`Widths`): Bytes of a row.
        backward (`bool`): Which direction.
    """
    ops, blocks = _columns(program, backward=backward)
    code = ops[:, 2]
    work = np.zeros(len(ops) + 1)
    work[_tasks(code) + 1] = entries(program, kind=kind, backward=backward)
    work = np.cumsum(work)
    exchanges = np.flatnonzero((code == CODES[Post]) | (code == CODES[Wait]))
    messages = _messages(program, blocks[code[blocks[:, 0]] == CODES[Post]], widths)
    found, before = [], 0.0
    for at, done in zip(exchanges.tolist(), work[exchanges].tolist(), strict=True):
        _, _, of, tag, after, _ = ops[at].tolist()
        posted = of == CODES[Post]
        found.append(Event(done - before, tag, posted, after, messages.get(at, ())))
        before = done
    return found, float(work[-1]) - before


def _columns(program: Program, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Operations of one direction, and their blocks, which count operations from its first."""
    first, end = np.searchsorted(program.ops[:, 0], (int(backward), int(backward) + 1))
    blocks = program.blocks[slice(*np.searchsorted(program.blocks[:, 0], (first, end)))]
    return program.ops[first:end], blocks - np.array([first, 0, 0, 0, 0, 0, 0, 0], np.int32)


def _tasks(code: np.ndarray) -> np.ndarray:
    return np.flatnonzero((code == CODES[Attend]) | (code == CODES[AttendGrad]))


def entries(program: Program, *, kind: LayerKind, backward: bool) -> np.ndarray:
    """float64 score entries of each task of one direction, in order; of all heads, the part that it
    attends to."""
    ops, blocks = _columns(program, backward=backward)
    tasks = _tasks(ops[:, 2])
    if not len(tasks):
        return np.zeros(0)
    begin = np.searchsorted(blocks[:, 0], tasks)
    queries, keys = blocks[begin], blocks[begin + 1]
    held = program.held.astype(np.int64)
    held = held[np.lexsort((held[:, 1], held[:, 0]))]
    stride = int(program.arrays[:, 1].max()) + 1

    def tokens(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        array, start, stop = blocks[:, 3:6].astype(np.int64).T
        last = array * stride + stop - 1
        run = np.searchsorted(held[:, 0] * stride + held[:, 1], last, "right") - 1
        end = held[run, 3] + stop - held[run, 1]  # see `Program.task`
        return end - (stop - start), end

    (start, stop), (low, high) = tokens(queries), tokens(keys)
    longest = np.maximum(stop, high)  # a bidirectional row sees no key past those given
    seen = kind.entries_over(start, stop, low, high, length=longest).astype(np.float64)
    share = queries[:, 7] / max(int(program.head_groups[0]), 1)
    found: np.ndarray = np.where(queries[:, 7], share, 1.0) * seen
    return found


def _messages(
    program: Program, blocks: np.ndarray, widths: Widths
) -> dict[int, tuple[tuple[int, int, float], ...]]:
    """By post: (role, peer, bytes) of its messages."""
    if not len(blocks):
        return {}
    op, role, peer, array, start, stop, head, heads = blocks.T
    rows = _row_bytes(program, array, head, heads, widths)
    opens = np.append(True, (np.diff(blocks[:, :3], axis=0) != 0).any(axis=1))
    at = np.flatnonzero(opens)
    sizes = np.add.reduceat((stop - start) * rows, at)
    found: dict[int, list[tuple[int, int, float]]] = {}
    columns = (op[at].tolist(), role[at].tolist(), peer[at].tolist(), sizes.tolist())
    for post, way, whom, size in zip(*columns, strict=True):
        found.setdefault(post, []).append((way, whom, size))
    return {post: tuple(messages) for post, messages in found.items()}


def _row_bytes(
    program: Program, array: np.ndarray, head: np.ndarray, heads: np.ndarray, widths: Widths
) -> np.ndarray:
    """float64 `[blocks]`: bytes of a row of each block."""
    groups = int(program.head_groups[0])
    key = (program.arrays[array, 0] * (groups + 1) + head) * (groups + 1) + heads
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    kinds = program.kinds
    each = [
        widths.row(kinds[array[i]], heads=(int(head[i]), int(heads[i])), groups=groups)
        for i in first.tolist()
    ]
    return np.asarray(each, np.float64)[of]
