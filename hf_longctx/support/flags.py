"""A run's flags and its attention name -> refusal of flags that the name does not look at.

Floor: support.
"""

from typing import Any

from .rules import NESTED

_LOOKED_AT = (  # field, default, names that look at it, why others do not
    ("longctx_topology", "auto", NESTED, "its plans know no domains"),
    ("longctx_ulysses_size", 1, NESTED, "its plans know no domains"),
    ("longctx_scan", "auto", ("zeco_linear",), "it runs no recurrent layers"),
    ("longctx_softmax", "distca", ("zeco_linear",), "it runs all softmax layers itself"),
)


def refuse_unread_flags(arguments: Any, *, name: str, algorithm: str) -> None:
    """Refuse flags that would change nothing.

    Args:
        arguments: What has the `longctx_*` fields.
        name (`str`): The attention name.
        algorithm (`str`): Who plans its softmax layers.

    Raises:
        ValueError: naming the flag, its value, the rule and the remedy.
    """
    for flag, default, names, why in _LOOKED_AT:
        value = getattr(arguments, flag)
        if value != default and not {name, algorithm} & {*names}:
            raise ValueError(
                f"{flag}={value} under attn_implementation={name!r}: {why}; leave it at {default}, "
                f"or use {' or '.join(names)}"
            )
