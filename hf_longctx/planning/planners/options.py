"""Hold everything that the programs of a batch depend on, apart from its documents.

The trainer (or verify, a benchmark, a loop of the user's own) makes one frozen `PlanOptions` and
passes it whole, so that no flag can reach the programs without entering the digest that ranks
compare before each step. Layer: planning.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from ...support import NESTED
from ..layouts.cost import CostTable
from ..layouts.levels import Levels, Machine, NeighbourLink

# Values of flags, as users write them.
ALGORITHMS = ("distca", "ring", "charm", "ulysses")
OVERLAPS = ("none", "heads", "pingpong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """The measurements by which `charm` chooses between its own plan and the ring's.

    Args:
        itemsize (`int`): Bytes of one element of the rows that are exchanged.
        machine (`Machine`, *optional*): Links and speed. `None` where no link was measured, because
            all ranks share one place.
    """

    itemsize: int
    machine: Machine | None = None


def _option(default: Any, flag: str) -> Any:
    """A field with the flag that sets it, which an error about two ranks names."""
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the programs of every rank follow from, beside the layout and the layer kind.

    All ranks of a group must hold equal options: there is no field that may differ between ranks.

    Args:
        algorithm (`str`, *optional*, defaults to `"distca"`): Planner of the softmax layers, one of
            `ALGORITHMS`.
        layout (`str`, *optional*, defaults to `"auto"`): Name of the layout of the batches.
        tolerance (`float`, *optional*, defaults to 0.05): Attention work that a rank may do above
            the mean, as a fraction of it (`distca`).
        costs (`CostTable`, *optional*): Balance seconds by this table (`distca`); score entries
            without it.
        overlap (`str`, *optional*, defaults to `"none"`): One of `OVERLAPS`. `heads` cuts each
            exchange into groups of key/value heads, which travel while others are attended to.
        speeds (`tuple[float, ...]`, *optional*): Speed of each extra server, relative to a rank's
            1 (`distca`).
        topology (`Levels`, *optional*): Nested domains of the ranks: `charm` sends by them, and
            heads are exchanged over the channels of the level that a domain of theirs crosses.
            Without it all ranks are one domain.
        auto (`Auto`, *optional*): Measurements by which `charm` may run the ring's plan instead.
        ulysses_size (`int`, *optional*, defaults to 1): Ranks of a domain that exchange heads, with
            `charm` or `ring` across domains. With 1, `ulysses` exchanges heads over all ranks.
        scan (`str`, *optional*, defaults to `"auto"`): Schedule of the state scans of recurrent
            layers: `auto` or one of `state_scan.SCHEDULES`.
        link (`NeighbourLink`, *optional*): The measured link between neighbours, which decides
            the schedule of a scan and its pieces.

    Raises:
        ValueError: on an unknown algorithm, a negative tolerance, servers or an overlap for an
            algorithm without them, a speed that is not positive, or domains that exchange heads for
            an algorithm that has none.
    """

    algorithm: str = _option("distca", "attn_implementation or --longctx_softmax")
    layout: str = _option("auto", "--longctx_layout")
    tolerance: float = _option(0.05, "--longctx_tolerance")
    costs: CostTable | None = _option(None, "--longctx_cost")
    overlap: str = _option("none", "--longctx_overlap")
    speeds: tuple[float, ...] = _option((), "--longctx_servers or --longctx_server_memory")
    topology: Levels | None = _option(None, "--longctx_topology")
    auto: Auto | None = _option(None, "the links measured for --longctx_topology")
    ulysses_size: int = _option(1, "--longctx_ulysses_size")
    scan: str = _option("auto", "--longctx_scan")
    link: NeighbourLink | None = _option(None, "the link measured for --longctx_scan")

    def __post_init__(self) -> None:
        # Once, for whoever makes options: trainer, verify, benchmarks and loops of the user's own.
        # Equal options must hash equally, whatever kind of number they came in.
        object.__setattr__(self, "tolerance", float(self.tolerance))
        object.__setattr__(self, "speeds", tuple(map(float, self.speeds)))
        name = self.algorithm
        if name not in ALGORITHMS:
            raise ValueError(f"{name!r} has no planner; use one of {ALGORITHMS}")
        if not self.tolerance >= 0:
            raise ValueError(
                f"longctx_tolerance={self.tolerance} must be 0 or more, for example 0.05"
            )
        if self.speeds and (name != "distca" or not all(speed > 0 for speed in self.speeds)):
            raise ValueError(
                f"servers of speeds {self.speeds} for {name!r}: only distca has servers, and each "
                "speed must be positive, for example 1.0"
            )
        if self.overlap not in OVERLAPS or (name != "distca" and self.overlap != "none"):
            raise ValueError(
                f"overlap {self.overlap!r} for {name!r}: use none or, with distca, one of "
                f"{OVERLAPS}"
            )
        if self.ulysses_size > 1 and name not in NESTED:
            raise ValueError(
                f"longctx_ulysses_size={self.ulysses_size} for {name!r}: its ranks exchange no "
                f"heads; leave it at 1, or use one of {NESTED}"
            )

    def levels(self, ranks: int) -> Levels:
        """The nested domains of `ranks` ranks; one domain where no topology is given.

        Raises:
            ValueError: where the topology has another number of ranks.
        """
        levels = self.topology or Levels((ranks,))
        if levels.ranks != ranks:
            raise ValueError(
                f"longctx_topology={levels} has {levels.ranks} ranks, but {ranks} share a batch: "
                "the product of its sizes must be that number"
            )
        return levels

    def heads_over(self, ranks: int) -> int:
        """Ranks of a domain that exchange heads: under `ulysses` all `ranks`, unless given."""
        return (
            ranks if self.algorithm == "ulysses" and self.ulysses_size == 1 else self.ulysses_size
        )

    @cached_property
    def fingerprints(self) -> dict[str, int]:
        """A stable hash of each field, a non-negative int64, by the flag that sets it."""
        # JSON knows no NumPy numbers; anything else that it does not know is an error.
        values = asdict(self)
        texts = {name: json.dumps(value, default=np.generic.item) for name, value in values.items()}
        return {f.metadata["flag"]: fingerprint(texts[f.name].encode()) for f in fields(self)}

    @cached_property
    def digest(self) -> int:
        """A stable hash of all fields, as a non-negative int64."""
        return fingerprint(*(value.to_bytes(8, "little") for value in self.fingerprints.values()))


def fingerprint(*parts: bytes) -> int:
    """A stable hash of byte strings, as a non-negative int64."""
    hashed = hashlib.blake2b(b"|".join(parts), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 1
