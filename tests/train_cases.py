"""Train a tiny Llama in small runs, many in one `accelerate launch`, and keep results as JSON.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml tests/train_cases.py FOLDER CASES

A start of the processes takes longer than all runs, so they share one. `launch` starts this file.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launching import launching


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Args:
        lengths (`tuple[int, ...]`): Documents.
        name (`str`): Attention name.
        targets (`tuple[int, ...]`): Of each document, the leading tokens that count as targets; all
            when left out.
        evaluation (`dict[str, tuple[int, ...]]`): Evaluation sets, as lengths.
        options (`dict[str, Any]`): Training arguments over `arguments`' defaults.
    """

    lengths: tuple[int, ...]
    name: str = "distca"
    targets: tuple[int, ...] = ()
    evaluation: dict[str, tuple[int, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, list[int]]]:
        """The training documents."""
        from tiny import documents

        rows = documents(self.lengths)
        for row, kept in zip(rows, self.targets, strict=False):
            row["labels"] = [i if at < kept else -100 for at, i in enumerate(row["input_ids"])]
        return rows

    def evaluation_rows(self) -> dict[str, list[dict[str, list[int]]]]:
        """The evaluation documents of each set."""
        from tiny import documents

        return {key: documents(lengths, seed=9) for key, lengths in self.evaluation.items()}


UNEVEN = (150, 30, 17, 1, 64, 40, 9, 96, 2, 33)
# Documents long enough for the planner to give servers pieces of them.
SERVED = (900, 30, 17, 1, 364, 640, 9, 96, 2, 833)
WITH_SERVERS = {
    "longctx_max_tokens_per_rank": 640,
    "num_train_epochs": 1,
    "gradient_accumulation_steps": 2,
    "longctx_server_timeout": 20.0,
}
LONG_AND_SHORT = {"long": (140, 71, 3), "short": (1, 2, 5, 96, 4)}
CASES = {
    "distca": Case(lengths=UNEVEN, options={"num_train_epochs": 2}),
    "ring": Case(lengths=UNEVEN, name="ring", options={"gradient_accumulation_steps": 2}),
    "groups": Case(lengths=(48,) * 5, options={"longctx_group_size": 1}),
    "groups_of_uneven": Case(
        lengths=UNEVEN,
        name="ring",
        options={
            "longctx_group_size": 1,
            "gradient_accumulation_steps": 2,
            "longctx_overflow": "truncate",
        },
    ),
    "twelve_packs": Case(
        lengths=(48,) * 12,
        options={
            "longctx_group_size": 1,
            "gradient_accumulation_steps": 2,
            "lr_scheduler_type": "linear",
        },
    ),
    "one_document": Case(lengths=(64,), options={"longctx_max_tokens_per_rank": 64}),
    "no_targets": Case(
        lengths=(8, 8, 8),
        targets=(5, 0, 8),
        options={
            "longctx_max_tokens_per_rank": 4,
            "longctx_layout": "contiguous",
            "longctx_balance": "none",
            "train_sampling_strategy": "sequential",
        },
    ),
    "evaluate": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4},
    ),
    "evaluate_groups": Case(
        lengths=UNEVEN,
        evaluation=LONG_AND_SHORT,
        options={"longctx_group_size": 1, "eval_strategy": "epoch"},
    ),
    "reentrant": Case(
        lengths=UNEVEN,
        options={
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
    "nonreentrant": Case(
        lengths=UNEVEN,
        name="ring",
        options={
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
            "gradient_accumulation_steps": 2,
        },
    ),
    "workers": Case(
        lengths=UNEVEN,
        options={
            "dataloader_num_workers": 1,
            "dataloader_persistent_workers": True,
            "num_train_epochs": 2,
        },
    ),
    "resume": Case(
        lengths=UNEVEN,
        options={"num_train_epochs": 3, "optim": "adamw_torch", "save_strategy": "steps"},
    ),
    "digest": Case(lengths=(48,) * 8),
    "flags": Case(lengths=(48,) * 8, name="zeco_linear"),
    "apart": Case(lengths=UNEVEN, options={"use_cpu": False}),
    "kill": Case(lengths=UNEVEN),
    "kill_first": Case(lengths=UNEVEN),
    "raise": Case(lengths=UNEVEN),
}


def arguments(case: Case, folder: Path, **changes: Any) -> Any:
    """Training arguments of a case: plain SGD, so that weights show every gradient's scale."""
    from hf_longctx import LongCtxTrainingArguments

    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "longctx_max_tokens_per_rank": 48,
        "longctx_overflow": "split",
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_timeout": 60,
    }
    return LongCtxTrainingArguments(**given | case.options | changes)


def trainer_of(case: Case, folder: Path, *, model: Any = None, **changes: Any) -> Any:
    """The trainer of a case, in float32."""
    import torch
    from datasets import Dataset
    from tiny import tiny

    from hf_longctx import LongCtxTrainer

    sets = {key: Dataset.from_list(rows) for key, rows in case.evaluation_rows().items()}
    return LongCtxTrainer(
        model=model or tiny(case.name, dtype=torch.float32),
        args=arguments(case, folder, **changes),
        train_dataset=Dataset.from_list(case.rows()),
        eval_dataset=sets or None,
    )


def deepspeed_config(name: str) -> dict[str, Any]:
    """DeepSpeed's configuration, with the ZeRO stage of a case's name."""
    stage = int(name.removeprefix("deepspeed")[0])
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    auto = dict.fromkeys((*sizes, "gradient_clipping"), "auto")
    return {**auto, "zero_optimization": {"stage": stage}}


