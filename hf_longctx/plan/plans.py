"""(algorithm, layout, layer kind) -> a plan: every rank's program, with a digest and the balance.

Floor: plan. Plans are pure and deterministic: each rank computes the same one, and builds only its
own program. One int64 of the digest is compared across ranks before each step.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from . import ring
from .cost import LayerKind, max_over_mean
from .distca import Task, balance, items, tasks
from .exchange import ExchangePlan
from .layout import Layout, cut
from .program import Program

ALGORITHMS = ("distca", "ring")


@dataclass(frozen=True, eq=False)
class Plan:
    """How one batch's attention runs across the ranks, for one layer kind.

    Args:
        algorithm (`str`): One of `ALGORITHMS`.
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): The layers it is for.
        tasks (`np.ndarray`): int32 `[tasks, 5]`: the fields of `Task`; for `ring` all at home.
    """

    algorithm: str
    layout: Layout
    kind: LayerKind
    tasks: np.ndarray

    @cached_property
    def digest(self) -> int:
        """A stable hash of everything the programs follow from, as a non-negative int64."""
        kind = (self.kind.window, self.kind.query_width, self.kind.key_value_width)
        sees = "" if self.kind.causal else " bidirectional"
        text = f"{self.algorithm} {self.layout.ranks} {kind}{sees}".encode()
        columns = (self.layout.lengths, self.layout.columns, self.tasks)
        parts = [text, *(np.ascontiguousarray(c, "<i4").tobytes() for c in columns)]
        hashed = hashlib.blake2b(b"|".join(parts), digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> 1

    @cached_property
    def _exchange(self) -> ExchangePlan:
        views = [Task(*row) for row in self.tasks.tolist()]
        return ExchangePlan(self.layout, views, kind=self.kind)

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    def program(self, rank: int) -> Program:
        """The program of one rank; built on first use."""
        if rank not in self._programs:
            if self.algorithm == "ring":
                built = ring.program(self.layout, rank=rank, kind=self.kind)
            else:
                built = self._exchange.program(rank)
            self._programs[rank] = built
        return self._programs[rank]

    def work(self, *, balanced: bool) -> np.ndarray:
        """float64 `[ranks]`: score entries per rank, by server, or by home when not `balanced`."""
        by = self.tasks[:, 4 if balanced else 3]
        document, start, stop = self.tasks[:, :3].T
        cost = self.kind.entries(start, stop, length=self.layout.lengths[document])
        return np.bincount(by, weights=cost, minlength=self.layout.ranks)

    def attention_max_over_mean(self, *, balanced: bool = True) -> float:
        """Attention work of the busiest rank over the mean, after or before balancing."""
        return max_over_mean(self.work(balanced=balanced))


def make_plan(algorithm: str, layout: Layout, *, kind: LayerKind, tolerance: float = 0.05) -> Plan:
    """Plan one batch.

    Args:
        algorithm (`str`): `distca` moves tasks until ranks are within `tolerance`; `ring` leaves
            every query row at home.
        layout (`Layout`): Where the tokens lie.
        kind (`LayerKind`): The layers the plan is for.
        tolerance (`float`, *optional*, defaults to 0.05): Allowed excess over the mean work.

    Raises:
        ValueError: on an algorithm that is not built, or a negative tolerance.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm!r} has no planner yet; use one of {ALGORITHMS}")
    if not tolerance >= 0:
        raise ValueError(f"longctx_tolerance={tolerance} must be 0 or more, for example 0.05")
    if algorithm == "ring":
        table = items(layout)
    else:
        table = balance(layout, kind=kind, tolerance=tolerance)
    return Plan(algorithm, layout, kind, tasks(table))


@lru_cache(maxsize=32)
def local_plan(lengths: tuple[int, ...], window: int, *, causal: bool = True) -> Plan:
    """The plan of documents that one process holds whole: no exchange (memo of a pure function)."""
    layout = cut(lengths, ranks=1, layout="contiguous")
    kind = LayerKind(window=window, causal=causal)
    return make_plan("distca", layout, kind=kind, tolerance=float("inf"))
