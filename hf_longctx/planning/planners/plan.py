"""(algorithm, layout, layer kind) -> a plan: every rank's program, with a digest and the balance.

Layer: planning. Plans are pure and deterministic: each rank computes the same one, and builds only its
own program. One int64 of the digest is compared across ranks before each step.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np

from ...support import NESTED, Sharing, validate_heads
from ..layouts.cost import CostTable, LayerKind, max_over_mean
from ..layouts.layout import Layout, cut
from ..layouts.levels import Levels
from ..program.program import Program
from . import charm, ring, serve, ulysses
from .distca import balance, tasks
from .exchange import ExchangePlan
from .hierarchical_units import queries_are_lighter
from .key_splits import NO_SPLITS, Assignment, assignments, split_keys
from .rebalance import cost, cost_over, items

ALGORITHMS = ("distca", "ring", "charm", "ulysses")
OVERLAPS = ("none", "heads")
# Of heads, and of rows within: what the first one brings and the last one takes home is exposed.
_GROUPS = _PARTS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """How one batch's attention runs across the ranks, for one layer kind.

    Args:
        algorithm (`str`): One of `ALGORITHMS`.
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): The layers it is for.
        tasks (`np.ndarray`): int32 `[tasks, 5]`: the fields of `Task`; all at home but for distca.
        loans (`np.ndarray`): int32 `[loans, 4]`: the fields of `Loan`: keys of tasks that another
            than its server attends to.
        speeds (`tuple[float, ...]`, *optional*): Of each extra server, beside a rank's 1.
        overlap (`str`, *optional*): One of `OVERLAPS`.
        costs (`CostTable`, *optional*): What it balanced by; score entries without.
        topology (`Levels`, *optional*): The nested domains of the ranks: `charm` sends by them, and
            heads are exchanged over the channels of the level that a domain of theirs crosses.
        ulysses_size (`int`, *optional*): Ranks of a domain that exchange heads.
    """

    algorithm: str
    layout: Layout
    kind: LayerKind
    tasks: np.ndarray
    loans: np.ndarray
    speeds: tuple[float, ...] = ()
    overlap: str = "none"
    costs: CostTable | None = None
    topology: Levels | None = None
    ulysses_size: int = 1

    @property
    def groups(self) -> tuple[serve.HeadRange, ...]:
        """The head groups whose exchanges overlap; one of all heads where none do.

        At most four, whose sizes differ by at most one head: with one head there is nothing to cut.
        """
        count = min(self.kind.kv_heads, _GROUPS) if self.overlap == "heads" else 1
        if count == 1:
            return (serve.ALL_HEADS,)
        edges = [self.kind.kv_heads * i // count for i in range(count + 1)]
        return tuple((low, high - low) for low, high in pairwise(edges))

    @property
    def processes(self) -> int:
        """Ranks and extra servers, which are numbered after them."""
        return self.layout.ranks + len(self.speeds)

    @cached_property
    def digest(self) -> int:
        """A stable hash of everything the programs follow from, as a non-negative int64."""
        kind = (self.kind.window, self.kind.query_width, self.kind.key_value_width)
        sees = "" if self.kind.causal else " bidirectional"
        groups = self.groups if len(self.groups) > 1 else ""
        text = f"{self.algorithm} {self.layout.ranks} {kind}{sees}{self.speeds or ''}{groups}"
        text += self.costs.to_json() if self.costs else ""
        if self.topology or self.algorithm == "charm":
            text += f" {self.levels} {self.moves_queries}"
        if (heads := (self.kind.heads, self.kind.kv_heads)) != (1, 1):
            text += f" heads {heads} over {self.ulysses_size}"
        columns = [self.layout.lengths, self.layout.columns, self.tasks]
        columns += [self.loans] if len(self.loans) else []
        parts = [text.encode(), *(np.ascontiguousarray(c, "<i4").tobytes() for c in columns)]
        hashed = hashlib.blake2b(b"|".join(parts), digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> 1

    @property
    def levels(self) -> Levels:
        """The nested domains; one of all ranks where none are given."""
        return self.topology or Levels((self.layout.ranks,))

    @cached_property
    def moves_queries(self) -> bool:
        """Whether `charm`'s backward brings queries to keys, as that crosses with fewer bytes."""
        if self.algorithm != "charm":
            return False
        return queries_are_lighter(self.layout, self.kind, levels=self.levels)

    @cached_property
    def _exchange(self) -> ExchangePlan:
        views = [Assignment(*row) for row in self.shares.tolist()]
        parts = _PARTS if len(self.groups) > 1 else 1
        return ExchangePlan(
            self.layout, views, kind=self.kind, processes=self.processes, parts=parts
        )

    @cached_property
    def shares(self) -> np.ndarray:
        """int64 `[shares, 8]`: the fields of `Assignment` but `part`: what is computed where."""
        return assignments(self.layout, self.tasks, self.loans, kind=self.kind)

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    def program(self, rank: int) -> Program:
        """The program of one rank or extra server; built on first use."""
        if rank not in self._programs:
            if self.algorithm == "ulysses" or self.ulysses_size > 1:
                built = self._with_heads(rank)
            elif self.algorithm == "ring":
                built = ring.program(self.layout, rank=rank, kind=self.kind)
            elif self.algorithm == "charm":
                levels, queries = self.levels, self.moves_queries
                built = charm.program(
                    self.layout, rank=rank, kind=self.kind, levels=levels, queries=queries
                )
            else:
                built = serve.program(self._exchange, rank=rank, groups=self.groups)
            if rank == 0 and self.speeds and (self.shares[:, 4] >= self.layout.ranks).any():
                built = _in_three_phases(built)
            self._programs[rank] = built
        return self._programs[rank]

    def _with_heads(self, rank: int) -> Program:
        """Heads are exchanged in domains; `charm` goes by the levels above them."""
        size, across = self.ulysses_size, ring.program
        if self.algorithm == "charm":
            across = partial(_charm, levels=self.levels.outside(size))
        first = rank // size * size
        level = self.levels.crosses(first, first + size - 1) if size > 1 else 0
        return ulysses.program(
            self.layout, rank=rank, kind=self.kind, size=size, across=across, level=level
        )

    def work(self, *, balanced: bool) -> np.ndarray:
        """float64 `[processes]`: score entries by server, or by home when not `balanced`.

        Seconds, where the plan balanced by a cost table.
        """
        by = self.tasks[:, 4 if balanced else 3]
        document, start, stop = self.tasks[:, :3].astype(np.int64).T
        length = self.layout.lengths[document].astype(np.int64)
        each = cost(start, stop, length=length, kind=self.kind, costs=self.costs)
        work = np.bincount(by, weights=each, minlength=self.processes)
        if balanced and self.ulysses_size > 1:
            groups, members = ulysses.head_shares(self.ulysses_size, kind=self.kind)
            part = np.asarray([heads for _, heads in members]) / groups
            return (work.reshape(-1, self.ulysses_size).sum(1, keepdims=True) * part).ravel()
        if balanced and len(self.loans):
            task, server, low, high = self.loans.astype(np.int64).T
            lent = cost_over(
                start[task],
                stop[task],
                low,
                high,
                length=length[task],
                kind=self.kind,
                costs=self.costs,
            )
            work += np.bincount(server, weights=lent, minlength=self.processes)
            work -= np.bincount(self.tasks[task, 4], weights=lent, minlength=self.processes)
        return work

    def attention_max_over_mean(self, *, balanced: bool = True) -> float:
        """Attention work of the busiest rank over the mean, after or before balancing.

        Extra servers count, by their speed, only after it.
        """
        ranks, speed = self.layout.ranks, np.concatenate([np.ones(self.layout.ranks), self.speeds])
        work = self.work(balanced=balanced)
        if not balanced:
            return max_over_mean(work[:ranks])
        total = float(work.sum())
        return float((work / speed).max()) * float(speed.sum()) / total if total else 1.0


