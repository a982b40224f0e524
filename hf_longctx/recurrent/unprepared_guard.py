"""A model with recurrent layers that is not prepared -> one that refuses packed documents.

Layer: recurrent. A model without softmax layers calls no attention function, so none of ours could
refuse for it. Transformers asks every model for its attention name as it is made and when the name
is set: there a watch is put on it. A pickle loses what `prepare` did to a model, but not its watch.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..support import NAMES, recurrent_family, validate_misspelt
from .adapter import is_wrapped, validate_unknown
from .packed_inputs import OTHER_BOUNDARIES, batch_in

logger = logging.getLogger(__name__)

_ASKED = "_check_and_adjust_attn_implementation"
_PARAMETERS = "self attn_implementation is_init_check allow_all_kernels"
_Guard = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], None]


def guard_names() -> None:
    """Have models with recurrent layers refuse packed documents under our names while they are not
    prepared.

    Importing `hf_longctx` does this; a second time changes nothing. Where Transformers asks models
    for their names in another way than in the version that is known, a warning says so.
    """
    original: Any = getattr(PreTrainedModel, _ASKED, None)
    if hasattr(original, "hf_longctx_original"):
        return
    try:
        validate_unknown(f"{PreTrainedModel.__module__}.{_ASKED}", original, _PARAMETERS)
    except ValueError as error:
        logger.warning(
            "models without softmax layers do not refuse packed documents before they are "
            "prepared: %s",
            error,
        )
        return

    @wraps(original)
    def asked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        for part in _models_in(self):
            if part.config is self.config:  # others are asked for names of their own
                _guard_by_name(part, name)
        return name

    asked.hf_longctx_original = original  # type: ignore[attr-defined]
    setattr(PreTrainedModel, _ASKED, asked)


def guard(model: nn.Module) -> None:
    """Put the watch on the models within a model, or take it off, by the names that they have."""
    for part in _models_in(model):
        _guard_by_name(part, part.config._attn_implementation)


def keep_prepared(model: nn.Module) -> None:
    """Have a prepared model refuse packed documents, under any name, once it is so no longer."""
    if not _guarded(model, validate_still_prepared):
        model.register_forward_pre_hook(validate_still_prepared, with_kwargs=True)


def validate_prepared(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A forward's arguments -> a refusal of packed documents in a model that is not prepared.

    Raises:
        ValueError: with the model's class and what shows its recurrent layers.
    """
    if _leaks(model, args, kwargs):
        raise ValueError(
            f"packed documents reached {type(model).__name__}, whose recurrent layers "
            f"({recurrent_family(model.config)}) do not know of them; call "
            "hf_longctx.prepare(model) once it is loaded"
        )


def validate_still_prepared(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """A forward's arguments -> a refusal of packed documents in a model that was prepared once.

    Raises:
        ValueError: with the model's class.
    """
    if _leaks(model, args, kwargs):
        raise ValueError(
            f"packed documents reached {type(model).__name__}, which was prepared, but lost that "
            "with its forward (pickles do not keep it); call hf_longctx.prepare(model) again"
        )


def _leaks(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward is given packed documents that it would not look for."""
    if is_wrapped(model):
        return False
    names = inspect.signature(model.forward).parameters
    given = dict(zip(names, args, strict=False), **kwargs)
    validate_misspelt(given, known={*names, *OTHER_BOUNDARIES})
    return batch_in(given) is not None


def _models_in(model: nn.Module) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _guard_by_name(model: PreTrainedModel, name: str | None) -> None:
    watched = _guarded(model, validate_prepared)
    if name in NAMES and recurrent_family(model.config) is not None:
        if not watched:
            model.register_forward_pre_hook(validate_prepared, with_kwargs=True)
        return
    for number in watched:
        del model._forward_pre_hooks[number]
        model._forward_pre_hooks_with_kwargs.pop(number, None)


def _guarded(model: nn.Module, by: _Guard) -> list[int]:
    """The numbers of a module's hooks that are the given one."""
    return [number for number, hook in model._forward_pre_hooks.items() if hook is by]
