"""Sides of one case -> what the ranks of an emulated cluster did with them.

Floor: bench. `python -m hf_longctx.bench.on_cluster CASE RESULTS` is what each rank runs: it reads
the case, trains on its sides in turn, and leaves its `RankRun` in the folder of results.
"""

import pickle
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.channels import GlooChannel
from ..comm.processes import RankContext, RankError
from .cluster import Cluster, ClusterSpec
from .common import Shape
from .sides import RankRun, Side, run_rank


def run_on(
    spec: ClusterSpec, *, shape: Shape, sides: Mapping[str, Side], rounds: int
) -> list[RankRun]:
    """Make the cluster, and run the sides on it; every rank's run.

    Args:
        spec (`ClusterSpec`): Nodes and links.
        shape (`Shape`): The model.
        sides (`Mapping[str, Side]`): Of `spec.ranks` ranks.
        rounds (`int`): Of each side.

    Raises:
        ClusterUnavailable: where this machine cannot make it.
        RankError: where a rank fails; its own words stand on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="hf_longctx_cluster_") as name, Cluster(spec) as made:
        folder = Path(name)
        case = folder / "case"
        case.write_bytes(pickle.dumps({"shape": shape, "sides": dict(sides), "rounds": rounds}))
        code = made.run([sys.executable, "-m", __name__, str(case), name])
        if code:
            raise RankError(f"a rank of the emulated cluster ended with code {code}")
        return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(spec.ranks)]


def main(case: str, results: str) -> None:
    """One rank's share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    context = RankContext(rank, ranks, GlooChannel(group), group)
    run = run_rank(context, **pickle.loads(Path(case).read_bytes()))
    (Path(results) / f"rank{rank}").write_bytes(pickle.dumps(run))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
