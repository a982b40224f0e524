"""Trainers and a group size -> this process's group, its channel, and the arithmetic in words.

Layer: servers.
"""

import atexit
import ctypes
import math
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.channels import EXCHANGE_SECONDS, GlooChannel
from ..runtime.executor import Runtime
from .manager import Servers

MOST_SERVERS = 62  # of a group: those that are lost travel as bits of one int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks that share this process's batches.

    Args:
        trainers (`int`): Trainer processes.
        size (`int`): Ranks of a group.
        index (`int`): Which group this process is in.
        rank (`int`): Its rank within the group.
    """

    trainers: int
    size: int
    index: int
    rank: int

    @property
    def groups(self) -> int:
        """Groups, data-parallel to each other."""
        return self.trainers // self.size


def find_group(arguments: Any) -> Group:
    """The group of this process, from the training arguments.

    Raises:
        ValueError: where the group size does not divide the trainers, or the launcher started
            processes that do not train together.
    """
    trainers = int(arguments.world_size)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != trainers:
        raise ValueError(
            f"the launcher started {launched} processes but Trainer sees {trainers}: they would "
            "train apart; without a GPU set use_cpu=True in the training arguments"
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


def exchange_seconds(default_seconds: float) -> float:
    """Longest wait for a peer in an exchange, under that in the default group, so that the error
    of a lost peer comes from there, where it names the peer."""
    return min(EXCHANGE_SECONDS, default_seconds / 2)


def servers_of_a_group(arguments: Any, group: Group, *, name: str) -> int:
    """Attention servers that each group starts.

    Args:
        arguments: The training arguments.
        group (`Group`): Where this process is.
        name (`str`): Attention name.

    Raises:
        ValueError: where they cannot be shared evenly, the attention has none, or trainers would
            give each other up before a server.
    """
    servers = arguments.longctx_servers
    if not servers:
        return 0
    if name != "distca":
        raise ValueError(
            f"longctx_servers={servers} under attn_implementation={name!r}: only distca has "
            "servers; use it, or leave longctx_servers at 0"
        )
    nodes = group.trainers // int(os.environ.get("LOCAL_WORLD_SIZE", group.trainers))
    each = math.lcm(group.groups, nodes)
    if servers % each:
        raise ValueError(
            f"longctx_servers={servers} must be divided evenly over {group.groups} group(s) and "
            f"{nodes} node(s); use a multiple of {each}"
        )
    if servers > MOST_SERVERS * group.groups:
        raise ValueError(
            f"longctx_servers={servers} over {group.groups} group(s): a group has at most "
            f"{MOST_SERVERS} servers; start fewer, or make longctx_group_size smaller"
        )
    limit = exchange_seconds(arguments.ddp_timeout)
    if group.size > 1 and not arguments.longctx_server_timeout < limit:
        raise ValueError(
            f"longctx_server_timeout={arguments.longctx_server_timeout} must be below {limit:g}, "
            "the seconds after which trainers give each other up: 120, or half of ddp_timeout; "
            "lower the one or raise the other"
        )
    return int(servers // group.groups)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAUNCHER = os.getppid()  # as this process began


def end_with_launcher() -> None:
    """Have Linux end this process when its launcher is killed, which could not end it any more.

    Only under torchrun's agent (`accelerate launch` too), which is the parent and outlives its
    ranks: elsewhere the parent may be a shell that leaves a run behind on purpose.

    Raises:
        RuntimeError: where the launcher is gone already.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != _LAUNCHER:  # it ended before that
            raise RuntimeError("the launcher that started this trainer is gone, so it ends too")


def join(group: Group, *, default_seconds: float) -> Runtime:
    """This process's runtime: every trainer builds the groups' channels in one order.

    Args:
        group (`Group`): Where this process is.
        default_seconds (`float`): Longest wait in the default group, whose gloo time-out Trainer
            leaves at 30 minutes on the CPU; see `exchange_seconds` for an exchange.
    """
    end_with_launcher()
    if group.trainers > 1 and dist.get_backend() == "gloo":
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timedelta(seconds=default_seconds))
    if group.size == 1:
        return Runtime()
    channel = _channel_of_each(group, seconds=exchange_seconds(default_seconds))
    atexit.register(channel.close)
    return Runtime(channel=channel)


def _channel_of_each(group: Group, *, seconds: float) -> GlooChannel:
    """One channel more in every group, which all trainers make, as torch numbers groups; ours."""
    mine: dist.ProcessGroup | None = None
    for index in range(group.groups):
        members = list(range(index * group.size, (index + 1) * group.size))
        made = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=seconds))
        if index == group.index:
            mine = made
    assert mine is not None
    return GlooChannel(mine, timeout=seconds)


def widen(channel: GlooChannel, group: Group, *, channels: int, device: torch.device) -> None:
    """Add channels, until there are as many as any group needs; all trainers call this at once.

    Args:
        channel (`GlooChannel`): Between the ranks of the group.
        group (`Group`): Where this process is.
        channels (`int`): That a plan of this group uses: two per level of a topology.
        device (`torch.device`): On which the default group exchanges.
    """
    most = torch.tensor(channels, device=device)  # measured, so groups may differ in their levels
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for number in range(1 + len(channel.more), int(most)):
        further = _channel_of_each(group, seconds=channel.timeout.total_seconds())
        further.agree(number, what="a channel's number")  # warm, before the first step
        channel.more = (*channel.more, further)


def servers_for(runtime: Runtime, group: Group, arguments: Any, *, name: str) -> Servers:
    """The servers that the training arguments ask for, not started yet.

    Raises:
        ValueError: see `servers_of_a_group`.
    """
    return Servers(
        runtime,
        ranks=group.size,
        rank=group.rank,
        count=servers_of_a_group(arguments, group, name=name),
        folder=Path(arguments.output_dir) / "longctx_servers",
        name=f"group{group.index}",
        timeout=arguments.longctx_server_timeout,
        toward=os.environ.get("MASTER_ADDR", "127.0.0.1"),
    )
