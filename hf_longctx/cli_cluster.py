"""`hf-longctx cluster`: a command on emulated nodes of this machine, once per rank.

Floor: the top. Exit codes: that of the first rank that fails, else 0; 2 also for a wrong
description and where no cluster can be made, then with nothing run.
"""

import argparse
from typing import Any

from .bench.cluster_spec import EXAMPLE

_HELP = """\
Runs COMMAND once per rank on emulated nodes: network namespaces of this machine, joined by links
of a given rate. Rank, world size and rendezvous are in its environment as launchers set them, so a
program that calls torch.distributed.init_process_group("gloo") runs as it is.

  nodes=2            nodes
  ranks_per_node=4   ranks of each; inside a node they talk as fast as the machine can
  cross=200mbit      rate of a link between nodes, in each direction: kbit, mbit or gbit
  rails=per_rank     each rank has such a link of its own (default)
  rails=shared       the ranks of a node share one

Output comes line by line behind the rank, as `[3] ...`. When a rank fails, the others are killed,
and its exit code is that of the command. Nothing is left behind, also after SIGKILL. Needs Linux,
root or user namespaces, and the tools of util-linux and iproute2.
"""

_EXAMPLES = f"""\
examples:
  hf-longctx cluster {EXAMPLE} -- python my_gloo_script.py
  hf-longctx cluster nodes=2,ranks_per_node=2,cross=1gbit,rails=shared -- \\
      python -m hf_longctx.bench.link_probe          # the rates that gloo reaches
  hf-longctx cluster nodes=2,ranks_per_node=1,cross=200mbit -- ip -s link show cross
"""


def add_cluster(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    cluster = commands.add_parser(
        "cluster",
        help="run a command on emulated nodes with slow links between them, once per rank",
        usage=f"hf-longctx cluster {EXAMPLE} -- COMMAND ...",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster.add_argument("description", metavar="NODES", help=f"as {EXAMPLE}")
    cluster.add_argument("program", metavar="COMMAND", nargs=argparse.REMAINDER, help="after --")
    cluster.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the cluster and run the command on it; returns the exit code."""
    from .bench.cluster import Cluster, ClusterSpec

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ValueError(f"no COMMAND to run; write it as {EXAMPLE} -- COMMAND")
    try:
        with Cluster(ClusterSpec.parse(arguments.description)) as cluster:
            return cluster.run(program)
    except KeyboardInterrupt:
        return 130  # as a shell names it
