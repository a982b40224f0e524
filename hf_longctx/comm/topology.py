"""Find the nested domains of a group's ranks, from a flag or from their places and measured links.

A place names the node, the NUMA domain and, for a CUDA device, the PCI bridge that it shares with
its neighbours. Ranks whose places begin with the same names share everything up to there. A flag is
taken as it is. Under `auto` places give the possible domains, and a short probe decides which of
them matter: traffic inside a NUMA domain can be slower than between two, and then there is one
level, not two.
Layer: comm.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..planning.layouts.levels import LevelLink, Levels
from .channels import Channel

logger = logging.getLogger(__name__)

Place = tuple[str, str, str]  # as in KINDS
KINDS = ("node", "NUMA domain", "PCI bridge")
SYS = Path("/sys")
_UNKNOWN = "?"  # equal everywhere, so it separates no ranks

APART = 1.5  # a level's links must be this many times as fast as the links around it
PROBE_BYTES = 4 << 20  # of a message: far above latencies, a third of a second at 100 Mbit/s
_WARM_BYTES = 64 << 10
_HOPS = 8  # messages of one byte; the fastest counts, as ranks need some to fall into step


def own_place(device: torch.device) -> Place:
    """Return the place of this process, which computes on `device`."""
    node = node_name(os.environ)
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return node, *pci_place(bus)
    # A process that may run on several domains belongs to none.
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return node, cpu_place(affinity(0) if affinity else set()), _UNKNOWN


def node_name(environment: Mapping[str, str]) -> str:
    """Return the node that the launcher says this process is on, else the host's name.

    Args:
        environment (`Mapping[str, str]`): With `GROUP_RANK`, the node's number under torchrun, or
            `RANK` and `LOCAL_WORLD_SIZE`, if the process was launched.
    """
    # Host names may be equal in containers, so the launcher's numbers come first.
    if "GROUP_RANK" in environment:
        return environment["GROUP_RANK"]
    if "RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        return str(int(environment["RANK"]) // int(environment["LOCAL_WORLD_SIZE"]))
    return socket.gethostname()


def pci_place(bus: str, *, sys: Path = SYS) -> tuple[str, str]:
    """Return the NUMA domain and the bridge of a PCI device; `?` for what is not known.

    Args:
        bus (`str`): Its address, as `0000:83:00.0`.
        sys (`Path`, *optional*, defaults to `/sys`): Where the kernel describes devices.
    """
    device = sys / "bus" / "pci" / "devices" / bus
    try:
        domain = (device / "numa_node").read_text().strip()
        # The device hangs on a port of its own; the bridge above it is what neighbours share.
        port = device.resolve().parent
    except OSError:
        return _UNKNOWN, _UNKNOWN
    return domain, port.parent.name


def cpu_place(cpus: Set[int], *, sys: Path = SYS) -> str:
    """Return the NUMA domain that holds all CPUs of a process, or `?`.

    Args:
        cpus (`Set[int]`): The CPUs that it may run on.
        sys (`Path`, *optional*, defaults to `/sys`): Where the kernel describes domains.
    """
    for listed in sorted(sys.glob("devices/system/node/node*/cpulist")):
        if cpus and cpus <= _numbers(listed.read_text()):
            return listed.parent.name
    return _UNKNOWN


def _numbers(text: str) -> set[int]:
    """Read a kernel list such as `0-3,8`."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {n for low, _, high in ends for n in range(int(low), int(high or low) + 1)}


