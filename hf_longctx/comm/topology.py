"""A flag, or ranks' places and measured links -> the nested domains of a group's ranks.

Floor: comm. The flag is taken as it is. Under `auto` places say which domains there may be, and a
short probe which of them matter: traffic inside a NUMA domain can be slower than between two, and
then there is one level, not two.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.levels import Levels
from ..plan.predict import Link
from .channels import Channel
from .places import KINDS, Place, nest

logger = logging.getLogger(__name__)

APART = 1.5  # times as fast must links be inside a domain as those out of it, to be a level
PROBE_BYTES = 4 << 20  # of a message: far above latencies, a third of a second at 100 Mbit/s
_WARM_BYTES = 64 << 10
_HOPS = 8  # messages of one byte, of which the fastest counts: ranks fall into step


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """Bytes per second that the slowest rank sends over the links of a level, and receives at once.

    Args:
        together (`float`): While all ranks do.
        alone (`float`): While one pair of them does. Larger where ranks share a link.
        hop (`float`, *optional*): Seconds that a message of one byte takes.
    """

    together: float
    alone: float
    hop: float = 0.0

    def __str__(self) -> str:
        return f"{self.together / 1e9:.3g} GB/s a rank, {self.alone / 1e9:.3g} alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The nested domains of a group's ranks.

    Args:
        levels (`Levels`): Sizes, outermost first.
        why (`str`): Where they come from.
        rates (`tuple[LinkRate, ...]`, *optional*): Of each level; empty where none was measured.
    """

    levels: Levels
    why: str
    rates: tuple[LinkRate, ...] = ()

    @property
    def links(self) -> tuple[Link, ...]:
        """The measured links as predictions see them: as many lanes as rates together fill."""
        behind = (self.levels.below(level) for level in range(len(self.rates)))
        return tuple(
            Link(rate.alone, min(rate.together / rate.alone, 1.0) * ranks)
            for rate, ranks in zip(self.rates, behind, strict=True)
        )


def given_levels(text: str, *, ranks: int, ulysses_size: int = 1) -> Levels | None:
    """The levels that the flag names; `None` for `auto`.

    Raises:
        ValueError: where they are not those of `ranks` ranks, or `ulysses_size` ranks that exchange
            heads do not fit in their domains.
    """
    if text == "auto":
        return None
    levels = Levels.parse(text)
    if levels.ranks != ranks:
        pairs = [f"{ranks // n}x{n}" for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"longctx_topology={text} holds {levels.ranks} ranks, but {ranks} share a batch: its "
            f"sizes, outermost first, must multiply to that; use one of {', '.join(pairs)}, or auto"
        )
    levels.outside(ulysses_size)  # refuses what does not fit
    return levels


def refuse_domains(found: Topology, *, size: int) -> None:
    """Refuse domains of `size` ranks that exchange heads, where found levels do not hold them.

    Raises:
        ValueError: with what was found, and the remedy.
    """
    try:
        found.levels.outside(size)
    except ValueError as error:
        raise ValueError(
            f"longctx_topology=auto found {found.levels}, {found.why}: {error}; or give "
            "longctx_topology yourself"
        ) from error


def find_topology(text: str, *, ranks: int, channel: Channel | None, place: Place) -> Topology:
    """The topology of a group, the same on all its ranks, which call this at once; logged once.

    Args:
        text (`str`): The flag.
        ranks (`int`): Ranks of the group.
        channel (`Channel`, *optional*): Between them; `None` where there is one.
        place (`Place`): This rank's.

    Raises:
        ValueError: see `given_levels`.
        ExchangeError: where a rank does not answer.
    """
    given = given_levels(text, ranks=ranks)
    if given is not None:
        found = Topology(levels=given, why="as longctx_topology says")
    elif channel is None:
        found = Topology(levels=Levels((ranks,)), why="no rank exchanges")
    else:
        found = _measured(channel, ranks, place)
    if channel is None or channel.rank == 0:
        logger.info("topology of %d ranks: %s, %s", ranks, found.levels, found.why)
    return found


