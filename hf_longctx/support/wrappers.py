"""A trainer, with its model loaded and its Accelerator made -> a refusal of wrappers that would not
be what the user asked for, or not be exact.

Floor: support. Accelerate passes over FSDP and DeepSpeed in silence where it does not support them.
"""

import os
from typing import Any

from .rules import Rule, refuse


def _asked(flag: str, variable: str, trainer: Any) -> object:
    """The training argument, or Accelerate's variable for it, that asks for a wrapper."""
    value = getattr(trainer.args, flag, None)
    if value:
        return f"{flag}={value}"
    asked = os.environ.get(variable, "false").lower() == "true"
    return f"{variable}=true" if asked else None


def _ignored_fsdp(trainer: Any) -> object:
    return None if trainer.is_fsdp_enabled else _asked("fsdp", "ACCELERATE_USE_FSDP", trainer)


def _ignored_deepspeed(trainer: Any) -> object:
    if trainer.is_deepspeed_enabled or getattr(trainer.args, "deepspeed_plugin", None) is None:
        return None
    return f"distributed_type is {trainer.accelerator.distributed_type.value}"


def _best_of_sharded(trainer: Any) -> object:
    if not getattr(trainer, "is_distributed_loading_by_transformers", False):
        return None
    return "load_best_model_at_end=True" if trainer.args.load_best_model_at_end else None


def _model_parallel(trainer: Any) -> object:
    config = getattr(trainer.model.config, "distributed_config", None)
    for field in ("tp_size", "pp_size", "ep_size"):
        size = getattr(config, field, None) or 1
        if size > 1:
            return f"{field}={size}"
    return None


def _accelerate_parallel(trainer: Any) -> object:
    config = trainer.accelerator.parallelism_config
    for field in ("tp_size", "cp_size", "sp_size"):
        size = getattr(config, field, None) or 1
        if size > 1:
            return f"parallelism_config.{field}={size}"
    return None


WRAPPER_RULES: tuple[Rule, ...] = (
    Rule(
        "FSDP through Accelerate on the CPU",
        _ignored_fsdp,
        "Accelerate ignores it there, and the run would be DDP",
        "load the model with from_pretrained(..., distributed_config=DistributedConfig("
        "fsdp_size=N))",
    ),
    Rule(
        "DeepSpeed with ACCELERATE_USE_CPU",
        _ignored_deepspeed,
        "Accelerate ignores it there, and the run would be DDP",
        "unset that variable and pass use_cpu=True",
    ),
    Rule(
        "best model of native FSDP2",
        _best_of_sharded,
        "Transformers loads no checkpoint into weights that were sharded when they were loaded",
        "leave it out, and load best_model_checkpoint with from_pretrained after the run",
    ),
    Rule(
        "tensor, pipeline and expert parallelism",
        _model_parallel,
        "its ranks share tokens, but a group's ranks hold different ones",
        "use fsdp_size alone",
    ),
    Rule(
        "parallelism of Accelerate",
        _accelerate_parallel,
        "it would cut batches or layers that hf_longctx has cut already",
        "leave those sizes at 1",
    ),
)


def refuse_wrappers(trainer: Any) -> None:
    """Refuse what would wrap or cut the trainer's model in a way that is not exact.

    Args:
        trainer: A `Trainer` after its own construction.

    Raises:
        ValueError: with every rule that applies.
    """
    refuse(WRAPPER_RULES, trainer)
