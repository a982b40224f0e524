"""Whole optimizer steps of two ranks -> seconds and memory of ours and of the stock Trainer.

Floor: bench. The same documents, model, optimizer and tokens a rank on both sides:

- `ours`: `LongCtxTrainer` under `distca`, one batch shared by the ranks, nothing cut.
- `stock`: Transformers' `Trainer` under `sdpa` on TRL's `bfd` packs, one a rank, which cut every
  document at the tokens of one rank.

Each launch starts fresh processes, and launches alternate, so that drift meets both sides alike. A
step lasts from the end of the one before, on the rank that ends last: data, forward, backward,
optimizer and log. The first step warms up. Figures are medians over the steps of all launches.
"""

import logging
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import mean, median
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback

from ..arguments import LongCtxTrainingArguments
from ..comm.processes import RankContext, RankPool
from ..training.trainer import LongCtxTrainer
from .common import SEED, keep_pages, setting
from .peers import bfd_packs, stock_trainer
from .texts import addresses, save_cut_model

logger = logging.getLogger(__name__)
SIDES = {"ours": "distca", "stock": "sdpa"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both sides train.

    Args:
        folder (`str`): Checkpoint to load.
        documents (`list[list[int]]`): Token ids of each.
        tokens_per_rank (`int`): Budget of one rank and step.
        steps (`int`): Measured steps of a launch, after one that warms up.
        ranks (`int`, *optional*, defaults to 2): Trainers.
    """

    folder: str
    documents: list[list[int]]
    tokens_per_rank: int
    steps: int
    ranks: int = 2


@dataclass(slots=True)
class Launch:
    """What one rank measured in one launch.

    Args:
        wall, cpu (`list[float]`): Seconds of each step after the first.
        tokens (`list[int]`): Tokens of all ranks in those steps.
        peak_memory (`int`): Growth of the largest resident set, in bytes, over that before loading.
        history (`list[dict[str, float]]`): The trainer's log.
        allocator (`str`): How memory is kept.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_memory: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    allocator: str = ""


class StepClock(TrainerCallback):
    """Seconds and tokens between the ends of steps, into a `Launch`."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.last: tuple[float, float, int] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note how far it is from the step before."""
        now = time.perf_counter(), time.process_time(), int(state.num_input_tokens_seen)
        if self.last is not None:
            self.launch.wall.append(now[0] - self.last[0])
            self.launch.cpu.append(now[1] - self.last[1])
            self.launch.tokens.append(now[2] - self.last[2])
        self.last = now


def run_rank(context: RankContext, *, case: Case, side: str, packs: Any, seed: int) -> Launch:
    """One rank of one launch: load, train, report. The seed picks which packs come first."""
    ranks = {"RANK": context.rank, "LOCAL_RANK": context.rank, "WORLD_SIZE": context.ranks}
    os.environ |= {key: str(value) for key, value in ranks.items()}  # as a launcher sets them
    os.environ["LOCAL_WORLD_SIZE"] = str(context.ranks)
    launch = Launch(allocator=keep_pages())
    before = peak_resident()
    model = AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=torch.float32, attn_implementation=SIDES[side]
    )
    with tempfile.TemporaryDirectory() as output:
        options = {
            "output_dir": output,
            "use_cpu": True,
            "max_steps": 1 + case.steps,
            "learning_rate": 2e-5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "ddp_find_unused_parameters": False,
            "include_num_input_tokens_seen": "all",
            "seed": seed,
        }
        trainer: Any = (
            stock_trainer(model, packs, **options)
            if side == "stock"
            else our_trainer(model, case, **options)
        )
        trainer.remove_callback(PrinterCallback)  # standard output is for the figures
        trainer.add_callback(StepClock(launch))
        trainer.train()
    launch.peak_memory = peak_resident() - before
    launch.history = trainer.state.log_history
    return launch


def our_trainer(model: Any, case: Case, **options: Any) -> LongCtxTrainer:
    """`LongCtxTrainer` on the documents, with every `longctx_*` flag but the budget at its default.

    Args:
        model: Under one of our names.
        case (`Case`): Documents and budget.
        options: Fields of `TrainingArguments`.
    """
    options["longctx_max_tokens_per_rank"] = case.tokens_per_rank
    return LongCtxTrainer(
        model=model,
        args=LongCtxTrainingArguments(**options),
        train_dataset=Dataset.from_dict({"input_ids": case.documents}),
    )


