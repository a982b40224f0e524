"""Validate a tokenised data set in one pass, before the first step.

A bad row stops the run at once and not hours into it. Rows hold `input_ids` and optionally
`labels`, `attention_mask` and target masks of the same length, and boundaries of documents; see
`documents`. A stream is checked with the same functions, row by row. Layer: data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm

from .documents import (
    BOUNDARIES,
    IGNORE,
    MASKS,
    DataRows,
    Documents,
    checksum,
    count_targets,
    split_row,
)

_COLUMNS = ("input_ids", "labels", "attention_mask", *MASKS, *BOUNDARIES)
_REFUSED = (  # columns that give boundaries or targets, and are not read
    "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "shift_labels", "loss_mask",
    "label_ids",
)  # fmt: skip
_ROWS_AT_ONCE = 128  # amortises the overhead of a batch; 128 rows of 128K tokens are 128 MiB


class Hasher(Protocol):
    """Takes bytes in order, as a hash of `hashlib` does."""

    def update(self, data: bytes, /) -> None: ...


def validate_documents(
    dataset: DataRows,
    *,
    vocab_size: int | None,
    description: str,
    progress: bool = True,
    fingerprint: Hasher | None = None,
    ignore_id: int | None = None,
) -> Documents:
    """Validate every row and find the documents in it.

    Args:
        dataset (`DataRows`): The tokenised rows, unpadded.
        vocab_size (`int` or `None`): Ids that the model knows, [0, vocab_size); `None` checks only
            that ids are not negative.
        description (`str`): What to call the data set in messages, e.g. `"train_dataset"`.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a bar if the pass takes
            more than 2 seconds.
        fingerprint (`Hasher`, *optional*): Is given all that every row holds, so that ranks can
            compare the documents they hold.
        ignore_id (`int`, *optional*): See `Documents`.

    Raises:
        ValueError: No rows; no `input_ids`; ids or labels out of the vocabulary; a column of
            another length than `input_ids`; a padded row; boundaries that contradict the row;
            rows that read differently each time. Names the row.
    """
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{description} is a {type(dataset).__name__} without a length; pass a data set with "
            "one, or an IterableDataset to stream it"
        )
    if not len(dataset):
        raise ValueError(f"{description} has no rows; pass a data set with at least one document")
    columns = read_columns(dataset[0], where=f"{description}: row 0")
    # A transform computes its columns row by row, and another format would switch it off.
    if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        dataset = dataset.with_format("numpy", columns=columns)
    spans, checksums, targets = [], [], 0
    with tqdm(
        total=len(dataset), desc=f"Scanning {description}", delay=2, disable=not progress
    ) as bar:
        for first, batch in _batches(dataset, columns=columns, description=description):
            rows = validate_rows(batch, start=first, vocab_size=vocab_size, description=description)
            for number, row in enumerate(rows, start=first):
                where = f"{description}: row {number}"
                for start, stop, document in split_row(row, where=where, ignore_id=ignore_id):
                    spans.append((number, start, stop))
                    checksums.append(checksum(document))
                    targets += count_targets(document)
                if fingerprint is not None:
                    hash_row(fingerprint, row)
            bar.update(len(rows))
    documents = Documents(
        rows=dataset,
        spans=np.array(spans, np.int64).reshape(-1, 3),
        checksums=np.array(checksums, np.uint32),
        targets=targets,
        description=description,
        ignore_id=ignore_id,
    )
    # The first, the middle and the last one again: rows drawn anew on each read show here.
    for again in range(len(documents))[:: max(1, (len(documents) - 1) // 2)]:
        documents[again]
    return documents


def hash_row(hasher: Hasher, row: Mapping[str, np.ndarray]) -> None:
    """Add all that a validated row holds to a hash."""
    for name in _COLUMNS:
        values = row.get(name, np.empty(0, np.int64))
        # Lengths too: the same ids could be cut into rows in another way.
        hasher.update(values.size.to_bytes(8, "little"))
        hasher.update(values.tobytes())


def read_columns(row: Any, *, where: str) -> list[str]:
    """Return the columns of a data set's first row that are read.

    Raises:
        ValueError: There is no `input_ids`, or a column that would have to be read and is not.
    """
    if not isinstance(row, Mapping) or "input_ids" not in row:
        found = sorted(row) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(
            f"{where} holds {found}, but packing needs a column input_ids; tokenise first, e.g. "
            "with hf_longctx.data.chat.tokenize_rows (messages, prompt and completion, text)"
        )
    refused = sorted(name for name in _REFUSED if name in row)
    if refused:
        raise ValueError(
            f"{where} holds {refused}, boundaries or target masks that are not read; give one "
            "document per row, with labels (-100 for no target), or boundaries as seq_lengths, "
            "without these columns"
        )
    return [column for column in _COLUMNS if column in row]


def _batches(
    dataset: DataRows, *, columns: list[str], description: str
) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """Yield the first row's number, and the rows, of a few rows at a time."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "numpy":
        for index, batch in enumerate(dataset.iter(batch_size=_ROWS_AT_ONCE)):
            each = zip(*(batch[column] for column in columns), strict=True)
            yield index * _ROWS_AT_ONCE, [dict(zip(columns, row, strict=True)) for row in each]
        return
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = [dataset[row] for row in range(start, min(start + _ROWS_AT_ONCE, len(dataset)))]
        for number, row in enumerate(rows, start=start):
            validate_columns(row, columns, where=f"{description}: row {number}")
        yield start, rows


