"""Plans of seeded random batches -> a form that survives renames and renumbering, to be compared.

    python tests/plan_record.py            what differs from the record
    python tests/plan_record.py --dump 17  the operations of one case, to be diffed between commits
    python tests/plan_record.py --write    record anew: only where plans were meant to change

A case is plain JSON: whatever plans it is told so by the adapter below, the only part of this file
that knows a name of the package. Arrays and exchanges are numbered as operations first name them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

RECORD = Path(__file__).parent / "data" / "plans_0f7a96e.json"
SEED = 20240
DIRECTIONS = ("forward", "backward")
# A fixed measured table: small pieces are slow, and a grid that most tasks lie between.
COSTS = {
    "rows": [16, 128, 1024], "keys": [16, 256, 4096], "tile": 16,
    "per_entry": [[9e-8, 5e-8, 3e-8], [4e-8, 2e-8, 1.5e-8], [2e-8, 1e-8, 0.5e-8]],
}  # fmt: skip
HEAD_DIM, VALUE_DIM, STATE = 4, 6, 2  # of the widths that bytes are counted for
Case = dict[str, Any]
Block = tuple[int, int, int, int, int]  # array, first row, end, first head group, groups (0: all)
Message = tuple[int, list[Block]]  # peer, blocks


class Op(NamedTuple):
    """An operation in the record's own words: `post`, `wait`, `attend`, `attend_grad` or
    `fold`; what it names in order, under the record's words for its roles."""

    kind: str
    blocks: tuple[tuple[str, Block], ...] = ()
    tag: int = -1
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    after: int = -1
    channel: int = 0
    how: str = ""  # of a fold


class Read(NamedTuple):
    """One process's program. `own`: the arrays that a layer binds, by number."""

    own: dict[int, str]
    arrays: list[tuple[str, int]]  # kind, rows
    held: list[tuple[int, int, int, int, int]]  # array, row, document, start, stop
    groups: int  # head groups
    phases: tuple[list[list[Op]], list[list[Op]]]
    costs: tuple[str, str]  # of each direction: bytes by channel and peer, and peaks
    sent: tuple[int, int]  # bytes of each direction


class Part(NamedTuple):
    """One plan of a case: a batch's, or that of one of its halves."""

    name: str
    lengths: list[int]
    segments: list[list[int]]  # rank, row, document, start, stop
    programs: dict[int, Read | None]


# --- The adapter: all that knows names of the package. ------------------------------------------
from hf_longctx.planning.layouts.cost import CostTable, LayerKind  # noqa: E402
from hf_longctx.planning.layouts.layout import Layout, cut, halve  # noqa: E402
from hf_longctx.planning.layouts.levels import Levels  # noqa: E402
from hf_longctx.planning.planners import state_scan  # noqa: E402
from hf_longctx.planning.planners.options import PlanOptions  # noqa: E402
from hf_longctx.planning.planners.plan import make_plan  # noqa: E402
from hf_longctx.planning.planners.state_scan import HaloArray  # noqa: E402
from hf_longctx.planning.program.counts import (  # noqa: E402
    Widths,
    message_peak_bytes,
    peak_bytes,
    sent_by_channel,
)
from hf_longctx.planning.program.operations import (  # noqa: E402
    Attend,
    AttendGrad,
    Fold,
    Post,
    Wait,
)
from hf_longctx.planning.program.program import Program, ScanArray  # noqa: E402

# Which arrays of a program a layer binds, and the record's word for each.
OWN = {
    "attention": dict(enumerate(("q", "kv", "out", "grad", "dq", "dkv"))),
    "scan": {
        ScanArray.SUMMARY: "summary", ScanArray.DECAY: "decay", ScanArray.ENTERING: "entering",
        ScanArray.GRAD: "grad", ScanArray.DECAY_T: "decay_t",
        ScanArray.LEAVING_GRAD: "leaving_grad",
    },
    "halo": {
        HaloArray.TAIL: "tail", HaloArray.HALO: "halo", HaloArray.TAIL_GRAD: "tail_grad",
        HaloArray.HALO_GRAD: "halo_grad", HaloArray.RETURNED: "returned",
    },
}  # fmt: skip
# The package's words for kinds of arrays, folds and layouts, where they differ from the record's.
KINDS: dict[str, str] = {}
FOLDS: dict[str, str] = {}