def sharded(name: str, folder: Path, *, family: str = "llama") -> Any:
    """A tiny model under an attention name, from a checkpoint, sharded while it loads."""
    import torch
    import torch.distributed as dist
    from tiny import tiny
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        tiny("sdpa", family=family, dtype=torch.float32).save_pretrained(folder / "start")
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder / "start",
        attn_implementation=name,
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    )


class Lines(logging.Handler):
    """Keeps what hf_longctx logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(name: str, folder: Path) -> dict[str, Any]:
    """Train a case to its end and save the model; the result is the same on all ranks."""
    lines, logger = Lines(), logging.getLogger("hf_longctx")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    trainer = trainer_of(CASES[name], folder)
    trainer.train()
    logger.removeHandler(lines)
    trainer.save_model(str(folder / "final"))
    result = {
        "history": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "scheduler": trainer.lr_scheduler.last_epoch,
        "batches": len(trainer.get_train_dataloader()),
        "summary": trainer.longctx_summary(),
        "lines": lines.lines,
    }
    if CASES[name].evaluation:
        given = trainer.eval_dataset["long"]
        predicted = trainer.predict(given)
        result["test_loss"] = predicted.metrics["test_loss"]
        result["eval_loss"] = trainer.evaluate()["eval_long_loss"]
    return result


def run_resume(name: str, folder: Path) -> dict[str, Any]:
    """Train with checkpoints; then go on from one within the second epoch, with stock attention."""
    import torch
    from tiny import tiny

    first = trainer_of(CASES[name], folder, save_steps=6)
    first.train()
    first.save_model(str(folder / "final"))
    lines = Lines()
    logging.getLogger("hf_longctx").addHandler(lines)
    second = trainer_of(
        CASES[name],
        folder / "again",
        model=tiny("sdpa", dtype=torch.float32),
        save_strategy="no",
    )
    second.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    second.save_model(str(folder / "resumed"))
    return {
        "history": first.state.log_history,
        "resumed": second.state.log_history,
        "batches": len(first.get_train_dataloader()),
        "attention": second.model.config._attn_implementation,
        "lines": lines.lines,
    }


def run_digest(name: str, folder: Path) -> dict[str, Any]:
    """Rank 1 draws with another seed than rank 0, documents of the same lengths."""
    rank = int(os.environ["RANK"])
    trainer = trainer_of(CASES[name], folder, data_seed=rank)
    try:
        trainer.train()
    except ValueError as error:
        return {"error": str(error), "steps": trainer.state.global_step}
    return {"error": "", "steps": trainer.state.global_step}


def run_flags(name: str, folder: Path) -> dict[str, Any]:
    """Rank 1 was started with another `--longctx_scan`, so that it would not measure links."""
    import torch
    from tiny import tiny

    case, scan = CASES[name], "tree" if os.environ["RANK"] == "1" else "auto"
    model = tiny(case.name, family="qwen3_next", dtype=torch.float32)
    trainer, began = trainer_of(case, folder, model=model, longctx_scan=scan), time.monotonic()
    try:
        trainer.train()
    except ValueError as error:
        steps, seconds = trainer.state.global_step, time.monotonic() - began
        return {"error": str(error), "steps": steps, "seconds": seconds}
    return {"error": ""}


def run_until_death(name: str, folder: Path) -> dict[str, Any]:
    """Rank 1, or the first one, dies or raises in its second step."""
    from transformers import TrainerCallback

    loses = 0 if name == "kill_first" else 1

    class Dies(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and args.process_index == loses:
                (folder.parent / "died").write_text(str(time.time()))
                if name.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(f"rank {args.process_index} raises")

    trainer = trainer_of(CASES[name], folder)
    trainer.add_callback(Dies())
    trainer.train()
    return {}


Perform = Callable[[str, Path], dict[str, Any]]
RUNS: dict[str, Perform] = {
    "resume": run_resume,
    "digest": run_digest,
    "flags": run_flags,
    "kill": run_until_death,
    "kill_first": run_until_death,
    "raise": run_until_death,
}


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Run one case."""
    return RUNS.get(name, run)(name, folder)


def main(folder: Path, names: list[str], *, perform: Perform = perform) -> None:
    """Run the named cases; rank 0 writes `results.json`."""
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    torch.set_num_threads(1)
    results = {name: perform(name, folder / name) for name in names}
    state = PartialState()
    if state.is_main_process:
        found = {
            "world": state.num_processes,
            "distributed_type": str(state.distributed_type),
            "cases": results,
        }
        (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How a launch ended.

    Args:
        code (`int`): Exit code of the launcher.
        output (`str`): What all processes printed.
        ended (`float`): When, in seconds since the epoch.
        left (`list[int]`): Processes of the launch that still ran a second later.
    """

    code: int
    output: str
    ended: float
    left: list[int]


def launch_pairs(folder: Path, cases: Iterable[str], *, script: str) -> Path:
    """Run a script's cases over two trainers, all in one launch."""
    ended = launch(folder, *cases, processes=2, script=script)
    assert ended.code == 0, ended.output[-8000:]
    assert ended.left == []
    return folder


def logged_by_pairs(folder: Path) -> dict[str, Any]:
    """What each case of `launch_pairs` logged."""
    found = json.loads((folder / "results.json").read_text())
    assert found["world"] == 2
    return found["cases"]


def launch(
    folder: Path,
    *names: str,
    processes: int,
    timeout: float = 240.0,
    script: str = __file__,
    forked: bool = True,
) -> Launched:
    """Run a script's cases under `accelerate launch` with the committed configuration."""
    command = ("--num_processes", str(processes), script, str(folder), *names)
    with launching(*command, forked=forked) as under_way:
        code = under_way.wait(seconds=timeout)
        at = time.time()
        if under_way.processes():
            time.sleep(1)
        left = under_way.processes()
        return Launched(code=code, output=under_way.printed(), ended=at, left=left)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
