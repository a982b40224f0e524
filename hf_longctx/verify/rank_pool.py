"""Start rank processes on this machine once, and send them one job after another.

`hf-longctx verify`, benchmarks and tests use them; in training the launcher starts the ranks. Jobs
are functions of an importable module, sent over local pipes. Layer: verify.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from ..comm.channels import Channel, over_groups


@dataclass(frozen=True, slots=True)
class RankContext:
    """The rank that a job runs as.

    Args:
        rank (`int`): This rank.
        ranks (`int`): Ranks of the job.
        channel (`Channel`): The job's channel, a new one for each job.
        group (`dist.ProcessGroup`): The gloo group beneath it.
    """

    rank: int
    ranks: int
    channel: Channel
    group: dist.ProcessGroup


class RankError(RuntimeError):
    """A rank failed or died; the message is the first error of any rank."""


class RankPool:
    """Gloo processes with one thread each, started by the first job.

    Args:
        ranks (`int`): Processes to start; a job may use fewer.
        timeout (`float`, *optional*, defaults to 60.0): Seconds one exchange may take.
    """

    def __init__(self, ranks: int, *, timeout: float = 60.0) -> None:
        self.ranks, self.timeout = ranks, timeout
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._channels: dict[int, int] = {}  # by ranks of a job: channels made so far
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks; none before the first job."""
        return tuple(p.pid for p in self._processes if p.pid is not None)

    def _start(self) -> None:
        # Torch and Transformers take seconds to import: the ranks are forked from one process that
        # has imported them and done nothing else. Forking this process, which may hold threads,
        # could deadlock.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["hf_longctx"])
        self._folder = tempfile.TemporaryDirectory(prefix="hf_longctx_ranks_")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.ranks, store, self.timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self, job: Callable[..., Any], *, ranks: int | None = None, channels: int = 1, **given: Any
    ) -> list[Any]:
        """Run `job(context, **given)` on the first `ranks` ranks; returns their results by rank.

        Args:
            job (`Callable`): A function of an importable module.
            ranks (`int`, *optional*): All ranks by default.
            channels (`int`, *optional*, defaults to 1): Channels of the job, the first included.

        Raises:
            RankError: with the first error of any rank. The processes are ended then, and the next
                job starts new ones.
        """
        if not self._processes:
            self._start()
        used = self.ranks if ranks is None else ranks
        assert 1 <= used <= self.ranks, (used, self.ranks)
        results: dict[int, Any] = {}
        try:
            if channels > self._channels.get(used, 1):
                self._channels[used] = channels
                for pipe in self._pipes:  # torch counts groups: all ranks make each
                    pipe.send((None, used, channels, {}))
            for pipe in self._pipes[:used]:
                pipe.send((job, used, channels, given))
            while len(results) < used:
                for rank in self._ready(results, used):
                    failed, value = self._pipes[rank].recv()
                    if failed:
                        raise RankError(f"rank {rank} failed:\n{value}")
                    results[rank] = value
        except (EOFError, OSError) as error:
            self.close()
            raise RankError("a rank process died") from error
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(used)]

    def _ready(self, results: dict[int, Any], used: int) -> list[int]:
        due: Sequence[Connection] = [self._pipes[r] for r in range(used) if r not in results]
        ready = wait(due)
        return [r for r in range(used) if self._pipes[r] in ready]

    def close(self) -> None:
        """End all rank processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._channels = [], [], {}
        if self._folder is not None:
            self._folder.cleanup()


def _serve(rank: int, ranks: int, store: str, timeout: float, pipe: Connection) -> None:
    """Run a rank process: join the group, then do jobs until the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look this host's name up
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=2 * timeout),  # the channel's time-out must end first
        )
        groups = {n: [dist.new_group(list(range(n)))] for n in range(1, ranks + 1)}
    except Exception:  # another rank never joined: the parent reports it, not this process
        with suppress(OSError):
            pipe.send((True, traceback.format_exc()))
        return
    while True:
        try:
            job, used, channels, given = pipe.recv()
        except (EOFError, OSError):  # the parent closed the pipe, or is gone
            break
        try:
            own = groups[used]
            if job is None:
                own += [dist.new_group(list(range(used))) for _ in range(channels - len(own))]
                continue
            channel = over_groups(own[:channels], timeout=timeout)
            context = RankContext(rank, used, channel, own[0])
            pipe.send((False, job(context, **given)))
        except BaseException:
            with suppress(OSError):  # the parent may have gone after another rank's error
                pipe.send((True, traceback.format_exc()))
    dist.destroy_process_group()
