"""Compute with half-open ranges `(start, stop)` of tokens or rows.

Planners speak of runs of tokens everywhere: which of them a rank holds, needs, sends. These few
functions are all the arithmetic on them, for single ranges and for sets of ranges.
Layer: planning.
"""

from collections.abc import Iterable

import numpy as np

Range = tuple[int, int]
Ranges = tuple[Range, ...]  # sorted, disjoint, none of them empty


def length(interval: Range) -> int:
    """Count the tokens of a range; 0 when it is empty or reversed."""
    return max(0, interval[1] - interval[0])


def total(ranges: Ranges) -> int:
    """Count the tokens of a set."""
    return sum(map(length, ranges))


def intersect(one: Range, other: Range) -> Range | None:
    """Return the common part of two ranges, or `None` when they share no token."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the tokens that are in both sets."""
    found, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        if both := intersect(one[a], other[b]):
            found.append(both)
        # The range that ends first can meet nothing further on.
        if one[a][1] <= other[b][1]:
            a += 1
        else:
            b += 1
    return tuple(found)


def union(ranges: Iterable[Range]) -> Ranges:
    """Return the set that covers the same tokens as any ranges; those that touch become one."""
    merged: list[Range] = []
    for start, stop in sorted(r for r in ranges if length(r)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract(interval: Range, holes: Iterable[Range]) -> Ranges:
    """Return what is left of a range once every token of `holes` is taken out."""
    left: list[Range] = []
    start, stop = interval
    for hole in union(holes):
        if start < min(hole[0], stop):
            left.append((start, min(hole[0], stop)))
        start = max(start, hole[1])
    if start < stop:
        left.append((start, stop))
    return tuple(left)


def split(ranges: Ranges, parts: int) -> tuple[Ranges, ...]:
    """Cut a set, in order, into `parts` sets whose sizes differ by one token at most."""
    size, found = total(ranges), []
    for at in range(parts):
        wanted = size * at // parts, size * (at + 1) // parts
        part, before = [], 0  # `before`: tokens of the set that precede a range
        for start, stop in ranges:
            if taken := intersect(wanted, (before, before + stop - start)):
                part.append((start + taken[0] - before, start + taken[1] - before))
            before += stop - start
        found.append(tuple(part))
    return tuple(found)


def touching(
    start: np.ndarray, stop: np.ndarray, *same: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the runs of consecutive ranges that touch and may become one.

    Args:
        start, stop (`np.ndarray`): int `[n]`: ranges in order.
        same (`np.ndarray`): `[n]`: columns in which all ranges of a run agree, such as their rank.

    Returns:
        int64 `[runs]`: the index of the first range of each run, and that of its last.
    """
    apart = start[1:] != stop[:-1]
    for column in same:
        apart = apart | (column[1:] != column[:-1])
    opens = np.append(True, apart)[: len(start)]
    return np.flatnonzero(opens), np.flatnonzero(np.append(opens[1:], True)[: len(start)])
