"""Capture and restore what PyTorch and the random generators keep per thread or per process.

Ping-pong switches between two coroutines of one thread, which would otherwise share this state. The
replay of an accumulation window needs the random numbers that it drew the first time.
Layer: runtime.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _autograd

_DEVICES = ("cpu", "cuda")
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of the random generators.

    Args:
        cpu (`Tensor`): PyTorch's generator of the CPU.
        cuda (`Tensor`, *optional*): That of the current GPU; `None` if CUDA is not in use.
        python, numpy (*optional*): Those of `random` and `numpy.random`; `None` leaves them alone.
    """

    cpu: Tensor
    cuda: Tensor | None
    python: Any = None
    numpy: Any = None

    @classmethod
    def capture(cls, *, torch_only: bool) -> "RandomState":
        """Return the present state.

        Args:
            torch_only (`bool`): Leave out Python's and NumPy's generators. Layers do not draw from
                them, so two halves of a batch share them; data preparation does.
        """
        # is_initialized, not is_available: asking for the state would start CUDA.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        cpu = torch.get_rng_state()  # a copy, as all of these are
        if torch_only:
            return cls(cpu, cuda)
        return cls(cpu, cuda, random.getstate(), np.random.get_state())

    def seeded(self, seed: int) -> "RandomState":
        """Return this state with PyTorch's generators seeded anew."""
        cpu = torch.Generator().manual_seed(seed).get_state()
        # Generators of their own give the state without touching the global ones.
        cuda = self.cuda
        if cuda is not None:
            cuda = torch.Generator("cuda").manual_seed(seed).get_state()
        return replace(self, cpu=cpu, cuda=cuda)

    def restore(self) -> None:
        """Make this the state of the generators."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        # Python's and NumPy's are captured together or not at all.
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class ThreadState:
    """State that PyTorch keeps per thread, which coroutines of one thread share.

    Args:
        hooks (`list`): Saved-tensor hooks, bottom first. Activation checkpointing pushes them.
        grad (`bool`): Grad mode.
        autocast (`list`): Enabled, and dtype, of each device type.
        random (`RandomState`): PyTorch's generators.
    """

    hooks: list[_Hooks]
    grad: bool
    autocast: list[tuple[bool, torch.dtype]]
    random: RandomState

    @classmethod
    def capture(cls) -> "ThreadState":
        """Return the thread's present state."""
        return cls(
            _swap_hooks(None),
            torch.is_grad_enabled(),
            [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES],
            RandomState.capture(torch_only=True),
        )

    def restore(self) -> None:
        """Make this the thread's state."""
        # The whole stack: checkpointing in one half must not see the other half's tensors.
        _swap_hooks(self.hooks)
        torch.set_grad_enabled(self.grad)
        for device, (enabled, dtype) in zip(_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        self.random.restore()


def _swap_hooks(hooks: list[_Hooks] | None) -> list[_Hooks]:
    """Return the stack of saved-tensor hooks, bottom first; replace it by `hooks` if given."""
    found: list[_Hooks] = []
    # PyTorch shows the top of the stack alone, so it is taken down and put up again.
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        found.insert(0, top)
        _autograd._pop_saved_tensors_default_hooks()
    for pair in found if hooks is None else hooks:
        _autograd._push_saved_tensors_default_hooks(*pair)
    return found