def make_plan(
    algorithm: str,
    layout: Layout,
    *,
    kind: LayerKind,
    tolerance: float = 0.05,
    speeds: tuple[float, ...] = (),
    overlap: str = "none",
    costs: CostTable | None = None,
    topology: Levels | None = None,
    ulysses_size: int = 1,
) -> Plan:
    """Plan one batch.

    Args:
        algorithm (`str`): `distca` moves tasks until ranks are within `tolerance`; `ring` and
            `charm` leave every query row at home.
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): The layers the plan is for.
        tolerance (`float`, *optional*, defaults to 0.05): Allowed excess over the mean work.
        speeds (`tuple[float, ...]`, *optional*): One positive number per extra server (`distca`
            only): how fast it attends beside a rank, whose speed is 1.
        overlap (`str`, *optional*, defaults to `none`): `heads` cuts each exchange (of `distca`
            only) into groups of key/value heads, which travel while others are attended to.
        costs (`CostTable`, *optional*): Balance seconds by it (`distca` only; `ring` moves no
            rows); by default score entries.
        topology (`Levels`, *optional*): The nested domains that `charm` sends by, and whose
            channels exchange heads; without, all ranks are one domain.
        ulysses_size (`int`, *optional*, defaults to 1): Ranks of a domain that exchange heads, with
            `charm` across domains, or else `ring`. 1: under `ulysses` all ranks do.

    Raises:
        ValueError: on an algorithm that is not built, a negative tolerance, servers or overlap for
            an algorithm without, a speed that is not positive, a topology of other ranks, or ranks
            that cannot share the heads.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm!r} has no planner yet; use one of {ALGORITHMS}")
    if not tolerance >= 0:
        raise ValueError(f"longctx_tolerance={tolerance} must be 0 or more, for example 0.05")
    if speeds and (algorithm != "distca" or not min(speeds) > 0):
        raise ValueError(
            f"servers of speeds {speeds} for {algorithm!r}: only distca has servers, and each "
            "speed must be positive, for example 1.0"
        )
    if overlap not in OVERLAPS or (algorithm != "distca" and overlap != "none"):
        raise ValueError(
            f"overlap {overlap!r} for {algorithm!r}: use none or, with distca, one of {OVERLAPS}"
        )
    levels = topology or Levels((layout.ranks,))
    if levels.ranks != layout.ranks:
        raise ValueError(
            f"longctx_topology={levels} has {levels.ranks} ranks, but {layout.ranks} share a "
            "batch: the product of its sizes must be that number"
        )
    if ulysses_size > 1 and algorithm not in NESTED:
        raise ValueError(
            f"longctx_ulysses_size={ulysses_size} for {algorithm!r}: its ranks exchange no heads; "
            f"leave it at 1, or use one of {NESTED}"
        )
    if algorithm == "ulysses" and ulysses_size == 1:
        ulysses_size = layout.ranks
    validate_heads(Sharing(layout.ranks, ulysses_size, kind.heads, kind.kv_heads))
    if algorithm == "charm":
        levels.outside(ulysses_size)  # refuses what does not fit in its domains
    if algorithm in NESTED:
        table = items(layout)
    else:
        table = balance(layout, kind=kind, tolerance=tolerance, speeds=speeds, costs=costs)
    balanced, loans = tasks(table), NO_SPLITS
    if algorithm == "distca" and tolerance < float("inf"):  # else nothing shall move
        loans = split_keys(layout, balanced, kind=kind, speeds=speeds, costs=costs)
    return Plan(
        algorithm, layout, kind, balanced, loans, speeds, overlap, costs, topology, ulysses_size
    )


def _charm(layout: Layout, *, rank: int, kind: LayerKind, levels: Levels) -> Program:
    lighter = queries_are_lighter(layout, kind, levels=levels)
    return charm.program(layout, rank=rank, kind=kind, levels=levels, queries=lighter)


def _in_three_phases(program: Program) -> Program:
    """A program of one phase as the middle one of three.

    Rank 0 tells servers of a layer at its first phase. Where two halves of a batch alternate at
    phases, it must do so in the order in which other ranks send, though it may send nothing itself.
    """
    if program.phases.tolist() != [1, 1]:
        return program
    ops, phases = program.ops.copy(), np.full_like(program.phases, 3)
    ops[:, 1] = 1
    return replace(program, ops=ops, phases=phases)


@lru_cache(maxsize=32)
def local_plan(lengths: tuple[int, ...], window: int, *, causal: bool = True) -> Plan:
    """The plan of documents that one process holds whole: no exchange (memo of a pure function)."""
    layout = cut(lengths, ranks=1, layout="contiguous")
    kind = LayerKind(window=window, causal=causal)
    return make_plan("distca", layout, kind=kind, tolerance=float("inf"))
