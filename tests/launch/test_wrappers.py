"""Train under native FSDP2 and DeepSpeed over two trainers and compare each step with a plain loop.

One launch runs this file as its script. A case's name begins with its wrapper: `fsdp2` is native
FSDP2, `deepspeed0` to `deepspeed2` are ZeRO stages.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_loop import Plain, pieces_of, plain_loop, token_loss, weights_of
from tiny import collate, documents, tiny
from torch import Tensor
from train_cases import (
    LONG_AND_SHORT,
    UNEVEN,
    Case,
    arguments,
    deepspeed_config,
    launch_pairs,
    logged_by_pairs,
    main,
    sharded,
    trainer_of,
)
from transformers import AutoModelForCausalLM

from hf_longctx.support import table as support_table
from hf_longctx.support import validate_arguments, validate_wrappers
from hf_longctx.support.trainer_rules import WRAPPER_RULES

CLIPPED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
ACCUMULATED = Case(lengths=UNEVEN, options=CLIPPED)
ONE_STEP = Case(lengths=UNEVEN, options={"max_steps": 1, "max_grad_norm": 1e9})
SAVED = Case(
    lengths=UNEVEN,
    options={"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_only_model": True},
)
RESUMED = Case(
    lengths=UNEVEN,
    options={"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"},
)
CASES = {
    "fsdp2": ACCUMULATED,
    "fsdp2_checkpointing": replace(
        ACCUMULATED, options=CLIPPED | {"activation_checkpointing": True}, name="ring"
    ),
    "fsdp2_groups": Case(
        lengths=UNEVEN,
        options={
            "longctx_group_size": 1,
            "gradient_accumulation_steps": 2,
            "longctx_overflow": "truncate",
        },
    ),
    "fsdp2_evaluate": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4},
    ),
    "fsdp2_save": SAVED,
    "fsdp2_save_optimizer": RESUMED,
    **{f"deepspeed{stage}": ACCUMULATED for stage in range(3)},
    **{f"deepspeed{stage}_one_step": ONE_STEP for stage in range(3)},
    "deepspeed2_checkpointing": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "epoch", "activation_checkpointing": True},
    ),
    "deepspeed2_resume": RESUMED,
}


def wrapped_trainer(name: str, folder: Path, **changes: Any) -> Any:
    """The trainer of a case, with the wrapper that its name begins with."""
    case = CASES[name]
    if name.startswith("deepspeed"):
        import deepspeed.ops

        # else DeepSpeed compiles a C++ extension that training does not use, for 40 seconds
        deepspeed.ops.__compatible_ops__ = {}
        return trainer_of(case, folder, deepspeed=deepspeed_config(name), **changes)
    arguments(case, folder)  # makes the default group
    return trainer_of(case, folder, model=sharded(case.name, folder), **changes)


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case to its end and save the model, or note why it is refused."""
    started = time.time()
    try:
        trainer = wrapped_trainer(name, folder)
    except ValueError as error:
        return {"error": str(error)}
    before = trainer.evaluate() if name == "fsdp2_evaluate" else {}
    trainer.train()
    trainer.save_model(str(folder / "final"))
    result = {
        "before": before.get("eval_long_loss"),
        "history": trainer.state.log_history,
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameters": sorted({type(p).__name__ for p in trainer.model.parameters()}),
        "seconds": time.time() - started,
    }
    if name.endswith("_save"):
        again = wrapped_trainer(name, folder / "again")
        try:
            again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        except ValueError as error:
            result["resume_error"] = str(error)
    if name.endswith("_resume"):
        again = wrapped_trainer(name, folder / "again", save_strategy="no")
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        again.save_model(str(folder / "resumed"))
    return result


