"""Train with overlap pingpong over two trainers, under every wrapper: as with overlap none.

One launch runs this file as its script.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plain_loop import plain_loop
from train_cases import (
    UNEVEN,
    Case,
    Lines,
    arguments,
    deepspeed_config,
    launch,
    main,
    sharded,
    trainer_of,
)

MIXED = (150, 30, 17, 1, 64, 40, 9, 41, 2, 33, 96, 50, 46)  # 96 fills a batch: it has no halves
FEW_TARGETS = (150, 0, 0, 0, 64, 0, 0, 0, 0, 33)  # of UNEVEN: some halves have none
CASES = {
    "plain": Case(lengths=MIXED),
    "accumulated": Case(
        lengths=UNEVEN,
        targets=FEW_TARGETS,
        options={"gradient_accumulation_steps": 2, "activation_checkpointing": True},
    ),
    "ones": Case(lengths=(1,) * 40 + (56,), options={"train_sampling_strategy": "sequential"}),
    "servers": Case(lengths=MIXED, options={"longctx_servers": 1, "longctx_server_timeout": 20.0}),
    "bf16": Case(lengths=MIXED, options={"bf16": True}),
    "lora": Case(lengths=MIXED, options={"activation_checkpointing": True}),
    "sft": Case(lengths=MIXED),
    "fsdp2": Case(lengths=MIXED),
    "fsdp2_checkpointing": Case(lengths=MIXED, options={"activation_checkpointing": True}),
    "fsdp2_reshards": Case(lengths=MIXED),
    "deepspeed2": Case(lengths=MIXED),
    "reentrant": Case(
        lengths=MIXED,
        options={
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
}
REFUSED = ("fsdp2_reshards", "reentrant")


def sft_trainer(case: Case, folder: Path, overlap: str) -> Any:
    """TRL's trainer, whose loss reads logits and labels to measure accuracy and entropy."""
    from dataclasses import asdict, dataclass

    import torch
    import trl
    from datasets import Dataset
    from run_scripts import make_checkpoint
    from tiny import tiny
    from transformers import AutoTokenizer

    from hf_longctx import LongCtxArguments, LongCtxTrainerMixin

    @dataclass
    class Config(LongCtxArguments, trl.SFTConfig):
        pass

    class Shared(LongCtxTrainerMixin, trl.SFTTrainer):
        pass

    checkpoint = folder / f"checkpoint-of-rank-{os.environ['RANK']}"
    make_checkpoint(checkpoint)
    wanted = arguments(case, folder, longctx_overlap=overlap)
    given = {
        name: value
        for name, value in wanted.to_dict().items()
        if name in asdict(Config(output_dir=str(folder), use_cpu=True))
        and name not in ("longctx_attention", "loss_type")
    }
    return Shared(
        model=tiny("distca", dtype=torch.float32),
        args=Config(**given),
        train_dataset=Dataset.from_list(case.rows()),
        processing_class=AutoTokenizer.from_pretrained(checkpoint / "model"),
    )