def nested_levels(places: Sequence[Sequence[object]]) -> tuple[Levels, tuple[int, ...]]:
    """Nest neighbouring ranks that share a place into domains of equal size.

    Args:
        places (`Sequence[Sequence[object]]`): By rank, each of the same depth, outermost first.

    Returns:
        The levels, each with two members at least if there is more than one rank; and for each but
        the innermost, the depth at which the places of its members differ.
    """
    sizes, depths, inner = [], [], len(places)
    for depth in range(len(places[0])):
        runs = groupby(tuple(place[: depth + 1]) for place in places)
        # Domains of one level must be equal, so runs of unequal length count by their divisor.
        shared = gcd(inner, *(len(list(run)) for _, run in runs))
        if 1 < shared < inner:
            sizes.append(inner // shared)
            depths.append(depth)
            inner = shared
    return Levels((*sizes, inner)), tuple(depths)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """What the slowest rank sends over the links of a level while it receives as much.

    Args:
        together (`float`): Bytes per second while all ranks do so.
        alone (`float`): Bytes per second while one pair does so; larger if ranks share a link.
        hop (`float`, *optional*, defaults to 0.0): Seconds that a message of one byte takes.
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
        why (`str`): Where they come from, for the log.
        rates (`tuple[LinkRate, ...]`, *optional*): Of each level; empty if none was measured.
    """

    levels: Levels
    why: str
    rates: tuple[LinkRate, ...] = ()

    @property
    def links(self) -> tuple[LevelLink, ...]:
        """The measured links for predictions: each with the lanes that its ranks fill together."""
        behind = (self.levels.below(level) for level in range(len(self.rates)))
        return tuple(
            LevelLink(rate.alone, min(rate.together / rate.alone, 1.0) * ranks)
            for rate, ranks in zip(self.rates, behind, strict=True)
        )


def given_levels(text: str, *, ranks: int, ulysses_size: int = 1) -> Levels | None:
    """Return the levels that `longctx_topology=text` names; `None` for `auto`.

    Raises:
        ValueError: if they do not hold `ranks` ranks, or if `ulysses_size` ranks that exchange
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
    levels.outside(ulysses_size)  # raises if it does not fit
    return levels


def validate_domains(found: Topology, *, size: int) -> None:
    """Reject found levels that do not hold domains of `size` ranks that exchange heads.

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
    """Find the topology of a group, the same on all its ranks, which call this together.

    Args:
        text (`str`): The flag `longctx_topology`.
        ranks (`int`): Ranks of the group.
        channel (`Channel`, *optional*): Between them; `None` for a single rank.
        place (`Place`): This rank's.

    Raises:
        ValueError: see `given_levels`.
        ExchangeError: if a rank does not answer.
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
    """Return the levels that places suggest, as far as measured links confirm them."""
    # Names travel as numbers of one size. Seven bytes fit int64 and do not collide by chance.
    numbers = [int.from_bytes(hashlib.blake2b(x.encode(), digest_size=7).digest()) for x in place]
    everyone = gather(channel, torch.tensor(numbers, dtype=torch.int64), ranks=ranks)
    levels, depths = nested_levels(everyone.tolist())
    if bool((everyone == everyone[0]).all()):
        return Topology(levels=levels, why="one domain, as all share a node and a NUMA domain")
    # Also with one level: predictions use its links.
    rates = probe(channel, levels)
    if not depths:
        why = f"one domain, as no neighbours share a place that others lack; links: {rates[0]}"
        return Topology(levels=levels, rates=rates, why=why)
    kinds = " and ".join(KINDS[depth] for depth in depths)
    merged, kept = merge_levels(levels, rates)
    measured = "links from the outside in: " + "; ".join(map(str, rates))
    why = f"by {kinds}; {measured}"
    if merged != levels:
        rule = f"merged where links inside are not {APART:g} times as fast as those outside"
        why = f"from {levels} by {kinds}, {rule}; {measured}"
    return Topology(levels=merged, rates=kept, why=why)


def merge_levels(levels: Levels, rates: Sequence[LinkRate]) -> tuple[Levels, tuple[LinkRate, ...]]:
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


def probe_neighbours(
    levels: Levels, rank: int, level: int, *, alone: bool
) -> tuple[int, int] | None:
    """Return whom a rank sends to and receives from in the probe of a level; `None` if nobody.

    The ranks that differ at this level only form a ring. With `alone`, rank 0 and the next one have
    the links for themselves.
    """
    peers = levels.peers(0, level)[:2] if alone else levels.peers(rank, level)
    if len(peers) == 1 or rank not in peers:
        return None
    at = peers.index(rank)
    return peers[(at + 1) % len(peers)], peers[at - 1]


def probe(channel: Channel, levels: Levels) -> tuple[LinkRate, ...]:
    """Measure the links of each level: all ranks at once, one pair alone, the smallest messages.

    Returns:
        The rates of the slowest rank at each level, the same on every rank.
    """
    rank, found = channel.rank, []
    for level in range(len(levels.sizes)):
        for alone, size in ((False, _WARM_BYTES), (False, PROBE_BYTES), (True, PROBE_BYTES)):
            gather(channel, torch.zeros(1), ranks=levels.ranks)  # all begin together
            pair = probe_neighbours(levels, rank, level, alone=alone)
            found.append(_rate(channel, pair, size, what=f"link probe of level {level}"))
        pair = probe_neighbours(levels, rank, level, alone=False)
        small = (_rate(channel, pair, 1, what=f"hops of level {level}") for _ in range(_HOPS))
        found.append(max(small))
    everyone = gather(channel, torch.tensor(found, dtype=torch.float64), ranks=levels.ranks)
    # A step waits for its slowest rank, and all ranks must plan with the same numbers.
    slowest = everyone.min(dim=0).values.reshape(-1, 4).tolist()
    return tuple(
        LinkRate(together=together, alone=alone, hop=1 / small)
        for _, together, alone, small in slowest
    )


def _rate(channel: Channel, pair: tuple[int, int] | None, size: int, *, what: str) -> float:
    """Measure bytes per second of one message sent and one received; infinite without a pair."""
    if pair is None:  # infinite, so that it is never the slowest
        return float("inf")
    sent, received = torch.zeros(2, size, dtype=torch.uint8)
    began = time.perf_counter()
    channel.post([(pair[0], sent)], [(pair[1], received)], what=what).wait()
    return size / (time.perf_counter() - began)


def gather(channel: Channel, mine: Tensor, *, ranks: int) -> Tensor:
    """Return every rank's vector, `[ranks, n]`; `mine` has n entries on every rank."""
    everyone = mine.repeat(ranks, 1)
    others = [rank for rank in range(ranks) if rank != channel.rank]
    sends = [(rank, mine.view(torch.uint8)) for rank in others]
    recvs = [(rank, everyone[rank].view(torch.uint8)) for rank in others]
    channel.post(sends, recvs, what="gathering places and rates").wait()
    return everyone
