"""Head groups of blocks -> heads of their fields, and the heads that an array keeps.

Floor: plan. A program counts heads in equal groups of query heads: as many as there are key/value
heads, or more, of which several then have a key/value head in common. Letters: H query heads, K
key/value heads.
"""

from functools import lru_cache

import numpy as np

from .program import HOME, Program

Heads = tuple[int, int]  # first group, groups; (0, 0) for every head


def heads_in(heads: Heads, *, groups: int, of: int) -> tuple[int, int]:
    """Which heads `[first, stop)` of a field of `of` heads belong to these groups, out of `groups`.

    Args:
        heads (`Heads`): First group, and how many; all where that is 0.
        groups (`int`): Head groups altogether.
        of (`int`): H or K, heads of the field.
    """
    first, count = heads
    return (first * of // groups, -(-(first + count) * of // groups)) if count else (0, of)


@lru_cache(maxsize=256)
def kept_heads(program: Program) -> tuple[Heads, ...]:
    """The groups of each array that blocks name, which is what it keeps; of a rank's own rows, all.

    A memo of a pure function, keyed by identity.
    """
    array, _, _, head, heads = program.blocks[:, 3:].T
    arrays = len(program.arrays)
    first, stop = np.full(arrays, np.iinfo(np.int32).max), np.zeros(arrays, np.int32)
    np.minimum.at(first, array, head)
    np.maximum.at(stop, array, head + heads)
    whole = np.arange(arrays) < len(HOME)
    whole[array[heads == 0]] = True
    first[whole | (stop == 0)] = stop[whole] = 0
    return tuple(zip(first.tolist(), (stop - first).tolist(), strict=True))
