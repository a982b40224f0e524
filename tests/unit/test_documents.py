"""Read rows of a data set as documents: packed rows taken apart, masks folded into labels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCABULARY, documents
from trl import pack_dataset

from hf_longctx.data.documents import Documents, piece_targets
from hf_longctx.data.packing import Piece
from hf_longctx.data.validate import validate_documents


def scan(rows: Any, **options: Any) -> Documents:
    options = {"vocab_size": VOCABULARY, "description": "train_dataset", **options}
    return validate_documents(rows, progress=False, **options)


def read(rows: Any, **options: Any) -> list[dict[str, list[int]]]:
    found = scan(rows, **options)
    return [{k: v.tolist() for k, v in found[at].items()} for at in range(len(found))]


def ids(rows: Any, **options: Any) -> list[list[int]]:
    return sorted(document["input_ids"] for document in read(rows, **options))


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_b20_rows_that_trl_packed_are_taken_apart(strategy):
    given = documents([30, 7, 12, 3, 50, 20])
    packed = pack_dataset(Dataset.from_list(given), seq_length=32, strategy=strategy)
    assert len(packed) < len(given) and "seq_lengths" in packed.column_names
    pieces = [row["input_ids"][:32] for row in given]
    if strategy == "bfd_split":
        pieces += [row["input_ids"][32:] for row in given if len(row["input_ids"]) > 32]
    assert ids(packed) == ids([*packed]) == sorted(pieces)


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4)
)
def test_b20_both_kinds_of_boundaries_give_the_documents_that_were_packed(lengths):
    rows, expected = [], []
    for of_row in lengths:
        parts = [document["input_ids"] for document in documents(of_row)]
        expected += parts
        rows.append(
            {
                "input_ids": sum(parts, []),
                "seq_lengths": of_row,
                "position_ids": [at for n in of_row for at in range(n)],
            }
        )
    for left_out in ((), ("seq_lengths",), ("position_ids",)):
        kept = [{k: v for k, v in row.items() if k not in left_out} for row in rows]
        assert [document["input_ids"] for document in read(kept)] == expected
        assert scan(kept).lengths.tolist() == [n for of_row in lengths for n in of_row]


def test_b13_a_boundary_is_a_step_that_is_not_plus_one():
    for positions, sizes in (
        ([3, 4, 5, 6], [4]),
        ([3, 4, 0, 1, 2], [2, 3]),
        ([0, 0, 0], [1, 1, 1]),
        ([7, 5, 6], [1, 2]),
    ):
        row = {"input_ids": [*range(len(positions))], "position_ids": positions}
        assert scan([row]).lengths.tolist() == sizes


def test_b03_the_first_token_of_a_packed_document_is_no_target():
    found = scan([{"input_ids": [10, 11, 12, 20, 21, 22], "seq_lengths": [3, 3]}])
    targets = [
        piece_targets(found[at]["input_ids"], piece=Piece(document=at, start=0, stop=3)).tolist()
        for at in range(2)
    ]
    assert targets == [[11, 12, -100], [21, 22, -100]]


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"completion_mask": [0, 0, 1, 1]}, [-100, -100, 7, 7]),
        ({"assistant_masks": [0, 1, 0, 1]}, [-100, 6, -100, 7]),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 1]}, [-100, -100, 7, 7]),
        ({"completion_mask": [0, 1, 1, 1], "labels": [1, 2, -100, 3]}, [1, 2, -100, 3]),
    ],
)
def test_masks_are_folded_into_labels(row, labels):
    row = {"input_ids": [5, 6, 7, 7]} | row
    for rows in ([row], Dataset.from_list([row])):
        assert read(rows) == [{"input_ids": [5, 6, 7, 7], "labels": labels}]
    packed = read([row | {"seq_lengths": [1, 3]}])
    assert [document["labels"] for document in packed] == [labels[:1], labels[1:]]


def test_b20_targets_under_another_name_are_refused():
    with pytest.raises(ValueError, match="row 0 holds .'label_ids'., boundaries or target masks"):
        scan([{"input_ids": [5, 6], "label_ids": [-100, 6]}])


def test_targets_are_counted_and_said(caplog):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, {"input_ids": [1], "labels": [1]}]
    with caplog.at_level("INFO", logger="hf_longctx"):
        scan(rows).log_targets()
        scan(documents([4, 2])).log_targets()
        scan([{"input_ids": [5, 6], "completion_mask": [1, 0]}]).log_targets()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "train_dataset: 1 of 4 tokens are targets"),
        ("INFO", "train_dataset: 4 of 6 tokens are targets"),
        ("WARNING", "train_dataset: 0 of 2 tokens are targets"),
    ]


def test_the_padding_token_is_no_target_where_a_row_has_no_labels():
    row = {"input_ids": [5, 0, 7]}
    assert read([row]) == [row]
    assert read([row], ignore_id=0) == [row | {"labels": [5, -100, 7]}]
    assert read([row | {"labels": [5, 0, 7]}], ignore_id=0)[0]["labels"] == [5, 0, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lengths": [2, 1]}, "row 1 has 4 input_ids, but its seq_lengths [2, 1] add up to 3"),
        ({"seq_lengths": [4, 0]}, "each must be at least 1"),
        (
            {"seq_lengths": [3, 1], "position_ids": [0, 1, 0, 1]},
            "row 1: seq_lengths gives documents of [3, 1] tokens, but position_ids restarts after "
            "[2, 2]",
        ),
        ({"position_ids": [0, 1, 2]}, "row 1 has 3 position_ids for 4 input_ids"),
        ({"completion_mask": [0, 1, 2, 1]}, "completion_mask[2] is 2; a mask is 1 for targets"),
        ({"assistant_masks": [1]}, "row 1 has 1 assistant_masks for 4 input_ids"),
    ],
)
def test_b20_boundaries_and_masks_that_contradict_the_row_are_refused(change, message):
    good = {"seq_lengths": [4], "position_ids": [0, 1, 2, 3]}
    good |= {"completion_mask": [1] * 4, "assistant_masks": [1] * 4}
    rows = [{"input_ids": [1, 2, 3, 4]} | {k: good[k] for k in change} for _ in range(2)]
    scan(rows)
    rows[1] |= change
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(rows)


class Drawn(list[Any]):
    """Rows with one column drawn anew on each read."""

    def __init__(self, rows: Any, column: str) -> None:
        super().__init__(rows)
        self.column, self.reads = column, 0

    def __getitem__(self, row: Any) -> Any:
        self.reads += 1
        drawn = [self.reads >> bit & 1 for bit in range(9)]  # the count, in binary
        return super().__getitem__(row) | {self.column: drawn}


@pytest.mark.parametrize("column", ["input_ids", "labels", "completion_mask", "assistant_masks"])
def test_rows_drawn_anew_on_each_read_are_refused_by_the_scan(column):
    rows = Drawn(documents([9, 9, 9, 9]), column)
    with pytest.raises(ValueError, match="row 0 reads differently than when it was scanned"):
        scan(rows)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[1]["input_ids"].__setitem__(3, 63),
        lambda rows: rows[1]["labels"].__setitem__(3, -100),
        lambda rows: rows[1]["input_ids"].pop(),
        lambda rows: rows[1]["labels"].pop(),
        lambda rows: rows[1].pop("input_ids"),
        lambda rows: rows[1].pop("labels"),
        lambda rows: rows.pop(),
    ],
    ids=["ids", "labels", "fewer_ids", "fewer_labels", "no_ids", "no_labels", "fewer_rows"],
)
def test_a_data_set_that_changes_after_its_scan_is_refused(change):
    rows = [row | {"labels": [*row["input_ids"]]} for row in documents([5, 6])]
    rows = [row | {"completion_mask": [1] * len(row["labels"])} for row in rows]
    rows[1]["labels"][0] = 7  # unlike the ids
    found = scan(rows)
    assert found[1]["labels"].tolist() == rows[1]["labels"]
    change(rows)
    assert found[0]["input_ids"].tolist() == rows[0]["input_ids"]
    message = "train_dataset: row 1 reads differently than when it was scanned, so ranks would"
    with pytest.raises(ValueError, match=message + ".*leave the data set as it is until the run"):
        found[1]


@pytest.mark.parametrize(
    "column",
    ["cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "shift_labels", "loss_mask"],
)
def test_b20_boundaries_that_are_not_read_are_refused(column):
    with pytest.raises(ValueError, match=rf"row 0 holds .'{column}'., boundaries or target masks"):
        scan([{"input_ids": [1, 2], column: [0, 2]}])
