"""Decide which trainers run exactly: what they were given, what wraps the model, and overlap.

Accelerate ignores FSDP and DeepSpeed without a word where it does not support them, so a run would
be something else than the user asked for. Layer: support.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .rules import NAMES, Rule, validate_rules

COLLATOR = Rule(
    "a data collator of your own",
    lambda value: value,  # found by `training.checks`
    "it would build or cut batches on its own",
    "leave it out and pass documents with input_ids (and labels)",
)


def validate_given(model: Any, *, train_dataset: Any) -> None:
    """Raise for a wrapped model, one that Transformers did not make, or a dict of data sets.

    Args:
        model: The trainer's model: a `PreTrainedModel`, with PEFT adapters or without.
        train_dataset: The trainer's data set.

    Raises:
        ValueError: Names the class, the rule and the remedy.
    """
    from transformers import PreTrainedModel  # not above: servers must not import Transformers

    of = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"model is wrapped in {of}, but the trainer wraps it itself; pass model.module"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"model is a {of}, but only a Transformers PreTrainedModel looks attention up by name; "
            "load it with AutoModelForCausalLM"
        )
    if isinstance(train_dataset, Mapping):
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__} of {sorted(train_dataset)}, but "
            "training takes one data set; pass one of them, as train_dataset=data['train']"
        )


def _ignored_fsdp(trainer: Any) -> object:
    if trainer.is_fsdp_enabled:
        return None
    if value := getattr(trainer.args, "fsdp", None):
        return f"fsdp={value}"
    variable = "ACCELERATE_USE_FSDP"  # how `accelerate launch` asks for it
    return f"{variable}=true" if os.environ.get(variable, "").lower() == "true" else None


def _ignored_deepspeed(trainer: Any) -> object:
    if trainer.is_deepspeed_enabled or getattr(trainer.args, "deepspeed_plugin", None) is None:
        return None
    return f"distributed_type is {trainer.accelerator.distributed_type.value}"


def _best_of_sharded(trainer: Any) -> object:
    if not getattr(trainer, "is_distributed_loading_by_transformers", False):
        return None
    return "load_best_model_at_end=True" if trainer.args.load_best_model_at_end else None


def _sizes_over_1(
    prefix: str, config_of: Callable[[Any], Any], *fields: str
) -> Callable[[Any], object]:
    """Make a finder for the first of some sizes of a parallel configuration that is above 1."""

    def find(trainer: Any) -> object:
        config = config_of(trainer)
        sizes = ((field, getattr(config, field, None) or 1) for field in fields)
        return next((f"{prefix}{field}={size}" for field, size in sizes if size > 1), None)

    return find


WRAPPER_RULES: tuple[Rule, ...] = (
    Rule("FSDP through Accelerate on the CPU", _ignored_fsdp,
         "Accelerate ignores it there, and the run would be DDP",
         "load the model with from_pretrained(..., "
         "distributed_config=DistributedConfig(fsdp_size=N))"),
    Rule("DeepSpeed with ACCELERATE_USE_CPU", _ignored_deepspeed,
         "Accelerate ignores it there, and the run would be DDP",
         "unset that variable and pass use_cpu=True"),
    Rule("best model of native FSDP2", _best_of_sharded,
         "Transformers cannot load a checkpoint into weights that were sharded at loading",
         "leave it out, and load best_model_checkpoint with from_pretrained after the run"),
    Rule("tensor, pipeline and expert parallelism",
         _sizes_over_1(
             "", lambda trainer: getattr(trainer.model.config, "distributed_config", None),
             "tp_size", "pp_size", "ep_size"),
         "its ranks share tokens, but the ranks of a group hold different ones",
         "use fsdp_size alone"),
    Rule("parallelism of Accelerate",
         _sizes_over_1(
             "parallelism_config.", lambda trainer: trainer.accelerator.parallelism_config,
             "tp_size", "cp_size", "sp_size"),
         "it would cut batches or layers that hf_longctx cuts already",
         "leave those sizes at 1"),
)  # fmt: skip


def validate_wrappers(trainer: Any) -> None:
    """Raise for what would wrap or cut the trainer's model in a way that is not exact.

    Args:
        trainer: A `Trainer` after its own construction.

    Raises:
        ValueError: With every rule that applies.
    """
    validate_rules(WRAPPER_RULES, trainer)


def _without_phases(subject: tuple[str, Any]) -> object:
    name, _ = subject
    return f"attn_implementation={name}" if name != "distca" else None


def _reshards(subject: tuple[str, Any]) -> object:
    """Find FSDP that frees a layer's gathered weights while the other half is still inside it."""
    _, trainer = subject
    if trainer is None:
        return None
    if trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        version, reshards = plugin.fsdp_version, plugin.reshard_after_forward
        if version != 2 or reshards:
            return f"fsdp_version={version}, reshard_after_forward={reshards}"
    for module in trainer.model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in state()._fsdp_param_groups if state else ():
            if group.post_forward_mesh_info is not None:  # None: weights stay after a forward
                return f"reshard_after_forward=True of {type(module).__name__}"
    return None


def _reentrant(subject: tuple[str, Any]) -> object:
    _, trainer = subject
    if trainer is None or trainer.args.world_size == 1:
        return None
    given = trainer.args.activation_checkpointing_kwargs or {}
    asked = trainer.args.activation_checkpointing and given.get("use_reentrant")
    enabled = (  # by the user, on the model itself
        module._gradient_checkpointing_func.keywords.get("use_reentrant")
        for module in trainer.model.modules()
        if getattr(module, "gradient_checkpointing", False)
    )
    return "use_reentrant=True" if asked or any(enabled) else None


PINGPONG_RULES: tuple[Rule, ...] = (
    Rule("overlap `pingpong` without phases", _without_phases,
         "all its exchanges lie within one phase, so the halves of a batch cannot alternate",
         "use distca, or longctx_overlap=none",
         names=tuple(name for name in NAMES if name != "distca")),
    Rule("overlap `pingpong` with FSDP that reshards after forward", _reshards,
         "one half would free a layer's weights while the other half still uses them",
         "call model.set_reshard_after_forward(False) once the model is loaded, or set "
         "longctx_overlap=none"),
    Rule("overlap `pingpong` with re-entrant checkpointing over several trainers", _reentrant,
         "each half runs its own backward through a layer, which DDP and ZeRO take for two steps",
         "set activation_checkpointing_kwargs={'use_reentrant': False}, or longctx_overlap=none"),
)  # fmt: skip


def validate_pingpong(name: str, *, trainer: Any = None) -> None:
    """Raise if overlap `pingpong` cannot run exactly.

    Args:
        name (`str`): The attention name.
        trainer (*optional*): A `Trainer` after its own construction.

    Raises:
        ValueError: With every rule that applies.
    """
    validate_rules(PINGPONG_RULES, (name, trainer))