CLOSE = 1e-5
TRAINED = [name for name in CASES if not name.endswith(("_optimizer", "_resume"))]
EACH_RUN = pytest.mark.parametrize("name", TRAINED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases over two trainers, in one launch."""
    return launch_pairs(tmp_path_factory.mktemp("wrappers"), CASES, script=__file__)


@pytest.fixture(scope="module")
def cases(folder) -> dict[str, Any]:
    """What each case logged."""
    return logged_by_pairs(folder)


def plain(name: str) -> Plain:
    return plain_loop(CASES[name], world=2)


def steps(case: dict[str, Any], key: str) -> list[float]:
    """A figure of each optimizer step."""
    return [entry[key] for entry in case["history"] if "loss" in entry]


def saved_weights(place: Path) -> dict[str, Tensor]:
    """Of a saved model, loaded as anyone would."""
    return weights_of(AutoModelForCausalLM.from_pretrained(place, attn_implementation="sdpa"))


def close(found: list[float], right: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(right), rtol=CLOSE, atol=0)


@EACH_RUN
def test_b08_loss_gradient_norm_and_weights_of_each_step(name, cases, folder):
    right = plain(name)
    close(steps(cases[name], "loss"), right.losses)
    if not name.startswith("deepspeed0"):  # which tells Trainer no norm
        close(steps(cases[name], "grad_norm"), right.norms)
    before = weights_of(tiny("sdpa", dtype=torch.float32))
    for key, weight in saved_weights(folder / name / "final").items():
        torch.testing.assert_close(weight, right.weights[key], rtol=0, atol=CLOSE)
        assert float((weight - before[key]).abs().max()) > 20 * CLOSE


@pytest.mark.parametrize("stage", range(3))
def test_b08_deepspeed_gradient_norm_from_the_weights_of_one_step(stage, cases, folder):
    after = saved_weights(folder / f"deepspeed{stage}_one_step" / "final")
    before = weights_of(tiny("sdpa", dtype=torch.float32))
    moved = torch.stack([(after[key] - before[key]).norm() for key in after]).norm()
    (norm,) = plain("deepspeed0_one_step").norms
    assert abs(float(moved) / 0.1 / norm - 1) < 1e-4  # learning rate 0.1


def test_wrappers_are_what_they_seem(cases):
    for name in TRAINED:
        sharded = name.startswith("fsdp2")
        assert cases[name]["parameters"] == (["DTensor"] if sharded else ["Parameter"])
        wrapper = "FSDPLlamaForCausalLM" if sharded else "DeepSpeedEngine"
        assert cases[name]["wrapper"] == wrapper


def test_clipping_clips():
    assert min(plain("fsdp2").norms) > 0.5  # of 0.3 allowed


@pytest.mark.parametrize("name", ["fsdp2_evaluate", "deepspeed2_checkpointing"])
def test_evaluation_is_weighted_by_tokens(name, cases):
    right, found = plain(name).evaluations, 0
    for entry in cases[name]["history"]:
        for key in (k for k in entry if k.startswith("eval_") and k.endswith("_loss")):
            close([entry[key]], [right[entry["step"] - 1][key.split("_")[1]]])
            found += 1
    assert found == 2 * (2 if name == "fsdp2_evaluate" else 1)


def test_fsdp2_evaluates_before_training(cases):
    case = CASES["fsdp2_evaluate"]
    rows = case.evaluation_rows()["long"]
    with torch.no_grad():
        loss = token_loss(tiny("sdpa", dtype=torch.float32), rows, pieces_of(case, rows, 2))
    close([cases["fsdp2_evaluate"]["before"]], [loss.item()])


def test_b57_fsdp2_saves_each_step_and_at_the_end(cases, folder):
    assert cases["fsdp2_save"]["seconds"] < 60
    right = saved_weights(folder / "fsdp2_save" / "final")
    for step in range(1, 5):
        place = folder / "fsdp2_save" / f"checkpoint-{step}"
        config = (place / "config.json").read_text()
        assert not any(word in config for word in ("distca", "longctx", "FSDP", "fsdp"))
        weights = saved_weights(place)
        same = [torch.equal(weights[key], right[key]) for key in right]
        assert all(same) if step == 4 else not any(same)
    model = AutoModelForCausalLM.from_pretrained(place, attn_implementation="distca")
    assert torch.isfinite(model(**collate(documents([4, 3]))).loss)


def test_fsdp2_refuses_to_save_or_restore_an_optimizer(cases):
    assert "save_only_model=True" in cases["fsdp2_save_optimizer"]["error"]
    assert "Load the checkpoint's weights" in cases["fsdp2_save"]["resume_error"]


def test_deepspeed_resumes_exactly(cases, folder):
    place = folder / "deepspeed2_resume"
    right, found = saved_weights(place / "final"), saved_weights(place / "resumed")
    half = saved_weights(place / "checkpoint-2")
    assert all(torch.equal(found[key], right[key]) for key in right)
    assert not any(torch.equal(half[key], right[key]) for key in right)


# What is refused


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device=cpu",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True"),
        ({"optimizer": {"type": "AdamW"}}, "deepspeed keys ['optimizer']"),
        ({"pipeline": {}, "sequence_parallel_size": 2}, "['pipeline', 'sequence_parallel_size']"),
    ],
)
def test_other_deepspeed_configurations_are_refused(config, value):
    plugin = SimpleNamespace(deepspeed_config=config)
    for given in ({"deepspeed": config}, {"deepspeed": "a.json", "deepspeed_plugin": plugin}):
        with pytest.raises(ValueError, match="set zero_optimization.stage to 0, 1 or 2") as refusal:
            validate_arguments(SimpleNamespace(**given))
        assert value in str(refusal.value)


def test_deepspeed_configurations_that_are_not_refused():
    off = {"device": "none", "nvme_path": None}
    written = {"stage": 2, "offload_optimizer": off, "offload_param": off}  # by accelerate launch
    for zero in (written, {"stage": 1, "overlap_comm": True}, {}):
        config = {"zero_optimization": zero, "bf16": {"enabled": "auto"}}
        validate_arguments(SimpleNamespace(deepspeed=config))


def wrapped(*, sizes: dict[str, int] | None = None, **changes: Any) -> Any:
    """As much of a trainer as the rules look at."""
    given = {
        "args": SimpleNamespace(fsdp=None, deepspeed_plugin=None),
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
        "model": SimpleNamespace(config=SimpleNamespace()),
        "accelerator": SimpleNamespace(
            parallelism_config=SimpleNamespace(**(sizes or {})),
            distributed_type=SimpleNamespace(value="MULTI_CPU"),
        ),
    }
    return SimpleNamespace(**given | changes)


def model_of(**sizes: int) -> Any:
    config = SimpleNamespace(distributed_config=SimpleNamespace(fsdp_size=2, **sizes))
    return SimpleNamespace(config=config)


WRAPPED = {
    "FSDP through Accelerate on the CPU": (
        wrapped(args=SimpleNamespace(fsdp="full_shard")),
        "fsdp=full_shard",
    ),
    "DeepSpeed with ACCELERATE_USE_CPU": (
        wrapped(args=SimpleNamespace(fsdp=None, deepspeed_plugin="given")),
        "MULTI_CPU",
    ),
    "best model of native FSDP2": (
        wrapped(
            args=SimpleNamespace(fsdp=None, deepspeed_plugin=None, load_best_model_at_end=True),
            is_distributed_loading_by_transformers=True,
        ),
        "load_best_model_at_end=True",
    ),
    "tensor, pipeline and expert parallelism": (wrapped(model=model_of(tp_size=2)), "tp_size=2"),
    "parallelism of Accelerate": (wrapped(sizes={"cp_size": 2}), "parallelism_config.cp_size=2"),
}


@pytest.mark.parametrize("rule", WRAPPER_RULES, ids=lambda rule: rule.feature)
def test_wrappers_are_refused_with_value_rule_and_remedy(rule, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    validate_wrappers(wrapped(model=model_of(tp_size=1)))
    trainer, value = WRAPPED[rule.feature]
    with pytest.raises(ValueError) as refusal:
        validate_wrappers(trainer)
    for part in (value, rule.rule, rule.remedy):
        assert part in str(refusal.value)
    assert f"| {rule.feature} |" in support_table()


def test_fsdp2_by_accelerates_variable_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true"):
        validate_wrappers(wrapped())
    validate_wrappers(wrapped(is_fsdp_enabled=True))


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
