"""Labels of one document -> the target of each of its tokens.

Layer: data. Letters: T tokens of one document.

Transformers takes two arrays: `labels`, aligned with `input_ids`, and `shift_labels`, which holds
the next token's label and is what the loss reads. A shift inside a rank's share loses the target of
the share's last token, and a shift over a whole pack teaches the end of one document to predict the
start of the next. So targets are made here, per document and before anything is cut; whatever cuts
afterwards cuts tokens and targets alike.

Rows of a data set -> documents: where each begins and ends, and which tokens are targets. Most rows are one document. A row that another tool packed (TRL's `bfd` and `bfd_split`
add `seq_lengths`, others restart `position_ids`) holds several; it is taken apart again here, so
that the scan, the sampler and the collator know documents alone. Letters: T tokens of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

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


logger = logging.getLogger(__name__)

MASKS = ("completion_mask", "assistant_masks")
"""Columns that are 0 where a token is no target."""
BOUNDARIES = ("seq_lengths", "position_ids")
"""Columns that tell the documents of a row apart."""


class DataRows(Protocol):
    """A map-style data set: a `datasets.Dataset`, or any sequence of dicts."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def columns_in(dataset: Any) -> list[str]:
    """The columns of a data set, or of its first row; none for a stream that does not know them."""
    named = getattr(dataset, "column_names", None)
    if named is None and hasattr(dataset, "__len__") and len(dataset):
        named = dataset[0]
    return list(named or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """A data set seen as documents: a view, which copies no tokens.

    Args:
        rows (`DataRows`): Rows of `input_ids` and, if they like, `labels` and masks.
        spans (`np.ndarray`): Row, first token and end of each document, `[documents, 3]` int64.
        checksums (`np.ndarray`): What `checksum` gave for each document when the rows were scanned,
            `[documents]` uint32.
        targets (`int`): Tokens of all documents that are targets.
        description (`str`): What to call the data set in messages.
        ignore_id (`int`, *optional*): In a document without labels of its own, the id that is no
            target, e.g. the padding token, as for `DataCollatorForLanguageModeling`.
    """

    rows: DataRows
    spans: np.ndarray
    checksums: np.ndarray
    targets: int
    description: str
    ignore_id: int | None = None

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, document: int) -> dict[str, np.ndarray]:
        """`input_ids` and, unless all of them are targets, `labels`, each int64 `[tokens]`.

        Raises:
            ValueError: The data set holds another document there than when it was scanned.
        """
        row, start, stop = self.spans[document].tolist()
        cause = None
        try:
            found = read(self.rows[row], start=start, stop=stop, ignore_id=self.ignore_id)
            if checksum(found) == self.checksums[document]:
                return found
        except LookupError as error:  # a row, a column or a part of one is gone
            cause = error
        raise ValueError(
            f"{self.description}: row {row} reads differently than when it was scanned, so ranks "
            "would hold parts of different versions of it; draw random choices before training, "
            "e.g. in map(), and leave the data set as it is until the run ends"
        ) from cause

    def say_targets(self) -> None:
        """Log how many tokens are targets; a warning where none is."""
        tokens, level = int(self.lengths.sum()), logging.INFO if self.targets else logging.WARNING
        line = "%s: %s of %s tokens are targets"
        logger.log(level, line, self.description, f"{self.targets:,}", f"{tokens:,}")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, `[documents]` int64."""
        return np.asarray(self.spans[:, 2] - self.spans[:, 1])


def read(
    row: Mapping[str, Any], *, start: int, stop: int, ignore_id: int | None
) -> dict[str, np.ndarray]:
    """Tokens [start, stop) of a row as a document: see `Documents`.

    A token is a target where its label is not `IGNORE`, or, in a row without labels, every mask
    holds 1: who made labels has decided on the masks (TRL keeps one that it was told to leave out).
    The first token never is one, as nothing precedes it: `targets.shift` leaves it out.
    """
    ids = np.asarray(row["input_ids"], np.int64)[start:stop]
    given = row.get("labels")
    masks = [name for name in MASKS if name in row and given is None]
    if given is None and not masks and ignore_id is None:
        return {"input_ids": ids}
    labels = ids.copy() if given is None else np.array(given, np.int64)[start:stop]
    if given is None and ignore_id is not None:
        labels[ids == ignore_id] = IGNORE
    for name in masks:
        labels[np.asarray(row[name])[start:stop] == 0] = IGNORE
    return {"input_ids": ids, "labels": labels}


def targets_in(document: Mapping[str, np.ndarray]) -> int:
    """Tokens of a document that are targets: none before the second."""
    labels = document.get("labels", document["input_ids"])
    return int(np.count_nonzero(labels[1:] != IGNORE))


def checksum(document: Mapping[str, np.ndarray]) -> int:
    """A 32-bit number that stands for a document's ids and labels."""
    number = 0
    for name, values in document.items():
        number = crc32(values.tobytes(), crc32(name.encode(), number))
    return number


def restarts(position_ids: Any, *, real: Any = None, backwards_only: bool = False) -> Any:
    """Find where `position_ids` restart: bool `[..., T - 1]`, true at i if token i + 1 does.

    A restart is any step that is not +1: positions of a document need not begin at 0, and a
    document of one token is followed by a step of 0 or back.

    Args:
        position_ids (`Tensor` or `np.ndarray`): Integers `[..., T]`.
        real (*optional*): Bool `[..., T]`, false for padding. Steps to and from padding, whose
            positions mean nothing, are then no restarts.
        backwards_only (`bool`, *optional*, defaults to `False`): Only a step back is a restart. For
            the time axis of multimodal positions, on which the tokens of an image share one step
            and the next text token may skip several.
    """
    steps = position_ids[..., 1:] - position_ids[..., :-1]
    found = steps < 0 if backwards_only else steps != 1
    return found if real is None else found & real[..., 1:] & real[..., :-1]


def sizes(row: Mapping[str, np.ndarray], *, where: str) -> np.ndarray:
    """Tokens of each document in a row, `[documents]` int64.

    Args:
        row (`Mapping`): Its columns, each `[T]`; `seq_lengths` `[documents]`.
        where (`str`): What to call the row in messages.

    Raises:
        ValueError: The boundaries do not fit the row, or contradict each other.
    """
    tokens, found = row["input_ids"].size, []
    if "seq_lengths" in row:
        lengths = row["seq_lengths"]
        if (lengths < 1).any() or lengths.sum() != tokens:
            raise ValueError(
                f"{where} has {tokens} input_ids, but its seq_lengths {_short(lengths)} add up to "
                f"{lengths.sum()}; each must be at least 1 and all must add up to the row: pack "
                "again, or drop the column and give one document per row"
            )
        found.append(lengths)
    if "position_ids" in row:
        breaks = np.flatnonzero(restarts(row["position_ids"])) + 1
        found.append(np.diff(breaks, prepend=0, append=tokens))
    if len(found) == 2 and not np.array_equal(found[0], found[1]):
        raise ValueError(
            f"{where}: seq_lengths gives documents of {_short(found[0])} tokens, but position_ids "
            f"restarts after {_short(found[1])}; drop the column that is wrong"
        )
    return found[0] if found else np.array([tokens])


def _short(lengths: np.ndarray) -> str:
    """The first few lengths of a row."""
    return f"[{', '.join(map(str, lengths[:8]))}{', ...' if lengths.size > 8 else ''}]"
