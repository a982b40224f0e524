"""An attention name, and a trainer before its model is wrapped -> a refusal of overlap `pingpong`
where two halves of a batch could not take turns, or not exactly.

Floor: support.
"""

from typing import Any

from .rules import NAMES, Rule, refuse


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


def refuse_pingpong(name: str, *, trainer: Any = None) -> None:
    """Refuse overlap `pingpong` where it cannot run exactly.

    Args:
        name (`str`): The attention name.
        trainer (*optional*): A `Trainer` after its own construction.

    Raises:
        ValueError: with every rule that applies.
    """
    refuse(PINGPONG_RULES, (name, trainer))
