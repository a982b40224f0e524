"""Adapt the recurrent layers of a Transformers model, so that they keep packed documents apart.

Layer: recurrent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..support import RECURRENT_LAYERS, recurrent_family
from ..support.model_rules import FLA_RULE
from ..support.rules import validate_rules
from . import fla_layers, transformers_layers
from .adapter import Adapter
from .context import carry_batch, disable_recompute
from .packed_inputs import read_packed_inputs
from .unprepared_guard import guard_prepared

ADAPTERS: tuple[Adapter, ...] = (*fla_layers.ADAPTERS, *transformers_layers.ADAPTERS)
Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model) -> Model:
    """Adapt a model's recurrent layers, so that packed documents do not leak into each other.

    Documents are read from `cu_seq_lens_q`, packed `position_ids` or `seq_idx`, whatever attention
    name the model has. Calls without packed documents, also padded and cached ones, run the code of
    Transformers as before. Nothing of it is saved with a checkpoint. A copy is prepared, too; what
    comes out of a pickle rejects packed documents until it is prepared again.

    Args:
        model (`nn.Module`): A Transformers model, or a wrapper of one. It is changed in place; a
            second time changes nothing, nor does a model without recurrent layers.

    Returns:
        The model.

    Raises:
        ValueError: naming the class of a recurrent layer that is not known, or a function of
            Transformers that takes other arguments than in the version that is known; also for
            options of flash-linear-attention that are not built, and for a module that holds no
            Transformers model.
    """
    # Hooks outlive a pickle, wrapped forwards do not: the guard then rejects documents.
    for part in _adapt(model):
        guard_prepared(part)
    return model


def _adapt(model: nn.Module) -> list[nn.Module]:
    """Change a model's recurrent layers; return the models around them, which read documents."""
    layers = recurrent_layers(model)
    _validate_known(model, [layer for layer, _ in layers])
    if not layers:
        return []
    # Before any function is replaced, so that a rejected model leaves the library as it was.
    validate_rules((FLA_RULE,), _base(model).config)
    for layer, adapter in layers:
        home = adapter.home(layer)
        assert home is not None
        adapter.adapt(layer, home)
        # Zamba2 has decoder layers within decoder layers.
        block, *inner = _blocks_of(layer, model)
        if adapter.drops_kwargs:
            carry_batch(block)
        for each in inner:
            disable_recompute(each)
    # By identity: modules compare by it, but a list of them would be searched for each.
    ids = {id(layer) for layer, _ in layers}
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    # Also models within: a loss of the user's own may call the model without its head.
    readers = [_base(model), *(part for part in models if _count_inside(part, ids))]
    needs_gpu = any(adapter.needs_gpu for _, adapter in layers)
    for part in readers:
        read_packed_inputs(part, needs_gpu=needs_gpu)
    return readers


def recurrent_layers(model: nn.Module) -> list[tuple[nn.Module, Adapter]]:
    """Return the recurrent layers of a model that can be adapted, in order, with their adapters."""
    return [
        (module, adapter)
        for module in model.modules()
        for adapter in ADAPTERS
        if adapter.home(module) is not None
    ]


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Prepare a model for a while; afterwards its forwards and classes are what they were."""
    # A module has a forward of its own only if somebody wrapped it.
    before = {m: (type(m), m.__dict__.get("forward")) for m in model.modules()}
    _adapt(model)
    try:
        yield
    finally:
        for module, (kind, forward) in before.items():
            module.__class__ = kind
            if module.__dict__.get("forward") is not forward:
                del module.forward
            if forward is not None:
                module.forward = forward


def _validate_known(model: nn.Module, known: list[nn.Module]) -> None:
    """Reject decoder layers that the config calls recurrent and in which no layer was known.

    Raises:
        ValueError: naming the class and what the config says of it.
    """
    base, ids = _base(model), {id(layer) for layer in known}
    config = base.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    lists = (m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == len(kinds))
    # A vision tower may have as many layers; the text model is the list with recurrent ones.
    blocks = max(lists, key=lambda blocks: _count_inside(blocks, ids), default=())
    unknown = {
        type(block).__name__: f"layer_types {kind!r}"
        for block, kind in zip(blocks, kinds, strict=False)
        if kind in RECURRENT_LAYERS and not _count_inside(block, ids)
    }
    if not known and recurrent_family(config) is not None:
        unknown.setdefault(type(base).__name__, str(recurrent_family(config)))
    if unknown:
        named = " and ".join(f"{name} ({found})" for name, found in unknown.items())
        raise ValueError(
            f"{named} has recurrent layers that hf_longctx does not know; train it one document at "
            "a time, with its own attention"
        )


def _count_inside(module: nn.Module, ids: set[int]) -> int:
    """Count the modules with these ids inside a module."""
    return sum(id(part) in ids for part in module.modules())


def _blocks_of(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers around a recurrent layer, from outside to inside."""
    blocks = (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    return [block for block in blocks if any(m is layer for m in block.modules())]


def _base(model: Any) -> Any:
    """Return the model that Transformers made, inside PEFT's, DDP's or a user's wrapper or not."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    base = next(parts, model)
    if not hasattr(base, "config"):
        raise ValueError(
            f"{type(model).__name__} holds no Transformers model; give hf_longctx.prepare one"
        )
    return base
