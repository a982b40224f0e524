"""A run of tokens -> the affine map `S -> M S + E` it applies to the state.

Floor: kernels. Letters: H heads, N rows of the state, V its columns.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run of tokens does to the state that enters it.

    Args:
        state (`Tensor`): `[H, N, V]`, E: the state that leaves the run if zeros entered.
        decay (`Tensor`): M: `[H, 1, 1]` or `[H, N, 1]` (a diagonal, which multiplies) or
            `[H, N, N]` (the delta rule; latest factor leftmost).
    """

    state: Tensor
    decay: Tensor


def apply(summary: Summary, state: Tensor) -> Tensor:
    """The state `[H, N, V]` that leaves the run if `state` entered: `M S + E`."""
    return decayed(summary.decay, state) + summary.state


def decayed(decay: Tensor, state: Tensor) -> Tensor:
    """`M S`; where N is 1, a matrix and a diagonal are the same."""
    return decay @ state if decay.shape[-1] > 1 else decay * state
