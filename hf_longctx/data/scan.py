"""A tokenised data set -> the length of each document, every row checked on the way.

Floor: data. One pass before the first step, so that a bad row stops the run at once and not hours
into it. Rows hold `input_ids` and, if they like, `labels` and `attention_mask` of the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from datasets import Dataset
from tqdm.auto import tqdm

from .targets import IGNORE

_COLUMNS = ("input_ids", "labels", "attention_mask")
_BOUNDARIES = (  # columns that bound documents inside a row, or say which tokens are targets
    "position_ids", "seq_lengths", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx",
    "shift_labels", "completion_mask", "assistant_masks", "loss_mask",
)  # fmt: skip
_ROWS_AT_ONCE = 128  # amortises the overhead of a batch; 128 rows of 128K tokens are 128 MiB


class Documents(Protocol):
    """A map-style data set: a `datasets.Dataset`, or any sequence of dicts."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class Fingerprint(Protocol):
    """Takes bytes in order, as a hash of `hashlib` does."""

    def update(self, data: bytes, /) -> None: ...


def scan_documents(
    dataset: Documents,
    *,
    vocab_size: int | None,
    description: str,
    progress: bool = True,
    fingerprint: Fingerprint | None = None,
) -> np.ndarray:
    """Check every row and return the tokens of each, `[rows]` int64.

    Args:
        dataset (`Documents`): The tokenised documents, unpadded.
        vocab_size (`int` or `None`): Ids that the model knows, [0, vocab_size); `None` checks only
            that ids are not negative.
        description (`str`): What to call the data set in messages, e.g. `"train_dataset"`.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a bar if the pass takes
            more than 2 seconds.
        fingerprint (`Fingerprint`, *optional*): Is given every row's ids and labels, so that ranks
            can compare the documents they hold.

    Raises:
        ValueError: No rows; no `input_ids`; ids or labels out of the vocabulary; `labels` or
            `attention_mask` of another length than `input_ids`; a padded row. Names the row.
    """
    columns = _columns(dataset, description=description)
    lengths = np.empty(len(dataset), dtype=np.int64)
    with tqdm(
        total=len(dataset), desc=f"Scanning {description}", delay=2, disable=not progress
    ) as bar:
        for start, rows in _batches(dataset, columns=columns, description=description):
            sizes = _check(rows, start=start, vocab_size=vocab_size, description=description)
            if fingerprint is not None:
                fingerprint.update(sizes.tobytes())  # the same ids may be cut otherwise
                for column in columns:
                    flat = np.concatenate([np.asarray(row, np.int64) for row in rows[column]])
                    fingerprint.update(flat.tobytes())
            lengths[start : start + sizes.size] = sizes
            bar.update(sizes.size)
    _refuse_unsteady(dataset, description=description)
    return lengths


def _refuse_unsteady(dataset: Documents, *, description: str) -> None:
    """Read a few rows twice: ranks that read a document apart must see the same one."""
    for row in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        first, again = (np.asarray(dataset[row]["input_ids"]) for _ in range(2))
        if not np.array_equal(first, again):
            raise ValueError(
                f"{description}: row {row} reads differently each time, so ranks would hold parts "
                "of different versions of it; draw random choices before training, e.g. in map()"
            )


def _columns(dataset: Documents, *, description: str) -> list[str]:
    """Those of `_COLUMNS` that the first row has."""
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{description} is a {type(dataset).__name__} without a length, but packing needs the "
            "length of every document; load it without streaming"
        )
    if not len(dataset):
        raise ValueError(f"{description} has no rows; pass a data set with at least one document")
    first = dataset[0]
    if not isinstance(first, Mapping) or "input_ids" not in first:
        found = sorted(first) if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise ValueError(
            f"{description}: row 0 holds {found}, but packing needs a column input_ids; tokenise "
            "first, e.g. dataset.map(lambda row: tokenizer(row['text']), remove_columns=['text'])"
        )
    packed = sorted(name for name in _BOUNDARIES if name in first)
    if packed:
        raise ValueError(
            f"{description}: row 0 holds {packed}, boundaries or target masks that are not read; "
            "give one document per row, with labels (-100 for no target), without these columns"
        )
    return [column for column in _COLUMNS if column in first]


def _batches(
    dataset: Documents, *, columns: list[str], description: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (first row, column -> its rows) for a few rows at a time."""
    # A transform computes its columns row by row, and another format would switch it off.
    if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        view = dataset.with_format("numpy", columns=columns)
        for index, batch in enumerate(view.iter(batch_size=_ROWS_AT_ONCE)):
            yield index * _ROWS_AT_ONCE, batch
        return
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = [dataset[row] for row in range(start, min(start + _ROWS_AT_ONCE, len(dataset)))]
        for offset, row in enumerate(rows):
            found = [column for column in _COLUMNS if column in row]
            if found != columns:
                raise ValueError(
                    f"{description}: row {start + offset} has {found}, but row 0 has {columns}; "
                    "give every row the same columns"
                )
        yield start, {column: [row[column] for row in rows] for column in columns}


def _check(
    batch: dict[str, Any], *, start: int, vocab_size: int | None, description: str
) -> np.ndarray:
    """Raise for the first bad row of a batch; return the tokens of each row, `[rows]` int64."""
    where = f"{description}: row "
    arrays = {
        column: [
            _integers(values, where=f"{where}{start + row}, {column}")
            for row, values in enumerate(rows)
        ]
        for column, rows in batch.items()
    }
    sizes = np.array([ids.size for ids in arrays["input_ids"]], dtype=np.int64)
    for column, rows in arrays.items():
        for row, (values, size) in enumerate(zip(rows, sizes, strict=True)):
            if values.size != size:
                raise ValueError(
                    f"{where}{start + row} has {values.size} {column} for {size} input_ids; both "
                    "need the same length: make and cut them together"
                )
    top = np.inf if vocab_size is None else vocab_size
    span = "0 or more" if vocab_size is None else f"in [0, {vocab_size}), the model's vocabulary"
    for column, rows in arrays.items():
        flat = np.concatenate(rows)
        if column == "attention_mask":
            bad = flat == 0
            rule = "a packed path takes documents without padding; tokenise with padding=False"
        else:
            bad = (flat < 0) | (flat >= top)
            rule = f"ids are {span}; use the tokenizer that belongs to the model"
        if column == "labels":
            bad &= flat != IGNORE
            rule = f"labels are {IGNORE} (no target) or {span}"
        if bad.any():
            at = int(bad.argmax())
            row = int(np.searchsorted(np.cumsum(sizes), at, side="right"))
            token = at - int(sizes[:row].sum())
            raise ValueError(f"{where}{start + row}, {column}[{token}] is {flat[at]}; {rule}")
    return sizes


def _integers(values: Any, *, where: str) -> np.ndarray:
    """One row of a column as an int64 array `[T]`."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise ValueError(
            f"{where} is {array.dtype} of shape {list(array.shape)}, but a document is a flat list "
            "of integers; tokenise one document per row"
        )
    return array.astype(np.int64, copy=False)