def _measured(channel: Channel, ranks: int, place: Place) -> Topology:
    """What places suggest, as far as measured links bear it out."""
    numbers = [int.from_bytes(hashlib.blake2b(x.encode(), digest_size=7).digest()) for x in place]
    everyone = gather(channel, torch.tensor(numbers, dtype=torch.int64), ranks=ranks)
    levels, depths = nest(everyone.tolist())
    if bool((everyone == everyone[0]).all()):
        return Topology(levels=levels, why="one domain, as all share a node and a NUMA domain")
    rates = probe(channel, levels)
    if not depths:
        why = f"one domain, as no neighbours share a place that others lack; links: {rates[0]}"
        return Topology(levels=levels, rates=rates, why=why)
    kinds = " and ".join(KINDS[depth] for depth in depths)
    merged, kept = merge(levels, rates)
    measured = "links from the outside in: " + "; ".join(map(str, rates))
    why = f"by {kinds}; {measured}"
    if merged != levels:
        rule = f"merged where links inside are not {APART:g} times as fast as those outside"
        why = f"from {levels} by {kinds}, {rule}; {measured}"
    return Topology(levels=merged, rates=kept, why=why)


def merge(levels: Levels, rates: Sequence[LinkRate]) -> tuple[Levels, tuple[LinkRate, ...]]:
    """Merge each level with the one around it unless its links are `APART` times as fast.

    A merged level is as fast as the slower of both.
    """
    sizes, kept = [levels.sizes[0]], [rates[0]]
    for size, rate in zip(levels.sizes[1:], rates[1:], strict=True):
        if rate.together >= APART * kept[-1].together:
            sizes.append(size)
            kept.append(rate)
        else:
            sizes[-1] *= size
            kept[-1] = min(rate, kept[-1], key=lambda x: x.together)
    return Levels(tuple(sizes)), tuple(kept)


def neighbours(levels: Levels, rank: int, level: int, *, alone: bool) -> tuple[int, int] | None:
    """Whom a rank sends to and receives from when a level's links are probed; `None` when nobody.

    Each goes round the ranks that differ at this level only. With `alone`, rank 0 and the next one
    have the links for themselves.
    """
    peers = levels.peers(0, level)[:2] if alone else levels.peers(rank, level)
    if len(peers) == 1 or rank not in peers:
        return None
    at = peers.index(rank)
    return peers[(at + 1) % len(peers)], peers[at - 1]


def probe(channel: Channel, levels: Levels) -> tuple[LinkRate, ...]:
    """Measure the links of each level, all ranks at once and one pair alone, one message each;
    and how long the smallest messages take.

    Returns:
        The same on every rank.
    """
    rank, found = channel.rank, []
    for level in range(len(levels.sizes)):
        for alone, size in ((False, _WARM_BYTES), (False, PROBE_BYTES), (True, PROBE_BYTES)):
            gather(channel, torch.zeros(1), ranks=levels.ranks)  # all begin together
            pair = neighbours(levels, rank, level, alone=alone)
            found.append(_rate(channel, pair, size, what=f"link probe of level {level}"))
        pair = neighbours(levels, rank, level, alone=False)
        small = (_rate(channel, pair, 1, what=f"hops of level {level}") for _ in range(_HOPS))
        found.append(max(small))
    everyone = gather(channel, torch.tensor(found, dtype=torch.float64), ranks=levels.ranks)
    slowest = everyone.min(dim=0).values.reshape(-1, 4).tolist()
    return tuple(
        LinkRate(together=together, alone=alone, hop=1 / small)
        for _, together, alone, small in slowest
    )


def _rate(channel: Channel, pair: tuple[int, int] | None, size: int, *, what: str) -> float:
    """Bytes per second of one message there and one from the other side; infinite for nobody's."""
    if pair is None:
        return float("inf")
    sent, received = torch.zeros(2, size, dtype=torch.uint8)
    began = time.perf_counter()
    channel.post([(pair[0], sent)], [(pair[1], received)], what=what).wait()
    return size / (time.perf_counter() - began)


def gather(channel: Channel, mine: Tensor, *, ranks: int) -> Tensor:
    """Every rank's vector, `[ranks, n]`, where `mine` has `n` entries, as on all ranks."""
    everyone = mine.repeat(ranks, 1)
    others = [rank for rank in range(ranks) if rank != channel.rank]
    sends = [(rank, mine.view(torch.uint8)) for rank in others]
    recvs = [(rank, everyone[rank].view(torch.uint8)) for rank in others]
    channel.post(sends, recvs, what="gathering places and rates").wait()
    return everyone
