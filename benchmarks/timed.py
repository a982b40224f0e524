"""Ways to attend -> seconds of one layer on these ranks: real messages, timed compute.

Eight ranks cannot compute at once on a few cores, but they can sleep: a task takes
its score entries' seconds, and everything else is what training does, on arrays of real size:
plans, packing, messages, waits, merges and sums. Letters: H query heads, K key/value heads, D head
size.
"""

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.public_ring import PublicRing
from hf_longctx.comm.channels import Channel, sent_over_all
from hf_longctx.comm.topology import LinkRate, probe
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import Plan, make_plan
from hf_longctx.planning.predict.predict import BACKWARD, entries
from hf_longctx.planning.program.counts import Widths, sent
from hf_longctx.planning.program.program import HomeArray, Program
from hf_longctx.runtime.executor import Execution, drive
from hf_longctx.verify.cost_profile import keep_pages
from hf_longctx.verify.rank_pool import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a layer's ranks attend.

    Args:
        algorithm (`str`): Of the plan.
        ulysses_size (`int`, *optional*, defaults to 1): Ranks of a domain that exchange heads.
        public (`bool`, *optional*): Of `ring`: as public implementations run it; see `PublicRing`.
        flat (`bool`, *optional*): The layout knows of no domains.
    """

    algorithm: str
    ulysses_size: int = 1
    public: bool = False
    flat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Documents on nested domains of ranks, and the sizes of their rows.

    Args:
        levels (`Levels`): The domains.
        lengths (`tuple[int, ...]`): Tokens of each document.
        heads (`int`): H.
        kv_heads (`int`): K.
        head_dim (`int`): D; values have it, too. All are bfloat16.
    """

    levels: Levels
    lengths: tuple[int, ...]
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def kind(self) -> LayerKind:
        """The layer."""
        return LayerKind(
            query_width=self.heads * self.head_dim,
            key_value_width=2 * self.kv_heads * self.head_dim,
            kv_heads=self.kv_heads,
            heads=self.heads,
        )

    @property
    def widths(self) -> Widths:
        """Its rows."""
        size, dim = (self.heads, self.kv_heads), self.head_dim
        return Widths(heads=size[0], kv_heads=size[1], head_dim=dim, value_dim=dim, itemsize=2)

    def layout(self, *, flat: bool = False) -> Layout:
        """Documents in zigzag, within the domains that hold them unless it is `flat`."""
        levels = None if flat else self.levels
        return cut(self.lengths, ranks=self.levels.ranks, layout="zigzag", levels=levels)

    @property
    def chunk_bytes(self) -> int:
        """Keys and values of a rank, if all have equally many."""
        return sum(self.lengths) // self.levels.ranks * self.widths.row("kv")

    def plan(self, way: Way) -> Plan:
        """The plan of a way."""
        made = make_plan(
            self.layout(flat=way.flat),
            kind=self.kind,
            options=PlanOptions(
                algorithm=way.algorithm, topology=self.levels, ulysses_size=way.ulysses_size
            ),
        )
        return (
            PublicRing(**{f.name: getattr(made, f.name) for f in fields(made)})
            if way.public
            else made
        )


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one rank found.

    Args:
        seconds (`dict[str, list[list[tuple[float, float]]]]`): By way, point and round: of forward
            and of backward.
        sent (`dict[str, int]`): By way: bytes that its channels counted in one layer.
        planned (`dict[str, int]`): By way: bytes that its program sends in one layer.
        carried (`dict[str, int]`): By way: bytes that left through the interface `cross` meanwhile,
            headers and acknowledgements included; 0 where there is none.
        rates (`tuple[LinkRate, ...]`): Of each level, as the probe of a trainer finds them.
        allocator (`str`): What became of freed memory.
    """

    seconds: dict[str, list[list[tuple[float, float]]]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    carried: dict[str, int] = field(default_factory=dict)
    rates: tuple[LinkRate, ...] = ()
    allocator: str = ""


class TimedExecution(Execution):
    """One direction of a program whose tasks sleep.

    Args:
        program (`Program`): This rank's program.
        case (`Case`): Its layer.
        entry_seconds (`float`): Of one score entry in forward.
        backward (`bool`): Which direction.
        channel (`Channel`): Between the ranks.
    """

    def __init__(
        self,
        program: Program,
        *,
        case: Case,
        entry_seconds: float,
        backward: bool,
        channel: Channel,
    ) -> None:
        super().__init__(
            program, widths=case.widths, dtype=torch.bfloat16, backward=backward, channel=channel
        )
        each = entry_seconds * (BACKWARD if backward else 1.0)
        work = entries(program, kind=case.kind, backward=backward)
        self._task_seconds: Iterator[float] = iter((work * each).tolist())
        self._overslept = 0.0
        for array in HomeArray:
            for tensor in self.fields(array).values():
                tensor.zero_()

    def _attend(self, step: Any) -> None:
        """Sleep as long as the tasks take, less what the last sleep took too long."""
        seconds = sum(next(self._task_seconds) for _ in range(step.tasks)) - self._overslept
        began = time.perf_counter()
        if seconds > 0:
            time.sleep(seconds)
        self._overslept = time.perf_counter() - began - seconds


def time_ways(
    context: RankContext,
    *,
    case: Case,
    ways: Mapping[str, Way],
    points: Sequence[float],
    rounds: Sequence[int],
) -> Measured:
    """Run every way at every point, in turn; the job of one rank.

    Args:
        context (`RankContext`): With as many channels as the levels need.
        case (`Case`): What is attended to.
        ways (`Mapping[str, Way]`): By name.
        points (`Sequence[float]`): Seconds of a score entry.
        rounds (`Sequence[int]`): Of every way at each point.
    """
    found = Measured(rates=probe(context.channel, case.levels), allocator=keep_pages())
    programs = {name: case.plan(way).program(context.rank) for name, way in ways.items()}
    for name, program in programs.items():
        _count(context.channel, name, program, case, found)
    gc.disable()
    for number, point in enumerate(points):
        if context.rank == 0:
            print(f"point {number + 1} of {len(points)}", file=sys.stderr)
        for _ in range(rounds[number]):
            for name, program in programs.items():
                each = found.seconds.setdefault(name, [])
                if len(each) == number:
                    each.append([])
                forward, backward = (
                    _time(program, case, point, channel=context.channel, backward=b)
                    for b in (False, True)
                )
                each[number].append((forward, backward))
                gc.collect(0)
    gc.enable()
    return found


def _time(
    program: Program, case: Case, entry_seconds: float, *, channel: Channel, backward: bool
) -> float:
    """Seconds of one direction from when all ranks were ready."""
    run = TimedExecution(
        program, case=case, entry_seconds=entry_seconds, backward=backward, channel=channel
    )
    channel.agree(0, what="that all are ready")
    started = time.perf_counter()
    drive(run.phase(0), run.account)
    return time.perf_counter() - started


def _count(channel: Channel, name: str, program: Program, case: Case, found: Measured) -> None:
    """Run a way once, untimed, and count its bytes."""
    channel.agree(0, what="that all are ready")
    before, carried = sent_over_all(channel), carried_bytes()
    for backward in (False, True):
        _time(program, case, 0.0, channel=channel, backward=backward)
    channel.agree(0, what="that all are done")
    found.sent[name] = sent_over_all(channel) - before
    found.carried[name] = carried_bytes() - carried
    found.planned[name] = sum(
        sum(sent(program, case.widths, backward=b).values()) for b in (False, True)
    )


def carried_bytes() -> int:
    """Bytes that have left through the interface `cross` of this network namespace; 0 without."""
    counts = Path("/proc/self/net/dev")
    for line in counts.read_text().splitlines() if counts.exists() else []:
        device, _, numbers = line.partition(":")
        if device.strip() == "cross":
            return int(numbers.split()[8])
    return 0
