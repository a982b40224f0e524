"""What ranks predict for their rows of a batch -> predictions and labels of whole documents.

Floor: training. Letters: T rows of this rank, V what a row's prediction holds (for logits, the
vocabulary), D documents of the data set, S tokens of the longest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.batch import LongCtxBatch
from ..data.targets import IGNORE

_CHECKED = 64  # rows; see `process`


@dataclass(slots=True)
class DocumentRows:
    """Collects the rows of evaluation batches from all trainers, and puts them where they belong.

    Every trainer ends up with all predictions, as under Trainer; only one batch at a time is on the
    device.
    """

    places: list[np.ndarray] = field(default_factory=list)
    columns: list[tuple[np.ndarray, ...]] = field(default_factory=list)

    def add(self, batch: LongCtxBatch, *columns: Tensor, accelerator: Any) -> None:
        """Note one batch; a collective call.

        Args:
            batch (`LongCtxBatch`): Says which documents the rows are of.
            columns (`Tensor`): Each `[1, T, ...]`, one row of it per token.
            accelerator: Gathers from all trainers.
        """
        device = columns[0].device
        places = torch.from_numpy(batch.places()).to(device)
        rows, *gathered = (
            _gather(values, accelerator, fill=-1 if i == 0 else 0)
            for i, values in enumerate((places, *(column[0] for column in columns)))
        )
        kept = rows[:, 0] >= 0  # neither filler nor what a shorter rank was padded with
        self.places.append(rows[kept])
        self.columns.append(tuple(values[kept] for values in gathered))

    def documents(self) -> tuple[np.ndarray, ...]:
        """Each column as `[D, S, ...]`, in the order of the data set, -100 after a document's end.

        Fragments of a split document stand where they were cut from; what truncation drops is left
        out.
        """
        shape = np.max([rows.max(0) for rows in self.places], 0) + 1
        whole = [np.full((*shape, *c.shape[1:]), IGNORE, c.dtype) for c in self.columns[0]]
        for rows, columns in zip(self.places, self.columns, strict=True):
            for out, values in zip(whole, columns, strict=True):
                out[rows[:, 0], rows[:, 1]] = values
        return tuple(whole)


def _gather(rows: Tensor, accelerator: Any, *, fill: int) -> np.ndarray:
    """`[rows of all trainers, ...]`; a trainer with fewer than others adds rows of `fill`."""
    if rows.dtype == torch.bfloat16:
        rows = rows.float()  # NumPy has no bfloat16
    padded = accelerator.pad_across_processes(rows, dim=0, pad_index=fill)
    gathered: np.ndarray = accelerator.gather(padded).cpu().numpy()
    return gathered


def process(function: Callable[[Tensor, Tensor], Any], logits: Tensor, labels: Tensor) -> Tensor:
    """Predictions that `preprocess_logits_for_metrics` makes of a rank's logits.

    Args:
        function (`Callable`): The user's.
        logits (`Tensor`): `[1, T, V]`.
        labels (`Tensor`): int64 `[1, T]`, not shifted.

    Returns:
        `[1, T, ...]`.

    Raises:
        ValueError: where a row of the result depends on other rows, which may be of another
            document, or be missing on this rank.
    """
    found = function(logits, labels)
    rows = logits.shape[1]
    # some of the rows, back to front: a function that shifts or sums over tokens shows itself
    some = slice(0, min(_CHECKED, (rows + 1) // 2))
    again = function(logits[:, some].flip(1), labels[:, some].flip(1))
    if isinstance(found, Tensor) and found.shape[:2] == (1, rows):
        few, same = found[:, some].flip(1).double(), again.double()
        if few.shape == same.shape and torch.allclose(few, same, 1e-4, 1e-6, equal_nan=True):
            return found
    got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"preprocess_logits_for_metrics made {got} of logits {tuple(logits.shape)}: a rank holds "
        "parts of several documents, so it must return [1, tokens, ...] and treat each token by "
        "itself; shift and sum in compute_metrics, where documents are whole"
    )
