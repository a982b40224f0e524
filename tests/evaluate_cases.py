"""Evaluate, pick best checkpoints and train adapters in one launch; each rank writes a JSON file.

`train_cases.launch` starts this file.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import trl
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import decode_two, documents, tiny
from tokenizers import Tokenizer, models
from train_cases import Case, arguments
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast, TrainerCallback

from hf_longctx import LongCtxArguments, LongCtxTrainer, LongCtxTrainerMixin

BUDGET = 96  # tokens of a batch, whatever the ranks
LENGTHS = (64, 1, 7, 30, 12, 90, 3, 5)
LONG = (130, 40, 9)  # the first is longer than a batch
PROMPT = torch.arange(7)[None] * 9 % 64


def rows(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Documents of which every other one has targets at its end only, and the third none."""
    found = documents(lengths, seed=9)
    for at, row in enumerate(found):
        ids = row["input_ids"]
        first = len(ids) if at == 2 else (at % 2) * (len(ids) - 10)
        row["labels"] = [-100 if i < first else token for i, token in enumerate(ids)]
    return found


class Labelled(Case):
    """Trains on documents with labels of `rows`."""

    def rows(self) -> list[dict[str, list[int]]]:
        return rows(self.lengths)


TRAINED = Labelled(lengths=(150, 30, 17, 1, 64, 40, 9, 96, 2, 33))


def metrics(given: Any) -> dict[str, float]:
    """Of whole documents: whatever shifts, as metrics of language models do."""
    wanted = given.label_ids[:, 1:]
    kept, before = wanted != -100, given.predictions[:, :-1]
    if before.ndim == 2:
        found = {"accuracy": float((before == wanted)[kept].mean())}
    else:
        at = torch.from_numpy(before[kept]).log_softmax(-1)
        found = {"nll": float(-at[torch.arange(len(at)), wanted[kept]].mean())}
        found["eval_best"] = float((before.argmax(-1) == wanted)[kept].mean())
    if given.inputs is not None:
        found["tokens"] = float((given.inputs != -100).sum())
    return found


