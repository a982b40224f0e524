"""The launcher's environment and /sys -> where a process computes, from the node inwards.

Floor: comm. A place names the node, the NUMA domain and, for a CUDA device, the PCI bridge that it
hangs on with its neighbours. Ranks that begin with the same names share everything up to there.
"""

import os
import socket
from collections.abc import Mapping, Sequence, Set
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any

import torch

from ..plan.levels import Levels

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
