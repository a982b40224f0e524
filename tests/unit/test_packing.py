"""Pack, shift targets and validate a data set: no token lost, none over budget, bad rows named."""

from __future__ import annotations

import re
from itertools import pairwise

import datasets
import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny import fill

from hf_longctx.data.documents import IGNORE, piece_targets, shift
from hf_longctx.data.packing import OverflowReport, Piece, fit, pack
from hf_longctx.data.validate import validate_documents

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
CAPACITY = st.integers(1, 70)


def tokens(pieces):
    """Every (document, token) of the pieces, in the order they hold them."""
    return [(piece.document, at) for piece in pieces for at in range(piece.start, piece.stop)]


@given(lengths=LENGTHS, capacity=CAPACITY)
def test_split_keeps_every_token_once_and_in_order(lengths, capacity):
    pieces, report = fit(lengths, capacity=capacity, overflow="split")
    assert tokens(pieces) == [(row, at) for row, size in enumerate(lengths) for at in range(size)]
    assert all(0 < piece.length <= capacity for piece in pieces)
    for left, right in pairwise(pieces):  # only the last fragment of a document is shorter
        assert left.document != right.document or left.length == capacity
    assert report.dropped_tokens == report.truncated_documents == 0
    assert report.split_documents == sum(size > capacity for size in lengths)
    assert len(pieces) == report.documents - report.split_documents + report.fragments


@given(lengths=LENGTHS, capacity=CAPACITY)
def test_truncate_drops_only_the_tails_it_reports(lengths, capacity):
    pieces, report = fit(lengths, capacity=capacity, overflow="truncate")
    assert [(p.document, p.start, p.stop) for p in pieces] == [
        (row, 0, min(size, capacity)) for row, size in enumerate(lengths)
    ]
    assert report.tokens - report.dropped_tokens == sum(piece.length for piece in pieces)
    assert report.truncated_documents == sum(size > capacity for size in lengths)


