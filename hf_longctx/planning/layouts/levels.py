"""Describe a machine as a tree of nested domains, and say which ranks share which link.

Nodes hold NUMA domains, which hold pairs, which hold ranks. Levels are numbered from the outside:
level 0 is the slowest link. Ranks are numbered depth first, so a rank's coordinates are the digits
of its number in mixed radix. Layer: planning.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class Levels:
    """Sizes of nested domains, outermost first: `(2, 4)` is 2 nodes of 4 ranks.

    Args:
        sizes (`tuple[int, ...]`): Members of one domain at each level; `(R,)` is flat.

    Raises:
        ValueError: where a level has no member.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"longctx_topology {self}: each level needs at least one member, as in 2x4"
            )

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))

    @classmethod
    def parse(cls, text: str) -> "Levels":
        """Return the levels that `2x4` names. Raises `ValueError` on other words."""
        words = text.split("x")
        if not all(word.isdecimal() for word in words):
            raise ValueError(
                f"longctx_topology={text!r}: write nodes x ranks, outermost first, as 2x4, or auto"
            )
        return cls(tuple(map(int, words)))

    @cached_property
    def ranks(self) -> int:
        """Ranks altogether."""
        return prod(self.sizes)

    @property
    def channels(self) -> int:
        """Channels that plans use: of each level one for keys and values, one for gradients."""
        return 2 * len(self.sizes)

    def below(self, level: int) -> int:
        """Count the ranks of one member of a domain at `level`."""
        return self._below[level]

    @cached_property
    def _below(self) -> tuple[int, ...]:
        return tuple(prod(self.sizes[level + 1 :]) for level in range(len(self.sizes)))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return which member `rank` lies in, at each level."""
        return tuple(rank // self.below(at) % size for at, size in enumerate(self.sizes))

    def peers(self, rank: int, level: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` at `level` alone, itself included."""
        step, size = self.below(level), self.sizes[level]
        first = rank - rank // step % size * step
        return tuple(range(first, first + size * step, step))

    def outside(self, size: int) -> "Levels":
        """Return the levels in which domains of `size` ranks, which are runs of ranks, are ranks.

        Raises:
            ValueError: where such domains do not fill those of a level.
        """
        # Take domains away from the inside: all of the last levels, or a divisor of one.
        above, rest = list(self.sizes), size
        while above and rest > 1 and rest % above[-1] == 0:
            rest //= above.pop()
        if rest > 1 and (not above or above[-1] % rest):
            raise ValueError(
                f"longctx_ulysses_size={size} does not divide the domains of longctx_topology="
                f"{self}; use a divisor of its last size, {self.sizes[-1]}, a product of its "
                "last sizes, or 1"
            )
        return Levels((*above[:-1], above[-1] // rest) if above else (1,))

    def crosses(self, one: int, other: int) -> int:
        """Return the outermost level whose link is between two ranks; `len(sizes)` for one rank."""
        pairs = zip(self.coordinates(one), self.coordinates(other), strict=True)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), len(self.sizes))


@dataclass(frozen=True, slots=True)
class LevelLink:
    """The link between the domains of one level.

    Args:
        rate (`float`): Bytes per second, each way, that one rank gets if it is alone.
        lanes (`float`): Ranks of a domain that get this rate at the same time: 1 for a shared
            link, one per rank where each has its own.
    """

    rate: float
    lanes: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What predictions must know of the hardware.

    Args:
        levels (`Levels`): Its nested domains.
        links (`tuple[LevelLink, ...]`): One per level, outermost first.
        entry_seconds (`float`): Seconds of one score entry of a layer, in forward.
    """

    levels: Levels
    links: tuple[LevelLink, ...]
    entry_seconds: float

    def __post_init__(self) -> None:
        if len(self.links) != len(self.levels.sizes):
            raise ValueError(
                f"{len(self.links)} links for the levels {self.levels}: describe one per level"
            )


class NeighbourLink(NamedTuple):
    """The link between neighbouring ranks: seconds of any message, and bytes per second."""

    hop: float = 5e-5
    rate: float = 1e9

    def __str__(self) -> str:
        return f"{1e6 * self.hop:.3g} us a hop and {self.rate / 1e9:.3g} GB/s"
