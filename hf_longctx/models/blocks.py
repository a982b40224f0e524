"""Decoder layers around a recurrent layer -> layers that carry the batch to it, and that recompute
it once.

Floor: models. Some hand no keyword arguments to their recurrent layer. The batch comes from the
model's forward under way; activation checkpointing keeps it among the layer's arguments, so that a
recompute sees the batch of its own forward.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from ..data.batch import KEY
from .running import batch_of_model, running_block


def carry(block: nn.Module) -> None:
    """Have one decoder layer carry the batch; a second time changes nothing.

    Args:
        block (`nn.Module`): Its class becomes one derived from it, of the same name.
    """
    kind: Any = type(block)
    if not hasattr(kind, "hf_longctx_carries"):
        block.__class__ = _carrying(kind)


@cache
def _carrying(kind: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(KEY) is None:
            kwargs[KEY] = batch_of_model()
        return super(derived, self).__call__(*args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with running_block(kwargs.pop(KEY)):
            return super(derived, self).forward(*args, **kwargs)

    members = {"__call__": __call__, "forward": forward, "hf_longctx_carries": True}
    derived = _derived(kind, members, by=_carrying)
    return derived


def leave_recompute(block: nn.Module) -> None:
    """Have a decoder layer leave its recompute to the one that it lies in, as in Zamba2.

    Each would recompute the recurrent layer, of which states are kept for one recompute.

    Args:
        block (`nn.Module`): Its class becomes one derived from it, of the same name.
    """
    kind: Any = type(block)
    if not hasattr(kind, "hf_longctx_leaves"):
        block.__class__ = _leaving(kind)


@cache
def _leaving(kind: Any) -> Any:
    off = property(lambda self: False, lambda self, value: None)
    members = {"gradient_checkpointing": off, "hf_longctx_leaves": True}
    return _derived(kind, members, by=_leaving)


def _derived(kind: Any, members: dict[str, Any], *, by: Callable[[Any], Any]) -> Any:
    """A class of the same name, whose instances pickle as what `by` makes of the class."""

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        return _new, (by, kind), vars(self)

    members = members | {"__reduce_ex__": __reduce_ex__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def _new(by: Callable[[Any], Any], kind: Any) -> Any:
    """An instance whose state comes later."""
    derived = by(kind)
    return derived.__new__(derived)
