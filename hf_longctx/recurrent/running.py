"""The recurrent layer under way -> what the functions that its forward calls must know of it.

Layer: recurrent. Those functions are found by name in a modeling file and are given tensors alone, so
the layer and its batch reach them through context variables, each set for the length of one call.

Decoder layers around a recurrent layer -> layers that carry the batch to it, and that recompute
it once. Some hand no keyword arguments to their recurrent layer. The batch comes from the
model's forward under way; activation checkpointing keeps it among the layer's arguments, so that a
recompute sees the batch of its own forward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..data.batch import KEY, LongCtxBatch


@dataclass(slots=True)
class Running:
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
        """Note that a function of ours runs on `rows`, `[T, ...]` with the batch's tokens.

        Raises:
            ValueError: where there are more or fewer.
        """
        held = self.batch.layout.rows(self.batch.rank)
        if len(rows) != held:
            raise ValueError(
                f"{type(self.module).__name__} gave its {step} {len(rows)} rows of packed "
                f"documents with {held} tokens; pass every layer the rows that the model was given"
            )
        self.steps.append(step)

    def refuse(self, **given: Any) -> None:
        """Refuse arguments of the original that no function of ours takes.

        Raises:
            ValueError: naming the layer and those that are set.
        """
        found = " and ".join(name for name, x in given.items() if x is not None and x is not False)
        if found:
            raise ValueError(
                f"{type(self.module).__name__} was given {found} with packed documents, which is "
                "not computed per document; set use_cache=False and leave out masks and options "
                "that the model does not set itself"
            )


_LAYER: ContextVar[Running | None] = ContextVar("hf_longctx_layer", default=None)
_BLOCK: ContextVar[LongCtxBatch | None] = ContextVar("hf_longctx_block", default=None)
_MODEL: ContextVar[tuple[nn.Module | None, LongCtxBatch | None]] = ContextVar(
    "hf_longctx_model", default=(None, None)
)
_TARGETS: ContextVar[Tensor | None] = ContextVar("hf_longctx_targets", default=None)


def layer_under_way() -> Running | None:
    """The recurrent layer that runs on packed documents, if one does."""
    return _LAYER.get()


def batch_of_block() -> LongCtxBatch | None:
    """The documents in the decoder layer that runs and carries them for its recurrent layer."""
    return _BLOCK.get()


def batch_of_model() -> LongCtxBatch | None:
    """The documents in the model's forward that runs; in a recompute none, or another's."""
    return _MODEL.get()[1]


def part_of_model_under_way(module: nn.Module) -> bool:
    """Whether a module lies in the model whose forward runs and has looked for documents."""
    outer = _MODEL.get()[0]
    return outer is not None and any(part is module for part in outer.modules())


def targets_of_model() -> Tensor | None:
    """The `shift_labels` given to the model under way, for heads that do not hand them on."""
    return _TARGETS.get()


@contextmanager
def running_layer(module: nn.Module, batch: LongCtxBatch) -> Iterator[Running]:
    """Make a recurrent layer the one under way."""
    layer = Running(module, batch)
    with _set(_LAYER, layer):
        yield layer


def running_block(batch: LongCtxBatch | None) -> AbstractContextManager[None]:
    """Make a batch, or none, that of the decoder layer under way."""
    return _set(_BLOCK, batch)


@contextmanager
def running_model(
    model: nn.Module, batch: LongCtxBatch | None, targets: Tensor | None
) -> Iterator[None]:
    """Make a model the one under way, with a batch or none, and its `shift_labels`."""
    with _set(_MODEL, (model, batch)), _set(_TARGETS, targets):
        yield


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


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
