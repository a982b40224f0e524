"""Decide how a run resumes from a checkpoint: under which attention name, and on which data.

A resumed run skips as many batches as the earlier run took. That is right only if those batches
held the same documents, so the arguments saved with the checkpoint are compared with this run's.
They are read without running code of the file, so a checkpoint from elsewhere can be resumed, and
one saved by an older version still reads although its classes have moved. Layer: training.
"""

import logging
import os
import pickle
from collections.abc import Iterable
from dataclasses import fields
from typing import Any
from zipfile import ZipFile

from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..config import LongCtxArguments

logger = logging.getLogger(__name__)

_HOW_ATTENTION_RUNS = (  # a step holds the same documents whatever these are
    "longctx_layout", "longctx_tolerance", "longctx_cost", "longctx_overlap", "longctx_servers",
    "longctx_server_devices", "longctx_server_timeout", "longctx_server_memory",
    "longctx_topology", "longctx_ulysses_size", "longctx_scan", "longctx_softmax",
)  # fmt: skip
_IN_STREAMS = ("longctx_lookahead", "dataloader_num_workers")  # a worker may shuffle differently
_SIZES = ("longctx_trainers", "longctx_group_size", "longctx_max_tokens_per_rank")


class _SavedObject(dict[Any, Any]):
    """The attributes of a pickled object, whatever its class was.

    A `dict`, so that items of a pickled mapping have a place too.
    """

    def __new__(cls, *given: Any) -> Any:
        # Enums are pickled as a call with their value, and compare equal to it.
        plain = len(given) == 1 and isinstance(given[0], str | int | float)
        return given[0] if plain else super().__new__(cls)

    def __init__(self, *given: Any) -> None:
        super().__init__()

    def __call__(self, *given: Any) -> Any:
        return _SavedObject(*given)  # what the pickle takes for a method of some class

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {})


class _SettingsUnpickler(pickle.Unpickler):
    """Reads plain values and attributes; imports no class that the file names and calls none."""

    def find_class(self, module: str, name: str, /) -> Any:
        return _SavedObject

    def persistent_load(self, pid: Any, /) -> Any:
        return None  # the contents of a tensor, which no setting needs


def saved_arguments(checkpoint: str | bool, *, output_dir: str) -> Any | None:
    """Read the training arguments that were saved with a checkpoint.

    Args:
        checkpoint (`str` or `bool`): A folder, or `True` for the last one in `output_dir`.
        output_dir (`str`): Where a run keeps its checkpoints.

    Returns:
        An object with the saved attributes, also those of flags that were removed since; `None` if
        the checkpoint holds no arguments.

    Raises:
        ValueError: The file cannot be read.
    """
    folder: Any = checkpoint
    if checkpoint is True:
        folder = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    path = os.path.join(str(folder), TRAINING_ARGS_NAME)
    if not os.path.isfile(path):
        return None  # Trainer reports what is missing
    try:
        with ZipFile(path) as archive:  # as torch.save writes it
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as pickled:
                return _SettingsUnpickler(pickled).load()
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}), so the settings of the run "
            "that saved it are unknown; resume from another checkpoint"
        ) from error


def validate_resumable(trainer: Any, *, checkpoint: str | bool) -> None:
    """Raise if the model was sharded when it was loaded, which Trainer cannot resume.

    Raises:
        ValueError: With the checkpoint and the remedy.
    """
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} cannot restore a model that was sharded when it "
            "was loaded (DistributedConfig): no checkpoint holds its optimizer state. Load the "
            "checkpoint's weights with from_pretrained and start a new run"
        )


def validate_same_data(saved: Any, arguments: Any, *, checkpoint: str | bool, stream: bool) -> None:
    """Raise if a resumed run would skip other data than the checkpoint's run trained on.

    Settings that only change how attention runs are logged.

    Args:
        saved: The checkpoint's training arguments.
        arguments: This run's; both with `longctx_attention`, `longctx_trainers` and
            `longctx_train_data` filled in.
        checkpoint (`str` or `bool`): What the user resumes from, for messages.
        stream (`bool`): Whether the training data has no length.

    Raises:
        ValueError: Names each setting with its old and new value, unless `ignore_data_skip`.
    """
    for change in _changes(("longctx_attention", *_HOW_ATTENTION_RUNS), saved, arguments):
        logger.warning("resuming, but %s", change)
    changed = "; ".join(_data_changes(saved, arguments, stream=stream))
    if not changed:
        return
    if arguments.ignore_data_skip:
        logger.warning("resuming without skipping data: %s", changed)
        return
    raise ValueError(
        f"resume_from_checkpoint={checkpoint!r} would skip other data than that run trained on: "
        f"{changed}; start with the old values, or pass ignore_data_skip=True to begin the epoch "
        "at its first batch"
    )


def _changes(names: Iterable[str], saved: Any, arguments: Any) -> list[str]:
    """Describe each setting that differs, with its old and new value."""
    pairs = ((name, getattr(saved, name, None), getattr(arguments, name, None)) for name in names)
    return [f"{name} was {a!r} and is {b!r}" for name, a, b in pairs if a != b]


def _data_changes(saved: Any, arguments: Any, *, stream: bool) -> list[str]:
    """Describe the changes that put other documents into a step's batches."""
    if getattr(saved, "longctx_trainers", None) is None:
        return ["it ran without hf_longctx"]
    # Only fields that exist today count, so a removed flag never prevents a resume. A field that is
    # neither known to be harmless nor a size is taken to matter: a new one is safe by default.
    other = {*_HOW_ATTENTION_RUNS, *_SIZES, *_IN_STREAMS}
    names = [field.name for field in fields(LongCtxArguments) if field.name not in other]
    names += ["gradient_accumulation_steps", "train_sampling_strategy"]
    names += _IN_STREAMS if stream else ()
    changes = _changes(names, saved, arguments)
    if _seed(saved) != _seed(arguments):
        changes.append(f"data_seed (or seed) was {_seed(saved)} and is {_seed(arguments)}")
    if _changes(("longctx_train_data",), saved, arguments):  # a fingerprint means nothing to users
        rows = "its first rows are" if stream else "its rows, or their order, are"
        changes.append(f"train_dataset is not that of the checkpoint: {rows} others")
    if _batches(saved) != _batches(arguments):
        changes += _changes(_SIZES, saved, arguments)
    return changes


def _seed(arguments: Any) -> int:
    """The seed that orders the data."""
    return int(arguments.seed if arguments.data_seed is None else arguments.data_seed)


def _batches(arguments: Any) -> tuple[int, int]:
    """Batches per step and the tokens of each; how many ranks share a batch does not matter."""
    trainers = arguments.longctx_trainers
    size = arguments.longctx_group_size or trainers
    return trainers // size, size * arguments.longctx_max_tokens_per_rank
