"""`hf-longctx`: check and verify a model under our names, start a run, profile, and serve.

Figures go to standard output, progress to standard error. Exit codes: 0 all bounds hold, 1 some do
not or a rank failed, 2 refused or wrong flags; `check`: 0 a name works, 2 none does, 1 a missing
file or wrong flags. Layer: cli.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from ..version import VERSION

# Commands that left the package, and what runs in their place in a clone of the repository.
_MOVED = {"bench": "python -m benchmarks", "cluster": "python -m benchmarks.cluster"}
# Each is a module of this folder with a function `add_command`.
_COMMANDS = ("check", "verify", "init", "sft", "profile", "serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        The exit code.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    from ..verify.rank_pool import RankError

    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] and given[0] in _MOVED:
        instead = f"{_MOVED[given[0]]} {shlex.join(given[1:])}".strip()
        print(
            f"hf-longctx {given[0]} has moved out of the package; in a clone of the repository, "
            f"run {instead}",
            file=sys.stderr,
        )
        return 2
    arguments = _parse(given)
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


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="hf-longctx",
        description=(
            "Exact attention across ranks for long, uneven documents: check and verify a model, "
            "start a training run, measure this machine."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hf-longctx {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    # Only the named command is imported: a server must not wait for Transformers.
    for name in [name for name in _COMMANDS if name in given[:1]] or _COMMANDS:
        import_module(f".{name}", __package__).add_command(commands)
    arguments, unknown = parser.parse_known_args(given)
    if unknown and not getattr(arguments, "takes_unknown", False):
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.unknown = unknown
    return arguments


if __name__ == "__main__":
    sys.exit(main())
