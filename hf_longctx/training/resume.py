"""The arguments in a checkpoint -> this run's attention name, and whether its data goes on there.

Layer: training. A resumed run skips as many batches as were taken before. It goes on where the
checkpoint stopped only if those batches held the same documents, which the arguments decide.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..config import LongCtxArguments

logger = logging.getLogger(__name__)

_HOW_ATTENTION_RUNS = (  # the same documents at every step, whatever these are
    "longctx_layout", "longctx_tolerance", "longctx_cost", "longctx_overlap", "longctx_servers",
    "longctx_server_devices", "longctx_server_timeout", "longctx_server_memory",
    "longctx_topology", "longctx_ulysses_size", "longctx_scan", "longctx_softmax", "longctx_verify",
)  # fmt: skip
_IN_STREAMS = ("longctx_lookahead", "dataloader_num_workers")  # a worker may shuffle otherwise
_SIZES = ("longctx_trainers", "longctx_group_size", "longctx_max_tokens_per_rank")


def arguments_of(checkpoint: str | bool, *, output_dir: str) -> Any | None:
    """The training arguments that a checkpoint was saved with; `None` where it holds none.

    Args:
        checkpoint (`str` or `bool`): A folder, or `True` for the last one in `output_dir`.
        output_dir (`str`): Where a run keeps its checkpoints.

    Raises:
        ValueError: where the file cannot be read.
    """
    folder: Any = checkpoint
    if checkpoint is True:
        folder = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    path = os.path.join(str(folder), TRAINING_ARGS_NAME)
    if not os.path.isfile(path):
        return None  # Trainer says what it misses
    try:
        return torch.load(path, weights_only=False)
    except Exception as error:  # whatever unpickling meets: a cut file, a class that moved
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}), so the run it belongs to is "
            "unknown; resume from another checkpoint, with the script that saved it"
        ) from error


def validate_resumable(trainer: Any, *, checkpoint: str | bool) -> None:
    """Refuse to resume a model that was sharded when it was loaded.

    Raises:
        ValueError: with the checkpoint and the remedy.
    """
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} cannot restore a model that was sharded when it "
            "was loaded (DistributedConfig): its optimizer state is in no checkpoint; load the "
            "checkpoint's weights with from_pretrained and start anew"
        )


def restore_name(model: Any, kept: Any, *, source: str) -> bool:
    """Put a model under the attention name of an earlier run; whether there was one.

    Args:
        model: Under a name that is not ours.
        kept: Training arguments of the earlier run.
        source (`str`): Where they come from, for the log.
    """
    name = getattr(kept, "longctx_attention", None)
    if not name:
        return False
    logger.warning("resuming with attn_implementation=%r from %s", name, source)
    model.set_attn_implementation(name)
    return True


def validate_same_data(kept: Any, arguments: Any, *, checkpoint: str | bool, stream: bool) -> None:
    """Refuse to skip other data than the checkpoint's run took; log what only changes its speed.

    Args:
        kept: The checkpoint's training arguments.
        arguments: This run's; both with `longctx_attention`, `longctx_trainers` and
            `longctx_train_data` filled in.
        checkpoint (`str` or `bool`): What the user resumes from, for messages.
        stream (`bool`): Whether the training data has no length.

    Raises:
        ValueError: naming each setting with its old and new value, unless `ignore_data_skip`.
    """
    for change in _changes(("longctx_attention", *_HOW_ATTENTION_RUNS), kept, arguments):
        logger.warning("resuming, but %s", change)
    changed = "; ".join(_changes_of_data(kept, arguments, stream=stream))
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


def _changes(names: Iterable[str], kept: Any, arguments: Any) -> list[str]:
    """Each setting that differs, with its old and new value."""
    pairs = ((name, getattr(kept, name, None), getattr(arguments, name, None)) for name in names)
    return [f"{name} was {a!r} and is {b!r}" for name, a, b in pairs if a != b]


def _changes_of_data(kept: Any, arguments: Any, *, stream: bool) -> list[str]:
    """The changes after which a step's batches hold other documents."""
    if getattr(kept, "longctx_trainers", None) is None:
        return ["it ran without hf_longctx"]
    apart = {*_HOW_ATTENTION_RUNS, *_SIZES, *_IN_STREAMS}
    names = [field.name for field in fields(LongCtxArguments) if field.name not in apart]
    names += ["gradient_accumulation_steps", "train_sampling_strategy"]
    names += _IN_STREAMS if stream else ()
    changes = _changes(names, kept, arguments)
    if _seed(kept) != _seed(arguments):
        changes.append(f"data_seed (or seed) was {_seed(kept)} and is {_seed(arguments)}")
    if _changes(("longctx_train_data",), kept, arguments):
        of = "its first rows are" if stream else "its rows, or their order, are"
        changes.append(f"train_dataset is not that of the checkpoint: {of} others")
    if _batches(kept) != _batches(arguments):
        changes += _changes(_SIZES, kept, arguments)
    return changes


def _seed(arguments: Any) -> int:
    return int(arguments.seed if arguments.data_seed is None else arguments.data_seed)


def _batches(arguments: Any) -> tuple[int, int]:
    """Batches at a time, and the tokens of each: how many ranks share them does not matter."""
    trainers = arguments.longctx_trainers
    size = arguments.longctx_group_size or trainers
    return trainers // size, size * arguments.longctx_max_tokens_per_rank
