"""Train a model with recurrent layers on one process and compare with a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_loop import plain_loop
from tiny import Document, Errors, Outcome, alone, collate, documents, gradients, targets, tiny
from train_cases import Case, arguments

from hf_longctx import LongCtxTrainer
from hf_longctx.config import RECOMPUTE

pytestmark = pytest.mark.filterwarnings("ignore")

CLOSE = 1e-4
UNEVEN = (150, 30, 17, 1, 64, 40, 9, 96, 2, 33)
OPTIONS = {"longctx_max_tokens_per_rank": 128, "gradient_accumulation_steps": 2}
EVALUATION = {"eval_strategy": "epoch"}


def model_of(name: str, *, lora: bool = False) -> Any:
    model = tiny(name, family="qwen3_next", dtype=torch.float32)
    if not lora:
        return model
    targets = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj"]
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:  # zeros, through which no gradient reaches lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def train(folder: Path, model: Any, **options: Any) -> LongCtxTrainer:
    case = Case(lengths=UNEVEN, options=OPTIONS | options)
    trainer = LongCtxTrainer(
        model=model,
        args=arguments(case, folder),
        train_dataset=case.rows(),
        eval_dataset=documents((5, 70, 20), seed=9),
    )
    trainer.train()
    return trainer


def relative(found: float, right: float) -> float:
    return abs(found - right) / abs(right)


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_b07_b54_steps_equal_those_of_documents_alone(tmp_path, checkpointing, lora):
    given: dict[str, Any] = {}
    if checkpointing is not None:
        kwargs = {"use_reentrant": checkpointing}
        given = {RECOMPUTE: True, f"{RECOMPUTE}_kwargs": kwargs}
    trainer = train(tmp_path, model_of("zeco_linear", lora=lora), **given)
    case = Case(lengths=UNEVEN, options=OPTIONS)
    right = plain_loop(case, world=1, model=model_of("sdpa", lora=lora))
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == len(right.losses) > 1
    for entry, loss, norm in zip(steps, right.losses, right.norms, strict=True):
        assert relative(entry["loss"], loss) < CLOSE
        assert relative(entry["grad_norm"], norm) < CLOSE
    for key, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, right.weights[key], rtol=0, atol=CLOSE)


def test_evaluation_and_generation_of_a_trained_model(tmp_path):
    trainer = train(tmp_path, model_of("zeco_linear"), **EVALUATION)
    stock = model_of("sdpa")
    stock.load_state_dict(trainer.model.state_dict())
    losses = []
    with torch.no_grad():
        for row in documents((5, 70, 20), seed=9):
            ids = torch.tensor([row["input_ids"]])
            losses.append(stock.eval()(input_ids=ids, labels=ids, num_items_in_batch=92).loss)
    assert relative(trainer.evaluate()["eval_loss"], float(sum(losses))) < CLOSE
    ids = torch.tensor([documents((9,))[0]["input_ids"]])
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    assert torch.equal(
        trainer.model.eval().generate(ids, **options), stock.generate(ids, **options)
    )


def packed(model: Any, rows: list[Document]) -> Outcome:
    """One batch through a model that a trainer has wrapped, forward and backward."""
    model.zero_grad()
    given = collate(rows, layout="contiguous")
    output = model(**given, num_items_in_batch=targets(rows))
    output.loss.backward()
    return Outcome([output.logits[0].detach()], output.loss.item(), gradients(model))


def test_mixed_precision_is_as_close_as_documents_alone(tmp_path):
    """Accelerate wraps the forward for it; documents stay apart, also after an evaluation."""
    trainer = train(tmp_path, model_of("zeco_linear"), bf16=True, **EVALUATION)
    before = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "saved"))
    assert trainer.evaluate()["eval_loss"] == before
    model, stock = trainer.model.train(), model_of("sdpa")
    stock.load_state_dict(model.state_dict())
    ours, plain = Errors(), Errors()
    for seed in range(20):
        rows = documents((40, 3, 25, 60), seed=seed)
        right = alone(stock, [rows])
        with torch.autocast("cpu", torch.bfloat16):
            plain.add(alone(stock, [rows]), right)
        found = packed(model, rows)
        ours.add(found, right)
    ours.assert_bf16_rule(plain)
    assert ours.root_mean_square("logits") > 1e-4  # it did run in bf16


def test_a_saved_run_goes_on_with_the_name(tmp_path):
    trainer = train(tmp_path, model_of("zeco_linear"), save_strategy="epoch")
    checkpoint = max(tmp_path.glob("checkpoint-*"))
    again = LongCtxTrainer(
        model=model_of("sdpa"),
        args=arguments(Case(lengths=UNEVEN, options=OPTIONS | {"num_train_epochs": 2}), tmp_path),
        train_dataset=Case(lengths=UNEVEN).rows(),
    )
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.longctx_attention == "zeco_linear"
    assert again.state.global_step == 2 * trainer.state.global_step
