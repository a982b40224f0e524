"""Two halves of a batch -> both results, computed in turns: each half hands over at its waits.

Layer: runtime. A half is a coroutine with a stack of its own, so a model's forward runs unchanged:
its attention hands over right after it has posted an exchange, and goes on once the other half has
done the same. Backward needs nothing: autograd runs nodes in the reverse order of their making.

PyTorch keeps some state by thread, which coroutines share; it is swapped at each turn: saved-tensor
hooks (activation checkpointing), grad mode, autocast and random state.

A model -> one whose forward runs the two halves of a batch in turns, as one forward. What wraps the model (DDP, PEFT, a Trainer's loss) sees one call with one batch and
one output, so nothing above it changes. Letters: T rows of this rank.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch._C import _autograd, _len_torch_dispatch_stack, _len_torch_function_stack

from ..data.batch import KEY, LongCtxBatch
from ..data.documents import IGNORE

_DEVICES = ("cpu", "cuda")
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(slots=True)
class _ModeState:
    """What a thread keeps beside its stack."""

    hooks: list[Hooks]
    grad: bool
    autocast: list[tuple[bool, torch.dtype]]
    random: Tensor
    random_cuda: Tensor | None

    @classmethod
    def now(cls) -> "_ModeState":
        """The thread's present state."""
        return cls(
            _exchange_hooks(None),
            torch.is_grad_enabled(),
            [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES],
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        )

    def apply(self) -> None:
        """Make it the thread's state."""
        _exchange_hooks(self.hooks)
        torch.set_grad_enabled(self.grad)
        for device, (enabled, dtype) in zip(_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_rng_state(self.random)
        if self.random_cuda is not None:
            torch.cuda.set_rng_state(self.random_cuda)

    def seeded(self, seed: int) -> "_ModeState":
        """The same, with random state of its own."""
        cpu = torch.Generator().manual_seed(seed).get_state()
        cuda = self.random_cuda
        if cuda is not None:
            cuda = torch.Generator("cuda").manual_seed(seed).get_state()
        return _ModeState(self.hooks, self.grad, self.autocast, cpu, cuda)


def _exchange_hooks(hooks: list[Hooks] | None) -> list[Hooks]:
    """The stack of saved-tensor hooks, bottom first; replaced by `hooks` where given."""
    found: list[Hooks] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        found.insert(0, top)
        _autograd._pop_saved_tensors_default_hooks()
    for pair in found if hooks is None else hooks:
        _autograd._push_saved_tensors_default_hooks(*pair)
    return found


class Turns:
    """Two coroutines of this thread.

    Args:
        halves (`Callable[[], Any]`): Each computes one half, and calls `turn` at its waits.
    """

    def __init__(self, *halves: Callable[[], Any]) -> None:
        self._hub = getcurrent()
        self._coroutines = [greenlet(half) for half in halves]
        for coroutine in self._coroutines:
            coroutine.gr_context = copy_context()
        self._modes = self._open_modes()

    @staticmethod
    def _open_modes() -> tuple[int, int]:
        return _len_torch_function_stack(), _len_torch_dispatch_stack()

    def turn(self) -> None:
        """Hand over to the other half, and return when it has handed back.

        Raises:
            ValueError: inside a torch function or dispatch mode that began within the half, which
                the other half would run under too.
        """
        if self._open_modes() != self._modes:
            raise ValueError(
                "attention runs inside a torch function or dispatch mode that its layer entered, "
                "as with a context_fn of activation checkpointing: the other half of the batch "
                "would run under it too; leave it out, or set longctx_overlap=none"
            )
        self._hub.switch()

    def run(self) -> list[Any]:
        """Both results.

        The first half starts from the thread's random state and leaves its own behind; the second
        has one that is seeded from it.

        Raises:
            Whatever a half raises; the other half then ends where it is.
        """
        seed = int(torch.randint(2**62, ()))
        base = _ModeState.now()
        states, results = [base, base.seeded(seed)], [None, None]
        running = [0, 1]
        try:
            while running:
                half = running.pop(0)
                states[half].apply()
                result = self._coroutines[half].switch()
                states[half] = _ModeState.now()
                if self._coroutines[half].dead:
                    results[half] = result
                else:
                    running.append(half)
        finally:
            for half in running:
                states[half].apply()
                self._coroutines[half].throw()  # ends it: its stack unwinds as at an error
            base.random, base.random_cuda = states[0].random, states[0].random_cuda
            base.apply()
        return results


logger = logging.getLogger(__name__)
_BY_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")


def run_in_halves(model: nn.Module) -> None:
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
            part.binding.turn = turns.turn
        try:
            return _join(turns.run(), [part.layout.rows(part.rank) for part in parts])
        finally:
            for part in parts:
                part.binding.turn = None

    model.forward = MethodType(forward, model)


def log_unsplit(batch: LongCtxBatch) -> None:
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