def _op(op: Any) -> Op:
    match op:
        case Post():
            sends, recvs = (
                tuple((peer, [tuple(b) for b in blocks]) for peer, blocks in side)
                for side in (op.sends, op.recvs)
            )
            return Op("post", (), op.tag, sends, recvs, op.after, op.channel)
        case Wait():
            return Op("wait", tag=op.tag)
        case Attend():
            return Op("attend", _roles(op, "q", "kv", "into"))
        case AttendGrad():
            return Op("attend_grad", _roles(op, "q", "kv", "grad", "dq", "dkv"))
        case Fold():
            parts = tuple(("part", tuple(block)) for block in op.parts)
            return Op("fold", (("into", tuple(op.into)), *parts), how=FOLDS.get(op.how, op.how))
    raise TypeError(op)


def _roles(op: Any, *roles: str) -> tuple[tuple[str, Block], ...]:
    return tuple((role, tuple(getattr(op, role))) for role in roles)


def _read(program: Program | None, family: str, widths: Widths) -> Read | None:
    if program is None:
        return None
    costs, sent = [], []
    for backward in (False, True):
        channels = sent_by_channel(program, widths, backward=backward)
        by = {c: dict(sorted(peers.items())) for c, peers in sorted(channels.items())}
        peaks = (f(program, widths, backward=backward) for f in (peak_bytes, message_peak_bytes))
        costs.append(f"sent {by} peak {next(peaks)} messages {next(peaks)}")
        sent.append(sum(sum(peers.values()) for peers in channels.values()))
    kinds = [KINDS.get(kind, kind) for kind in program.kinds]
    return Read(
        OWN[family],
        list(zip(kinds, program.rows, strict=True)),
        [tuple(row) for row in program.held.tolist()],
        int(program.head_groups[0]) or widths.kv_heads,
        tuple([list(map(_op, p)) for p in way] for way in (program.forward, program.backward)),
        tuple(costs),
        tuple(sent),
    )


def _layout(case: Case) -> Layout:
    if "edges" in case:  # shards end to end of any size, also without a token
        columns, bounds = [], [0]
        for length in case["lengths"]:
            bounds.append(bounds[-1] + length)
        for rank, (low, high) in enumerate(pairwise(case["edges"])):
            row = 0
            for document, (start, stop) in enumerate(pairwise(bounds)):
                first, last = max(low, start), min(high, stop)
                if first < last:
                    columns.append((rank, row, document, first - start, last - start))
                    row += last - first
        table = np.asarray(columns, np.int32).reshape(-1, 5)
        return Layout(np.asarray(case["lengths"], np.int32), len(case["edges"]) - 1, table)
    levels = Levels(tuple(case["levels"])) if case.get("levels") else None
    given = {"ranks": case["ranks"], "layout": case["layout"]}
    return cut(case["lengths"], **given, odd=case.get("odd", 0), levels=levels)


