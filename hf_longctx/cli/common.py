"""What subcommands of `hf-longctx` share: progress on standard error, figures as lines and JSON.

Layer: cli.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag that `progress` checks and `show` takes."""
    parser.add_argument("--json", metavar="FILE", help="write the figures there as one object")


@contextmanager
def progress(arguments: argparse.Namespace) -> Iterator[None]:
    """Says on standard error what runs now; an output that cannot be written shows at once."""
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        raise ValueError(f"--json {arguments.json}: no such folder; make it first")
    handler, logger = logging.StreamHandler(), logging.getLogger(__package__)
    handler.setFormatter(logging.Formatter(f"hf-longctx {arguments.command}: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def show(report: dict[str, Any], path: str | None) -> None:
    """Print a report's figures, a line each, and write it to `path` if there is one."""
    lines = dict(_flat(report))
    width = max(len(key) for key in lines)
    for key, value in lines.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(f"{key:<{width}}  {shown}")
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n")


def _flat(report: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A report's figures; those of a nested report as `outer.inner`."""
    for key, value in report.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
