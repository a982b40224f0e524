"""Place this process in a group of trainers, make its channels, and compare what ranks must share.

Trainers form groups of equal size. The ranks of a group share each batch; groups are data-parallel
to each other. Time-outs nest, so that the error of a lost process comes from the exchange that can
name it: a server's is below an exchange's, and that is below the default group's.
Layer: training.
"""

import atexit
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.channels import EXCHANGE_SECONDS, Channel, GlooChannel
from ..comm.topology import gather
from ..planning.planners.options import fingerprint
from ..runtime.executor import Runtime
from ..servers.server_pool import MAX_SERVERS, ServerPool
from ..servers.spawn import end_with_parent

_LAUNCHER = os.getppid()  # at import: a launcher that dies later is replaced by another parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks that share this process's batches.

    Args:
        trainers (`int`): Trainer processes.
        size (`int`): Ranks of a group.
        index (`int`): Number of this process's group.
        rank (`int`): Rank of this process within its group.
    """

    trainers: int
    size: int
    index: int
    rank: int

    @property
    def groups(self) -> int:
        """Number of groups, data-parallel to each other."""
        return self.trainers // self.size


def find_group(arguments: Any) -> Group:
    """Find the group of this process from the training arguments.

    Raises:
        ValueError: if the group size does not divide the number of trainers, or if the launcher
            started processes that Trainer would not train together.
    """
    trainers = int(arguments.world_size)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != trainers:
        raise ValueError(
            f"the launcher started {launched} processes but Trainer sees {trainers}, so they would "
            "train separately; without a GPU set use_cpu=True in the training arguments"
        )
    size = arguments.longctx_group_size or trainers
    if trainers % size:
        allowed = [n for n in range(1, trainers + 1) if trainers % n == 0]
        raise ValueError(
            f"longctx_group_size={size} must divide the {trainers} trainers; use one of {allowed} "
            "(accelerate launch --cpu --num_processes N starts one process: see "
            "accelerate_configs/cpu_2.yaml)"
        )
    rank = int(arguments.process_index)
    return Group(trainers=trainers, size=size, index=rank // size, rank=rank % size)


def exchange_timeout(default_seconds: float) -> float:
    """Return the seconds that an exchange may take, given the time-out of the default group."""
    return min(EXCHANGE_SECONDS, default_seconds / 2)


def servers_per_group(arguments: Any, group: Group, *, name: str) -> int:
    """Return how many attention servers each group starts.

    Args:
        arguments: The training arguments.
        group (`Group`): Group of this process.
        name (`str`): Attention name.

    Raises:
        ValueError: if groups and nodes cannot share the servers evenly, if the attention has no
            servers, or if trainers would give each other up before a lost server.
    """
    servers = arguments.longctx_servers
    if not servers:
        return 0
    if name != "distca":
        raise ValueError(
            f"longctx_servers={servers} under attn_implementation={name!r}: only distca has "
            "servers; use distca, or leave longctx_servers at 0"
        )
    nodes = group.trainers // int(os.environ.get("LOCAL_WORLD_SIZE", group.trainers))
    multiple = math.lcm(group.groups, nodes)
    if servers % multiple:
        raise ValueError(
            f"longctx_servers={servers} must be divided evenly over {group.groups} group(s) and "
            f"{nodes} node(s); use a multiple of {multiple}"
        )
    if servers > MAX_SERVERS * group.groups:
        raise ValueError(
            f"longctx_servers={servers} over {group.groups} group(s): a group has at most "
            f"{MAX_SERVERS} servers; start fewer, or make longctx_group_size smaller"
        )
    limit = exchange_timeout(arguments.ddp_timeout)
    if group.size > 1 and not arguments.longctx_server_timeout < limit:
        raise ValueError(
            f"longctx_server_timeout={arguments.longctx_server_timeout} must be below {limit:g}, "
            "the seconds after which trainers give each other up (120, or half of ddp_timeout); "
            "lower longctx_server_timeout or raise ddp_timeout"
        )
    return int(servers // group.groups)


def end_with_launcher() -> None:
    """Have Linux end this process when its launcher is killed and cannot end it any more.

    Raises:
        RuntimeError: if the launcher is gone already.
    """
    # Only below torchrun's agent (accelerate launch uses it too), which is this process's parent
    # and outlives its ranks. Any other parent may be a shell that leaves a run behind on purpose.
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if not end_with_parent(_LAUNCHER, signal=signal.SIGTERM):
        raise RuntimeError("the launcher that started this trainer is gone, so it ends as well")


def make_runtime(group: Group, *, default_seconds: float) -> Runtime:
    """Make this process's runtime. All trainers call this at the same time.

    Args:
        group (`Group`): Group of this process.
        default_seconds (`float`): Longest wait in the default group; see `exchange_timeout` for
            the group's own exchanges.
    """
    end_with_launcher()
    if group.trainers > 1 and dist.get_backend() == "gloo":
        assert dist.group.WORLD is not None
        # On the CPU Trainer leaves gloo's time-out at 30 minutes, whatever ddp_timeout is.
        dist.group.WORLD.set_timeout(timedelta(seconds=default_seconds))
    if group.size == 1:
        return Runtime()
    channel = _new_channel(group, seconds=exchange_timeout(default_seconds))
    atexit.register(channel.close)
    return Runtime(channel=channel)


def _new_channel(group: Group, *, seconds: float) -> GlooChannel:
    """Make one more channel in every group and return that of this process's group."""
    own: dist.ProcessGroup | None = None
    # torch numbers process groups by creation, so all trainers make those of all groups in order.
    for index in range(group.groups):
        members = list(range(index * group.size, (index + 1) * group.size))
        made = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=seconds))
        if index == group.index:
            own = made
    assert own is not None
    return GlooChannel(own, timeout=seconds)


