"""Our attention names in the two registries of Transformers.

Floor: attention. Both halves are needed: a name without a mask function silently loses causality.
"""

from collections.abc import Callable, Iterable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from .charm import charm_attention
from .distca import distca_attention
from .masks import attention_mask
from .ring import ring_attention
from .ulysses import ulysses_attention
from .zeco_linear import zeco_linear_attention

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "charm": charm_attention,
    "distca": distca_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "zeco_linear": zeco_linear_attention,
}


def register(names: Iterable[str] | None = None) -> None:
    """Make names known to Transformers: attention function and mask function.

    Importing `hf_longctx` does this for all of them; calling it again changes nothing.

    Args:
        names (`Iterable[str]`, *optional*): Which names; all by default.

    Raises:
        ValueError: on a name that is not ours.
    """
    for name in FUNCTIONS if names is None else names:
        if name not in FUNCTIONS:
            raise ValueError(f"{name!r} is not ours; use one of {sorted(FUNCTIONS)}")
        AttentionInterface.register(name, FUNCTIONS[name])
        AttentionMaskInterface.register(name, attention_mask)
