"""`python -m benchmarks packed --model NAME`: recurrent layers on packed documents, beside stock.

Transformers' recurrent layers leak across packed documents, so its users run them one
by one or as a padded batch. Sides run in turn, each figure is the median over rounds of the ratio
within a round, in CPU seconds of the one thread.

- `ours`: the packed batch through a prepared model under `zeco_linear`, without a runtime.
- `separate`: stock code on each document alone. `padded`: on all of them, padded on the right.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import SEED, differentiate, gradient_error, gradients, inputs
from benchmarks.packed import split
from hf_longctx.recurrent.prepare import prepare
from hf_longctx.verify.cost_profile import keep_pages, setting

logger = logging.getLogger(__name__)
# An eighth of Qwen3-Next-80B-A3B's widths, its linear heads' sizes, few experts: seconds a side.
SHAPES: dict[str, dict[str, int]] = {
    "qwen3_next": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "vocab_size": 1024,
    }
}
_NAMES = {"ours": "zeco_linear", "separate": "sdpa", "padded": "sdpa"}


def draw_lengths(
    documents: int = 32, *, shortest: int = 16, longest: int = 512, seed: int = SEED
) -> list[int]:
    """Log-uniform lengths, both ends included."""
    noise = np.random.default_rng(seed).uniform(
        np.log(shortest), np.log(longest + 1), size=documents
    )
    return np.exp(noise).astype(int).tolist()


def padded(documents: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Documents `[1, T]` as rows of one batch, padded on the right; no target is a padding."""
    longest = max(document["input_ids"].shape[1] for document in documents)
    fills = {"input_ids": 0, "labels": -100, "shift_labels": -100}
    batch = {
        name: torch.cat(
            [
                torch.nn.functional.pad(d[name], (0, longest - d[name].shape[1]), value=fill)
                for d in documents
            ]
        )
        for name, fill in fills.items()
    }
    lengths = torch.tensor([document["input_ids"].shape[1] for document in documents])
    mask = torch.arange(longest) < lengths[:, None]
    count = documents[0]["num_items_in_batch"]
    return {**batch, "attention_mask": mask.long(), "num_items_in_batch": count}


def run(
    *,
    family: str = "qwen3_next",
    shape: Mapping[str, int] | None = None,
    lengths: Sequence[int] | None = None,
    rounds: int = 2,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        family (`str`, *optional*): A `model_type`, one of `SHAPES`.
        shape (`Mapping[str, int]`, *optional*): Fields of its config; those of `SHAPES` by default.
        lengths (`Sequence[int]`, *optional*): Of the documents; drawn by default.
        rounds (`int`, *optional*, defaults to 2): Of each side, after one to warm up.

    Returns:
        Figures by name.

    Raises:
        ValueError: on a family without a shape.
    """
    if family not in SHAPES:
        raise ValueError(
            f"--model {family}: the bench has no shape for it; use {', '.join(SHAPES)}"
        )
    torch.set_num_threads(1)
    allocator, shape = keep_pages(), SHAPES[family] if shape is None else shape
    lengths = draw_lengths() if lengths is None else lengths
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(family, use_cache=False, **shape)
    model = AutoModelForCausalLM.from_config(config).train()
    packed = inputs(lengths, vocabulary=shape["vocab_size"])
    alone = split(packed, lengths)
    batches = {"separate": alone, "padded": [padded(alone)], "ours": [packed]}
    seconds: dict[str, list[float]] = {side: [] for side in batches}
    errors: dict[str, dict[str, float]] = {}
    logger.info("%d documents: %s in turn, %d rounds", len(lengths), ", ".join(batches), rounds)
    for number in range(1 + rounds):  # the first one warms up: the allocator fetches its pages
        for side, given in batches.items():
            if side == "ours":
                prepare(model)  # from then on, too, calls without packed documents run stock code
            model.set_attn_implementation(_NAMES[side])
            model.zero_grad()
            started = time.process_time()
            loss = differentiate(model, given)
            taken = time.process_time() - started
            if number:
                seconds[side].append(taken)
            elif side == "separate":
                right, right_loss = gradients(model), loss
            else:
                errors[side] = {
                    "loss": abs(loss - right_loss) / right_loss,
                    "grad": gradient_error(gradients(model), right),
                }
    over = {
        side: median(a / b for a, b in zip(seconds[side], seconds["ours"], strict=True))
        for side in ("separate", "padded")
    }
    return {
        **setting(dict(shape), processes=1, allocator=allocator, clock="CPU seconds"),
        "model": family,
        "rounds": rounds,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "tokens_padded": max(lengths) * len(lengths),
        **{f"seconds_{side}": median(taken) for side, taken in seconds.items()},
        **{f"speedup_vs_{side}": ratio for side, ratio in over.items()},
        "speedup_vs_stock": min(over.values()),
        "loss_error": max(error["loss"] for error in errors.values()),
        "grad_error": max(error["grad"] for error in errors.values()),
        "errors": errors,
    }
