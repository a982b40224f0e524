"""`hf-longctx verify`: compare a model over several ranks with one process.

It prints figures and ends with an exit code: 0 all bounds hold, 1 some do not, 2 refused or wrong
flags. Layer: cli.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .common import add_json, figure_help, progress, show

# Training flags whose values change what verify runs.
VERIFIED = (
    "longctx_layout",
    "longctx_tolerance",
    "longctx_overlap",
    "longctx_topology",
    "longctx_ulysses_size",
    "longctx_softmax",
    "longctx_scan",
)
# The keys of the JSON object, for the help text and for the documentation's page of JSON keys.
FIGURES = {
    "model, attn_implementation, dtype, ranks, layout, overlap, ulysses_size": "as asked for",
    "topology": "nested domains of the ranks",
    "logit_error": "largest error of a logit, relative to the largest logit, against naive float64 "
    "attention",
    "loss_error": "relative error of the summed loss",
    "grad_error": "largest error of a gradient entry, of the worst parameter, relative to the "
    "parameter's largest entry or 1e-3 of the model's",
    "logit_error_vs_transformers, loss_error_vs_transformers, grad_error_vs_transformers": "the "
    "same in float32, against stock Transformers",
    "leak": "largest gradient of other documents' logits in a document's embeddings; anything but "
    "0 means that documents see each other",
    "attention_calls": "calls of our softmax and recurrent layers, on all ranks together",
    "bytes_planned": "bytes that the plans send, forward and backward",
    "bytes_sent": "bytes that were sent; must equal bytes_planned",
    "recompute_bytes": "bytes sent again by activation checkpointing; must be 0",
    "logit_columns": "logits compared per token, drawn at random from a large vocabulary; loss and "
    "gradients cover all of them",
    "set_to_0": "dropout fields of the config, which both sides run without",
    "scan": "(zeco_linear) for each kind of state, what the longest scan ran: schedule, pieces, "
    "ranks, and the measured link",
    "servers": "extra attention servers",
    "tasks_on_servers": "attention tasks that ran on servers",
    "head_groups": "(--overlap heads) groups of key/value heads that an exchange was cut into",
    "switches": "(--overlap pingpong) times one half of a batch handed over to the other",
    "bounds": "upper bound of each error",
    "failed": "the bounds that do not hold",
}
KILL_FIGURES = {
    "ranks, servers, kill": "as asked for",
    "steps": "optimizer steps",
    "replayed_steps": "steps that were run again without the lost server; at least 1",
    "loss_difference": "largest difference of a step's loss from the undisturbed run, relative",
    "weights_difference": "largest difference of a weight at the end, relative to the largest",
    "orphans": "processes left when the run had ended; must be 0",
    "failed": "the bounds that do not hold",
}
_DESCRIPTION = """\
Answers: does this model train exactly under this name, over this many ranks?

Starts gloo processes on this machine, runs packed documents through the model
under one of our names, and compares logits, loss and every gradient with one
process that runs each document alone: once with naive float64 attention, once as
stock Transformers in float32.

A config's weights are drawn so that a leak between documents would show: the
states of recurrent layers decay slowly (rate 0.05), while those of the usual
rates forget a document within a few tokens. Dropout is set to 0 on both sides;
attention dropout is refused.

Bounds: 1e-10 in float64, 1e-9 with recurrent layers. In bf16 twice the error of
the plain bf16 path (gradients three times). In float32 and against Transformers
1e-5 (recurrent gradients 1e-4) or, where the plain float32 path itself is further
than that from float64, twice its error (gradients three times).

Exit codes: 0 all bounds hold, 1 some do not or a rank failed, 2 refused.
"""
_EXAMPLES = """\
examples:
  hf-longctx verify --model my_checkpoint --attn_implementation distca --ranks 2
  hf-longctx verify --model config.json --attn_implementation charm --ranks 4 \\
      --topology 2x2 --checkpointing --json report.json
  hf-longctx verify --model config.json --attn_implementation distca --ranks 2 \\
      --servers 1 --kill backward

"""


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    verify = commands.add_parser(
        "verify",
        help="compare a model over several ranks with one process, gradients included",
        description=_DESCRIPTION,
        epilog=_EXAMPLES
        + figure_help("figures", FIGURES)
        + "\n"
        + figure_help("figures of --kill", KILL_FIGURES),
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
    """Read numbers from a text as `1,5,300`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, as 1,5,300") from error


def _add_longctx_flags(parser: argparse.ArgumentParser, *, names: Sequence[str]) -> None:
    """Add the fields `longctx_X` in `names` as `--X` and, as in training, as `--longctx_X`.

    Errors name the second spelling. Flags that the command does not use stay unknown to it.
    """
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
    """Return how to read a field's value, and the values allowed."""
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None)), None
    return hint, None


def run(arguments: argparse.Namespace) -> int:
    """Verify and print the report; returns the exit code."""
    import torch

    torch.set_num_threads(1)
    with progress("hf-longctx verify", json_path=arguments.json):
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