def best(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A `preprocess_logits_for_metrics`."""
    return logits.argmax(-1)


@dataclass(kw_only=True)
class SFTArguments(LongCtxArguments, trl.SFTConfig):
    """TRL's arguments with ours."""


class SFTLongCtxTrainer(LongCtxTrainerMixin, trl.SFTTrainer):
    """TRL's trainer on shared batches."""


PREDICT: dict[str, dict[str, Any]] = {
    "whole": {},
    "classes": {"include_for_metrics": ["inputs"], "longctx_layout": "zigzag"},
    "groups": {
        "longctx_group_size": 1,
        "longctx_max_tokens_per_rank": BUDGET,
        "dataloader_num_workers": 1,  # batches pickle
        "eval_accumulation_steps": 1,
    },
    "split": {"longctx_overflow": "split"},
    "truncate": {"longctx_overflow": "truncate"},
}


def trainer_of(name: str, folder: Path, *, model: Any = None, **options: Any) -> LongCtxTrainer:
    """A trainer that evaluates documents of `LENGTHS` with `metrics`."""
    given: dict[str, Any] = {
        "longctx_max_tokens_per_rank": BUDGET // PartialState().num_processes,
        "longctx_overflow": "split",
    }
    return LongCtxTrainer(
        model=model or tiny("ring" if name == "groups" else "distca", dtype=torch.float32),
        args=arguments(TRAINED, folder, **given | options),
        train_dataset=Dataset.from_list(TRAINED.rows()),
        eval_dataset=Dataset.from_list(rows(LENGTHS)),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=best if name == "classes" else None,
    )


def run_predict(name: str, folder: Path) -> dict[str, Any]:
    """Predictions of whole documents, kept as arrays of each rank."""
    trainer = trainer_of(name, folder, **PREDICT[name])
    lengths = LONG if name in ("split", "truncate") else LENGTHS
    found = trainer.predict(Dataset.from_list(rows(lengths)))
    folder.mkdir(parents=True, exist_ok=True)
    rank = PartialState().process_index
    np.savez(folder / f"{rank}.npz", predictions=found.predictions, labels=found.label_ids)
    return {"predict": found.metrics, "evaluate": trainer.evaluate()}


def sft(folder: Path, *, accumulated: int = 1, **given: Any) -> SFTLongCtxTrainer:
    """A TRL trainer of the same documents, cut so that ranks without targets turn up."""
    tokens = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    special = {"pad_token": "0", "unk_token": "0", "eos_token": "1"}
    args = SFTArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        longctx_max_tokens_per_rank=BUDGET // PartialState().num_processes,
        longctx_overflow="split",
        longctx_layout="contiguous",
        max_length=None,
        max_steps=2,
        gradient_accumulation_steps=accumulated,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return SFTLongCtxTrainer(
        model=tiny("distca", dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(TRAINED.rows()),
        eval_dataset=Dataset.from_list(rows(LENGTHS)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, **special),
        **given,
    )


def run_sft(name: str, folder: Path) -> dict[str, Any]:
    """Evaluate under TRL's trainer: twice, since its metrics of a prediction must not be left."""
    trainer = sft(folder)
    counts = [int(x["shift_labels"].ne(-100).sum()) for x in trainer.get_eval_dataloader()]
    trainer.predict(Dataset.from_list(rows(LONG)))
    trainer.evaluate()
    trainer.compute_metrics = metrics
    return {"log": trainer.state.log_history, "targets": counts, "evaluate": trainer.evaluate()}


def run_best(name: str, folder: Path) -> dict[str, Any]:
    """Train until the evaluation gets no better, and load the best checkpoint."""
    peft, _, metric = name.rpartition("_")
    trainer = trainer_of(
        name,
        folder,
        model=adapted("distca") if peft else None,
        max_steps=12,
        learning_rate=3.0 if peft else 1.0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=False,
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return {
        "log": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "attention": trainer.model.config._attn_implementation,
        "again": trainer.evaluate()["eval_loss"],
    }


def decoded(model: Any) -> list[torch.Tensor]:
    """Four tokens after seven, on a cache; and the logits of two decoded at once onto one."""
    with torch.no_grad():
        tokens = model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=4,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return [tokens, decode_two(model, PROMPT)]


def run_generate(name: str, folder: Path) -> dict[str, Any]:
    """Generate while an evaluation runs: in metrics and in a callback, on all ranks and on one."""
    found: dict[str, list[Any]] = {"metrics": [], "callback": [], "sent": []}
    trainer = trainer_of(name, folder, max_steps=2, eval_strategy="steps", eval_steps=1)
    rank = PartialState().process_index

    def compare(place: str, model: Any) -> None:
        before = trainer.longctx_runtime.sent_bytes
        ours, stock = decoded(model), copy.deepcopy(model)
        found["sent"].append(trainer.longctx_runtime.sent_bytes - before)
        stock.set_attn_implementation("sdpa")
        right = decoded(stock)
        equal = torch.equal(ours[0], right[0]) and torch.allclose(ours[1], right[1], atol=1e-5)
        found[place].append([equal, ours[0].shape[1], list(ours[1].shape)])

    class Generates(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            compare("callback", kwargs["model"])
            if rank == 0:  # alone: the other rank goes on to the next step
                compare("callback", kwargs["model"])

    def alone(given: Any) -> dict[str, float]:
        if rank == 0:
            compare("metrics", trainer.model)
        return metrics(given)

    trainer.compute_metrics = alone
    trainer.add_callback(Generates())
    trainer.train()
    return found | {"steps": trainer.state.global_step}


def adapted(name: str, **given: Any) -> Any:
    """Tiny Llama with adapters of rank 4 on queries and values, the same ones each time."""
    torch.manual_seed(0)
    return get_peft_model(tiny(name, dtype=torch.float32), lora(**given))


def lora(**given: Any) -> LoraConfig:
    """Random, so that both halves get gradients in the first step."""
    modules = ["q_proj", "v_proj"]
    return LoraConfig(
        r=4, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False, **given
    )


PEFT: dict[str, dict[str, Any]] = {
    "peft": {},
    "peft_head": {"modules_to_save": ["lm_head"]},
    "peft_reentrant": {"use_reentrant": True},
    "peft_nonreentrant": {"use_reentrant": False},
}


class Gradients(TrainerCallback):
    """Keeps which weights have gradients."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.names |= {name for name, p in named if p.grad is not None}


def run_peft(name: str, folder: Path) -> dict[str, Any]:
    """Train adapters; then go on from the second step."""
    how, options = dict(PEFT[name]), {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    if "use_reentrant" in how:
        options |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": how}
        how = {}
    gradients = Gradients()
    trainer = trainer_of(name, folder, model=adapted("distca", **how), **options)
    trainer.add_callback(gradients)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    found = {
        "log": trainer.state.log_history,
        "gradients": sorted(gradients.names),
        "evaluate": trainer.evaluate(),
    }
    if name == "peft":
        model = adapted("sdpa")
        again = trainer_of(name, folder / "again", model=model, **options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        again.save_model(str(folder / "resumed"))
        found["attention"] = again.longctx_attention
    return found


def run_sft_peft(name: str, folder: Path) -> dict[str, Any]:
    """Train adapters that TRL puts on, once the untrained ones were evaluated."""
    trainer = sft(folder, peft_config=lora())
    trainer.save_model(str(folder / "initial"))
    trainer.evaluate()  # which prepares the model without DDP
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return {"log": trainer.state.log_history}


RUNS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    **dict.fromkeys(PREDICT, run_predict),
    "sft": run_sft,
    "loss": run_best,
    "nll": run_best,
    "peft_nll": run_best,
    "generate": run_generate,
    **dict.fromkeys(PEFT, run_peft),
    "sft_peft": run_sft_peft,
}


def main(folder: Path, names: list[str]) -> None:
    """Run the named cases; every rank writes what it found."""
    torch.set_num_threads(1)
    found = {name: RUNS[name](name, folder / name) for name in names}
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
