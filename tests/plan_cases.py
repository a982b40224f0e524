"""A seed -> the random batches whose plans `plan_record` keeps; nothing of the package is used."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any

Case = dict[str, Any]
LAYOUTS = ("contiguous", "zigzag", "spread")
NESTED = {  # levels -> sizes, outermost first
    1: [[2], [3], [4], [5], [7], [8], [9]],
    2: [[2, 2], [2, 3], [3, 2], [2, 4], [4, 2], [3, 3], [1, 3], [3, 1]],
    3: [[2, 2, 2], [2, 1, 3], [1, 2, 3], [2, 2, 1]],
}


SHAPES = ("one", "short", "mixed", "mixed", "mixed", "equal", "long and short")


def lengths(draw: Random, *, scale: int, shapes: tuple[str, ...] = SHAPES) -> list[int]:
    """Documents: one long, many short, all sizes, or equal ones; often with some of one token."""
    shape = draw.choice(shapes)
    if shape == "one":
        made = [draw.randint(scale, 8 * scale)]
    elif shape == "short":
        made = [draw.randint(1, max(2, scale // 8)) for _ in range(draw.randint(6, 24))]
    elif shape == "equal":
        made = [draw.randint(1, 2 * scale)] * draw.randint(1, 9)
    elif shape == "long and short":
        made = [draw.randint(4 * scale, 12 * scale)]
        made += [draw.randint(1, max(2, scale // 4)) for _ in range(draw.randint(2, 12))]
        draw.shuffle(made)
    else:
        made = [int(2 ** draw.uniform(0, 12) * scale / 700) + 1 for _ in range(draw.randint(2, 12))]
    for _ in range(draw.choice((0, 0, 1, 3))):
        made.insert(draw.randint(0, len(made)), 1)
    return made


def attention(draw: Random, planner: str, *, ranks: int, scale: int, **given: Any) -> Case:
    """A case of the attention planners."""
    heads, kv_heads = draw.choice(((1, 1), (4, 4), (4, 2), (6, 3), (8, 1), (10, 5)))
    case = {
        "family": "attention",
        "planner": planner,
        "lengths": lengths(draw, scale=scale),
        "ranks": ranks,
        "layout": draw.choice(LAYOUTS),
        "odd": draw.choice((0, 0, 1, 5)),
        "window": draw.choice((0, 0, 0, 1, draw.randint(2, 60), draw.randint(61, 2 * scale + 62))),
        "causal": draw.random() < 0.7,
        "heads": heads,
        "kv_heads": kv_heads,
        "tolerance": 0.05,
        "speeds": [],
        "overlap": "none",
        "costs": False,
        "levels": None,
        "ulysses_size": 1,
    }
    return case | given


def cases(draw: Random) -> Iterator[Case]:
    """Every case, in the record's order."""
    yield from balanced(draw)
    yield from rings(draw)
    yield from charms(draw)
    yield from shared_heads(draw)
    yield from many_ranks(draw)
    yield from states(draw)


def balanced(draw: Random) -> Iterator[Case]:
    """distca: in place, with servers, by measured costs, overlapped, as halves."""

    def some(count: int, **given: Any) -> Iterator[Case]:
        for _ in range(count):
            ranks, scale = draw.randint(1, 9), draw.choice((60, 700, 700, 3000))
            tolerance = draw.choice((0.0, 0.01, 0.05, 0.05, 0.2, 0.5))
            made = {key: value() if callable(value) else value for key, value in given.items()}
            spec: Any = {"ranks": ranks, "scale": scale, "tolerance": tolerance} | made
            yield attention(draw, "distca", **spec)

    def speeds() -> list[float]:
        return [draw.choice((0.25, 0.5, 1.0, 2.0, 3.0)) for _ in range(draw.randint(1, 3))]

    def multihead() -> int:
        return draw.choice((2, 3, 5))

    yield from some(26)
    yield from some(12, layout="contiguous", scale=3000, tolerance=0.0)  # keys are cut most
    yield from some(4, tolerance=None)
    yield from some(20, speeds=speeds)
    yield from some(12, costs=True)
    yield from some(6, costs=True, speeds=speeds)
    for overlapped in some(14, overlap="heads", scale=3000, kv_heads=multihead):
        yield overlapped | {"heads": 2 * overlapped["kv_heads"]}
    for overlapped in some(6, overlap="heads", speeds=speeds, kv_heads=multihead):
        yield overlapped | {"heads": 2 * overlapped["kv_heads"]}

    def documents() -> list[int]:
        return lengths(draw, scale=700, shapes=("mixed", "short", "mixed", "equal"))

    yield from some(14, overlap="pingpong", lengths=documents)
    yield from some(6, overlap="pingpong", lengths=documents, speeds=speeds)
    for _ in range(4):  # rank 0 exchanges nothing, and a server is told all the same
        yield attention(draw, "distca", ranks=2, scale=1, **aside(draw))


def aside(draw: Random) -> Case:
    """Rank 0 has the work that is its share, and a server takes what rank 1 has above its own."""
    n = draw.randint(2000, 6000)
    documents = [n, n, round(1.707 * n), 2 * n - round(1.707 * n)]
    given = {"lengths": documents, "layout": "contiguous", "odd": 0, "speeds": [0.5], "window": 0}
    return given | {"causal": True}


