"""Run an unmodified Trainer script with batches that a group of ranks shares.

    accelerate launch --config_file CONFIG -m hf_longctx.run their_script.py \\
        --attn_implementation distca --longctx_max_tokens_per_rank 4096 --their_flag ...

Our flags are taken off the command line. The script then runs in this process, as `__main__`, with
three public entry points of its libraries replaced: `ArgumentParser.parse_known_args`,
`from_pretrained` (and `from_config`) of causal models, and the construction of a `Trainer`.
Layer: run.
"""

import argparse
import dataclasses
import functools
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from .config import (
    LongCtxArguments,
    LongCtxTrainingArguments,
    unset_batch_sizes,
    validate_removed_flags,
)
from .support import NAMES, validate_name
from .training.trainer import LongCtxTrainerMixin

NAME = "attn_implementation"
_EPILOG = """\
Flags that start with --longctx_ and --attn_implementation may stand anywhere after the script. They
are passed to the script if its own parser knows them; all other flags are passed on unchanged.

The script's transformers.Trainer, or trl.SFTTrainer, then takes documents (rows of input_ids and
optional labels) and shares batches of them among the ranks. A batch holds ranks x
--longctx_max_tokens_per_rank tokens, so per_device_train_batch_size must be 1; that is the default.
`hf-longctx check --model M` tells beforehand whether a model works.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A parsed command line.

    Args:
        script (`str`): Path of the script, or name of a module.
        module (`bool`): Whether it is a module (`-m NAME`).
        rest (`list[str]`): The script's arguments without ours.
        taken (`dict[str, str]`): Our flags, with underscores, and their values as given.
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
    """Split a command line into the script, its arguments, and our flags.

    Raises:
        SystemExit: on `--help`, a missing script, or a wrong flag of ours.
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
    validate_removed_flags(taken)
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
    validate_name(named.attn_implementation)
    return Command(
        script=script, module=module, rest=rest, taken=taken, name=named.attn_implementation,
        longctx=longctx,
    )  # fmt: skip


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and texts as they are written."""


def _split(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate the script's arguments from ours; of a flag given twice the last value counts."""
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
    """Return the flags of a command line, without leading dashes, with underscores."""
    return {part.partition("=")[0].lstrip("-").replace("-", "_") for part in argv}


logger = logging.getLogger("hf_longctx.run")  # this module runs as __main__


class Launch:
    """The run of a script, and where our flags went.

    Args:
        command (`Command`): The parsed command line.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.handed = False
        self.trainers = 0
        self.cooperative: Callable[[type], type] = functools.cache(self._cooperative)

    def run(self) -> None:
        """Run the script as `__main__`."""
        command = self.command
        with self.patched():
            if command.module:
                runpy.run_module(command.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command.script, run_name="__main__")
        if not self.trainers:
            logger.warning(
                "%s made no transformers.Trainer, so hf_longctx had nothing to share among ranks",
                command.script,
            )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the entry points, and set `sys.argv` and `sys.path` as the script expects."""
        parser, auto = argparse.ArgumentParser, AutoModelForCausalLM
        folder = os.path.dirname(os.path.abspath(self.command.script))
        replaced: list[tuple[Any, str, Any]] = [
            (sys, "argv", [self.command.script, *self.command.rest]),
            (sys, "path", sys.path if self.command.module else [folder, *sys.path[1:]]),
            (parser, "parse_known_args", self._parsing(parser.parse_known_args)),
            (PreTrainedModel, "from_pretrained", self._naming(PreTrainedModel.from_pretrained)),
            (auto, "from_pretrained", self._naming(auto.from_pretrained)),
            (auto, "from_config", self._naming(auto.from_config)),
            (Trainer, "__new__", self._made),
        ]
        with ExitStack() as stack:
            for owner, name, value in replaced:
                # Trainer has no __new__ of its own, and deleting one that was set leaves a class
                # that refuses arguments: it gets a plain one instead.
                stack.callback(setattr, owner, name, vars(owner).get(name, _plain_new))
                setattr(owner, name, value)
            yield

    def _parsing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `parse_known_args` to pass our flags to a parser that knows them.

        They go first, so that a `--` or a subcommand does not swallow them. A script that parses an
        explicit empty list gets none.
        """

        def parse_known_args(parser: Any, args: Any = None, namespace: Any = None) -> Any:
            given = sys.argv[1:] if args is None else list(args)
            taken, first = self.command.taken, []
            for action in parser._actions if args is None or given else ():
                allowed = action.choices is None or taken.get(action.dest) in action.choices
                if action.dest in taken and action.option_strings and allowed:
                    self.handed |= action.dest == NAME
                    first += [action.option_strings[0], taken[action.dest]]
            return original(parser, [*first, *given], namespace)

        return parse_known_args

    def _naming(self, original: Any) -> Any:
        """Wrap `from_pretrained` or `from_config` to load causal models under our name."""

        def load(of: type, *args: Any, **kwargs: Any) -> Any:
            if "ForCausalLM" in of.__name__:
                given = kwargs.get(NAME)
                if given not in (None, self.command.name):
                    logger.warning("%s=%r of the script gives way to the flag", NAME, given)
                kwargs[NAME] = self.command.name
            return original.__func__(of, *args, **kwargs)

        return classmethod(load)

    def _made(self, of: type, *args: Any, **kwargs: Any) -> Any:
        """Make a Trainer of a subclass that takes documents and shares batches (a `__new__`)."""
        return object.__new__(self.cooperative(of))

    def _cooperative(self, of: type) -> type:
        return type(of.__name__, (_Launched, of), {"launch": self, "__module__": of.__module__})

    def log_changes(self, trainer: str, changes: Sequence[str]) -> None:
        """Log two lines on what was changed, for the first Trainer only."""
        self.trainers += 1
        if self.trainers > 1:
            return
        command = self.command
        logger.info(
            "hf_longctx.run: %s=%r went to %s; %s",
            NAME,
            command.name,
            "the script's own flag and from_pretrained" if self.handed else "from_pretrained",
            ", ".join(f"{k}={v}" for k, v in command.taken.items() if k != NAME)
            or "longctx_* flags have their defaults",
        )
        logger.info(
            "hf_longctx.run: %s takes documents and shares batches of them among ranks%s",
            trainer,
            "".join(f"; {change}" for change in changes),
        )


def _from_us(error: BaseException) -> bool:
    """Tell whether an error was raised by a line of this package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("hf_longctx")


