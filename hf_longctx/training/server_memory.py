"""A batch and a limit in bytes -> speeds at which no attention server holds more of any layer.

Floor: training. The plan gives a server work by its speed, so a server short of memory is planned
as a slower one. Every rank finds the same speeds.
"""

from collections.abc import Sequence

from ..data.batch import LongCtxBatch
from ..plan.cost import LayerKind
from ..plan.count import Widths, peak_bytes

_SMALLER = 0.9  # of the speed that would just fit, if bytes followed work


def limit_memory(
    batch: LongCtxBatch,
    *,
    algorithm: str,
    layers: Sequence[tuple[LayerKind, Widths]],
    limit: int,
) -> None:
    """Lower `batch.speeds` until every server keeps within `limit`.

    Args:
        batch (`LongCtxBatch`): With the speeds of its servers.
        algorithm (`str`): Attention name.
        layers (`Sequence[tuple[LayerKind, Widths]]`): Kind and row sizes of each layer.
        limit (`int`): Bytes of queries, keys, values and results of one layer.
    """
    while True:
        peaks = [
            _peak(batch, number, algorithm=algorithm, layers=layers)
            for number in range(len(batch.speeds))
        ]
        if not peaks or max(peaks) <= limit:
            return
        batch.speeds = tuple(
            speed if peak <= limit else speed * _SMALLER * min(limit / peak, 1.0)
            for speed, peak in zip(batch.speeds, peaks, strict=True)
        )


def _peak(
    batch: LongCtxBatch, number: int, *, algorithm: str, layers: Sequence[tuple[LayerKind, Widths]]
) -> int:
    """Bytes that a server holds of the largest layer, in the worse direction."""
    process = batch.layout.ranks + number
    programs = {
        (part.plan(algorithm, kind).program(process), widths)
        for part in batch.parts
        for kind, widths in layers
    }
    return max(
        peak_bytes(program, widths, backward=backward)
        for program, widths in programs
        for backward in (False, True)
    )
