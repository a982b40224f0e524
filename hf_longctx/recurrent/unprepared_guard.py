"""Make models with recurrent layers reject packed documents while they are not prepared.

A model without softmax layers calls no attention function, so no hook of ours could reject for it.
Transformers asks every model for its attention name when it is made and when the name is set: there
a guard, a forward pre-hook, is put on the model. A pickle loses what `prepare` did to a model, but
keeps its guard.
Layer: recurrent.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..runtime.wrapping import Function, is_wrapped
from ..support import NAMES, recurrent_family, validate_misspelt
from .adapter import replace_function
from .packed_inputs import OTHER_BOUNDARIES, find_batch

logger = logging.getLogger(__name__)

_NAME_HOOK = "_check_and_adjust_attn_implementation"
_PARAMETERS = "self attn_implementation is_init_check allow_all_kernels"
_Guard = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], None]


def guard_by_name() -> None:
    """Guard every model with recurrent layers that gets one of our attention names.

    Importing `hf_longctx` does this; a second time changes nothing. If Transformers asks models for
    their names in another way than in the version that is known, a warning says so.
    """
    # A private method: without it there is no place where every model passes by.
    place = f"{PreTrainedModel.__module__}.{_NAME_HOOK}"
    try:
        replace_function(PreTrainedModel, _NAME_HOOK, _guard_after, place=place, known=_PARAMETERS)
    except ValueError as error:
        # Only a warning: importing hf_longctx must not fail for models that never need this.
        logger.warning(
            "models without softmax layers do not refuse packed documents before they are "
            "prepared: %s",
            error,
        )


def _guard_after(original: Function) -> Function:
    def check_and_adjust(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        for part in _models_in(self):
            if part.config is self.config:  # others are asked for names of their own
                _set_guard(part, name)
        return name

    return check_and_adjust


def guard(model: nn.Module) -> None:
    """Guard the models within a model, or remove their guards, by the names that they have."""
    for part in _models_in(model):
        _set_guard(part, part.config._attn_implementation)


def guard_prepared(model: nn.Module) -> None:
    """Make a prepared model reject packed documents, under any name, once it is so no longer."""
    # Hooks are compared by identity, so these two are module functions and not closures.
    if not _hook_numbers(model, validate_still_prepared):
        model.register_forward_pre_hook(validate_still_prepared, with_kwargs=True)


def validate_prepared(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Reject packed documents in a model that was never prepared; a forward pre-hook.

    Raises:
        ValueError: with the model's class and what shows its recurrent layers.
    """
    if _would_leak(model, args, kwargs):
        raise ValueError(
            f"packed documents reached {type(model).__name__}, whose recurrent layers "
            f"({recurrent_family(model.config)}) do not know of them; call "
            "hf_longctx.prepare(model) once it is loaded"
        )


def validate_still_prepared(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Reject packed documents in a model that was prepared once; a forward pre-hook.

    Raises:
        ValueError: with the model's class.
    """
    if _would_leak(model, args, kwargs):
        raise ValueError(
            f"packed documents reached {type(model).__name__}, which was prepared, but lost that "
            "with its forward (pickles do not keep it); call hf_longctx.prepare(model) again"
        )


def _would_leak(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward is given packed documents that it would not look for."""
    # A wrapped forward reads the documents itself.
    if is_wrapped(model):
        return False
    names = inspect.signature(model.forward).parameters
    given = dict(zip(names, args, strict=False), **kwargs)
    # A misspelt boundary would pass as a call without documents.
    validate_misspelt(given, known={*names, *OTHER_BOUNDARIES})
    return find_batch(given) is not None


def _models_in(model: nn.Module) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _set_guard(model: PreTrainedModel, name: str | None) -> None:
    """Guard one model if it has recurrent layers and one of our names; else remove its guard."""
    guards = _hook_numbers(model, validate_prepared)
    if name in NAMES and recurrent_family(model.config) is not None:
        if not guards:
            model.register_forward_pre_hook(validate_prepared, with_kwargs=True)
        return
    # By number: handles do not survive a deepcopy or a pickle, the numbered hooks do.
    for number in guards:
        del model._forward_pre_hooks[number]
        model._forward_pre_hooks_with_kwargs.pop(number, None)


def _hook_numbers(model: nn.Module, hook: _Guard) -> list[int]:
    """Return the numbers under which a module holds a hook."""
    return [number for number, found in model._forward_pre_hooks.items() if found is hook]
