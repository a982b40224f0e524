"""Stop runs of two trainers within any epoch, or pass of a stream, and resume them exactly.

One launch runs this file as its script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import token_loss, weights_of
from tiny import VOCABULARY, Document, tiny
from torch.utils.data import DataLoader
from train_cases import UNEVEN, Case, arguments, launch, main
from transformers import AutoModelForCausalLM

from hf_longctx.data.packing import Piece
from hf_longctx.data.stream import PackStream

EPOCHS = {"num_train_epochs": 3}
STREAM = {"max_steps": 14, "longctx_lookahead": 4}
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
GROUPS = {"longctx_group_size": 1}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run and the step whose checkpoint another run goes on from.

    Args:
        options (`dict[str, Any]`): Training arguments.
        step (`int`): Of the checkpoint.
        stream (`bool`): Whether the documents are streamed, in another order each pass.
    """

    options: dict[str, Any]
    step: int
    stream: bool = False


# 442 tokens make 5 batches an epoch: steps 3, 8, 12 are in the first, second and third.
RESUMED = {
    "first_epoch": Resumed(options=EPOCHS, step=3),
    "third_epoch": Resumed(options=EPOCHS, step=12),
    "accumulated": Resumed(options=EPOCHS | ACCUMULATED, step=8),  # of 3 steps an epoch
    "workers": Resumed(options=EPOCHS | WORKERS, step=8),
    "groups": Resumed(options=EPOCHS | GROUPS, step=12),
    "stream_first_pass": Resumed(options=STREAM, step=3, stream=True),
    "stream_third_pass": Resumed(options=STREAM, step=12, stream=True),
    "stream_accumulated": Resumed(options=STREAM | ACCUMULATED, step=6, stream=True),
    "stream_workers": Resumed(options=STREAM | WORKERS, step=8, stream=True),
    "stream_groups": Resumed(options=STREAM | GROUPS, step=8, stream=True),
}


def stream() -> Any:
    """The documents, shuffled anew in each pass."""
    from datasets import Dataset

    rows = Dataset.from_list(Case(lengths=UNEVEN).rows())
    return rows.to_iterable_dataset().shuffle(seed=3, buffer_size=len(UNEVEN))


def trainer_of(folder: Path, rows: Any, **options: Any) -> Any:
    """A trainer of rows, whose optimizer has a state to restore."""
    import torch
    from tiny import tiny

    from hf_longctx import LongCtxTrainer

    case = Case(lengths=UNEVEN)
    given = {"optim": "adamw_torch", "learning_rate": 0.01} | options
    return LongCtxTrainer(
        model=tiny("distca", dtype=torch.float32),
        args=arguments(case, folder, **given),
        train_dataset=rows,
    )


def run_resumed(name: str, folder: Path) -> dict[str, Any]:
    """Train to the end, keeping a checkpoint; then go on from it in a new trainer."""
    from datasets import Dataset

    case = RESUMED[name]
    checkpoint = str(folder / f"checkpoint-{case.step}")

    def make(where: Path, **options: Any) -> Any:
        rows = stream() if case.stream else Dataset.from_list(Case(lengths=UNEVEN).rows())
        return trainer_of(where, rows, **case.options | options)

    first = make(folder, save_strategy="steps", save_steps=case.step)
    first.train()
    first.save_model(str(folder / "final"))
    second = make(folder / "again")
    second.train(resume_from_checkpoint=checkpoint)
    second.save_model(str(folder / "resumed"))
    found = {"history": first.state.log_history, "resumed": second.state.log_history}
    if name == "stream_third_pass":
        third = make(folder / "anew", ignore_data_skip=True)
        third.train(resume_from_checkpoint=checkpoint)
        found["anew"] = third.state.log_history
    return found


def run_differing(name: str, folder: Path) -> dict[str, Any]:
    """Rank 1 streams another document than rank 0, among the first ones or later; or, as a group
    of its own, the same ones in another order."""
    from datasets import Dataset
    from tiny import documents

    rows = documents([48] * 16)
    at = 2 if name == "differs_early" else 12
    options = GROUPS if name == "differs_in_order" else {}
    if os.environ["RANK"] == "1" and options:
        rows[at:] = rows[at:][::-1]
    elif os.environ["RANK"] == "1":
        rows[at]["input_ids"][5] += 1 if rows[at]["input_ids"][5] < 63 else -1
    try:
        given = Dataset.from_list(rows).to_iterable_dataset()
        trainer = trainer_of(folder, given, max_steps=12, longctx_lookahead=1, **options)
        trainer.train()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


RUNS = dict.fromkeys(RESUMED, run_resumed)
RUNS |= dict.fromkeys(["differs_early", "differs_late", "differs_in_order"], run_differing)


STREAMS = [name for name, case in RESUMED.items() if case.stream]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The folder and the results of one launch."""
    folder = tmp_path_factory.mktemp("resume")
    ended = launch(folder, *RUNS, processes=2, script=__file__)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], perform=lambda name, folder: RUNS[name](name, folder))
