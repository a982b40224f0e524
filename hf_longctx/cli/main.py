"""`hf-longctx`: check and verify a model under our names, and measure.

Layer: cli. Exit codes: 0 all bounds hold, 1 some do not or a rank failed, 2 refused or wrong
flags; `check`: 0 a name works, 2 none does, 1 a missing file or wrong flags. Figures go to standard
output, and what runs now to standard error.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from benchmarks.cluster import add_cluster

from .check import add_check
from .common import add_json, progress, show
from .profile import add_profile
from .serve import add_serve
from .verify import add_verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        The exit code.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    from ..verify.rank_pool import RankError

    arguments = _parse(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except (ValueError, OSError) as error:  # OSError: a checkpoint without weights, for one
        print(f"hf-longctx {arguments.command}: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        lines = str(error).splitlines()  # those between the first and the last are a traceback
        cause = " ".join(dict.fromkeys((lines[0], lines[-1])))
        print(
            f"hf-longctx {arguments.command}: failed: a rank process died, was stopped, ran out of "
            f"memory or was too slow: {cause}",
            file=sys.stderr,
        )
        return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose exit code for wrong flags can be chosen."""

    wrong_flags = 2

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(self.wrong_flags, f"{self.prog}: error: {message}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="hf-longctx",
        description=(
            "Exact attention across ranks for long, uneven documents: check, verify, measure."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    each: dict[str, Callable[[Any], None]] = {
        "check": add_check,
        "verify": add_verify,
        "bench": _add_bench,
        "cluster": add_cluster,
        "serve": add_serve,
        "profile": add_profile,
    }
    given = sys.argv[1:] if argv is None else argv
    # One that is named is added alone: a server must not import Transformers for verify's flags.
    for name in each.keys() & {*given[:1]} or each:
        each[name](commands)
    arguments, unknown = parser.parse_known_args(given)
    if unknown:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure ours against a peer and a bound, in one run",
        description="Each bench prints shape, seed and machine, ours, the peer and the bound.",
    )
    bench.add_argument(
        "name",
        choices=("packed", "distca", "charm", "zeco", "trainer", "plan"),
        help="packed: one process against sdpa on packed documents; "
        "distca: two ranks, what balancing, overlap and servers gain and cost, against other ways "
        "to cut documents, also over slow links (25 minutes; needs what `hf-longctx cluster` "
        "needs); "
        "charm: eight ranks in two domains with slow links between them, rings, charm, Ulysses and "
        "their hybrid beside their bounds, and other libraries' (17 minutes, and the same needs); "
        "zeco: eight nodes with a slow link each, scans of linear-attention states beside "
        "all-gathers of them and their bounds (5 minutes, and the same needs); "
        "trainer: whole steps of two ranks against the stock Trainer on TRL's packs; "
        "plan: balance, traffic and planning time of plans for 8 to 512 ranks; no process starts",
    )
    bench.add_argument(
        "--model",
        metavar="FAMILY",
        help="packed: a config-initialised model of this family with recurrent layers, against "
        "Transformers' own code on documents one by one or padded (qwen3_next)",
    )
    add_json(bench)
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from benchmarks import charm, distca, packed, packed_linear, plan, trainer, zeco

    benches: dict[str, Callable[[], dict[str, Any]]] = {
        "packed": packed.run,
        "distca": distca.run,
        "charm": charm.run,
        "zeco": zeco.run,
        "trainer": trainer.run,
        "plan": plan.run,
    }
    if arguments.model is not None:
        if arguments.name != "packed":
            raise ValueError(f"--model is of bench packed; leave it out of bench {arguments.name}")
        benches["packed"] = partial(packed_linear.run, family=arguments.model)
    with progress(arguments):
        report = benches[arguments.name]()
    show(report, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
