"""Runs of two trainers that stop within any epoch, or pass of a stream, and go on exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import stream_cases
import torch
from plain_loop import token_loss, weights_of
from stream_cases import RESUMED, RUNS, stream
from tiny import VOCABULARY, Document, tiny
from torch.utils.data import DataLoader
from train_cases import launch
from transformers import AutoModelForCausalLM

from hf_longctx.data.packing import Piece
from hf_longctx.data.stream import PackStream

STREAMS = [name for name, case in RESUMED.items() if case.stream]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The folder and the results of one launch."""
    folder = tmp_path_factory.mktemp("resume")
    ended = launch(folder, *RUNS, processes=2, script=stream_cases.__file__)
    assert ended.code == 0 and ended.left == [], ended.output[-8000:]
    return folder, json.loads((folder / "results.json").read_text())["cases"]


def steps(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log entries of optimizer steps, without what a clock measured."""
    entries = [entry for entry in history if "loss" in entry]
    return [{k: v for k, v in e.items() if k != "longctx_wait_seconds"} for e in entries]


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_exact(ran, name):
    folder, cases = ran
    whole, resumed = steps(cases[name]["history"]), steps(cases[name]["resumed"])
    assert whole == resumed and len(whole) > RESUMED[name].step
    saved = [
        weights_of(AutoModelForCausalLM.from_pretrained(folder / name / which))
        for which in ("final", "resumed")
    ]
    assert all(torch.equal(weight, saved[1][key]) for key, weight in saved[0].items())


def test_resume_without_skipping_starts_the_stream_anew(ran):
    _, cases = ran
    case = cases["stream_third_pass"]
    tokens = [entry["longctx_tokens"] for entry in steps(case["history"])]
    anew = [entry["longctx_tokens"] for entry in steps(case["anew"])]
    assert anew == tokens[:12] + tokens[:2] != tokens


def item(given: Any) -> Any:
    """An item of a stream as it is."""
    return given


def windows(options: dict[str, Any]) -> Iterator[tuple[list[Document], list[Piece]]]:
    """Documents and pieces of each optimizer step over the stream, of both trainers."""
    groups = 2 // options.get("longctx_group_size", 2)
    streams = [
        PackStream(
            stream(),
            capacity=96 // groups,
            overflow="split",
            balance="tokens",
            groups=groups,
            group=group,
            lookahead=options["longctx_lookahead"],
            vocab_size=VOCABULARY,
            ignore_id=None,
            description="train_dataset",
            endless=True,
            log=False,
        )
        for group in range(groups)
    ]
    workers = options.get("dataloader_num_workers", 0)  # datasets shuffles otherwise in a worker
    loaders = [
        DataLoader(s, batch_size=None, num_workers=workers, collate_fn=item) for s in streams
    ]
    batches = zip(*loaders, strict=True)
    while True:
        rows, pieces = [], []
        for of_groups in islice(batches, options.get("gradient_accumulation_steps", 1)):
            for pack, found in of_groups:
                for piece in pack:
                    pieces.append(Piece(document=len(rows), start=piece.start, stop=piece.stop))
                    rows.append({"input_ids": found[piece.document]["input_ids"].tolist()})
        yield rows, pieces


@pytest.mark.parametrize("name", STREAMS)
def test_stream_loss_and_gradient_norm_are_those_of_a_plain_loop(ran, name):
    options, model = RESUMED[name].options, tiny("sdpa", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    found = steps(ran[1][name]["history"])
    assert len(found) == 14
    for entry, (rows, pieces) in zip(found, windows(options), strict=False):
        optimizer.zero_grad()
        loss = token_loss(model, rows, pieces)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        assert abs(entry["loss"] / loss.item() - 1) < 1e-4
        assert abs(entry["grad_norm"] / norm - 1) < 1e-3


def test_stream_that_differs_between_trainers_is_found_out(ran):
    _, cases = ran
    assert "train_dataset differs between the trainers" in cases["differs_early"]["error"]
    assert "the stream differs between the trainers" in cases["differs_in_order"]["error"]
    assert "disagree on the plan of a batch" in cases["differs_late"]["error"]
