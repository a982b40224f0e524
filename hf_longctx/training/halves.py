"""A model -> one whose forward runs the two halves of a batch in turns, as one forward.

Floor: training. What wraps the model (DDP, PEFT, a Trainer's loss) sees one call with one batch and
one output, so nothing above it changes. Letters: T rows of this rank.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import KEY, LongCtxBatch
from ..data.targets import IGNORE
from ..runtime.pingpong import Turns

logger = logging.getLogger(__name__)
_BY_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")


def run_halves(model: nn.Module) -> None:
    """Have a model's forward run a batch that comes in halves in turns, and others as before.

    Args:
        model (`nn.Module`): The outermost module that is not yet wrapped for training. Only this
            instance changes, and nothing of it is saved.

    Raises:
        ValueError: where its forward is no method of it.
    """
    inner: Any = getattr(model.forward, "__func__", None)
    if inner is None:
        raise ValueError(
            f"forward of {type(model).__name__} was replaced by a {type(model.forward).__name__}, "
            "so it cannot run the halves of a batch; load it without device_map, or set "
            "longctx_overlap=none"
        )

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch: LongCtxBatch | None = kwargs.get(KEY)
        if batch is None or not batch.halves:
            return inner(self, *args, **kwargs)
        parts = batch.parts
        given = _split(parts, kwargs)
        turns = Turns(*(partial(inner, self, *args, **each) for each in given))
        for part in parts:
            part.turn = turns.turn
        try:
            return _join(turns.run(), [part.layout.rows(part.rank) for part in parts])
        finally:
            for part in parts:
                part.turn = None

    model.forward = MethodType(forward, model)


def say_whole(batch: LongCtxBatch) -> None:
    """Log a batch that has no halves, though they were asked for."""
    if not batch.halves:
        lengths = batch.layout.lengths
        logger.info(
            "longctx_overlap=pingpong: a batch of %d documents over %d ranks, the longest with %d "
            "of %d tokens, cannot be split by whole documents, each half with a quarter of the "
            "tokens and one per rank; it runs without overlap",
            len(lengths), batch.layout.ranks, lengths.max(), lengths.sum(),
        )  # fmt: skip


def _split(parts: Sequence[LongCtxBatch], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The keyword arguments of each half's forward."""
    if kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
        # a mean over this rank's targets is asked for, but each half would form one of its own
        kwargs["num_items_in_batch"] = kwargs["shift_labels"].ne(IGNORE).sum().clamp(min=1)
    each: list[dict[str, Any]] = [dict(kwargs, **{KEY: part}) for part in parts]
    rows = [part.layout.rows(part.rank) for part in parts]
    for name in _BY_TOKEN:
        if kwargs.get(name) is not None:
            for given, values in zip(each, kwargs[name].split(rows, dim=1), strict=True):
                given[name] = values
    return each


def _join(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """One output: the loss is the sum, what has a row per token lies end to end, a cache is left
    out.

    Raises:
        ValueError: on an output that is neither, which nobody could read as that of one forward.
    """
    joined = {}
    if not isinstance(outputs[0], Mapping):  # return_dict=False
        raise _unjoined("all", outputs[0])
    for name in outputs[0]:
        values = [output[name] for output in outputs]
        if name == "loss":
            joined[name] = values[0] + values[1]
        elif isinstance(values[0], Tensor | tuple):
            joined[name] = _rows(values, rows, name=name)
        elif name != "past_key_values":
            raise _unjoined(name, values[0])
    return type(outputs[0])(**joined)


def _rows(values: Sequence[Any], rows: Sequence[int], *, name: str) -> Any:
    """`[1, T, ...]` of both halves, or tuples of such; what neither half gives stays `None`."""
    if values[0] is None:
        return None
    if isinstance(values[0], tuple):
        return tuple(_rows(pair, rows, name=name) for pair in zip(*values, strict=True))
    if [value.shape[1:2] for value in values] != [(count,) for count in rows]:
        raise _unjoined(name, values[0])
    return torch.cat(list(values), dim=1)


def _unjoined(name: str, value: object) -> ValueError:
    found = f"Tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return ValueError(
        f"the model's output {name}={found} cannot be put together from two halves of a batch; "
        "leave it out, or set longctx_overlap=none"
    )