def rings(draw: Random) -> Iterator[Case]:
    """ring: every layout, flat, and zigzag over nested domains."""
    for number in range(30):
        given = {"ranks": 1 + number % 9, "layout": LAYOUTS[number % 3]}
        yield attention(draw, "ring", scale=draw.choice((30, 300)), **given)
    for _ in range(6):
        levels = draw.choice(NESTED[2])
        given = {"levels": levels, "layout": "zigzag", "ranks": prod(levels)}
        yield attention(draw, "ring", scale=100, **given)


def charms(draw: Random) -> Iterator[Case]:
    """charm: one, two and three levels; heads with which backward brings keys, and queries."""
    for number in range(48):
        levels = draw.choice(NESTED[1 + number % 3])
        heads, kv_heads = draw.choice(((4, 4), (2, 2), (8, 1), (6, 2), (1, 1)))
        given = {"levels": levels, "ranks": prod(levels), "heads": heads, "kv_heads": kv_heads}
        yield attention(draw, "charm", scale=draw.choice((30, 200, 600)), **given)
    yield attention(draw, "charm", ranks=4, scale=100)  # without a topology


def shared_heads(draw: Random) -> Iterator[Case]:
    """Heads exchanged by all ranks, or within domains with a ring or charm between them."""
    heads = [(4, 4), (4, 1), (9, 3), (28, 4), (12, 2), (8, 8), (6, 6), (5, 5)]
    for number in range(24):
        shared, kv_heads = heads[number % len(heads)]
        fits = [r for r in range(1, 10) if r <= kv_heads or shared % r == 0]
        given = {"heads": shared, "kv_heads": kv_heads, "ranks": draw.choice(fits)}
        yield attention(draw, "ulysses", scale=draw.choice((30, 300)), **given)
    for number in range(36):
        planner = ("ulysses", "ring", "charm")[number % 3]
        size = draw.choice((2, 2, 3, 4))
        outside = draw.choice(([1], [2], [3], [2, 2], [2], [3]) if size < 4 else ([1], [2], [2, 1]))
        levels = draw.choice(([*outside, size], [*outside[:-1], outside[-1] * size]))
        shared, kv_heads = {2: (4, 2), 3: (6, 3), 4: (8, draw.choice((2, 4)))}[size]
        if draw.random() < 0.3:
            kv_heads = 1
        given = {"levels": levels, "ranks": prod(levels), "ulysses_size": size}
        given |= {"heads": shared, "kv_heads": kv_heads}
        yield attention(draw, planner, scale=draw.choice((30, 200)), **given)


def many_ranks(draw: Random) -> Iterator[Case]:
    """Groups of 16 to 64 ranks, of which some programs are kept."""
    for planner, ranks, more in (
        ("distca", 16, {}),
        ("distca", 32, {"overlap": "heads", "heads": 8, "kv_heads": 4}),
        ("distca", 64, {}),
        ("distca", 64, {"speeds": [1.0, 0.5, 2.0]}),
        ("ring", 16, {}),
        ("ring", 32, {}),
        ("charm", 16, {"levels": [2, 8]}),
        ("charm", 32, {"levels": [2, 4, 4]}),
        ("charm", 16, {"levels": [4, 4], "ulysses_size": 4, "heads": 8, "kv_heads": 4}),
        ("ulysses", 16, {"heads": 16, "kv_heads": 4}),
        ("ulysses", 32, {"ulysses_size": 4, "heads": 8, "kv_heads": 8}),
        ("ulysses", 48, {"heads": 48, "kv_heads": 48}),
    ):
        few = {"distca": ranks // 2, "ulysses": 6}.get(planner, 2 * ranks)
        documents = [3000] + [int(2 ** draw.uniform(0, 10)) for _ in range(few)]
        kept = sorted({0, 1, ranks // 2 - 1, ranks // 2, ranks - 1} | {draw.randrange(ranks)})
        kept += range(ranks, ranks + len(more.get("speeds", ())))
        given = {"lengths": documents, "kept": kept, **more}
        yield attention(draw, planner, ranks=ranks, scale=1, **given)


def states(draw: Random) -> Iterator[Case]:
    """Scans of recurrent states, and halos of short convolutions."""
    for number in range(48):
        schedule = ("chain", "tree", "allgather", "serial")[number % 4]
        yield shards(draw, long=draw.random() < 0.6) | {
            "family": "scan",
            "schedule": schedule,
            "decay": draw.choice(("head", "row", "matrix")),
            "pieces": draw.randint(1, 4) if schedule == "chain" else 1,
        }
    for schedule, ranks in (("chain", 64), ("tree", 64), ("serial", 32), ("allgather", 24)):
        kept = sorted({0, 1, 2, ranks // 2, ranks - 2, ranks - 1})
        yield {
            "family": "scan", "lengths": [2, 3 * ranks - 2], "ranks": ranks,
            "layout": "contiguous", "schedule": schedule, "decay": "row",
            "pieces": 2 if schedule == "chain" else 1, "kept": kept,
        }  # fmt: skip
    for _ in range(20):
        yield shards(draw, long=draw.random() < 0.6) | {
            "family": "halo",
            "width": draw.randint(1, 9),
        }


def shards(draw: Random, *, long: bool) -> Case:
    """Documents end to end over up to nine ranks, in equal shards or in any, some of them empty."""
    documents = [draw.randint(1, 20) for _ in range(draw.randint(1, 6))]
    documents[draw.randrange(len(documents))] += 60 * long
    total, ranks = sum(documents), draw.randint(2, 9)
    if draw.random() < 0.5:
        return {"lengths": documents, "ranks": ranks, "layout": "contiguous"}
    inner = sorted(draw.randint(0, total) for _ in range(ranks - 1))
    return {"lengths": documents, "ranks": ranks, "edges": [0, *inner, total]}
