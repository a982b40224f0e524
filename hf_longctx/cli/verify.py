"""`hf-longctx verify`: a model over several ranks against one process, as figures and an exit code.

Layer: cli. Exit codes: 0 all bounds hold, 1 some do not, 2 refused or wrong flags.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .common import add_json, progress, show

# Flags whose values change what verify runs.
VERIFIED = (
    "longctx_layout",
    "longctx_tolerance",
    "longctx_overlap",
    "longctx_topology",
    "longctx_ulysses_size",
    "longctx_softmax",
    "longctx_scan",
)
_DESCRIPTION = """\
Starts gloo processes on this machine, runs packed documents through the model
under one of our names, and compares logits, loss and every gradient with one
process that runs each document alone: naive float64 attention, and stock
Transformers in float32. Bounds: 1e-10 in float64, 1e-9 with recurrent layers;
in bf16 twice (gradients three times) the error of the plain bf16 path; in
float32, and against Transformers, 1e-5 (recurrent gradients 1e-4) or, where the
plain float32 path itself is further than that from float64, twice (three times)
its error.
Dropout is set to 0 on both sides; attention dropout is refused.
"""
_EPILOG = """\
example:
  hf-longctx verify --model tests/configs/tiny_llama.json \\
      --attn_implementation distca --ranks 3

figures:
  logit_error, loss_error, grad_error
                    of the worst tensor, against naive float64 attention;
                    X_vs_transformers: in float32, against stock Transformers
  leak              largest gradient of other documents' logits in a document's
                    embeddings; 0, or documents see each other. A config's
                    weights are drawn so that a leak would show: the states of
                    recurrent layers decay slowly (rate 0.05), while those of
                    the usual rates forget a document within a few tokens
  attention_calls   of our softmax and recurrent layers, on all ranks together
  bytes_planned, bytes_sent
                    by plans, and in fact, forward and backward; must be equal
  recompute_bytes   sent once more by activation checkpointing; must be 0
  logit_columns     logits of each token that are compared, drawn at random from
                    a large vocabulary; loss and gradients see all of them
  set_to_0          fields of the config for dropout, which both sides run
                    without
  scan              (zeco_linear) what the longest scan of each kind of state took:
                    schedule, pieces, ranks, and the measured link that it went by
  servers, tasks_on_servers
                    extra servers, and the attention tasks that they did
  head_groups       (--overlap heads) groups of key/value heads that an exchange
                    was cut into
  switches          (--overlap pingpong) how often one half of a batch handed
                    over to the other
  bounds.X, failed  what X may be, and which of them is not so

figures of --kill:
  steps, replayed_steps
                    optimizer steps, and those run again without the lost server
  loss_difference, weights_difference
                    from the undisturbed run, relative: of any step; at the end
  orphans           processes that were left when the run had ended
"""


def add_verify(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    verify = commands.add_parser(
        "verify",
        help="compare a model over several ranks with one process, gradients included",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("--model", required=True, help="checkpoint folder or config JSON")
    verify.add_argument(
        "--attn_implementation", required=True, help="distca, charm, ring, ulysses or zeco_linear"
    )
    verify.add_argument("--ranks", type=int, required=True, help="processes to start")
    verify.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="S",
        help="extra attention servers that the ranks start (distca; default: 0)",
    )
    verify.add_argument(
        "--kill",
        choices=("forward", "backward", "stall"),
        help="train instead, in float32, once undisturbed and once with a server that is killed in "
        "the middle of a step's forward or backward, or stops answering; bound of loss_difference: "
        "1e-5",
    )
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
    add_json(verify)
    _add_longctx_flags(verify, names=VERIFIED)
    verify.set_defaults(run=run)


def _numbers(text: str) -> tuple[int, ...]:
    """`1,5,300` -> the numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, as 1,5,300") from error


def _add_longctx_flags(parser: argparse.ArgumentParser, *, names: Sequence[str]) -> None:
    """The fields `longctx_X` in `names` as `--X`, or spelled as in training, as errors name them;
    flags that a command does not use are unknown."""
    from ..config import LongCtxArguments

    group = parser.add_argument_group("flags of the run, as in training")
    for field in dataclasses.fields(LongCtxArguments):
        if field.name not in names:
            continue
        kind, choices = _kind_of(field.type)
        group.add_argument(
            "--" + field.name.removeprefix("longctx_"),
            "--" + field.name,
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


def run(arguments: argparse.Namespace) -> int:
    """Verify, print the report; returns the exit code."""
    import torch

    torch.set_num_threads(1)
    with progress(arguments):
        report = _report_kill(arguments) if arguments.kill else _report(arguments)
    show(report, arguments.json)
    if report.get("switches") == 0:
        print("no batch could be halved, so all of this ran as under --overlap none")
    failed = report["failed"]
    print(f"failed: {'; '.join(failed)}" if failed else "exact: all bounds hold")
    return 1 if failed else 0


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    from ..config import LongCtxArguments
    from ..verify.compare import verify

    return verify(
        model=arguments.model,
        name=arguments.attn_implementation,
        ranks=arguments.ranks,
        arguments=LongCtxArguments(**{name: getattr(arguments, name) for name in VERIFIED}),
        dtype=arguments.dtype,
        checkpointing=arguments.checkpointing,
        document_lengths=arguments.document_lengths,
        servers=arguments.servers,
    )


def _report_kill(arguments: argparse.Namespace) -> dict[str, Any]:
    from ..verify.fault_injection import Trial, verify_fault

    if arguments.dtype == "bf16":
        raise ValueError("--kill with --dtype bf16: it trains in float32; leave --dtype out")
    trial = Trial(
        model=arguments.model,
        name=arguments.attn_implementation,
        ranks=arguments.ranks,
        servers=arguments.servers,
        kill=arguments.kill,
        lengths=arguments.document_lengths,
        checkpointing=arguments.checkpointing,
        flags={name: getattr(arguments, name) for name in VERIFIED},
    )
    return verify_fault(trial)