def add_channels(
    channel: GlooChannel, group: Group, *, channels: int, device: torch.device
) -> None:
    """Add channels until there are as many as any group needs. All trainers call this at once.

    Args:
        channel (`GlooChannel`): Channel between the ranks of the group, which gets the others.
        group (`Group`): Group of this process.
        channels (`int`): Channels that this group's plans use: two per level of a topology.
        device (`torch.device`): Device on which the default group exchanges.
    """
    # Topologies are measured, so groups may find different numbers of levels.
    most = torch.tensor(channels, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for number in range(1 + len(channel.more), int(most)):
        further = _new_channel(group, seconds=channel.timeout.total_seconds())
        further.agree(number, what="a channel's number")  # connects now, not within the first step
        channel.more = (*channel.more, further)


def make_server_pool(runtime: Runtime, group: Group, arguments: Any, *, name: str) -> ServerPool:
    """Make the pool of servers that the training arguments ask for, without starting it.

    Raises:
        ValueError: see `servers_per_group`.
    """
    return ServerPool(
        runtime,
        ranks=group.size,
        rank=group.rank,
        count=servers_per_group(arguments, group, name=name),
        folder=Path(arguments.output_dir) / "longctx_servers",
        name=f"group{group.index}",
        timeout=arguments.longctx_server_timeout,
        toward=os.environ.get("MASTER_ADDR", "127.0.0.1"),
    )


def validate_agreement(
    fingerprints: Mapping[str, int], *, made: int = 0, channel: Channel, ranks: int, what: str
) -> None:
    """Refuse to go on where the ranks of a group hold different values.

    All ranks of the group call this at once.

    Args:
        fingerprints (`Mapping[str, int]`): A stable hash of each value, a non-negative int64, by
            what sets it; the same names on all ranks.
        made (`int`, *optional*): A hash of what the ranks made of these values, which may differ
            between versions of a library.
        channel (`Channel`): Between the ranks.
        ranks (`int`): How many they are.
        what (`str`): What is compared, for errors.

    Raises:
        ValueError: on every rank, with what differs and on which ranks.
        ExchangeError: where a rank does not answer.
    """
    mine = torch.tensor([*fingerprints.values()], dtype=torch.int64)
    number = fingerprint(mine.numpy().tobytes(), made.to_bytes(8, "little"))
    try:
        channel.agree(number, what=what)
    except ValueError as error:
        # every rank is here: `agree` raises on all of them or on none
        everyone = gather(channel, mine, ranks=ranks)
        holders = (everyone[:, None] == everyone[None]).sum(0)
        usual = everyone.gather(0, holders.argmax(0, keepdim=True))  # in a tie that of a lower rank
        parts = [
            f"{name} on rank {' and '.join(map(str, odd.nonzero()[:, 0].tolist()))}"
            for name, odd in zip(fingerprints, (everyone != usual).T, strict=True)
            if odd.any()
        ]
        if not parts:  # what was made differs alone
            raise
        raise ValueError(
            f"rank {channel.rank}: the ranks of a group disagree on {what}: different from the "
            f"other ranks {'is' if len(parts) == 1 else 'are'} {'; '.join(parts)}; give every rank "
            "the same data set, seed, flags and versions"
        ) from error