@given(
    lengths=LENGTHS,
    capacity=CAPACITY,
    balance=st.sampled_from(["none", "tokens"]),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_packs_hold_every_piece_once_and_never_exceed_the_capacity(
    lengths, capacity, balance, seed, epoch, shuffle
):
    pieces, _ = fit(lengths, capacity=capacity, overflow="split")
    chosen = {"capacity": capacity, "balance": balance, "seed": seed, "epoch": epoch}
    packs = pack(pieces, **chosen, shuffle=shuffle)
    assert sorted(tokens([p for one in packs for p in one])) == tokens(pieces)
    assert all(0 < sum(piece.length for piece in one) <= capacity for one in packs)
    assert packs == pack(pieces, **chosen, shuffle=shuffle)
    assert 0 < fill(packs, capacity=capacity) <= 1
    assert set(packs) == set(pack(pieces, **chosen, shuffle=not shuffle))


@given(lengths=LENGTHS, capacity=CAPACITY, balance=st.sampled_from(["none", "tokens"]))
def test_the_number_of_packs_is_the_same_at_every_seed_and_epoch(lengths, capacity, balance):
    pieces, _ = fit(lengths, capacity=capacity, overflow="split")
    runs = [(seed, epoch) for seed in (0, 7) for epoch in range(6)]
    packs = [
        pack(pieces, capacity=capacity, balance=balance, seed=seed, epoch=epoch)
        for seed, epoch in runs
    ]
    sizes = [sorted(sorted(piece.length for piece in one) for one in run) for run in packs]
    assert all(size == sizes[0] for size in sizes)


@given(lengths=LENGTHS, capacity=st.integers(60, 200))
def test_best_fit_decreasing_matches_its_naive_twin(lengths, capacity):
    pieces, _ = fit(lengths, capacity=capacity, overflow="error")
    packs = pack(pieces, capacity=capacity, balance="tokens", seed=0, epoch=0, shuffle=False)
    naive: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [one for one in naive if sum(one) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            naive.append([length])
    assert sorted([piece.length for piece in one] for one in packs) == sorted(naive)


def test_none_keeps_the_order_and_tokens_moves_only_ties():
    pieces, _ = fit([4, 4, 3, 4, 1, 4], capacity=8, overflow="error")

    def documents(balance, epoch):
        run = pack(pieces, capacity=8, balance=balance, seed=3, epoch=epoch, shuffle=False)
        return [[piece.document for piece in one] for one in run]

    assert documents("none", 0) == documents("none", 1) == [[0, 1], [2, 3, 4], [5]]
    assert len({str(documents("tokens", epoch)) for epoch in range(8)}) > 1


def test_shuffle_changes_the_order_of_packs_with_epoch_and_seed():
    pieces, _ = fit([5] * 12, capacity=5, overflow="error")

    def run(seed, epoch):
        return pack(pieces, capacity=5, balance="none", seed=seed, epoch=epoch)

    assert run(0, 0) == run(0, 0)
    assert len({run(0, 0), run(0, 1), run(1, 0), run(1, 1)}) == 4


@pytest.mark.timeout(120)  # about 1.2 s on an idle core; quadratic takes many minutes
def test_a_hundred_thousand_documents_pack_in_seconds():
    lengths = np.random.default_rng(0).integers(1, 131_072, 100_000)
    pieces, _ = fit(lengths, capacity=131_072, overflow="error")
    packs = pack(pieces, capacity=131_072, balance="tokens", seed=0, epoch=0)
    assert fill(packs, capacity=131_072) > 0.99


def test_report_sums_up_what_happened():
    _, report = fit([10, 25, 7], capacity=10, overflow="split")
    assert report == OverflowReport(
        documents=3,
        tokens=42,
        split_documents=1,
        fragments=3,
        truncated_documents=0,
        dropped_tokens=0,
    )
    assert report.summary() == "3 documents, 42 tokens: 1 split into 3 fragments"
    assert fit([10, 25, 7], capacity=10, overflow="truncate")[1].summary() == (
        "3 documents, 42 tokens: 1 truncated, 15 tokens (35.7%) dropped"
    )
    assert fit([10, 3], capacity=10, overflow="error")[1].summary() == (
        "2 documents, 13 tokens: all kept whole"
    )


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 12, 30], {}, r"row 1 has 12 tokens.*holds 10.*2 of 3 rows"),
        ([5, 12], {}, r"--longctx_max_tokens_per_rank.*--longctx_group_size.*split.*truncate"),
        ([], {}, "no documents"),
        ([3, 0, 2, 0], {}, r"2 of 4 documents are empty \(row 1, 3\)"),
        ([0] * 9, {}, r"9 of 9 documents are empty \(row 0, 1, 2, 3, 4, \.\.\.\)"),
        ([1], {"capacity": 0}, "holds 0 tokens"),
        ([1], {"overflow": "drop"}, "longctx_overflow='drop' is unknown; use error, split"),
    ],
)
def test_fit_refuses(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        fit(lengths, **{"capacity": 10, "overflow": "error"} | options)


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ("attention", "not built yet; use --longctx_balance tokens"),
        ("work", "longctx_balance='work' is unknown"),
    ],
)
def test_pack_refuses(balance, message):
    pieces, _ = fit([1], capacity=1, overflow="error")
    with pytest.raises(ValueError, match=message):
        pack(pieces, capacity=1, balance=balance, seed=0, epoch=0)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8], ids="ranks{}".format)
def test_b01_a_cut_keeps_the_target_of_the_last_token(ranks):
    shares = np.split(shift(np.arange(1, 9)), ranks)
    assert np.concatenate(shares).tolist() == [2, 3, 4, 5, 6, 7, 8, IGNORE]
    if ranks == 2:
        assert [share.tolist() for share in shares] == [[2, 3, 4, 5], [6, 7, 8, -100]]


@given(size=st.integers(1, 60), capacity=CAPACITY)
@examples(50)
def test_b01_fragments_keep_all_targets_but_the_last_of_the_document(size, capacity):
    labels = np.arange(size) + 1
    pieces, _ = fit([size], capacity=capacity, overflow="split")
    cut = np.concatenate([piece_targets(labels, piece=piece) for piece in pieces])
    assert cut.tolist() == [*range(2, size + 1), IGNORE]
    tail = Piece(document=0, start=0, stop=min(size, capacity))  # a truncated document's as well
    assert piece_targets(labels, piece=tail).tolist() == cut[: tail.length].tolist()


