"""Run the two halves of a batch alternately, so that one computes while the other communicates.

Each half is a coroutine with a stack of its own, so a model's forward runs unchanged: its attention
switches to the other half right after it has posted an exchange, and goes on once the other half
has done the same. Backward needs nothing: autograd runs nodes in the reverse of the order in which
they were made. Whatever wraps the model (DDP, PEFT, a Trainer's loss) sees one forward, with one
batch and one output.
Layer: runtime. Letters: T rows of this rank.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from ..data.batch import KEY, LongCtxBatch
from ..data.documents import IGNORE
from .thread_state import ThreadState
from .wrapping import wrap_forward

logger = logging.getLogger(__name__)
# Arguments with a row per token, in their second axis; all others go to both halves.
_BY_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")


class PingPong:
    """Two coroutines of this thread that hand over to each other.

    Args:
        halves (`Callable[[], Any]`): Each computes one half of a batch, and calls `switch` where it
            would wait.
    """

    def __init__(self, *halves: Callable[[], Any]) -> None:
        self._main = getcurrent()
        self._coroutines = [greenlet(half) for half in halves]
        for coroutine in self._coroutines:
            # Context variables set in one half must not be seen by the other.
            coroutine.gr_context = copy_context()
        self._modes = self._open_modes()

    @staticmethod
    def _open_modes() -> tuple[int, int]:
        return _len_torch_function_stack(), _len_torch_dispatch_stack()

    def switch(self) -> None:
        """Let the other half run; return when it switches back.

        Raises:
            ValueError: inside a torch function mode or dispatch mode that began within this half:
                the other half would run under it too.
        """
        if self._open_modes() != self._modes:
            raise ValueError(
                "attention runs inside a torch function or dispatch mode that its layer entered, "
                "as with a context_fn of activation checkpointing; the other half of the batch "
                "would run under it too. Leave it out, or set longctx_overlap=none"
            )
        self._main.switch()

    def run(self) -> list[Any]:
        """Run both halves to their end and return their results.

        The first half starts from the thread's random state, and what it leaves is the thread's
        afterwards. The second half draws from generators of its own, seeded from the first's.

        Raises:
            Whatever a half raises. The other half is then ended where it stands.
        """
        # Drawn before the capture: the first half goes on in the same stream of numbers.
        seed = int(torch.randint(2**62, ()))
        base = ThreadState.capture()
        states = [base, replace(base, random=base.random.seeded(seed))]
        results: list[Any] = [None, None]
        running = [0, 1]
        try:
            while running:
                half = running.pop(0)
                states[half].restore()
                result = self._coroutines[half].switch()
                states[half] = ThreadState.capture()
                if self._coroutines[half].dead:
                    results[half] = result
                else:
                    running.append(half)
        finally:
            for half in running:
                # Its context managers unwind, as at an error, under the state that it left.
                states[half].restore()
                self._coroutines[half].throw()
            replace(base, random=states[0].random).restore()
        return results


def enable_pingpong(model: nn.Module) -> None:
    """Make a model's forward run the two halves of a batch alternately, if the batch has halves.

    Args:
        model (`nn.Module`): The outermost module that is not yet wrapped for training. Only this
            instance changes, and nothing of it is saved.

    Raises:
        ValueError: if its forward is not a method of it.
    """
    wrap_forward(
        model,
        _pingpong_forward,
        purpose="run the halves of a batch",
        remedy="load it without device_map, or set longctx_overlap=none",
        mark="hf_longctx_pingpong",
    )


def _pingpong_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch: LongCtxBatch | None = kwargs.get(KEY)
        if batch is None or not batch.halves:
            return original(self, *args, **kwargs)
        parts = batch.parts
        given = _split(parts, kwargs)
        # Attention finds the switch on the part of the batch that it is given.
        pingpong = PingPong(*(partial(original, self, *args, **each) for each in given))
        for part in parts:
            part.binding.turn = pingpong.switch
        try:
            return _join(pingpong.run(), [part.layout.rows(part.rank) for part in parts])
        finally:
            # A recompute in backward runs outside the coroutines and must not switch.
            for part in parts:
                part.binding.turn = None

    return forward


def log_unsplit(batch: LongCtxBatch) -> None:
    """Log a batch that could not be split in halves and so runs without overlap."""
    if not batch.halves:
        lengths = batch.layout.lengths
        logger.info(
            "longctx_overlap=pingpong: a batch of %d documents over %d ranks, the longest with %d "
            "of %d tokens, cannot be split by whole documents into halves that each hold a quarter "
            "of the tokens and one token per rank; it runs without overlap",
            len(lengths), batch.layout.ranks, lengths.max(), lengths.sum(),
        )  # fmt: skip


def _split(parts: Sequence[LongCtxBatch], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the keyword arguments of each half's forward."""
    if kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
        # The model would average over a half's targets; both must divide by those of the batch.
        kwargs["num_items_in_batch"] = kwargs["shift_labels"].ne(IGNORE).sum().clamp(min=1)
    each: list[dict[str, Any]] = [dict(kwargs, **{KEY: part}) for part in parts]
    rows = [part.layout.rows(part.rank) for part in parts]
    for name in _BY_TOKEN:
        if kwargs.get(name) is not None:
            for given, values in zip(each, kwargs[name].split(rows, dim=1), strict=True):
                given[name] = values
    return each


def _join(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """Make one output of two: add losses, concatenate what has a row per token, drop a cache.

    Raises:
        ValueError: on an output that is neither, which cannot be read as that of one forward.
    """
    joined = {}
    if not isinstance(outputs[0], Mapping):  # return_dict=False
        raise _cannot_join("all", outputs[0])
    for name in outputs[0]:
        # A half's loss is already divided by the targets of the whole batch.
        values = [output[name] for output in outputs]
        if name == "loss":
            joined[name] = values[0] + values[1]
        elif isinstance(values[0], Tensor | tuple):
            joined[name] = _join_rows(values, rows, name=name)
        elif name != "past_key_values":
            raise _cannot_join(name, values[0])
    return type(outputs[0])(**joined)


def _join_rows(values: Sequence[Any], rows: Sequence[int], *, name: str) -> Any:
    """Concatenate `[1, T, ...]` of both halves, or tuples of such; `None` stays `None`."""
    if values[0] is None:
        return None
    if isinstance(values[0], tuple):
        return tuple(_join_rows(pair, rows, name=name) for pair in zip(*values, strict=True))
    if [value.shape[1:2] for value in values] != [(count,) for count in rows]:
        raise _cannot_join(name, values[0])
    return torch.cat(list(values), dim=1)


def _cannot_join(name: str, value: object) -> ValueError:
    found = f"Tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return ValueError(
        f"the model's output {name}={found} cannot be put together from two halves of a batch; "
        "leave it out, or set longctx_overlap=none"
    )