def make(name: str, folder: Path, overlap: str) -> Any:
    """The trainer of a case."""
    case = CASES[name]
    if name == "sft":
        return sft_trainer(case, folder, overlap)
    changes: dict[str, Any] = {"longctx_overlap": overlap}
    if name.startswith("fsdp2"):
        arguments(case, folder)  # makes the default group
        changes["model"] = sharded("distca", folder)
        if not name.endswith("reshards"):
            changes["model"].set_reshard_after_forward(False)
    if name == "deepspeed2":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}
        changes["deepspeed"] = deepspeed_config(name)
    if name == "lora":
        import torch
        from peft import LoraConfig, get_peft_model
        from tiny import tiny

        torch.manual_seed(0)
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        changes["model"] = get_peft_model(tiny("distca", dtype=torch.float32), adapter)
    return trainer_of(replace(case), folder, **changes)


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case with either overlap, or note why one is refused."""
    import logging

    found: dict[str, Any] = {}
    for overlap in ("none", "pingpong"):
        lines, logger = Lines(), logging.getLogger("hf_longctx")
        logger.setLevel(logging.INFO)
        logger.addHandler(lines)
        try:
            trainer = make(name, folder / overlap, overlap)
        except ValueError as error:
            found[overlap] = {"error": str(error)}
            continue
        trainer.train()
        logger.removeHandler(lines)
        account = trainer.longctx_runtime.account
        found[overlap] = {
            "history": trainer.state.log_history,
            "lines": [line for line in lines.lines if "longctx_overlap" in line],
            "switches": account.switches,
            "recompute_bytes": account.recompute_bytes,
        }
        if not name.startswith(("deepspeed", "fsdp2")):
            found[overlap]["weights"] = float(
                sum(p.detach().double().abs().sum() for p in trainer.model.parameters())
            )
    return found


CLOSE = 1e-6
TRAINED = [name for name in CASES if name not in REFUSED]
FIGURES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "longctx_tokens", "longctx_fill")


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Both overlaps of all cases, in one launch."""
    folder = tmp_path_factory.mktemp("pingpong")
    ended = launch(folder, *CASES, processes=2, script=__file__)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    return json.loads((folder / "results.json").read_text())["cases"]


def steps(case: dict[str, Any], overlap: str) -> list[dict[str, float]]:
    return [entry for entry in case[overlap]["history"] if "loss" in entry]


@pytest.mark.parametrize("name", TRAINED)
def test_each_step_is_that_of_overlap_none(name, cases):
    ours, right = (steps(cases[name], overlap) for overlap in ("pingpong", "none"))
    bound = 2e-3 if name == "bf16" else CLOSE  # whose halves are rounded apart
    assert len(ours) == len(right) > 0
    for mine, other in zip(ours, right, strict=True):
        for figure in (key for key in FIGURES if key in other):
            assert mine[figure] == pytest.approx(other[figure], rel=bound, abs=1e-12), figure
    if "weights" in cases[name]["none"]:
        right_sum = cases[name]["none"]["weights"]
        assert cases[name]["pingpong"]["weights"] == pytest.approx(right_sum, rel=bound)


@pytest.mark.parametrize("name", ["plain", "accumulated"])
def test_b07_each_step_is_that_of_a_plain_loop(name, cases):
    right = plain_loop(CASES[name], world=2)
    ours = steps(cases[name], "pingpong")
    assert [entry["loss"] for entry in ours] == pytest.approx(right.losses, rel=1e-5)
    assert [entry["grad_norm"] for entry in ours] == pytest.approx(right.norms, rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_halves_alternate_and_recomputes_send_nothing(name, cases):
    assert cases[name]["pingpong"]["switches"] > 0 == cases[name]["none"]["switches"]
    assert cases[name]["pingpong"]["recompute_bytes"] == 0


def test_batches_without_halves_are_counted_and_logged(cases):
    halved = [entry["longctx_halved"] for entry in steps(cases["plain"], "pingpong")]
    assert {*halved} == {0.0, 1.0}
    assert len(cases["plain"]["pingpong"]["lines"]) == halved.count(0.0)
    line = cases["plain"]["pingpong"]["lines"][0]
    assert "a batch of 1 documents over 2 ranks, the longest with 96 of 96 tokens" in line
    assert all("longctx_halved" not in entry for entry in steps(cases["plain"], "none"))
    shared = [entry["longctx_halved"] for entry in steps(cases["accumulated"], "pingpong")]
    assert 0.5 in shared


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        (
            "fsdp2_reshards",
            "reshard_after_forward=True of FSDP",
            "set_reshard_after_forward(False)",
        ),
        ("reentrant", "use_reentrant=True", "activation_checkpointing_kwargs={'use_reentrant': F"),
    ],
)
def test_what_cannot_take_turns_is_refused(name, value, remedy, cases):
    assert steps(cases[name], "none")
    message = cases[name]["pingpong"]["error"]
    assert value in message and remedy in message


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