def build(case: Case) -> list[Part]:
    """The plans of a case, every process's program read into the record's words."""
    family = case["family"]
    heads, kv_heads = case.get("heads", 4), case.get("kv_heads", 4)
    widths = Widths(
        heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, value_dim=VALUE_DIM, state=STATE,
        itemsize=2,
    )  # fmt: skip
    if family != "attention":
        layout = _layout(case)
        programs: dict[int, Program | None] = {}
        for rank in case.get("kept") or range(layout.ranks):
            if family == "halo":
                programs[rank] = state_scan.halo_program(layout, rank=rank, width=case["width"])
            else:
                state = state_scan.State(STATE, case["decay"])
                given = {"schedule": case["schedule"], "pieces": case["pieces"]}
                programs[rank] = state_scan.scan_program(layout, rank=rank, state=state, **given)
        return [_part("whole", layout, programs, family, widths)]
    kind = LayerKind(
        window=case["window"],
        causal=case["causal"],
        query_width=heads * HEAD_DIM,
        key_value_width=kv_heads * (HEAD_DIM + VALUE_DIM),
        kv_heads=kv_heads,
        heads=heads,
    )
    if case["overlap"] == "pingpong":
        halves = halve(case["lengths"], ranks=case["ranks"], layout=case["layout"])
        layouts = {"first": halves.parts[0], "second": halves.parts[1]} if halves else {}
        parts = [_part("whole", halves.whole if halves else _layout(case), {}, family, widths)]
    else:
        layouts, parts = {"whole": _layout(case)}, []
    for name, layout in layouts.items():
        made = make_plan(
            layout,
            kind=kind,
            options=PlanOptions(
                algorithm=case["planner"],
                tolerance=float("inf") if case["tolerance"] is None else case["tolerance"],
                speeds=tuple(case["speeds"]),
                overlap="heads" if case["overlap"] == "heads" else "none",
                costs=CostTable.from_json(json.dumps(COSTS)) if case["costs"] else None,
                topology=Levels(tuple(case["levels"])) if case["levels"] else None,
                ulysses_size=case["ulysses_size"],
            ),
        )
        kept = {p: made.program(p) for p in case.get("kept") or range(made.processes)}
        parts.append(_part(name, layout, kept, family, widths))
    return parts


def _part(name: str, layout: Layout, programs: dict[int, Any], family: str, widths: Widths) -> Part:
    read = {process: _read(program, family, widths) for process, program in programs.items()}
    return Part(name, layout.lengths.tolist(), layout.columns.tolist(), read)


# --- The end of the adapter. --------------------------------------------------------------------


def stream(read: Read | None) -> Iterator[str]:
    """The lines of one program: each array as it is first named, and each operation."""
    if read is None:
        yield "no program"
        return
    held: dict[int, list[list[int]]] = {}
    for array, row, document, start, stop in sorted(read.held):
        runs = held.setdefault(array, [])
        if runs and runs[-1][1] == document and runs[-1][3] == start and (
            runs[-1][0] + runs[-1][3] - runs[-1][2] == row
        ):  # fmt: skip
            runs[-1][3] = stop
        elif start < stop:
            runs.append([row, document, start, stop])
    names: dict[int, str] = {}
    numbered = 0

    def named(block: Block) -> Iterator[str]:
        """The line that says what an array is, the first time."""
        nonlocal numbered
        array = block[0]
        if array not in names:
            names[array] = read.own.get(array, f"a{numbered}")
            numbered += array not in read.own
            kind, rows = read.arrays[array]
            runs = " ".join(f"{r}:{d}[{a}:{b}]" for r, d, a, b in held.get(array, []))
            yield f"  {names[array]} = {kind} of {rows} rows {runs}"

    def shown(block: Block) -> str:
        array, start, stop, head, heads = block
        whole = not heads or (head, heads) == (0, read.groups)
        part = "" if whole else f"h{head}+{heads}/{read.groups}"
        return f"{names[array]}[{start}:{stop}]{part}"

    for direction, phases in zip(DIRECTIONS, read.phases, strict=True):
        tags: dict[int, int] = {}
        for number, phase in enumerate(phases):
            yield f"{direction} {number}"
            for op in phase:
                messages = [b for _, blocks in (*op.sends, *op.recvs) for b in blocks]
                for block in (*messages, *(b for _, b in op.blocks)):
                    yield from named(block)
                if op.kind == "post":
                    tag = tags.setdefault(op.tag, len(tags))
                    after = f" after {tags[op.after]}" if op.after >= 0 else ""
                    sides = [
                        f" {word} {peer}: {' '.join(map(shown, blocks))}"
                        for word, side in (("to", op.sends), ("from", op.recvs))
                        for peer, blocks in side
                    ]
                    yield f"post {tag} over {op.channel}{after}{''.join(sides)}"
                elif op.kind == "wait":
                    yield f"wait {tags[op.tag]}"
                else:
                    blocks = " ".join(f"{role} {shown(b)}" for role, b in op.blocks)
                    yield f"{op.kind} {op.how} {blocks}"


