"""Plan one batch: every rank's program for one layer kind, with a digest and the balance.

A plan is a pure function of layout, layer kind and options, so every rank computes the same one and
builds only its own program. Its digest stands for it when ranks compare plans before a step.
Layer: planning.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np

from ...support import NESTED, Sharing, validate_heads
from ..layouts.cost import LayerKind, max_over_mean
from ..layouts.layout import Layout, cut
from ..layouts.levels import Levels
from ..program.program import Program
from . import charm, ring, serve, ulysses
from .distca import balance, tasks
from .exchange import ExchangePlan
from .hierarchical_units import queries_are_lighter
from .key_splits import NO_SPLITS, Assignment, assignments, split_keys
from .options import PlanOptions, fingerprint
from .rebalance import cost, cost_over, items

# Head groups of an overlapped exchange, and parts of the rows within one. The exchange of the first
# group's requests and of the last group's results has nothing to hide behind.
_GROUPS = _PARTS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """How one batch's attention runs across the ranks, for one layer kind.

    Args:
        layout (`Layout`): Which rank holds which tokens.
        kind (`LayerKind`): The layers that it is for.
        options (`PlanOptions`): What else it was made from.
        tasks (`np.ndarray`): int32 `[tasks, 5]`: the fields of `Task`. Each is computed on its home
            rank, except under `distca`.
        splits (`np.ndarray`): int32 `[splits, 4]`: the fields of `KeySplit`: keys of a task that
            another process than its server attends to.
    """

    layout: Layout
    kind: LayerKind
    options: PlanOptions
    tasks: np.ndarray
    splits: np.ndarray

    @property
    def groups(self) -> tuple[serve.HeadRange, ...]:
        """The head groups whose exchanges overlap; one group of all heads without overlap.

        At most four, whose sizes differ by at most one head. One head cannot be cut.
        """
        count = min(self.kind.kv_heads, _GROUPS) if self.options.overlap == "heads" else 1
        if count == 1:
            return (serve.ALL_HEADS,)
        edges = [self.kind.kv_heads * i // count for i in range(count + 1)]
        return tuple((low, high - low) for low, high in pairwise(edges))

    @property
    def processes(self) -> int:
        """Ranks and extra servers, which are numbered after them."""
        return self.layout.ranks + len(self.options.speeds)

    @property
    def levels(self) -> Levels:
        """The nested domains of the ranks."""
        return self.options.levels(self.layout.ranks)

    @property
    def ulysses_size(self) -> int:
        """Ranks of a domain that exchange heads."""
        return self.options.heads_over(self.layout.ranks)

    @cached_property
    def digest(self) -> int:
        """A stable hash of everything that the programs follow from, as a non-negative int64."""
        text = f"{self.options.digest} {self.layout.ranks} {self.kind}"
        # columns in little-endian int32, so that machines of all kinds agree
        columns = (self.layout.lengths, self.layout.columns, self.tasks, self.splits)
        return fingerprint(
            text.encode(), *(np.ascontiguousarray(c, "<i4").tobytes() for c in columns)
        )

    @cached_property
    def assignments(self) -> np.ndarray:
        """What is computed where, int64 `[assignments, 8]`: `Assignment` without `part`."""
        return assignments(self.layout, self.tasks, self.splits, kind=self.kind)

    @cached_property
    def _exchange(self) -> ExchangePlan:
        views = [Assignment(*row) for row in self.assignments.tolist()]
        parts = _PARTS if len(self.groups) > 1 else 1
        return ExchangePlan(
            self.layout, views, kind=self.kind, processes=self.processes, parts=parts
        )

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    def program(self, rank: int) -> Program:
        """The program of one rank or extra server; built on first use."""
        if rank not in self._programs:
            self._programs[rank] = self._build(rank)
        return self._programs[rank]

    def _build(self, rank: int) -> Program:
        name = self.options.algorithm
        if name == "distca":
            # ranks and servers read one exchange plan, so that both sides name the same messages
            program = serve.program(self._exchange, rank=rank, groups=self.groups)
            served = bool((self.assignments[:, 4] >= self.layout.ranks).any())
            return _in_three_phases(program) if rank == 0 and served else program
        across, size = ring.program, self.ulysses_size
        if name == "charm":
            across = partial(_charm, levels=self.levels.outside(size))
        # under `ulysses` also a rank alone runs its program, which then exchanges nothing
        if name != "ulysses" and size == 1:
            return across(self.layout, rank=rank, kind=self.kind)
        first = rank // size * size
        level = self.levels.crosses(first, first + size - 1) if size > 1 else 0
        return ulysses.program(
            self.layout, rank=rank, kind=self.kind, size=size, across=across, level=level
        )

    def work(self, *, balanced: bool) -> np.ndarray:
        """Work of each process, float64 `[processes]`: after balancing, or by home rank without.

        In score entries; in seconds where the plan balanced by a cost table.
        """
        by = self.tasks[:, 4 if balanced else 3]
        document, start, stop = self.tasks[:, :3].astype(np.int64).T
        length = self.layout.lengths[document].astype(np.int64)
        costs = self.options.costs
        each = cost(start, stop, length=length, kind=self.kind, costs=costs)
        work = np.bincount(by, weights=each, minlength=self.processes)
        if balanced and self.ulysses_size > 1:
            # members of a domain share its work by heads, of which one may hold more
            groups, members = ulysses.head_shares(self.ulysses_size, kind=self.kind)
            part = np.asarray([heads for _, heads in members]) / groups
            return (work.reshape(-1, self.ulysses_size).sum(1, keepdims=True) * part).ravel()
        if balanced and len(self.splits):
            # what another process attends to counts there, and no longer with the task's server
            task, server, low, high = self.splits.astype(np.int64).T
            moved = cost_over(
                start[task],
                stop[task],
                low,
                high,
                length=length[task],
                kind=self.kind,
                costs=costs,
            )
            work += np.bincount(server, weights=moved, minlength=self.processes)
            work -= np.bincount(self.tasks[task, 4], weights=moved, minlength=self.processes)
        return work

    def attention_max_over_mean(self, *, balanced: bool = True) -> float:
        """Attention work of the busiest rank over the mean, after or before balancing.

        Extra servers count after balancing only, by their speed.
        """
        work = self.work(balanced=balanced)
        if not balanced:
            return max_over_mean(work[: self.layout.ranks])
        speed = np.concatenate([np.ones(self.layout.ranks), self.options.speeds])
        total = float(work.sum())
        return float((work / speed).max()) * float(speed.sum()) / total if total else 1.0


def make_plan(layout: Layout, *, kind: LayerKind, options: PlanOptions) -> Plan:
    """Plan one batch for the layers of one kind.

    `distca` moves tasks until the ranks are within the tolerance. The other planners leave every
    query row on its home rank.

    Args:
        layout (`Layout`): Which rank holds which tokens.
        kind (`LayerKind`): The layers that the plan is for.
        options (`PlanOptions`): Planner, balance, overlap, domains and servers.

    Raises:
        ValueError: on a topology of other ranks, or ranks that cannot share the heads.
    """
    if options.algorithm in NESTED:
        levels, size = options.levels(layout.ranks), options.heads_over(layout.ranks)
        validate_heads(Sharing(layout.ranks, size, kind.heads, kind.kv_heads))
        if options.algorithm == "charm":
            levels.outside(size)  # raises where such domains do not fit into the levels
        return Plan(layout, kind, options, tasks(items(layout)), NO_SPLITS)
    if options.topology is not None:
        options.levels(layout.ranks)  # raises on a topology of other ranks
    speeds, costs, tolerance = options.speeds, options.costs, options.tolerance
    balanced = tasks(balance(layout, kind=kind, tolerance=tolerance, speeds=speeds, costs=costs))
    splits = NO_SPLITS
    if tolerance < float("inf"):  # with an infinite tolerance nothing shall move
        splits = split_keys(layout, balanced, kind=kind, speeds=speeds, costs=costs)
    return Plan(layout, kind, options, balanced, splits)


def _charm(layout: Layout, *, rank: int, kind: LayerKind, levels: Levels) -> Program:
    # backward brings queries to the keys where that crosses with fewer bytes than keys do
    lighter = queries_are_lighter(layout, kind, levels=levels)
    return charm.program(layout, rank=rank, kind=kind, levels=levels, queries=lighter)


def _in_three_phases(program: Program) -> Program:
    """Make the one phase of rank 0's program the middle one of three.

    Rank 0 sends requests to the servers at a layer's first phase. Where two halves of a batch
    alternate at phases, it must do so in the order in which the other ranks send, although it may
    exchange nothing itself.
    """
    if program.phases.tolist() != [1, 1]:
        return program
    ops, phases = program.ops.copy(), np.full_like(program.phases, 3)
    ops[:, 1] = 1
    return replace(program, ops=ops, phases=phases)


@lru_cache(maxsize=32)
def local_plan(lengths: tuple[int, ...], window: int, *, causal: bool = True) -> Plan:
    """Plan documents that one process holds whole: nothing is exchanged. Memoised."""
    layout = cut(lengths, ranks=1, layout="contiguous")
    kind = LayerKind(window=window, causal=causal)
    return make_plan(layout, kind=kind, options=PlanOptions(tolerance=float("inf")))
