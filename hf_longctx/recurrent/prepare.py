"""A Transformers model -> the same model, whose recurrent layers keep packed documents apart.

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
from . import fla, linear_attention, short_conv, state_space
from .adapter import Adapter
from .packed_inputs import read_packed_inputs
from .running import carry, leave_recompute
from .unprepared_guard import keep_prepared

ADAPTERS: tuple[Adapter, ...] = (
    *fla.ADAPTERS,
    *linear_attention.DELTA_ADAPTERS,
    *linear_attention.KIMI_ADAPTERS,
    *linear_attention.LIGHTNING_ADAPTERS,
    *short_conv.ADAPTERS,
    *state_space.SSM_ADAPTERS,
    *state_space.SELECTIVE_ADAPTERS,
)
Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model) -> Model:
    """Adapt a model's recurrent layers, so that packed documents do not leak into each other.

    Documents are read from `cu_seq_lens_q`, packed `position_ids` or `seq_idx`, whatever attention
    name the model has. Calls without packed documents, also padded and cached ones, run the code of
    Transformers as before. Nothing of it is saved with a checkpoint. A copy is prepared, too; what
    comes out of a pickle refuses packed documents until it is prepared again.

    Args:
        model (`nn.Module`): A Transformers model, or a wrapper of one. It is changed in place; a
            second time changes nothing, nor does a model without recurrent layers.

    Returns:
        The model.

    Raises:
        ValueError: naming the class of a recurrent layer that is not known, or of a function of
            Transformers that takes other arguments than the version that is known; and for options
            of flash-linear-attention that are not built, and for what holds no Transformers model.
    """
    for part in _adapt(model):
        keep_prepared(part)
    return model


def _adapt(model: nn.Module) -> list[nn.Module]:
    """Change a model's recurrent layers; the models around them, which now look for documents."""
    layers = recurrent_layers(model)
    _validate_unknown(model, [layer for layer, _ in layers])
    if not layers:
        return []
    validate_rules((FLA_RULE,), _base(model).config)
    for layer, adapter in layers:
        home = adapter.home(layer)
        assert home is not None
        adapter.adapt(layer, home)
        block, *inner = _blocks_of(layer, model)
        if adapter.carried:
            carry(block)
        for each in inner:
            leave_recompute(each)
    ids = {id(layer) for layer, _ in layers}
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    doors = [_base(model), *(part for part in models if _holds(part, ids))]
    for part in doors:  # also within: a loss may call the model without its head
        read_packed_inputs(part, plain=all(adapter.plain for _, adapter in layers))
    return doors


def recurrent_layers(model: nn.Module) -> list[tuple[nn.Module, Adapter]]:
    """The recurrent layers in a model that can be adapted, in order, each with its adapter."""
    return [
        (module, adapter)
        for module in model.modules()
        for adapter in ADAPTERS
        if adapter.home(module) is not None
    ]


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """A model prepared for a while; afterwards its forwards are what they were."""
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


def _validate_unknown(model: nn.Module, known: list[nn.Module]) -> None:
    """Refuse decoder layers that the config calls recurrent and in which no layer was known.

    Raises:
        ValueError: naming the class and what the config says of it.
    """
    base, ids = _base(model), {id(layer) for layer in known}
    config = base.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    lists = (m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == len(kinds))
    blocks = max(lists, key=lambda blocks: _holds(blocks, ids), default=())  # not those of vision
    unknown = {
        type(block).__name__: f"layer_types {kind!r}"
        for block, kind in zip(blocks, kinds, strict=False)
        if kind in RECURRENT_LAYERS and not _holds(block, ids)
    }
    if not known and recurrent_family(config) is not None:
        unknown.setdefault(type(base).__name__, str(recurrent_family(config)))
    if unknown:
        named = " and ".join(f"{name} ({found})" for name, found in unknown.items())
        raise ValueError(
            f"{named} has recurrent layers that hf_longctx does not know; train it one document at "
            "a time, with its own attention"
        )


def _holds(module: nn.Module, ids: set[int]) -> int:
    """How many of some modules lie in one."""
    return sum(id(part) in ids for part in module.modules())


def _blocks_of(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The decoder layers around a recurrent layer, from outside to inside."""
    blocks = (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    return [block for block in blocks if any(m is layer for m in block.modules())]


def _base(model: Any) -> Any:
    """The model that Transformers made, under PEFT's, DDP's or a user's wrapper or without one."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    base = next(parts, model)
    if not hasattr(base, "config"):
        raise ValueError(
            f"{type(model).__name__} holds no Transformers model; give hf_longctx.prepare one"
        )
    return base
