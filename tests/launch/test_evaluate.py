"""Compare evaluation, best checkpoints, generation and adapters over 1, 2 and 3 trainers with one
process under stock attention that sees each document alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluate_cases as cases
import numpy as np
import pytest
import torch
import trl
from peft import PeftModel, PromptTuningConfig, get_peft_model
from plain_loop import plain_loop, weights_of
from tiny import tiny
from train_cases import arguments, launch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_longctx import LongCtxTrainer, LongCtxTrainerMixin
from hf_longctx.training.checks import validate_loss
from hf_longctx.training.evaluation import TokenWeightedLoss, preprocess

# PEFT's own, as it wraps a model
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

CLOSE = 1e-5
VOLATILE = ("loss", "model_preparation_time", "runtime", "samples_per_second", "steps_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the ranks of a launch wrote."""

    folder: Path
    ranks: list[dict[str, Any]]

    def predicted(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and labels of a case, which are the same on every rank."""
        each = [np.load(self.folder / name / f"{rank}.npz") for rank in range(len(self.ranks))]
        for other in each[1:]:
            for key in ("predictions", "labels"):
                np.testing.assert_array_equal(other[key], each[0][key])
        return each[0]["predictions"], each[0]["labels"]


def evaluated(folder: Path, *names: str, processes: int) -> Evaluated:
    ended = launch(folder, *names, processes=processes, script=cases.__file__)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return Evaluated(folder=folder, ranks=found)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Evaluated:
    """Predictions in this process."""
    folder = tmp_path_factory.mktemp("one")
    found = {name: cases.run_predict(name, folder / name) for name in cases.PREDICT}
    return Evaluated(folder=folder, ranks=[found])


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Evaluated:
    """All cases over two trainers."""
    return evaluated(tmp_path_factory.mktemp("two"), *cases.RUNS, processes=2)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Evaluated:
    """Predictions over three trainers."""
    return evaluated(tmp_path_factory.mktemp("three"), *cases.PREDICT, processes=3)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Callable[[str], Any]:
    """`predict()` of a stock Trainer in one process, with batch size 1 and stock attention."""

    @cache
    def of(name: str) -> Any:
        args = TrainingArguments(
            output_dir=str(tmp_path_factory.mktemp("stock")),
            use_cpu=True,
            per_device_eval_batch_size=1,
            include_for_metrics=["inputs"] if name == "classes" else [],
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=tiny("sdpa", dtype=torch.float32),
            args=args,
            compute_metrics=cases.metrics,
            preprocess_logits_for_metrics=cases.best if name == "classes" else None,
            data_collator=default_data_collator,
        )
        return trainer.predict(cases.rows(cases.LENGTHS))  # type: ignore[arg-type]

    return of


@pytest.fixture
def worlds(request) -> Evaluated:
    """The launch that a test asks for by name."""
    return request.getfixturevalue(request.param)


EACH_WORLD = pytest.mark.parametrize("worlds", ["one", "two", "three"], indirect=True)


@EACH_WORLD
@pytest.mark.parametrize("name", ["whole", "classes", "groups"])
def test_b51_predictions_and_metrics_are_those_of_a_stock_trainer(worlds, name, stock):
    right, (predictions, labels) = stock(name), worlds.predicted(name)
    np.testing.assert_array_equal(labels, right.label_ids)
    np.testing.assert_allclose(predictions, right.predictions, rtol=0, atol=CLOSE)
    assert predictions.shape[:2] == (len(cases.LENGTHS), max(cases.LENGTHS))
    wanted = {k: v for k, v in right.metrics.items() if not k.endswith(VOLATILE)}
    assert len(wanted) == 2
    for rank in worlds.ranks:
        found = rank[name]["predict"]
        assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=CLOSE)
        # a mean over all targets; the stock Trainer's own is a mean over documents
        nll = stock("whole").metrics["test_nll"]
        assert found["test_loss"] == pytest.approx(nll, rel=CLOSE)
        assert abs(right.metrics["test_loss"] / nll - 1) > 100 * CLOSE
        again = {key.replace("test_", "eval_", 1): found[key] for key in (*wanted, "test_loss")}
        if "eval_eval_best" in again:  # a key that has the prefix already keeps it
            again["eval_best"] = again.pop("eval_eval_best")
        assert {key: rank[name]["evaluate"][key] for key in again} == pytest.approx(again)


@EACH_WORLD
@pytest.mark.parametrize("name", ["split", "truncate"])
def test_documents_longer_than_a_batch_are_predicted_in_their_place(worlds, name):
    predictions, labels = worlds.predicted(name)
    model, most = tiny("sdpa", dtype=torch.float32), cases.BUDGET
    longest = max(cases.LONG) if name == "split" else most
    right = np.full((len(cases.LONG), longest, 64), -100.0)
    given = np.full((len(cases.LONG), longest), -100)
    for document, row in enumerate(cases.rows(cases.LONG)):
        for start in range(0, min(longest, len(row["input_ids"])), most):
            piece = slice(start, min(start + most, len(row["input_ids"])))
            ids = torch.tensor([row["input_ids"][piece]])
            with torch.no_grad():
                right[document, piece] = model(ids).logits[0].numpy()
            given[document, piece] = row["labels"][piece]
    np.testing.assert_array_equal(labels, given)
    np.testing.assert_allclose(predictions, right, rtol=0, atol=CLOSE)


def preprocessed(function: Callable[..., Any]) -> torch.Tensor:
    torch.manual_seed(0)
    return preprocess(function, torch.randn(1, 9, 5), torch.arange(9)[None] % 5)


def test_preprocessing_that_treats_each_token_by_itself():
    assert preprocessed(cases.best).shape == (1, 9)
    chosen = preprocessed(lambda x, y: x.log_softmax(-1).gather(-1, y[..., None]))
    assert chosen.shape == (1, 9, 1)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x, y: x[:, :-1].argmax(-1), r"\(1, 8\)"),
        (lambda x, y: x - x.mean(1, keepdim=True), r"\(1, 9, 5\)"),
        (lambda x, y: x.argmax(-1) == y.roll(-1, 1), r"\(1, 9\)"),
        (lambda x, y: x.cumsum(1), r"\(1, 9, 5\)"),
        (lambda x, y: x.mean(), r"\(\)"),
        (lambda x, y: (x, y), "tuple"),
    ],
)
def test_preprocessing_that_mixes_tokens_is_refused(function, got):
    with pytest.raises(ValueError, match=f"made {got} of logits .*shift and sum in compute_m"):
        preprocessed(function)


def test_predictions_that_are_not_logits_alone_are_refused(tmp_path):
    trainer = cases.trainer_of("whole", tmp_path)
    trainer.model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="gave tuple as predictions.* name its other outputs in"):
        trainer.evaluate()
    found = trainer.evaluate(ignore_keys=["hidden_states"])
    assert found["eval_nll"] == pytest.approx(found["eval_loss"], rel=CLOSE)


def test_b07_batches_of_an_evaluation_weigh_by_their_targets():
    losses = TokenWeightedLoss()
    for loss, targets in ((1.0, 2), (3.0, 6), (0.0, 0)):
        losses.add(torch.tensor(loss), targets=torch.tensor(targets))
    assert losses.mean(SimpleNamespace(gather=lambda total: total)) == 2.5  # a plain mean: 1.33
    assert losses.weigh([1.0, 3.0, 0.0]) == 2.5


# TRL


def test_b05_trl_evaluation_is_a_mean_over_tokens(two, stock):
    right = stock("whole")
    shares = np.array([rank["sft"]["targets"] for rank in two.ranks])
    assert ((shares == 0).any(0) & (shares > 0).any(0)).any()  # a rank without, a batch with
    logits = torch.from_numpy(right.predictions[:, :-1][right.label_ids[:, 1:] != -100])
    entropy = float(torch.distributions.Categorical(logits=logits).entropy().mean())
    for rank in two.ranks:
        log = [entry for entry in rank["sft"]["log"] if "eval_loss" in entry]
        assert len(log) == 2
        for entry in log:
            assert entry["eval_loss"] == pytest.approx(right.metrics["test_nll"], rel=CLOSE)
            assert entry["eval_entropy"] == pytest.approx(entropy, rel=CLOSE)
            accuracy = right.metrics["test_eval_best"]
            assert entry["eval_mean_token_accuracy"] == pytest.approx(accuracy, rel=CLOSE)
        assert rank["sft"]["evaluate"]["eval_nll"] == pytest.approx(right.metrics["test_nll"])


def test_trl_losses_that_are_no_sum_over_tokens_are_refused():
    class Preferences(LongCtxTrainerMixin, trl.DPOTrainer):
        pass

    with pytest.raises(ValueError, match="DPOTrainer.compute_loss is overridden.*trl.SFTTrainer"):
        validate_loss(Preferences.__new__(Preferences))
    trainer = cases.SFTLongCtxTrainer.__new__(cases.SFTLongCtxTrainer)
    trainer.args = SimpleNamespace(loss_type="nll")
    validate_loss(trainer)
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.001
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.001: .* set router_aux_loss_coef"):
        validate_loss(trainer)
    trainer.args = SimpleNamespace(loss_type="dft")
    with pytest.raises(ValueError, match="loss_type='dft' is not tested across ranks; use"):
        validate_loss(trainer)


# The best checkpoint, and generation


def loaded(saved: Path) -> dict[str, torch.Tensor]:
    """Weights of a saved model, or of stock Llama with a saved adapter, loaded as anyone would."""
    if not (saved / "adapter_config.json").exists():
        return weights_of(AutoModelForCausalLM.from_pretrained(saved))
    return weights_of(PeftModel.from_pretrained(tiny("sdpa", dtype=torch.float32), saved))


@pytest.mark.parametrize("name", ["loss", "nll", "peft_nll"])
def test_early_stopping_and_the_best_checkpoint(two, name):
    for rank in two.ranks:
        case = rank[name]
        log = [entry for entry in case["log"] if "eval_loss" in entry]
        for entry in log:
            assert entry["eval_nll"] == pytest.approx(entry["eval_loss"], rel=CLOSE)
        best = min(log, key=lambda entry: entry[f"eval_{name.removeprefix('peft_')}"])
        assert best["step"] > 1 and case["steps"] == log[-1]["step"] == best["step"] + 2 < 12
        assert Path(case["best"]).name == f"checkpoint-{best['step']}"
        assert case["again"] == pytest.approx(best["eval_loss"], rel=1e-6)
        assert case["attention"] == "distca"
    final, right = two.folder / name / "final", loaded(Path(case["best"]))
    assert all(torch.equal(weight, right[key]) for key, weight in loaded(final).items())
    for folder in (final, Path(case["best"])):
        (config,) = folder.glob("*config.json") if name == "peft_nll" else [folder / "config.json"]
        assert "distca" not in config.read_text() and "longctx" not in config.read_text()


def test_b52_generation_during_evaluation_is_local(two):
    first, second = (rank["generate"] for rank in two.ranks)
    right = [True, 7 + 4, [1, 2, 64]]  # as sdpa: four tokens more, and logits of two on a cache
    assert first["callback"] == [right] * 4 and second["callback"] == [right] * 2
    assert first["metrics"] == [right] * 2 and second["metrics"] == []
    assert {*first["sent"], *second["sent"]} == {0}
    assert first["steps"] == second["steps"] == 2


# Adapters


@pytest.mark.parametrize("name", cases.PEFT)
def test_b54_peft_adapters_train_as_in_one_process(two, name):
    head = {key: v for key, v in cases.PEFT[name].items() if key == "modules_to_save"}
    case = replace(cases.TRAINED, options={"max_steps": 4})
    right = plain_loop(case, world=2, model=cases.adapted("sdpa", **head))
    for rank in two.ranks:
        steps = [entry for entry in rank[name]["log"] if "loss" in entry]
        assert [entry["loss"] for entry in steps] == pytest.approx(right.losses, rel=CLOSE)
        assert [entry["grad_norm"] for entry in steps] == pytest.approx(right.norms, rel=CLOSE)
        trained = {key.partition(".lora_")[0].rpartition(".")[2] for key in rank[name]["gradients"]}
        assert {"q_proj", "v_proj"} <= trained
        assert len(rank[name]["gradients"]) == 2 * 2 * 2 + len(head)
        assert all("lora_" in k or "modules_to_save" in k for k in rank[name]["gradients"])
        evaluation = rank[name]["evaluate"]
        assert evaluation["eval_loss"] == pytest.approx(evaluation["eval_nll"], rel=CLOSE)
    assert_adapter(two.folder / name / "final", right.weights, moved_from=cases.adapted("sdpa"))


def assert_adapter(saved: Path, right: dict[str, torch.Tensor], *, moved_from: Any) -> None:
    """Compare a saved adapter with the right weights."""
    assert "distca" not in (saved / "adapter_config.json").read_text()
    before = weights_of(moved_from)
    for key, weight in loaded(saved).items():
        torch.testing.assert_close(weight, right[key], rtol=0, atol=CLOSE)
        if "lora_" in key:
            assert float((weight - before[key]).abs().max()) > 20 * CLOSE


def test_b40_b54_peft_resume_is_exact_and_restores_the_hook(two):
    assert [rank["peft"]["attention"] for rank in two.ranks] == ["distca"] * 2
    whole, resumed = (loaded(two.folder / path) for path in ("peft/final", "peft/resumed"))
    assert all(torch.equal(weight, whole[key]) for key, weight in resumed.items())


def test_b54_peft_under_trl_trains_as_in_one_process(two):
    initial = two.folder / "sft_peft" / "initial"
    model = PeftModel.from_pretrained(tiny("sdpa", dtype=torch.float32), initial, is_trainable=True)
    before = PeftModel.from_pretrained(tiny("sdpa", dtype=torch.float32), initial)
    right = plain_loop(replace(cases.TRAINED, options={"max_steps": 2}), world=2, model=model)
    steps = [entry for entry in two.ranks[0]["sft_peft"]["log"] if "loss" in entry]
    assert [entry["loss"] for entry in steps] == pytest.approx(right.losses, rel=CLOSE)
    assert [entry["grad_norm"] for entry in steps] == pytest.approx(right.norms, rel=CLOSE)
    assert_adapter(two.folder / "sft_peft" / "final", right.weights, moved_from=before)


def test_peft_adapters_with_virtual_tokens_are_refused(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny("distca", dtype=torch.float32), config)
    with pytest.raises(ValueError, match="PROMPT_TUNING puts virtual tokens .* such as LoRA"):
        LongCtxTrainer(model=model, args=arguments(cases.TRAINED, tmp_path))