def test_b03_a_document_does_not_predict_the_start_of_the_next():
    pack_ = [np.array([10, 11, 12], dtype=np.uint16), np.array([20, 21, 22])]
    targets = np.concatenate([shift(labels) for labels in pack_])
    assert targets.tolist() == [11, 12, -100, 21, 22, -100]
    assert targets.dtype == np.int64
    assert shift(np.array([5])).tolist() == [-100]


def rows_of(lengths):
    return [{"input_ids": [*range(size)], "labels": [-100] * size} for size in lengths]


@pytest.mark.parametrize("kind", ["list", "dataset", "torch", "transform", "even"])
def test_scan_returns_the_lengths(kind):
    lengths = [4] * 300 if kind == "even" else [*range(1, 301)]
    rows = rows_of(lengths)
    data = rows if kind == "list" else datasets.Dataset.from_list(rows)
    if kind == "torch":
        data = data.with_format("torch")
    if kind == "transform":
        text = datasets.Dataset.from_dict({"size": lengths})
        data = text.with_transform(lambda batch: {"input_ids": [[7] * n for n in batch["size"]]})
    found = validate_documents(data, vocab_size=300, description="train_dataset").lengths
    assert found.tolist() == lengths and found.dtype == np.int64


def test_scan_leaves_empty_documents_to_fit():
    data = datasets.Dataset.from_dict({"input_ids": [[1], [], [2, 3]]})
    for dataset in (data, [*data]):
        found = validate_documents(dataset, vocab_size=None, description="train_dataset")
        assert found.lengths.tolist() == [1, 0, 2]


BAD_ROWS = {
    "id too large": ({"input_ids": [1, 8]}, r"row 200, input_ids\[1\] is 8; ids are in \[0, 8\)"),
    "id negative": ({"input_ids": [-1, 2]}, r"row 200, input_ids\[0\] is -1"),
    "label too large": ({"labels": [0, 9]}, r"row 200, labels\[1\] is 9; labels are -100 \(no"),
    "label negative": ({"labels": [-1, -100]}, r"row 200, labels\[0\] is -1"),
    "labels too short": ({"labels": [1]}, "row 200 has 1 labels for 2 input_ids"),
    "mask too long": ({"attention_mask": [1, 1, 1]}, "row 200 has 3 attention_mask for 2"),
    "padded": ({"attention_mask": [1, 0]}, r"row 200, attention_mask\[1\] is 0;.*padding=False"),
    "floats": ({"input_ids": [0.5, 1.0]}, "row 200, input_ids is float64 of shape"),
    "nested": ({"input_ids": [[1, 2]]}, r"row 200, input_ids is int64 of shape \[1, 2\]"),
    "column missing": ({"labels": ...}, r"row 200 has .*'input_ids', 'attention_mask'.* but row 0"),
}


@pytest.mark.parametrize(("change", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_scan_names_the_bad_row_of_a_list(change, message):
    rows = [{"input_ids": [1, 2], "labels": [2, 3], "attention_mask": [1, 1]} for _ in range(300)]
    rows[200] = {name: value for name, value in (rows[200] | change).items() if value is not ...}
    with pytest.raises(ValueError, match="train_dataset: " + message):
        validate_documents(rows, vocab_size=8, description="train_dataset")


@pytest.mark.parametrize("name", [name for name in BAD_ROWS if "id" in name or "label" in name])
def test_scan_names_the_bad_row_of_a_dataset(name):
    change, message = BAD_ROWS[name]
    rows = [{"input_ids": [1, 2], "labels": [2, 3]} for _ in range(300)]
    rows[200] |= change
    with pytest.raises(ValueError, match=message):
        validate_documents(
            datasets.Dataset.from_list(rows), vocab_size=8, description="eval_dataset"
        )


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "train_dataset has no rows"),
        ([{"text": "a"}], "row 0 holds ['text'], but packing needs a column input_ids; tokenise"),
        ([[1, 2]], "row 0 holds a list, but packing needs a column input_ids"),
        (iter([]), "is a list_iterator without a length"),
    ],
)
def test_scan_refuses(dataset, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_documents(dataset, vocab_size=8, description="train_dataset")
