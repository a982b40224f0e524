"""Half-open token ranges `(start, stop)`: the small arithmetic that planners share.

Layer: planning.
"""

from collections.abc import Iterable

Range = tuple[int, int]


def length(interval: Range) -> int:
    """Tokens in the range; 0 when it is empty or reversed."""
    return max(0, interval[1] - interval[0])


def intersect(a: Range, b: Range) -> Range | None:
    """The common part of two ranges, or `None` when they share no token."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, disjoint ranges that cover the same tokens; ranges that touch become one."""
    merged: list[Range] = []
    for start, stop in sorted(r for r in ranges if length(r)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract(whole: Range, holes: Iterable[Range]) -> tuple[Range, ...]:
    """What is left of `whole` once every token of `holes` is taken out, in order."""
    left: list[Range] = []
    start = whole[0]
    for hole in union(holes):
        if start < min(hole[0], whole[1]):
            left.append((start, min(hole[0], whole[1])))
        start = max(start, hole[1])
    if start < whole[1]:
        left.append((start, whole[1]))
    return tuple(left)