def peak_resident() -> int:
    """Bytes of the largest resident set that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


def run(
    *,
    layers: int = 6,
    documents: int = 24,
    tokens_per_rank: int = 4096,
    steps: int = 2,
    launches: int = 2,
) -> dict[str, Any]:
    """Run the bench on SmolLM2 and addresses that fit a batch of both ranks.

    Args:
        layers (`int`, *optional*, defaults to 6): Layers of SmolLM2 that are kept.
        documents (`int`, *optional*, defaults to 24): Addresses.
        tokens_per_rank (`int`, *optional*, defaults to 4096): Budget of one rank and step.
        steps (`int`, *optional*, defaults to 2): Measured steps of a launch.
        launches (`int`, *optional*, defaults to 2): Of each side.

    Returns:
        Figures by name.

    Raises:
        ValueError: where a package that the bench needs is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        logger.info("preparing SmolLM2 with %d layers and %d addresses", layers, documents)
        save_cut_model(folder, layers=layers)
        case = Case(
            folder=folder,
            documents=addresses(count=documents, longest=2 * tokens_per_rank),
            tokens_per_rank=tokens_per_rank,
            steps=steps,
        )
        return measure(case, launches=launches)


def measure(case: Case, *, launches: int) -> dict[str, Any]:
    """Both sides in turn, each launch in fresh processes -> figures by name."""
    packs = bfd_packs(case.documents, length=case.tokens_per_rank)
    found: dict[str, list[list[Launch]]] = {side: [] for side in SIDES}
    for number in range(launches):
        for side in SIDES:
            logger.info("%s, launch %d of %d", side, number + 1, launches)
            with RankPool(case.ranks, timeout=600) as pool:
                found[side].append(
                    pool.run(run_rank, case=case, side=side, packs=packs, seed=SEED + number)
                )
    config = AutoConfig.from_pretrained(case.folder)
    shape = (
        f"{config.model_type}, layers {config.num_hidden_layers}, hidden {config.hidden_size}, "
        f"heads {config.num_attention_heads}, kv_heads {config.num_key_value_heads}, "
        f"vocabulary {config.vocab_size}"
    )
    clock = "wall seconds from step end to step end, on the rank that ends last"
    return {
        **setting(
            shape,
            processes=case.ranks,
            allocator=found["ours"][0][0].allocator,
            clock=clock,
        ),
        "accelerate": version("accelerate"),
        "trl": version("trl"),
        "tokens_per_rank": case.tokens_per_rank,
        "launches": launches,
        "steps": case.steps,
        "documents": len(case.documents),
        "tokens": sum(map(len, case.documents)),
        "tokens_kept_stock": sum(len(pack["input_ids"]) for pack in packs),
        **figures(found),
    }


def figures(found: Mapping[str, Sequence[Sequence[Launch]]]) -> dict[str, Any]:
    """What the ranks of each side's launches measured -> ratios (ours / stock), and both sides."""
    seconds: dict[str, float] = {}
    tokens: dict[str, float] = {}
    cpu: dict[str, float] = {}
    result: dict[str, dict[str, Any]] = {}
    for side, launches in found.items():
        seconds[side] = median(mean(slowest(ranks, "wall")) for ranks in launches)
        tokens[side] = mean(mean(ranks[0].tokens) for ranks in launches)
        cpu[side] = median(mean(slowest(ranks, "cpu")) for ranks in launches)
        result[side] = {
            "seconds_per_step": seconds[side],
            "cpu_seconds_per_step": cpu[side],
            "tokens_per_step": tokens[side],
            "seconds_per_1000_tokens": 1000 * seconds[side] / tokens[side],
            **{
                f"peak_memory_rank{rank}": max(ranks[rank].peak_memory for ranks in launches)
                for rank in range(len(launches[0]))
            },
            "loss_first_step": launches[0][0].history[0]["loss"],
            "seconds_of_steps": [
                [round(s, 2) for s in slowest(ranks, "wall")] for ranks in launches
            ],
        }
    logs = [log for log in found["ours"][0][0].history if "longctx_tokens" in log][1:]
    step_time = seconds["ours"] / seconds["stock"]
    return {
        "step_time_ratio": step_time,
        "token_time_ratio": step_time * tokens["stock"] / tokens["ours"],
        "cpu_time_ratio": cpu["ours"] / cpu["stock"],
        "peak_memory_ratio": peak(found["ours"]) / peak(found["stock"]),
        "attention_max_over_mean_before": mean(log["longctx_attention_before"] for log in logs),
        "attention_max_over_mean": mean(log["longctx_attention_after"] for log in logs),
        "wait_seconds_per_step": mean(log["longctx_wait_seconds"] for log in logs),
        **result,
    }


def slowest(ranks: Sequence[Launch], clock: str) -> list[float]:
    """The seconds of each step on the rank that took longest."""
    return [max(taken) for taken in zip(*(getattr(r, clock) for r in ranks), strict=True)]


def peak(launches: Sequence[Sequence[Launch]]) -> int:
    """The largest growth of any rank of a side."""
    return max(rank.peak_memory for ranks in launches for rank in ranks)
