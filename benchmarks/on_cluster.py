"""A function and its arguments -> what it returned on each rank of an emulated cluster.

`python -m benchmarks.on_cluster CASE RESULTS` is what each rank runs: it reads
the case, does its share, and leaves the result in the folder of results.
"""

import faulthandler
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster import Cluster
from benchmarks.cluster_spec import ClusterSpec
from hf_longctx.comm.channels import over_groups
from hf_longctx.verify.rank_pool import RankContext, RankError

_GRACE = 30.0  # seconds for ranks that started late to print their stacks


def run_on(
    spec: ClusterSpec,
    work: Callable[..., Any],
    *,
    channels: int = 1,
    seconds: float = 3600.0,
    **arguments: Any,
) -> list[Any]:
    """Make the cluster, and do work on it; every rank's result.

    Args:
        spec (`ClusterSpec`): Nodes and links.
        work (`Callable`): A function of an importable module: `(context, **arguments)`.
        channels (`int`, *optional*, defaults to 1): Channels of each rank, with a group each.
        seconds (`float`, *optional*, defaults to 3600): How long it may take. Ranks that are not
            done then print the stack of each of their threads, which says where they wait.
        arguments: What else it takes.

    Raises:
        ClusterUnavailable: where this machine cannot make it.
        RankError: where a rank fails; its own words stand on standard error.
        TimeoutError: Names the ranks that were not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="hf_longctx_cluster_") as name, Cluster(spec) as made:
        folder = Path(name)
        case = folder / "case"
        case.write_bytes(pickle.dumps((work, channels, seconds, arguments)))
        # The stacks come first, so that they are passed on before the ranks are killed.
        code = made.run([sys.executable, "-m", __name__, str(case), name], seconds=seconds + _GRACE)
        if code:
            raise RankError(f"a rank of the emulated cluster ended with code {code}")
        return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(spec.ranks)]


def main(case: str, results: str) -> None:
    """One rank's share."""
    work, channels, seconds, arguments = pickle.loads(Path(case).read_bytes())
    faulthandler.dump_traceback_later(seconds)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    groups = [group, *(dist.new_group() for _ in range(channels - 1))]
    context = RankContext(rank, ranks, over_groups(groups, timeout=120.0), group)
    (Path(results) / f"rank{rank}").write_bytes(pickle.dumps(work(context, **arguments)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
