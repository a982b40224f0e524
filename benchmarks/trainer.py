"""Whole optimizer steps of two ranks -> seconds and memory of ours and of the stock Trainer.

The same documents, model, optimizer and tokens a rank on both sides:

- `ours`: `LongCtxTrainer` under `distca`, one batch shared by the ranks, nothing cut.
- `stock`: Transformers' `Trainer` under `sdpa` on TRL's `bfd` packs, one a rank, which cut every
  document at the tokens of one rank.

Each launch starts fresh processes, and launches alternate, so that drift meets both sides alike.
The first step of a launch warms up; its seed picks the packs, the same on both sides' turns.
"""

import logging
import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback

from benchmarks.common import SEED, Shape, product_rate
from benchmarks.peers import bfd_packs, stock_trainer
from benchmarks.steps import Launch, PeakMemory, StepClock, figures
from benchmarks.texts import addresses, save_cut_model
from hf_longctx.config import LongCtxTrainingArguments
from hf_longctx.training.trainer import LongCtxTrainer
from hf_longctx.verify.cost_profile import keep_pages, setting
from hf_longctx.verify.rank_pool import RankContext, RankPool

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


def run_rank(context: RankContext, *, case: Case, side: str, packs: Any, seed: int) -> Launch:
    """One rank of one launch: load, train, report. The seed picks which packs come first."""
    ranks = {"RANK": context.rank, "LOCAL_RANK": context.rank, "WORLD_SIZE": context.ranks}
    os.environ |= {key: str(value) for key, value in ranks.items()}  # as a launcher sets them
    os.environ["LOCAL_WORLD_SIZE"] = str(context.ranks)
    launch = Launch(allocator=keep_pages())
    memory = PeakMemory()
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
        clock = StepClock(launch, rank=context.rank)
        model.register_forward_pre_hook(clock.see, with_kwargs=True)
        trainer.add_callback(clock)
        trainer.train()
    launch.peak_memory = memory.grown()
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
    torch.set_num_threads(1)
    rate = product_rate()
    found: dict[str, list[list[Launch]]] = {side: [] for side in SIDES}
    for number in range(launches):
        for side in SIDES:
            logger.info("%s, launch %d of %d", side, number + 1, launches)
            with RankPool(case.ranks, timeout=600) as pool:
                found[side].append(
                    pool.run(run_rank, case=case, side=side, packs=packs, seed=SEED + number)
                )
    config = AutoConfig.from_pretrained(case.folder)
    shape = Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
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
        "product_gflops": rate / 1e9,
        "launches": launches,
        "steps": case.steps,
        "documents": len(case.documents),
        "tokens": sum(map(len, case.documents)),
        "tokens_kept_stock": sum(len(pack["input_ids"]) for pack in packs),
        **figures(found, shape=shape, rate=rate),
    }
