"""Ranks that exchange heads, and a layer's heads -> a refusal of sizes that cannot share them.

Floor: support. Key/value heads go whole to ranks, in shares that differ by at most one; more ranks
than key/value heads share out query heads evenly, and have key/value heads in common.
"""

from typing import NamedTuple

from .rules import NESTED, Rule, refuse


class Sharing(NamedTuple):
    """Domains of `size` out of `ranks` ranks exchange `heads` query and `kv_heads` key/value
    heads."""

    ranks: int
    size: int
    heads: int
    kv_heads: int

    @property
    def exact(self) -> bool:
        """Whether every rank of a domain gets heads."""
        return self.size <= self.kv_heads or self.heads % self.size == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that divide the ranks and can share the heads."""
        given = (self._replace(size=size) for size in range(1, self.ranks + 1))
        return tuple(x.size for x in given if self.ranks % x.size == 0 and x.exact)


def _does_not_divide(sharing: Sharing) -> object:
    if sharing.ranks % sharing.size == 0:
        return None
    return f"longctx_ulysses_size={sharing.size} of {sharing.ranks} ranks; use {_listed(sharing)}"


def _too_few(sharing: Sharing) -> object:
    if sharing.exact:
        return None
    have = f"{sharing.size} ranks, {sharing.heads} query heads, {sharing.kv_heads} key/value heads"
    return f"{have}; of {sharing.ranks} ranks use {_listed(sharing)}"


def _listed(sharing: Sharing) -> str:
    """Sizes that can, but for 1: under `ulysses` that stands for all ranks."""
    sizes = [str(size) for size in sharing.sizes if size > 1]
    return " or ".join([*sizes, "ring or charm without it"])


HEAD_RULES = (
    Rule(
        "domains that do not divide the ranks",
        _does_not_divide,
        "each rank belongs to one domain, and all are of one size",
        "set --longctx_ulysses_size to one of those",
        names=NESTED,
    ),
    Rule(
        "heads that the ranks of a domain cannot share",
        _too_few,
        "it takes as many key/value heads as ranks, or query heads that the ranks divide",
        "set --longctx_ulysses_size to one of those, or change --longctx_group_size",
        names=NESTED,
    ),
)


def refuse_heads(sharing: Sharing) -> None:
    """Refuse a size of domains that cannot share a layer's heads.

    Raises:
        ValueError: with the size, the rule and the sizes that can.
    """
    refuse(HEAD_RULES, sharing)
