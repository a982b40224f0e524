"""What a Trainer was given -> a refusal of models and data sets that are not what it needs.

Layer: support.
A trainer, with its model loaded and its Accelerator made -> a refusal of wrappers that would not
be what the user asked for, or not be exact. Accelerate passes over FSDP and DeepSpeed in silence where it does not support them.

An attention name, and a trainer before its model is wrapped -> a refusal of overlap `pingpong`
where two halves of a batch could not take turns, or not exactly.

What a forward on a few tokens shows, beside what a config tells -> why a model is refused. The probe finds the values; a rule here says why they are refused.
"""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from .model_rules import NAMES, SOFTMAX_NAMES, WITH_SDPA, Rule, raise_if_broken

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def validate_given(model: Any, *, train_dataset: Any) -> None:
    """Refuse a model that Transformers did not make or that is wrapped, and a dict of splits.

    Args:
        model: The trainer's model: a `PreTrainedModel`, with PEFT adapters or without.
        train_dataset: The trainer's data set.

    Raises:
        ValueError: naming the class, the rule and the remedy.
    """
    from transformers import PreTrainedModel  # plans, and so servers, do without it

    of = type(model).__name__
    if isinstance(model, _WRAPPERS):
        raise ValueError(
            f"model is wrapped in {of}, but the trainer wraps it itself; pass model.module"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
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


def validate_wrappers(trainer: Any) -> None:
    """Refuse what would wrap or cut the trainer's model in a way that is not exact.

    Args:
        trainer: A `Trainer` after its own construction.

    Raises:
        ValueError: with every rule that applies.
    """
    raise_if_broken(WRAPPER_RULES, trainer)


def _phaseless(subject: tuple[str, Any]) -> object:
    name, _ = subject
    return f"attn_implementation={name}" if name != "distca" else None


def _gathers_again(subject: tuple[str, Any]) -> object:
    """FSDP that frees a layer's gathered weights while the other half is still inside it."""
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
    enabled = (
        module._gradient_checkpointing_func.keywords.get("use_reentrant")
        for module in trainer.model.modules()
        if getattr(module, "gradient_checkpointing", False)
    )
    return "use_reentrant=True" if asked or any(enabled) else None


PINGPONG_RULES: tuple[Rule, ...] = (
    Rule(
        "overlap `pingpong` without phases",
        _phaseless,
        "all its exchanges lie within one phase, so there is no place to hand over to the other "
        "half",
        "use distca, or longctx_overlap=none",
        names=tuple(name for name in NAMES if name != "distca"),
    ),
    Rule(
        "overlap `pingpong` with FSDP that reshards after forward",
        _gathers_again,
        "a layer's weights would be freed by one half while the other is still inside it",
        "call model.set_reshard_after_forward(False) once the model is loaded, or set "
        "longctx_overlap=none",
    ),
    Rule(
        "overlap `pingpong` with re-entrant checkpointing over several trainers",
        _reentrant,
        "each half runs a backward of its own through a layer, which DDP and ZeRO take for two "
        "steps",
        "set activation_checkpointing_kwargs={'use_reentrant': False}, or longctx_overlap=none",
    ),
)


def validate_pingpong(name: str, *, trainer: Any = None) -> None:
    """Refuse overlap `pingpong` where it cannot run exactly.

    Args:
        name (`str`): The attention name.
        trainer (*optional*): A `Trainer` after its own construction.

    Raises:
        ValueError: with every rule that applies.
    """
    raise_if_broken(PINGPONG_RULES, (name, trainer))


def _as_found(value: object) -> object:
    return value


def _rule(feature: str, rule: str, remedy: str, *, names: tuple[str, ...] = NAMES) -> Rule:
    return Rule(feature, _as_found, rule, remedy, names=names)


NO_KEYWORDS = _rule(
    "forward without **kwargs",
    "documents cannot reach its attention",
    "use a model class whose forward passes keyword arguments on",
)
TENSOR_PARALLEL = _rule(
    "tensor parallel size over 1",
    "ranks that share weights would be taken for ranks that share documents",
    "load it without a tensor parallel plan",
)
BYPASSED = _rule(
    "attention outside the interface",
    "some attention bypasses the interface or drops keyword arguments",
    "train it with its own attention",
)
REPEATED = _rule(
    "several attention calls in a layer",
    "a layer's result is kept once for activation checkpointing, so its second call would be given "
    "the first one's",
    WITH_SDPA,
)
IGNORES_TARGETS = _rule(
    "loss that ignores shift_labels",
    "targets across ranks would be lost",
    "use a model whose loss takes shift_labels",
)
OTHER_LOSS = _rule(
    "loss that is no sum over targets",
    "ranks' losses would not add up to the mean over all trainers' targets",
    "use a model whose loss is its cross entropy over num_items_in_batch",
)
IGNORES_POSITIONS = _rule(
    "positions that are not read",
    "a document cut over ranks would be numbered anew on each",
    "use a model that takes position_ids",
    names=SOFTMAX_NAMES,  # recurrent layers know the order of tokens without positions
)
OTHER_POSITIONS = _rule(
    "positions of its own",
    "documents are numbered 0, 1, 2, ..., which would not be what the model was trained with",
    "use a model that numbers tokens so by itself",
    names=SOFTMAX_NAMES,
)
NEIGHBOURS = _rule(
    "terms from neighbours in the batch",
    "something beside attention crosses documents or counts from the start of the batch",
    WITH_SDPA,
)
COLLATOR = _rule(
    "a data collator of your own",
    "it would build or cut batches on its own",
    "leave it out and pass documents with input_ids (and labels)",
)

PROBE_RULES = (
    NO_KEYWORDS,
    TENSOR_PARALLEL,
    BYPASSED,
    REPEATED,
    IGNORES_TARGETS,
    OTHER_LOSS,
    IGNORES_POSITIONS,
    OTHER_POSITIONS,
    NEIGHBOURS,
    COLLATOR,
)