def validate_columns(row: Mapping[str, Any], columns: list[str], *, where: str) -> None:
    """Raise ValueError for a row with other columns than the first one."""
    found = [column for column in _COLUMNS if column in row]
    if found != columns:
        raise ValueError(
            f"{where} has {found}, but row 0 has {columns}; give every row the same columns"
        )


def validate_rows(
    rows: list[Mapping[str, Any]], *, start: int, vocab_size: int | None, description: str
) -> list[dict[str, np.ndarray]]:
    """Return what is read of a few rows, int64 arrays `[T]`.

    Args:
        rows (`list[Mapping]`): With the same columns.
        start (`int`): Number of the first row.
        vocab_size (`int` or `None`), description (`str`): See `validate_documents`.

    Raises:
        ValueError: For the first bad row; see `validate_documents`.
    """
    where = f"{description}: row "
    columns = [column for column in _COLUMNS if column in rows[0]]
    arrays = [
        {column: _integers(row[column], where=f"{where}{at}, {column}") for column in columns}
        for at, row in enumerate(rows, start=start)
    ]
    aligned = [column for column in columns if column != "seq_lengths"]
    for at, row in enumerate(arrays, start=start):
        for column in aligned:
            if row[column].size != row["input_ids"].size:
                raise ValueError(
                    f"{where}{at} has {row[column].size} {column} for {row['input_ids'].size} "
                    "input_ids; both need the same length: make and cut them together"
                )
    # All rows at once, since most calls would be on short arrays.
    for column in aligned:
        values = np.concatenate([row[column] for row in arrays])
        bad, rule = _bad_values(column, values, vocab_size=vocab_size)
        if bad.any():
            at, stops = int(bad.argmax()), np.cumsum([row["input_ids"].size for row in arrays])
            index = int(np.searchsorted(stops, at, side="right"))
            token = at - int(stops[index - 1] if index else 0)
            raise ValueError(f"{where}{start + index}, {column}[{token}] is {values[at]}; {rule}")
    return arrays


def _bad_values(
    column: str, values: np.ndarray, *, vocab_size: int | None
) -> tuple[np.ndarray, str]:
    """Return which values of a column are refused, bool `[T]`, and the rule that they break."""
    if column == "attention_mask":
        return values == 0, "packing takes documents without padding; tokenise with padding=False"
    if column in MASKS:
        return (values != 0) & (values != 1), "a mask is 1 for targets and 0 for others"
    if column == "position_ids":
        return np.zeros(values.shape, bool), ""  # only its steps are read
    top = np.inf if vocab_size is None else vocab_size
    span = "0 or more" if vocab_size is None else f"in [0, {vocab_size}), the model's vocabulary"
    bad = (values < 0) | (values >= top)
    if column == "labels":
        return bad & (values != IGNORE), f"labels are {IGNORE} (no target) or {span}"
    return bad, f"ids are {span}; use the tokenizer that belongs to the model"


def _integers(values: Any, *, where: str) -> np.ndarray:
    """Convert one row of a column to an int64 array `[T]`."""
    array = np.asarray(values)
    # Before the cast, which would turn floats into ids without a word.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise ValueError(
            f"{where} is {array.dtype} of shape {list(array.shape)}, but a document is a flat list "
            "of integers; tokenise one document per row"
        )
    return array.astype(np.int64, copy=False)
