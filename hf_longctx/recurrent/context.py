"""Hand the batch of a forward to the functions that a recurrent layer calls.

A layer's functions are found by name in a modeling file and get tensors alone, so the layer and its
batch reach them through context variables, each set for the length of one call. Some decoder layers
hand no keyword arguments to their recurrent layer; those carry the batch here. Activation
checkpointing keeps it among the decoder layer's arguments, so that a recompute, which may run while
another model's forward is active, gets the batch of its own forward.
Layer: recurrent. Letters: T tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..data.batch import KEY, LongCtxBatch


@dataclass(slots=True)
class ActiveLayer:
    """One call of a recurrent layer on packed documents.

    Args:
        module (`nn.Module`): The layer.
        batch (`LongCtxBatch`): The documents in its rows.
        steps (`list[str]`): The functions of ours that it has called so far.
    """

    module: nn.Module
    batch: LongCtxBatch
    steps: list[str] = field(default_factory=list)

    def begin(self, step: str, rows: Tensor) -> None:
        """Note that the function `step` of ours runs on `rows`, `[T, ...]`.

        Raises:
            ValueError: if the batch has more or fewer than T tokens on this rank.
        """
        held = self.batch.layout.rows(self.batch.rank)
        if len(rows) != held:
            raise ValueError(
                f"{type(self.module).__name__} gave its {step} {len(rows)} rows of packed "
                f"documents with {held} tokens; pass every layer the rows that the model was given"
            )
        self.steps.append(step)

    def validate_unset(self, **arguments: Any) -> None:
        """Reject arguments of the original that our function does not take into account.

        Raises:
            ValueError: naming the layer and the arguments that are neither `None` nor `False`.
        """
        found = [name for name, x in arguments.items() if x is not None and x is not False]
        if found:
            raise ValueError(
                f"{type(self.module).__name__} was given {' and '.join(found)} with packed "
                "documents, which is not computed per document; set use_cache=False and leave out "
                "masks and options that the model does not set itself"
            )


class _ActiveModel(NamedTuple):
    module: nn.Module | None
    batch: LongCtxBatch | None
    targets: Tensor | None


# Context variables, since each thread and each half of a ping-pong has values of its own.
_NO_MODEL = _ActiveModel(None, None, None)
_LAYER: ContextVar[ActiveLayer | None] = ContextVar("hf_longctx_layer", default=None)
_BLOCK: ContextVar[LongCtxBatch | None] = ContextVar("hf_longctx_block", default=None)
_MODEL: ContextVar[_ActiveModel] = ContextVar("hf_longctx_model", default=_NO_MODEL)


def active_layer() -> ActiveLayer | None:
    """Return the recurrent layer that now runs on packed documents, if one does."""
    return _LAYER.get()


def batch_of_block() -> LongCtxBatch | None:
    """Return the batch that the active decoder layer carries for its recurrent layer."""
    return _BLOCK.get()


def batch_of_model() -> LongCtxBatch | None:
    """Return the batch of the active model; in a recompute there is none, or another model's."""
    return _MODEL.get().batch


def targets_of_model() -> Tensor | None:
    """Return the `shift_labels` of the active model, for heads that do not hand them on."""
    return _MODEL.get().targets


def inside_active_model(module: nn.Module) -> bool:
    """Return whether a module is part of the active model, which has read the documents already."""
    # A model's head calls its base model, which is wrapped too and must not read them again.
    outer = _MODEL.get().module
    return outer is not None and any(part is module for part in outer.modules())


def activate_layer(layer: ActiveLayer) -> AbstractContextManager[None]:
    """Make a recurrent layer the active one."""
    return _set(_LAYER, layer)


def activate_model(
    model: nn.Module, batch: LongCtxBatch | None, targets: Tensor | None
) -> AbstractContextManager[None]:
    """Make a model the active one, with its batch, if any, and its `shift_labels`."""
    return _set(_MODEL, _ActiveModel(model, batch, targets))


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)  # models nest, so the value before comes back afterwards
    try:
        yield
    finally:
        variable.reset(token)


def carry_batch(block: nn.Module) -> None:
    """Make a decoder layer carry the batch to its recurrent layer; twice changes nothing.

    Args:
        block (`nn.Module`): Its class is replaced by a derived one of the same name.
    """
    kind: Any = type(block)
    if not hasattr(kind, "hf_longctx_carries"):
        block.__class__ = _carrying(kind)


@cache
def _carrying(kind: Any) -> Any:
    # Checkpointing happens in __call__: what is added there is an argument of the recompute, too.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        # In a recompute it is there already, as an argument that checkpointing kept.
        if kwargs.get(KEY) is None:
            kwargs[KEY] = batch_of_model()
        return super(derived, self).__call__(*args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not handed on, as the original does not take it.
        with _set(_BLOCK, kwargs.pop(KEY)):
            return super(derived, self).forward(*args, **kwargs)

    members = {"__call__": __call__, "forward": forward, "hf_longctx_carries": True}
    derived = _derived(kind, members, by=_carrying)
    return derived


def disable_recompute(block: nn.Module) -> None:
    """Leave the recompute of a decoder layer to the decoder layer that it lies in, as in Zamba2.

    Args:
        block (`nn.Module`): Its class is replaced by a derived one of the same name.
    """
    # Each of the two would recompute the recurrent layer, whose states are kept for one recompute.
    kind: Any = type(block)
    if not hasattr(kind, "hf_longctx_leaves"):
        block.__class__ = _leaving(kind)


@cache
def _leaving(kind: Any) -> Any:
    # A property of the class: Transformers sets the flag on every module that has it.
    off = property(lambda self: False, lambda self, value: None)
    members = {"gradient_checkpointing": off, "hf_longctx_leaves": True}
    return _derived(kind, members, by=_leaving)


def _derived(kind: Any, members: dict[str, Any], *, by: Callable[[Any], Any]) -> Any:
    """Derive a class of the same name; its instances pickle by `by` and the original class."""

    # Pickle finds a class by its name, and by this name it would find the original.
    def __reduce_ex__(self: Any, protocol: int) -> Any:
        return _new, (by, kind), vars(self)

    members = members | {"__reduce_ex__": __reduce_ex__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def _new(by: Callable[[Any], Any], kind: Any) -> Any:
    """Make an instance without state, which pickle sets afterwards."""
    derived = by(kind)
    return derived.__new__(derived)
