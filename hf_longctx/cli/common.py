"""Share what the commands have in common: progress lines, printed figures, JSON, help of keys.

Layer: cli.
"""

import argparse
import json
import logging
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--json FILE`, which `progress` checks and `show` takes."""
    parser.add_argument("--json", metavar="FILE", help="write the figures there as one object")


@contextmanager
def progress(command: str, *, json_path: str | None, package: str = "hf_longctx") -> Iterator[None]:
    """Show what runs now on standard error, each line with the command's name before it.

    Args:
        command (`str`): Name of the command, as `hf-longctx verify`.
        json_path (`str`, *optional*): Where the figures are to be written.
        package (`str`, *optional*, defaults to `"hf_longctx"`): Whose log lines are shown.

    Raises:
        ValueError: where the folder of `json_path` does not exist.
    """
    # A run takes minutes: an output that cannot be written must be known before it starts.
    if json_path and not Path(json_path).absolute().parent.is_dir():
        raise ValueError(f"--json {json_path}: no such folder; make it first")
    handler, logger = logging.StreamHandler(), logging.getLogger(package)
    handler.setFormatter(logging.Formatter(f"{command}: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def show(report: Mapping[str, Any], path: str | None) -> None:
    """Print a report's figures, one per line, and write it to `path` if there is one."""
    lines = dict(_flat(report))
    width = max(len(key) for key in lines)
    for key, value in lines.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(f"{key:<{width}}  {shown}")
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n")


def _flat(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a report's figures; those of a nested report as `outer.inner`."""
    for key, value in report.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def figure_help(title: str, figures: Mapping[str, str]) -> str:
    """Format a table of JSON keys and their meaning for a help text."""
    lines = [f"{title}:"]
    for keys, meaning in figures.items():
        indented = textwrap.wrap(meaning, 78, initial_indent=" " * 20, subsequent_indent=" " * 20)
        if len(keys) < 17:  # the meaning starts beside a short key, below a long one
            indented[0] = f"  {keys:<18}{indented[0].lstrip()}"
        else:
            lines.append(f"  {keys}")
        lines += indented
    return "\n".join(lines) + "\n"
