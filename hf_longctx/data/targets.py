"""Labels of one document -> the target of each of its tokens.

Floor: data (plain NumPy). Letters: T tokens of one document.

Transformers takes two arrays: `labels`, aligned with `input_ids`, and `shift_labels`, which holds
the next token's label and is what the loss reads. A shift inside a rank's share loses the target of
the share's last token, and a shift over a whole pack teaches the end of one document to predict the
start of the next. So targets are made here, per document and before anything is cut; whatever cuts
afterwards cuts tokens and targets alike.
"""

from __future__ import annotations

import numpy as np

from .packing import Piece

IGNORE = -100
"""A target that the loss leaves out, as in `torch.nn.CrossEntropyLoss`."""


def shift(labels: np.ndarray) -> np.ndarray:
    """Targets `[T]` int64 of one whole document: `targets[i] = labels[i + 1]`, the last `IGNORE`.

    Args:
        labels (`np.ndarray`): Integers `[T]`, aligned with the document's tokens; `IGNORE` where a
            token is not to be predicted.
    """
    assert labels.ndim == 1, labels.shape
    targets = np.full(labels.shape, IGNORE, dtype=np.int64)
    targets[:-1] = labels[1:]
    return targets


def piece_targets(labels: np.ndarray, *, piece: Piece) -> np.ndarray:
    """Targets `[piece.length]` int64 of one piece of a document.

    A fragment keeps the target of its last token, the first token of the next fragment; only the
    end of the document has none.

    Args:
        labels (`np.ndarray`): Integers `[T]` of the whole document.
        piece (`Piece`): The tokens asked for, inside the document.
    """
    assert piece.stop <= labels.size, (piece, labels.size)
    return shift(labels)[piece.start : piece.stop]
