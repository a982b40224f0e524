"""The launcher's environment and /sys -> where a process computes, from the node inwards.

Layer: comm. A place names the node, the NUMA domain and, for a CUDA device, the PCI bridge that it
hangs on with its neighbours. Ranks that begin with the same names share everything up to there.

A flag, or ranks' places and measured links -> the nested domains of a group's ranks. The flag is taken as it is. Under `auto` places say which domains there may be, and a
short probe which of them matter: traffic inside a NUMA domain can be slower than between two, and
then there is one level, not two.
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

from ..planning.layouts.levels import Levels, Link
from .channels import Channel

Place = tuple[str, str, str]  # as in KINDS
KINDS = ("node", "NUMA domain", "PCI bridge")
SYS = Path("/sys")
_UNKNOWN = "?"  # equal everywhere: it parts no ranks


def own_place(device: torch.device) -> Place:
    """Where this process computes.

    Args:
        device (`torch.device`): What it computes on.
    """
    node = node_name(os.environ)
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return node, *pci_place(bus)
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return node, cpu_place(affinity(0) if affinity else set()), _UNKNOWN


def node_name(environment: Mapping[str, str]) -> str:
    """The node that a launcher says this process is on; else the host's name.

    Args:
        environment (`Mapping[str, str]`): With `GROUP_RANK`, the node's number under torchrun, or
            `RANK` and `LOCAL_WORLD_SIZE`, if the process was launched.
    """
    if "GROUP_RANK" in environment:
        return environment["GROUP_RANK"]
    if "RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        return str(int(environment["RANK"]) // int(environment["LOCAL_WORLD_SIZE"]))
    return socket.gethostname()


def pci_place(bus: str, *, sys: Path = SYS) -> tuple[str, str]:
    """NUMA domain and bridge of a PCI device.

    Args:
        bus (`str`): Its address, as `0000:83:00.0`.
        sys (`Path`, *optional*): Where the kernel tells of devices.
    """
    device = sys / "bus" / "pci" / "devices" / bus
    try:
        domain = (device / "numa_node").read_text().strip()
        port = device.resolve().parent  # one of the bridge's, for this device alone
    except OSError:
        return _UNKNOWN, _UNKNOWN
    return domain, port.parent.name


def cpu_place(cpus: Set[int], *, sys: Path = SYS) -> str:
    """The NUMA domain that holds all CPUs of a process.

    Args:
        cpus (`Set[int]`): Those that it may run on.
        sys (`Path`, *optional*): Where the kernel tells of domains.
    """
    for listed in sorted(sys.glob("devices/system/node/node*/cpulist")):
        if cpus and cpus <= _numbers(listed.read_text()):
            return listed.parent.name
    return _UNKNOWN


def _numbers(text: str) -> set[int]:
    """`0-3,8` -> the numbers."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {n for low, _, high in ends for n in range(int(low), int(high or low) + 1)}


def nest(places: Sequence[Sequence[object]]) -> tuple[Levels, tuple[int, ...]]:
    """Ranks' places -> nested domains of neighbouring ranks that share a place.

    Args:
        places (`Sequence[Sequence[object]]`): By rank, each of the same depth, outermost first.

    Returns:
        The levels, each of two members at least where there is more than one rank, and for each but
        the innermost the depth at which its members part.
    """
    sizes, depths, inner = [], [], len(places)
    for depth in range(len(places[0])):
        runs = groupby(tuple(place[: depth + 1]) for place in places)
        shared = gcd(inner, *(len(list(run)) for _, run in runs))
        if 1 < shared < inner:
            sizes.append(inner // shared)
            depths.append(depth)
            inner = shared
    return Levels((*sizes, inner)), tuple(depths)


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


def validate_domains(found: Topology, *, size: int) -> None:
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
