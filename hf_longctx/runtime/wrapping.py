"""Wrap a library's function, or the forward of one module, so that code of ours runs first.

Models and libraries are not subclassed: a wrapper sees the original's arguments and decides whether
to call it. A wrapper carries the original under a mark, an attribute, so that nothing is wrapped
twice for one purpose and `inspect.unwrap` finds it below wrappers of other libraries.
Layer: runtime.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]

ORIGINAL = "hf_longctx_original"
"""The mark of whatever keeps documents apart in recurrent layers."""


def wrap(original: Function, wrapper: Wrapper, *, mark: str = ORIGINAL) -> Function:
    """Return `wrapper(original)` under the original's name, marked with the original."""
    ours = wraps(original)(wrapper(original))
    # After wraps(), which copies the original's attributes and so the marks of inner wrappers.
    setattr(ours, mark, original)
    return ours


def wrap_forward(
    module: nn.Module, wrapper: Wrapper, *, purpose: str, remedy: str, mark: str = ORIGINAL
) -> None:
    """Wrap the forward of one instance; a second call with the same mark changes nothing.

    Args:
        module (`nn.Module`): The instance. Its class and its checkpoints stay as they are.
        wrapper (`Callable`): Takes the forward as a function of the module and its arguments, and
            returns another such function.
        purpose (`str`): What the wrapper makes possible, for the error.
        remedy (`str`): What to do about a forward that cannot be wrapped, for the error.
        mark (`str`, *optional*): Name of the attribute that keeps the original.

    Raises:
        ValueError: if the forward is not a method of the module.
    """
    if hasattr(module.forward, mark):
        return
    # Bound methods alone: what is no method may have captured its module or other arguments.
    original = getattr(module.forward, "__func__", None)
    if original is None:
        raise ValueError(
            f"forward of {type(module).__name__} was replaced by a "
            f"{type(module.forward).__name__}, so it cannot {purpose}; {remedy}"
        )
    # A bound method: deepcopy binds it to the copy, where a closure would keep the first module.
    module.forward = MethodType(wrap(original, wrapper, mark=mark), module)


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a forward carries `ORIGINAL`, also below the wrappers of other libraries."""
    # Accelerate wraps forwards for mixed precision; what lies below still runs.
    found = inspect.unwrap(module.forward, stop=lambda f: hasattr(f, ORIGINAL))
    return hasattr(found, ORIGINAL)
