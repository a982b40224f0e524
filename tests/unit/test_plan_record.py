"""Plans are those of the record: no operation, block, peer or byte of a random batch's changes."""

from __future__ import annotations

from random import Random

from plan_cases import cases
from plan_record import SEED, Op, Read, differences, entry, load, stream

NOTHING = (("", ""), (0, 0))


def test_plans_are_those_of_the_record() -> None:
    record = load()
    assert len(record) >= 240
    found = differences(record, [{"plan": entry(kept["case"])} for kept in record])
    assert not found, f"{len(found)} of {len(record)} plans differ:\n" + "\n".join(found[:12])


def test_the_record_is_of_the_cases_that_its_seed_gives() -> None:
    assert [kept["case"] for kept in load()] == list(cases(Random(SEED)))


def program(*, numbers: tuple[int, int, int] = (0, 6, 7), tag: int = 0, rows: int = 4) -> Read:
    """Own queries that meet keys which come in two runs, under any numbers."""
    own, keys, part = numbers
    arrays = [("x", 0)] * (max(numbers) + 1)
    arrays[own], arrays[keys], arrays[part] = ("q", rows), ("kv", 6), ("part", rows)
    held = [(own, 0, 2, 8, 12), (keys, 4, 2, 4, 6), (keys, 0, 2, 0, 4), (part, 0, 2, 8, 12)]
    ops = [
        Op("post", tag=tag, recvs=((1, [(keys, 0, 4, 0, 0), (keys, 4, 6, 0, 2)]),)),
        Op("wait", tag=tag),
        Op("attend", (("q", (own, 0, rows, 0, 0)), ("kv", (keys, 0, 6, 0, 0)))),
        Op("fold", (("into", (part, 0, rows, 1, 1)), ("part", (part, 0, rows, 1, 1))), how="lse"),
    ]
    return Read({own: "q"}, arrays, held, 2, ([ops], [[]]), *NOTHING)


def test_numbers_of_arrays_and_exchanges_do_not_matter_and_rows_do() -> None:
    plain = list(stream(program()))
    assert plain == list(stream(program(numbers=(3, 1, 9), tag=5)))
    assert plain != list(stream(program(rows=3)))
    assert plain == [
        "forward 0",
        "  a0 = kv of 6 rows 0:2[0:6]",
        "post 0 over 0 from 1: a0[0:4] a0[4:6]",
        "wait 0",
        "  q = q of 4 rows 0:2[8:12]",
        "attend  q q[0:4] kv a0[0:6]",
        "  a1 = part of 4 rows 0:2[8:12]",
        "fold lse into a1[0:4]h1+1/2 part a1[0:4]h1+1/2",
        "backward 0",
    ]


def test_differences_name_the_case_and_what_of_it() -> None:
    case = {"planner": "ring", "ranks": 2, "levels": None}
    before = {"case": case, "plan": {"each": "a b", "sent": [1, 2], "bytes": "x"}}
    assert not differences([before], [before])
    after = {"plan": {"each": "a c", "sent": [1, 3], "bytes": "x"}}
    (line,) = differences([before], [after])
    assert "case 0: programs [1] of 2; sent [1, 2] -> [1, 3]\n" in line
    assert '"planner": "ring"' in line and "levels" not in line
