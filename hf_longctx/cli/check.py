"""`hf-longctx check`: show which attention names a checkpoint or config works under.

Exit codes: 0 a name (or the one given) works, 2 none does, 1 a missing file or a wrong flag, so
that scripts can tell "refused" from "misspelt". Layer: cli.
"""

import argparse
import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from ..support import NAMES, validate_name


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    check = commands.add_parser(
        "check",
        help="will it work with my model? every attention name, and why not",
        description=(
            "Applies the rules to the config, then runs a few tokens through a small instance of "
            "the family (the same layer kinds, heads, rotary settings, windows and flags; weights "
            "are not needed). Exit code 0: a name, or the one given, works; 2: none does; 1: a "
            "missing file or a wrong flag."
        ),
        epilog="example: hf-longctx check --model tests/configs/tiny_llama.json",
    )
    check.wrong_flags = 1
    check.add_argument("--model", required=True, help="checkpoint folder or config JSON")
    check.add_argument(
        "--attn_implementation",
        metavar="NAME",
        help=f"only this name, one of {', '.join(NAMES)} (default: all)",
    )
    check.add_argument("--json", metavar="FILE", help="write the rows there as one object")
    check.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows of `hf_longctx.check` for a config; returns the exit code."""
    # Imported here: `hf-longctx --help` should not wait for Transformers' models.
    from transformers.utils import logging

    from ..verify.check import check
    from ..verify.twins import load_config

    logging.set_verbosity_error()  # warnings of the small instance are not about the checkpoint
    wanted = arguments.attn_implementation
    try:
        if wanted is not None:
            validate_name(wanted)
        config = load_config(arguments.model)
    except ValueError as error:
        return _wrong(str(error))
    rows = [row for row in check(config) if wanted in (None, row.name)]
    print("\n".join(_table(rows)))
    if arguments.json:
        found = {"model": arguments.model, "rows": [dataclasses.asdict(row) for row in rows]}
        try:
            Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            return _wrong(f"--json: {error}")
    return 0 if any(row.works for row in rows) else 2


def _wrong(message: str) -> int:
    print(f"hf-longctx check: {message}", file=sys.stderr)
    return 1


def _table(rows: list[Any]) -> list[str]:
    """Format a line per name; names in a row that are refused for the same reasons share them."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        lines.append(f"{row.name:<{width}}  {'works' if row.works else 'refused'}")
        same = after and (row.rule, row.remedy) == (after.rule, after.remedy)
        if row.works or same:
            continue
        for rule, remedy in zip(row.rule.split(" | "), row.remedy.split(" | "), strict=False):
            lines += _indented(rule, width + 2)
            lines += _indented(f"-> {remedy}", width + 4)
    return lines


def _indented(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, 100, initial_indent=margin, subsequent_indent=margin)
