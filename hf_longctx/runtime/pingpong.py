"""Two halves of a batch -> both results, computed in turns: each half hands over at its waits.

Floor: runtime. A half is a coroutine with a stack of its own, so a model's forward runs unchanged:
its attention hands over right after it has posted an exchange, and goes on once the other half has
done the same. Backward needs nothing: autograd runs nodes in the reverse order of their making.

PyTorch keeps some state by thread, which coroutines share; it is swapped at each turn: saved-tensor
hooks (activation checkpointing), grad mode, autocast and random state.
"""

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch._C import _autograd, _len_torch_dispatch_stack, _len_torch_function_stack

_DEVICES = ("cpu", "cuda")
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(slots=True)
class _State:
    """What a thread keeps beside its stack."""

    hooks: list[Hooks]
    grad: bool
    autocast: list[tuple[bool, torch.dtype]]
    random: Tensor
    random_cuda: Tensor | None

    @classmethod
    def now(cls) -> "_State":
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

    def seeded(self, seed: int) -> "_State":
        """The same, with random state of its own."""
        cpu = torch.Generator().manual_seed(seed).get_state()
        cuda = self.random_cuda
        if cuda is not None:
            cuda = torch.Generator("cuda").manual_seed(seed).get_state()
        return _State(self.hooks, self.grad, self.autocast, cpu, cuda)


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
        base = _State.now()
        states, results = [base, base.seeded(seed)], [None, None]
        running = [0, 1]
        try:
            while running:
                half = running.pop(0)
                states[half].apply()
                result = self._coroutines[half].switch()
                states[half] = _State.now()
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
