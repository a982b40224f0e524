"""Tasks and what they need sent -> phases, whose exchanges may hide behind the tasks.

Floor: plan. Head groups, and parts of rows within each, travel one behind the other: all are posted
at the start, a server attends to one while the next ones travel, and sends its results at once,
into receives that wait for them. Tasks that need no arrival stand between the groups: the first
hide the first arrival, the last ones hide how the last results travel home.
"""

from collections.abc import Iterable, Sequence

from .program import Attend, AttendGrad, Block, Fold, Op, Phases, Post, Wait

_IN, _BACK, _DUE = range(3)  # exchanges of a part: to servers, results that leave, and come
Heads = tuple[int, int]  # first key/value head and heads of a group; (0, 0) for all
ALL_HEADS: Heads = (0, 0)
Messages = dict[int, list[Block]]  # by peer
Sides = tuple[Messages, Messages]  # sent, received
Steps = tuple[Sequence[Op], Sequence[Op], Sequence[Op]]  # first, before sends, once results came
Part = tuple[Sides, Sequence[Op], Sides]  # what its tasks need, they, and what comes of them


def phases(
    steps: Steps, ready: Sequence[Op], parts: Sequence[Part], *, groups: Sequence[Heads]
) -> Phases:
    """Three phases (start, serve and collect), or one where nothing leaves or arrives.

    Args:
        steps (`Steps`): Folds beside the tasks.
        ready (`Sequence[Op]`): Tasks that need no arrival.
        parts (`Sequence[Part]`): Those that do, in the order in which they travel.
        groups (`Sequence[Heads]`): Head groups that travel apart; one part goes with one group.
    """
    first, prepare, finish = steps
    moves = [side for request, _, answer in parts for side in (*request, *answer)]
    if not any(blocks for side in moves for blocks in side.values()):
        return ((*first, *ready, *(op for _, tasks, _ in parts for op in tasks), *finish),)
    if len(groups) == 1:
        ((request, waiting, answer),) = parts
        ask, asked = _exchange(_IN, ALL_HEADS, request)
        give, given = _exchange(_BACK, ALL_HEADS, answer)
        serve = (*ready, *asked, *waiting, *give)
        return ((*first, *prepare, *ask), serve, (*given, *finish))
    return _in_groups(steps, ready, parts, groups)


def _in_groups(
    steps: Steps, ready: Sequence[Op], parts: Sequence[Part], groups: Sequence[Heads]
) -> Phases:
    first, prepare, finish = steps
    start, serve, collect = list(first), list[Op](), list[Op]()
    receive, left = list[Op](), list[Op]()
    if not any(tasks for _, tasks, _ in parts):  # nothing to stand between
        serve, ready = list(ready), ()
    for number, heads in enumerate(groups):
        local, last = _of(heads, ready), number == len(groups) - 1
        start += _of(heads, prepare)
        serve += [] if last else local
        for part, (request, tasks, answer) in enumerate(parts):
            tag = 3 * (number * len(parts) + part)
            ask, asked = _exchange(tag + _IN, heads, request)
            give, given = _exchange(tag + _BACK, heads, (answer[0], {}))
            due, came = _exchange(tag + _DUE, heads, ({}, answer[1]))
            start += ask
            receive += due
            serve += [*asked, *_of(heads, tasks), *give]
            collect += came
            left += given
        serve += local if last else []
        collect += _of(heads, finish)
    return ((*start, *receive), tuple(serve), (*collect, *left))


def _exchange(tag: int, heads: Heads, sides: Sides) -> tuple[list[Op], list[Op]]:
    """How an exchange starts and ends, for some heads; nothing where nothing moves."""
    pack = [
        tuple(
            (peer, tuple(_some(heads, b) for b in blocks))
            for peer, blocks in side.items()
            if blocks
        )
        for side in sides
    ]
    return ([Post(tag, pack[0], pack[1])], [Wait(tag)]) if any(pack) else ([], [])


def _some(heads: Heads, block: Block) -> Block:
    return block._replace(head=heads[0], heads=heads[1])


def _of(heads: Heads, ops: Iterable[Op]) -> list[Op]:
    """Tasks and folds of all heads, for some of them."""
    cut: list[Op] = []
    for op in ops:
        if isinstance(op, Fold):
            parts = tuple(_some(heads, part) for part in op.parts)
            cut.append(Fold(_some(heads, op.into), parts, op.how))
        elif isinstance(op, Attend):
            cut.append(Attend(*(_some(heads, block) for block in op)))
        elif isinstance(op, AttendGrad):
            cut.append(AttendGrad(*(_some(heads, block) for block in op)))
    return cut
