"""Read documents from the rows of a data set: where each begins and ends, and its targets.

Most rows are one document. A row that another tool packed (TRL's `bfd` and `bfd_split` add
`seq_lengths`, others restart `position_ids`) holds several and is split again here, so that
validation, sampler and collator only meet documents.

Targets are made per document, before anything is cut. Transformers takes two arrays: `labels`,
aligned with `input_ids`, and `shift_labels`, which holds the next token's label and is what the
loss reads. A shift after cutting would lose the target of each part's last token, and a shift over
a whole pack would teach the end of one document to predict the start of the next.

Layer: data. Letters: T tokens of a row or of a document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from .packing import Piece

logger = logging.getLogger(__name__)

IGNORE = -100
"""A target that the loss leaves out, as in `torch.nn.CrossEntropyLoss`."""
MASKS = ("completion_mask", "assistant_masks")
"""Columns that are 0 for tokens that are no targets."""
BOUNDARIES = ("seq_lengths", "position_ids")
"""Columns that give the boundaries of a row's documents."""


def shift(labels: np.ndarray) -> np.ndarray:
    """Return the targets of one whole document, int64 `[T]`: `labels[i + 1]`, the last `IGNORE`.

    Args:
        labels (`np.ndarray`): Integers `[T]`, aligned with the document's tokens; `IGNORE` for
            tokens that are not to be predicted.
    """
    assert labels.ndim == 1, labels.shape
    targets = np.full(labels.shape, IGNORE, dtype=np.int64)
    targets[:-1] = labels[1:]
    return targets


def piece_targets(labels: np.ndarray, *, piece: Piece) -> np.ndarray:
    """Return the targets of one piece of a document, int64 `[piece.length]`.

    Args:
        labels (`np.ndarray`): Integers `[T]` of the whole document.
        piece (`Piece`): The tokens asked for, inside the document.
    """
    assert piece.stop <= labels.size, (piece, labels.size)
    # Shift first: a piece's last token keeps its target, which is the first token of the next one.
    return shift(labels)[piece.start : piece.stop]


class DataRows(Protocol):
    """A map-style data set: a `datasets.Dataset`, or any sequence of dicts."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def column_names(dataset: Any) -> list[str]:
    """Return the columns of a data set or of its first row; none if a stream does not know them."""
    named = getattr(dataset, "column_names", None)
    if named is None and hasattr(dataset, "__len__") and len(dataset):
        named = dataset[0]
    return list(named or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """A data set seen as documents. It copies no tokens.

    Args:
        rows (`DataRows`): Rows of `input_ids` and optional `labels` and masks.
        spans (`np.ndarray`): Row, first token and end of each document, int64 `[documents, 3]`.
        checksums (`np.ndarray`): `checksum` of each document when the rows were validated, uint32
            `[documents]`.
        targets (`int`): Tokens of all documents that are targets.
        description (`str`): What to call the data set in messages.
        ignore_id (`int`, *optional*): In a document without labels, the id that is no target, e.g.
            the padding token, as for `DataCollatorForLanguageModeling`.
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
        """Return `input_ids` and, unless all tokens are targets, `labels`, each int64 `[T]`.

        Raises:
            ValueError: The data set holds another document there than when it was validated.
        """
        row, start, stop = self.spans[document].tolist()
        cause = None
        try:
            found = read_document(self.rows[row], start=start, stop=stop, ignore_id=self.ignore_id)
            if checksum(found) == self.checksums[document]:
                return found
        except LookupError as error:  # a row, a column or a part of one is gone
            cause = error
        raise ValueError(
            f"{self.description}: row {row} reads differently than when it was scanned, so ranks "
            "would hold parts of different versions of it; draw random choices before training, "
            "e.g. in map(), and leave the data set as it is until the run ends"
        ) from cause

    def log_targets(self) -> None:
        """Log how many tokens are targets; a warning if none is."""
        tokens, level = int(self.lengths.sum()), logging.INFO if self.targets else logging.WARNING
        line = "%s: %s of %s tokens are targets"
        logger.log(level, line, self.description, f"{self.targets:,}", f"{tokens:,}")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 `[documents]`."""
        return np.asarray(self.spans[:, 2] - self.spans[:, 1])


def read_document(
    row: Mapping[str, Any], *, start: int, stop: int, ignore_id: int | None
) -> dict[str, np.ndarray]:
    """Read tokens [start, stop) of a row as a document; see `Documents`.

    A token is a target if its label is not `IGNORE` or, in a row without labels, if every mask
    holds 1. The first token never is one, since nothing precedes it: `shift` leaves it out.
    """
    ids = np.asarray(row["input_ids"], np.int64)[start:stop]
    given = row.get("labels")
    # Whoever made labels has applied the masks already. (TRL also keeps a mask it was told to
    # leave out.)
    masks = [name for name in MASKS if name in row and given is None]
    if given is None and not masks and ignore_id is None:
        return {"input_ids": ids}
    labels = ids.copy() if given is None else np.array(given, np.int64)[start:stop]
    if given is None and ignore_id is not None:
        labels[ids == ignore_id] = IGNORE
    for name in masks:
        labels[np.asarray(row[name])[start:stop] == 0] = IGNORE
    return {"input_ids": ids, "labels": labels}


def split_row(
    row: Mapping[str, np.ndarray], *, where: str, ignore_id: int | None
) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
    """Yield start, stop and contents of each document in a row.

    Args:
        row (`Mapping`): Its columns, each int64 `[T]`; `seq_lengths` `[documents]`.
        where (`str`): What to call the row in messages.
        ignore_id (`int` or `None`): See `Documents`.

    Raises:
        ValueError: See `document_lengths`.
    """
    lengths = document_lengths(row, where=where)
    stops = np.cumsum(lengths)
    for start, stop in zip((stops - lengths).tolist(), stops.tolist(), strict=True):
        yield start, stop, read_document(row, start=start, stop=stop, ignore_id=ignore_id)


def count_targets(document: Mapping[str, np.ndarray]) -> int:
    """Count the tokens of a document that are targets; its first token never is."""
    labels = document.get("labels", document["input_ids"])
    return int(np.count_nonzero(labels[1:] != IGNORE))


def checksum(document: Mapping[str, np.ndarray]) -> int:
    """Return a 32-bit checksum of a document's ids and labels."""
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


def document_lengths(row: Mapping[str, np.ndarray], *, where: str) -> np.ndarray:
    """Return the tokens of each document in a row, int64 `[documents]`.

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
    """Format the first few lengths of a row."""
    return f"[{', '.join(map(str, lengths[:8]))}{', ...' if lengths.size > 8 else ''}]"