def _plain_new(of: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(of)


class _Launched(LongCtxTrainerMixin):
    """The mixin for a Trainer whose script does not know of it."""

    launch: ClassVar[Launch]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except ValueError as error:
            if not _from_us(error):
                raise
            logger.error("error: %s", error)  # a traceback through the script would hide it
            sys.exit(2)

    def _longctx_arguments(self) -> None:
        """Attach the `longctx_*` fields, and set unset batch sizes to 1."""
        arguments, command, changes = self.args, self.launch.command, []
        for field in dataclasses.fields(LongCtxArguments):
            if field.name in command.taken or not hasattr(arguments, field.name):
                setattr(arguments, field.name, getattr(command.longctx, field.name))
        given = flags_in(sys.argv)
        for size, value in unset_batch_sizes(arguments).items():
            if size not in given:
                setattr(arguments, size, 1)
                changes.append(f"{size}, unset, is 1 instead of {value}")
        self._train_batch_size = arguments.train_batch_size
        # Trainers wait for each other's data longer than Transformers' default allows.
        usual = TrainingArguments.__dataclass_fields__["ddp_timeout"].default
        if arguments.ddp_timeout == usual and "ddp_timeout" not in given:
            arguments.ddp_timeout = LongCtxTrainingArguments.ddp_timeout
        if getattr(arguments, "max_length", None):  # of SFTConfig, 1024 when left out
            changes.append(f"max_length={arguments.max_length} of the script cut them beforehand")
        self.launch.log_changes(type(self).__name__, changes)


def _wants_deepspeed(command: Command) -> bool:
    """Tell whether DeepSpeed is asked for: Accelerate ignores it if ACCELERATE_USE_CPU is set."""
    by_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    return by_launcher or "deepspeed" in flags_in(command.rest)


def _log_to_stderr() -> None:
    """Show our log on the main process, and warnings on all; the script's logging is untouched."""
    package, handler = logging.getLogger("hf_longctx"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    package.propagate = False
    package.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


def main(argv: Sequence[str]) -> None:
    """Parse our flags and run the script."""
    _log_to_stderr()
    try:
        launch = Launch(read(argv))
    except ValueError as error:
        logger.error("hf_longctx.run: %s", error)
        sys.exit(2)
    if not (torch.cuda.is_available() or _wants_deepspeed(launch.command)):
        # Without it, several processes without a GPU would each train alone, without a word.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    launch.run()


if __name__ == "__main__":
    main(sys.argv[1:])
