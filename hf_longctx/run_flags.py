"""A command line -> the script to run, what is ours of it, and what stays the script's.

Floor: the top.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from difflib import get_close_matches

from transformers import HfArgumentParser

from .arguments import LongCtxArguments
from .support import NAMES, refuse_name

NAME = "attn_implementation"
_EPILOG = """\
Flags that start with --longctx_ and --attn_implementation may stand anywhere behind the script.
They go to the script where its own parser knows them; everything else is handed on as it is.

The script's transformers.Trainer, or trl.SFTTrainer, then takes documents (rows of input_ids and
optional labels) and shares batches of them among the ranks. A batch holds ranks x
--longctx_max_tokens_per_rank tokens, so per_device_train_batch_size must be 1; left out, it is.
`hf-longctx check --model M` says beforehand whether a model will do.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, taken apart.

    Args:
        script (`str`): Path of the script, or name of a module.
        module (`bool`): Whether it is a module (`-m NAME`).
        rest (`list[str]`): The script's arguments without ours.
        taken (`dict[str, str]`): Ours, as given: flag with underscores -> value.
        name (`str`): Attention name.
        longctx (`LongCtxArguments`): The `longctx_*` flags.
    """

    script: str
    module: bool
    rest: list[str]
    taken: dict[str, str]
    name: str
    longctx: LongCtxArguments


def read(argv: Sequence[str]) -> Command:
    """Take our flags off a command line.

    Raises:
        SystemExit: on `--help`, a missing script, or a flag of ours that is wrong.
        ValueError: from `LongCtxArguments`, or for an attention name that is not ours.
    """
    parser = HfArgumentParser(
        LongCtxArguments,
        prog="accelerate launch -m hf_longctx.run",
        usage="%(prog)s [-m] SCRIPT --attn_implementation NAME [--longctx_* ...] [SCRIPT'S FLAGS]",
        description="Runs an unmodified Trainer script with batches that a group of ranks shares.",
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        f"--{NAME}", required=True, metavar="NAME", help=f"How attention runs: {', '.join(NAMES)}."
    )
    if not argv:
        parser.error("which script? --help says more")
    if argv[0] in ("-h", "--help"):
        parser.parse_args(["--help"])
    module = argv[0] == "-m"
    script, *given = argv[1:] if module and len(argv) > 1 else argv
    if script.startswith("-"):
        parser.error(f"the script comes first, before {script}")
    rest, taken = _split(given)
    flags = [part for flag, value in taken.items() for part in (f"--{flag}", value)]
    longctx, named, unknown = parser.parse_args_into_dataclasses(
        flags, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        flag = unknown[0].removeprefix("--")
        near = get_close_matches(
            flag, [field.name for field in dataclasses.fields(LongCtxArguments)]
        )
        meant = f"did you mean --{near[0]}?" if near else "--help lists those that there are"
        parser.error(f"no such flag: --{flag}; {meant}")
    refuse_name(named.attn_implementation)
    return Command(
        script=script, module=module, rest=rest, taken=taken, name=named.attn_implementation,
        longctx=longctx,
    )  # fmt: skip


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the text as it is written."""


def _split(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The script's arguments, and ours by flag; a flag given twice counts the last time."""
    rest, taken = [], {}
    left = iter(given)
    for part in left:
        flag, equals, value = part.removeprefix("--").partition("=")
        flag = flag.replace("-", "_")
        if part.startswith("--") and (flag == NAME or flag.startswith("longctx_")):
            taken[flag] = value if equals else next(left, "")
        else:
            rest.append(part)
    return rest, taken


def flags_in(argv: Sequence[str]) -> set[str]:
    """The flags of a command line, without dashes, with underscores."""
    return {part.partition("=")[0].lstrip("-").replace("-", "_") for part in argv}
