"""`python -m benchmarks NAME`: measure ours against a peer and a bound, in one run.

Exit codes: 0 measured, 1 a rank failed, 2 refused, or a cluster that this machine cannot make.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from hf_longctx.cli.common import add_json, progress, show
from hf_longctx.verify.rank_pool import RankError

BENCHMARKS = {
    "packed": "one process against sdpa on packed documents",
    "distca": "two ranks: what balancing, overlap and servers gain and cost, against other ways to "
    "cut documents, also over slow links (25 minutes; needs an emulated cluster, see "
    "benchmarks.cluster)",
    "charm": "eight ranks in two domains with slow links between them: rings, charm, Ulysses and "
    "their hybrid beside their bounds, and other libraries (17 minutes; needs a cluster)",
    "zeco": "eight nodes with a slow link each: scans of recurrent states beside all-gathers of "
    "them and their bounds (5 minutes; needs a cluster)",
    "trainer": "whole steps of two ranks against the stock Trainer on TRL's packs",
    "plan": "balance, traffic and planning time of plans for 8 to 512 ranks; starts no process",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        The exit code.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Each benchmark prints shape, seed and machine, ours, the peer and the bound.",
        epilog="\n".join(f"{name}:\n  {text}" for name, text in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, help="see below")
    parser.add_argument(
        "--model",
        metavar="FAMILY",
        help="packed: a config-initialised model of this family with recurrent layers, against "
        "Transformers' own code on documents one by one or padded (qwen3_next)",
    )
    add_json(parser)
    arguments = parser.parse_args(argv)
    command = f"python -m benchmarks {arguments.name}"
    options = {} if arguments.model is None else {"family": arguments.model}
    try:
        if options and arguments.name != "packed":
            raise ValueError("--model is a flag of packed; leave it out")
        module = "packed_linear" if options else arguments.name
        run = importlib.import_module(f"benchmarks.{module}").run
        with (
            progress(command, json_path=arguments.json),
            progress(command, json_path=arguments.json, package="benchmarks"),
        ):
            report = run(**options)
        show(report, arguments.json)
    except (ValueError, OSError) as error:  # OSError: no cluster can be made here, for one
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"{command}: failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