def counts(read: Read | None) -> Counter[str]:
    """Operations by kind, folds by how."""
    ops = (op for way in read.phases for phase in way for op in phase) if read else ()
    return Counter(f"fold {op.how}" if op.kind == "fold" else op.kind for op in ops)


def lines(case: Case) -> Iterator[str]:
    """A case as text: layouts, and every program's operations and costs."""
    for part in build(case):
        yield f"plan of {part.name}: lengths {part.lengths}"
        yield from (f"segment {segment}" for segment in part.segments)
        for process, read in part.programs.items():
            yield f"process {process}"
            yield from stream(read)
            if read:
                yield from map(": ".join, zip(DIRECTIONS, read.costs, strict=True))


def _hash(text: list[str], size: int = 64) -> str:
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:size]


def entry(case: Case) -> dict[str, Any]:
    """What the record keeps of a case beside its parameters."""
    layouts, streams, each, costs = [], [], [], []
    total, sent = Counter[str](), [0, 0]
    for part in build(case):
        layouts += [part.name, str(part.lengths), *map(str, part.segments)]
        for process, read in part.programs.items():
            text = list(stream(read))
            streams += [f"{part.name} {process}", *text]
            each.append(_hash(text, 8))
            total += counts(read)
            if read:
                costs += [f"{part.name} {process}", *read.costs]
                sent = [a + b for a, b in zip(sent, read.sent, strict=True)]
    return {
        "layout": _hash(layouts, 16),
        "operations": _hash(streams),
        "each": " ".join(each),
        "bytes": _hash(costs, 16),
        "sent": sent,
        "counts": dict(sorted(total.items())),
    }


def differences(record: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """What of the record's cases is otherwise now, one line for each case."""
    found = []
    for number, (before, after) in enumerate(zip(record, now, strict=True)):
        words = []
        for key in before["plan"]:
            was, became = before["plan"][key], after["plan"][key]
            if was != became and key == "each":
                pairs = zip(was.split(), became.split(), strict=False)
                ranks = [at for at, (a, b) in enumerate(pairs) if a != b]
                words.append(f"programs {ranks} of {len(was.split())}")
            elif was != became:
                short = key in ("sent", "counts")
                words.append(f"{key} {was} -> {became}" if short else key)
        if words:
            case = {k: v for k, v in before["case"].items() if v not in (None, False, [], "none")}
            found.append(f"case {number}: {'; '.join(words)}\n    of {json.dumps(case)}")
    return found


def load() -> list[dict[str, Any]]:
    """The record: cases with what was planned for them."""
    return json.loads(RECORD.read_text())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dump", type=int, metavar="CASE")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.write:
        from plan_cases import cases

        written = [{"case": case, "plan": entry(case)} for case in cases(Random(SEED))]
        body = ",\n".join(json.dumps(x, separators=(",", ":")) for x in written)
        RECORD.write_text(f"[\n{body}\n]\n")
    elif asked.dump is not None:
        sys.stdout.writelines(f"{line}\n" for line in lines(load()[asked.dump]["case"]))
    else:
        record = load()
        now = [{"plan": entry(x["case"])} for x in record]
        sys.stdout.writelines(f"{line}\n" for line in differences(record, now) or ["no difference"])


if __name__ == "__main__":
    main()
