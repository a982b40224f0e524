"""Training arguments -> a refusal of those under which numbers would be wrong.

Floor: support.
"""

from collections.abc import Callable
from typing import Any

from .rules import Rule


def _unless(field: str, *allowed: object) -> Callable[[Any], object]:
    """The field's value, unless it is one of those allowed."""

    def found(arguments: Any) -> object:
        value = getattr(arguments, field, allowed[0])
        return None if value in allowed else f"{field}={value}"

    return found


def _accelerator_flag(name: str) -> Callable[[Any], object]:
    def found(arguments: Any) -> object:
        config = getattr(arguments, "accelerator_config", None)
        return f"accelerator_config.{name}=True" if getattr(config, name, False) else None

    return found


def _batch_size(arguments: Any) -> object:
    for field in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        value = getattr(arguments, field, 1)
        if value != 1:
            return f"{field}={value}"
    return None


def _too_many_devices(arguments: Any) -> object:
    devices = getattr(arguments, "n_gpu", 0)
    return f"{devices} devices in one process" if devices > 1 else None


def _parallel_sizes(arguments: Any) -> object:
    """Ranks that Accelerate would have share weights or sequences."""
    config = getattr(arguments, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        size = getattr(config, name, 1)
        if size > 1:
            return f"parallelism_config.{name}={size}"
    return None


ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule(
        "label smoothing",
        _unless("label_smoothing_factor", 0, 0.0),
        "Trainer's smoother shifts labels again inside a rank's share",
        "set it to 0.0",
    ),
    Rule(
        "per-device batch sizes",
        _batch_size,
        "a batch is one pack per group, sized by --longctx_max_tokens_per_rank",
        "leave both at 1",
    ),
    Rule(
        "loss not averaged over devices",
        _unless("average_tokens_across_devices", True),
        "the loss is the mean over all trainers' tokens",
        "leave it at True",
    ),
    Rule(
        "DataParallel",
        _too_many_devices,
        "one process must drive one device",
        "start one process per device with accelerate launch",
    ),
    Rule(
        "parallelism_config of Accelerate",
        _parallel_sizes,
        "documents are cut over ranks here, and every rank counts as data-parallel",
        "leave tp_size, cp_size and sp_size at 1 and set --longctx_group_size",
    ),
    Rule(
        "automatic batch size",
        _unless("auto_find_batch_size", False),
        "a restart would change the steps of some ranks only",
        "set --longctx_max_tokens_per_rank to what fits",
    ),
    Rule(
        "split batches",
        _accelerator_flag("split_batches"),
        "batches are cut by the layout",
        "leave it at False",
    ),
    Rule(
        "other sampling strategies",
        _unless("train_sampling_strategy", "random", "sequential"),
        "packs are chosen by hf_longctx",
        "use random or sequential",
    ),
    Rule(
        "NEFTune",
        _unless("neftune_noise_alpha", None, 0, 0.0),
        "its noise is scaled by the rows of a rank, not by a document's length",
        "leave it out",
    ),
    Rule(
        "float16",
        _unless("fp16", False),
        "the CPU kernels take float32, bf16 and float64 alone",
        "use bf16=True",
    ),
    Rule(
        "torch.compile",
        _unless("torch_compile", False),
        "exchanges cannot be traced yet",
        "leave it at False",
    ),
    Rule(
        "DeepSpeed",
        _unless("deepspeed", None),
        "not tested yet, and its backward may step on its own",
        "use DDP",
    ),
)


def refuse_arguments(arguments: Any) -> None:
    """Refuse training arguments under which numbers would be wrong.

    Raises:
        ValueError: with every rule that applies.
    """
    found = ((rule, rule.found(arguments)) for rule in ARGUMENT_RULES)
    problems = [rule.message(value) for rule, value in found if value is not None]
    if problems:
        raise ValueError("; ".join(problems))
