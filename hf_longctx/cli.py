"""`hf-longctx`: check and verify a model under our names, and measure.

Floor: the top. Exit codes: 0 all bounds hold, 1 some do not or a rank failed, 2 refused or wrong
flags; `check`: 0 a name works, 2 none does, 1 a missing file or wrong flags. Figures go to standard
output, and what runs now to standard error.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .cli_check import add_check
from .cli_cluster import add_cluster

VERIFIED = ("longctx_layout", "longctx_tolerance")  # flags whose values change what verify runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        The exit code.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    from .comm.processes import RankError

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
    add_check(commands)
    _add_verify(commands)
    _add_bench(commands)
    add_cluster(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a model over several ranks with one process, gradients included",
        description=(
            "Starts gloo processes on this machine, runs packed documents through the model under "
            "one of our names, and compares logits, loss and every gradient with one process that "
            "runs each document alone: naive float64 attention, and stock Transformers in float32. "
            "Bounds: 1e-10 in float64; in bf16 twice (gradients three times) the error of the "
            "plain bf16 path; in float32, and against Transformers, 1e-5 or, where the plain "
            "float32 path itself is further than that from float64, twice (three times) its error. "
            "Dropout is set to 0 on both sides; attention dropout is refused."
        ),
        epilog=(
            "example: hf-longctx verify --model tests/configs/tiny_llama.json "
            "--attn_implementation distca --ranks 3"
        ),
    )
    verify.add_argument("--model", required=True, help="checkpoint folder or config JSON")
    verify.add_argument("--attn_implementation", required=True, help="distca or ring")
    verify.add_argument("--ranks", type=int, required=True, help="processes to start")
    verify.add_argument(
        "--dtype",
        choices=("float64", "float32", "bf16"),
        default="float64",
        help="of the comparison with the naive twin (default: float64)",
    )
    verify.add_argument(
        "--checkpointing",
        action="store_true",
        help="with activation checkpointing, both kinds; reports the worst",
    )
    verify.add_argument(
        "--document_lengths",
        type=_numbers,
        metavar="N,N,...",
        help="tokens of each document of one batch (default: three batches that end documents on, "
        "before and after rank edges)",
    )
    _add_json(verify)
    _add_longctx_flags(verify, names=VERIFIED)
    verify.set_defaults(run=_verify)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures there as one object")


def _numbers(text: str) -> tuple[int, ...]:
    """`1,5,300` -> the numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, as 1,5,300") from error


def _add_longctx_flags(parser: argparse.ArgumentParser, *, names: Sequence[str]) -> None:
    """The fields `longctx_X` in `names` as `--X`; flags that a command does not use are unknown."""
    from .arguments import LongCtxArguments

    group = parser.add_argument_group("flags of the run (--longctx_X in training)")
    for field in dataclasses.fields(LongCtxArguments):
        if field.name not in names:
            continue
        kind, choices = _kind_of(field.type)
        group.add_argument(
            "--" + field.name.removeprefix("longctx_"),
            dest=field.name,
            type=kind,
            choices=choices,
            default=field.default,
            help=f"{field.metadata['help']} (default: {field.default})",
        )


def _kind_of(hint: Any) -> tuple[Callable[[str], Any], tuple[str, ...] | None]:
    """How to read a field's value, and the values allowed."""
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None)), None
    return hint, None


def _verify(arguments: argparse.Namespace) -> int:
    import torch

    from .arguments import LongCtxArguments
    from .verify.compare import verify

    torch.set_num_threads(1)
    with _progress(arguments):
        report = verify(
            model=arguments.model,
            name=arguments.attn_implementation,
            ranks=arguments.ranks,
            arguments=LongCtxArguments(**{name: getattr(arguments, name) for name in VERIFIED}),
            dtype=arguments.dtype,
            checkpointing=arguments.checkpointing,
            document_lengths=arguments.document_lengths,
        )
    _show(report, arguments.json)
    failed = report["failed"]
    print(f"failed: {'; '.join(failed)}" if failed else "exact: all bounds hold")
    return 1 if failed else 0


@contextmanager
def _progress(arguments: argparse.Namespace) -> Iterator[None]:
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


def _show(report: dict[str, Any], path: str | None) -> None:
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


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure ours against a peer and a bound, in one run",
        description="Each bench prints shape, seed and machine, ours, the peer and the bound.",
    )
    bench.add_argument(
        "name",
        choices=("packed", "distca", "trainer", "plan"),
        help="packed: one process against sdpa on packed documents; "
        "distca: two ranks, one with a long document; "
        "trainer: whole steps of two ranks against the stock Trainer on TRL's packs; "
        "plan: balance, traffic and planning time of plans for 8 to 512 ranks; no process starts",
    )
    _add_json(bench)
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from .bench import distca, packed, plan, trainer

    benches: dict[str, Callable[[], dict[str, Any]]] = {
        "packed": packed.run,
        "distca": distca.run,
        "trainer": trainer.run,
        "plan": plan.run,
    }
    with _progress(arguments):
        report = benches[arguments.name]()
    _show(report, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
