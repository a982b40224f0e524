"""A tokenised data set -> its documents, every row checked on the way.

Layer: data. One pass before the first step, so that a bad row stops the run at once and not hours
into it. Rows hold `input_ids` and, if they like, `labels`, `attention_mask` and target masks of the
same length, and boundaries of documents; see `documents`.
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
    read,
    sizes,
    targets_in,
)

_COLUMNS = ("input_ids", "labels", "attention_mask", *MASKS, *BOUNDARIES)
_REFUSED = (  # columns that bound documents or say which tokens are targets, and are not read
    "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "shift_labels", "loss_mask",
    "label_ids",
)  # fmt: skip
_ROWS_AT_ONCE = 128  # amortises the overhead of a batch; 128 rows of 128K tokens are 128 MiB


class Fingerprint(Protocol):
    """Takes bytes in order, as a hash of `hashlib` does."""

    def update(self, data: bytes, /) -> None: ...


def validate_documents(
    dataset: DataRows,
    *,
    vocab_size: int | None,
    description: str,
    progress: bool = True,
    fingerprint: Fingerprint | None = None,
    ignore_id: int | None = None,
) -> Documents:
    """Check every row and find the documents in it.

    Args:
        dataset (`DataRows`): The tokenised rows, unpadded.
        vocab_size (`int` or `None`): Ids that the model knows, [0, vocab_size); `None` checks only
            that ids are not negative.
        description (`str`): What to call the data set in messages, e.g. `"train_dataset"`.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a bar if the pass takes
            more than 2 seconds.
        fingerprint (`Fingerprint`, *optional*): Is given all that every row holds, so that ranks
            can compare the documents they hold.
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
    columns = columns_of(dataset[0], where=f"{description}: row 0")
    # A transform computes its columns row by row, and another format would switch it off.
    if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        dataset = dataset.with_format("numpy", columns=columns)
    spans, checksums, targets = [], [], 0
    with tqdm(
        total=len(dataset), desc=f"Scanning {description}", delay=2, disable=not progress
    ) as bar:
        for first, batch in _batches(dataset, columns=columns, description=description):
            rows = check_rows(batch, start=first, vocab_size=vocab_size, description=description)
            for row, values in enumerate(rows, start=first):
                of_row = sizes(values, where=f"{description}: row {row}")
                stops = np.cumsum(of_row)
                spans.append(np.stack([np.full_like(stops, row), stops - of_row, stops], axis=1))
                for start, stop in zip(stops - of_row, stops, strict=True):
                    document = read(values, start=start, stop=stop, ignore_id=ignore_id)
                    checksums.append(checksum(document))
                    targets += targets_in(document)
                if fingerprint is not None:
                    add_row(fingerprint, values)
            bar.update(len(rows))
    documents = Documents(
        rows=dataset,
        spans=np.concatenate(spans),
        checksums=np.array(checksums, np.uint32),
        targets=targets,
        description=description,
        ignore_id=ignore_id,
    )
    for again in range(len(documents))[:: max(1, (len(documents) - 1) // 2)]:
        documents[again]  # what is drawn anew on each read is refused before the first step
    return documents


def add_row(fingerprint: Fingerprint, row: Mapping[str, np.ndarray]) -> None:
    """Add all that a checked row holds to a fingerprint."""
    for name in _COLUMNS:
        values = row.get(name, np.empty(0, np.int64))
        fingerprint.update(values.size.to_bytes(8, "little"))  # the same ids may be cut otherwise
        fingerprint.update(values.tobytes())


def columns_of(row: Any, *, where: str) -> list[str]:
    """The columns of a data set's first row that are read.

    Raises:
        ValueError: no `input_ids`, or columns that would have to be read and are not.
    """
    if not isinstance(row, Mapping) or "input_ids" not in row:
        found = sorted(row) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(
            f"{where} holds {found}, but packing needs a column input_ids; tokenise first, e.g. "
            "with hf_longctx.data.chat.tokenize_rows (messages, prompt and completion, text)"
        )
    packed = sorted(name for name in _REFUSED if name in row)
    if packed:
        raise ValueError(
            f"{where} holds {packed}, boundaries or target masks that are not read; give one "
            "document per row, with labels (-100 for no target), or boundaries as seq_lengths, "
            "without these columns"
        )
    return [column for column in _COLUMNS if column in row]


def _batches(
    dataset: DataRows, *, columns: list[str], description: str
) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """Yield (first row, rows) for a few rows at a time."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "numpy":
        for index, batch in enumerate(dataset.iter(batch_size=_ROWS_AT_ONCE)):
            each = zip(*(batch[column] for column in columns), strict=True)
            yield index * _ROWS_AT_ONCE, [dict(zip(columns, row, strict=True)) for row in each]
        return
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = [dataset[row] for row in range(start, min(start + _ROWS_AT_ONCE, len(dataset)))]
        for offset, row in enumerate(rows):
            same_columns(row, columns, where=f"{description}: row {start + offset}")
        yield start, rows


def same_columns(row: Mapping[str, Any], columns: list[str], *, where: str) -> None:
    """Raise ValueError for a row with other columns than the first one."""
    found = [column for column in _COLUMNS if column in row]
    if found != columns:
        raise ValueError(
            f"{where} has {found}, but row 0 has {columns}; give every row the same columns"
        )


def check_rows(
    rows: list[Mapping[str, Any]], *, start: int, vocab_size: int | None, description: str
) -> list[dict[str, np.ndarray]]:
    """Raise for the first bad row of a few; return what is read of each, int64 arrays `[T]`.

    Args:
        rows (`list[Mapping]`): With the same columns.
        start (`int`): Number of the first row.
        vocab_size (`int` or `None`), description (`str`): See `validate_documents`.

    Raises:
        ValueError: See `validate_documents`.
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
    top = np.inf if vocab_size is None else vocab_size
    span = "0 or more" if vocab_size is None else f"in [0, {vocab_size}), the model's vocabulary"
    for column in aligned:
        flat = np.concatenate([row[column] for row in arrays])
        if column == "attention_mask":
            bad = flat == 0
            rule = "a packed path takes documents without padding; tokenise with padding=False"
        elif column in MASKS:
            bad = (flat != 0) & (flat != 1)
            rule = "a mask is 1 for targets and 0 for others"
        elif column == "position_ids":
            continue  # only its steps are read
        else:
            bad = (flat < 0) | (flat >= top)
            rule = f"ids are {span}; use the tokenizer that belongs to the model"
        if column == "labels":
            bad &= flat != IGNORE
            rule = f"labels are {IGNORE} (no target) or {span}"
        if bad.any():
            at, stops = int(bad.argmax()), np.cumsum([row["input_ids"].size for row in arrays])
            index = int(np.searchsorted(stops, at, side="right"))
            token = at - int(stops[index - 1] if index else 0)
            raise ValueError(f"{where}{start + index}, {column}[{token}] is {flat[at]}; {rule}")
    return arrays


def _integers(values: Any, *, where: str) -> np.ndarray:
    """One row of a column as an int64 array `[T]`."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise ValueError(
            f"{where} is {array.dtype} of shape {list(array.shape)}, but a document is a flat list "
            "of integers; tokenise one document per row"
        )
    return array.astype(np.int64, copy=False)
