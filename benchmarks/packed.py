"""One process's packed batch -> how fast ours trains on it, beside `sdpa` and documents alone.

Sides run in turn; each figure is the median over rounds of the ratio within a round.
Seconds are CPU seconds of the one thread: nothing waits, so other processes must not count.

- `ours`: `distca` without a runtime; documents come from `position_ids`.
- `separate`: stock `sdpa` on each document alone: no mask, no padding, nothing to cut.
- `loop`: six lines that anyone would write: `sdpa` on each document of the packed batch.
- `sdpa`: stock `sdpa` on the packed batch, under the mask that Transformers makes.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from benchmarks.common import (
    SEED,
    Shape,
    differentiate,
    gradient_error,
    gradients,
    inputs,
    product_rate,
)
from hf_longctx.attention.boundaries import local_documents
from hf_longctx.attention.masks import attention_mask
from hf_longctx.verify.cost_profile import BUCKETS, keep_pages, setting

logger = logging.getLogger(__name__)
ONCE = ("loop", "sdpa")  # compared with each other, and `sdpa` takes four times as long as ours
_NAMES = {"ours": "distca", "separate": "sdpa", "loop": "document_loop", "sdpa": "sdpa"}


def draw_lengths(
    *, tokens: int = 8192, cap: int = 2048, seed: int | Sequence[int] = SEED
) -> list[int]:
    """Document lengths from `BUCKETS`, log-uniform inside each, capped; the last is cut to fit."""
    noise = np.random.default_rng(seed)
    shares = np.asarray(list(BUCKETS.values()))
    highs = list(BUCKETS)
    lows = [1, *(high + 1 for high in highs[:-1])]
    lengths: list[int] = []
    while sum(lengths) < tokens:
        bucket = noise.choice(len(highs), p=shares / shares.sum())
        drawn = int(np.exp(noise.uniform(np.log(lows[bucket]), np.log(highs[bucket] + 1))))
        lengths.append(min(drawn, cap, tokens - sum(lengths)))
    return lengths


def document_loop(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The loop that anyone would write: `[1, H, T, D]` -> `[1, T, H, D]`."""
    positions = kwargs["position_ids"]
    lengths = local_documents(batch=1, rows=query.shape[2], position_ids=positions)
    outs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    ]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the sides of one case took.

    Args:
        lengths (`Sequence[int]`): Tokens of each document.
        bound (`float`): Seconds of the case's floating-point operations at the rate of one large
            matrix product.
        cpu, wall (`dict[str, list[float]]`): Seconds of each round, by side.
        loss_error, grad_error (`float`): Of the worst side, against documents alone.
    """

    lengths: Sequence[int]
    bound: float
    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]
    loss_error: float
    grad_error: float

    def ratio(self, over: str, under: str) -> float:
        """Seconds of one side over those of another: the median over the rounds both ran in."""
        return median(a / b for a, b in zip(self.cpu[over], self.cpu[under], strict=False))

    def figures(self) -> dict[str, Any]:
        """Medians by side, and the fraction of the bound that each reached."""
        seconds = {side: median(taken) for side, taken in self.cpu.items()}
        return {
            "documents": len(self.lengths),
            "tokens": sum(self.lengths),
            **{f"seconds_{side}": value for side, value in seconds.items()},
            **{f"wall_seconds_{side}": median(taken) for side, taken in self.wall.items()},
            "bound_seconds": self.bound,
            **{f"fraction_of_bound_{side}": self.bound / s for side, s in seconds.items()},
            "loss_error": self.loss_error,
            "grad_error": self.grad_error,
        }


def measure(
    shape: Shape, lengths: Sequence[int], *, sides: Sequence[str], rounds: int, rate: float
) -> Measured:
    """Forward and backward of one model over the same documents, by every side in turn.

    Args:
        shape (`Shape`): The model.
        lengths (`Sequence[int]`): Tokens of each document.
        sides (`Sequence[str]`): Keys of `_NAMES`, `separate` first.
        rounds (`int`): How often; those in `ONCE` run in the first round only.
        rate (`float`): Floating-point operations per second of one large matrix product.
    """
    logger.info("%d documents: %s in turn, %d rounds", len(lengths), ", ".join(sides), rounds)
    model = shape.model()
    packed = inputs(lengths, vocabulary=shape.vocabulary)
    alone = split(packed, lengths)
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    wall: dict[str, list[float]] = {side: [] for side in sides}
    loss_error = grad_error = 0.0
    model.set_attn_implementation(_NAMES["ours"])
    differentiate(model, [packed])  # warms up: the allocator fetches its pages here
    for number in range(rounds):
        for side in sides if number == 0 else [side for side in sides if side not in ONCE]:
            model.set_attn_implementation(_NAMES[side])
            model.zero_grad()
            started = time.process_time(), time.perf_counter()
            loss = differentiate(model, alone if side == "separate" else [packed])
            taken = time.process_time() - started[0], time.perf_counter() - started[1]
            cpu[side].append(taken[0])
            wall[side].append(taken[1])
            if side == "separate":
                right, right_loss = gradients(model), loss
            elif number == 0:
                loss_error = max(loss_error, abs(loss - right_loss) / right_loss)
                grad_error = max(grad_error, gradient_error(gradients(model), right))
    return Measured(
        lengths=lengths,
        bound=shape.operations(lengths) / rate,
        cpu=cpu,
        wall=wall,
        loss_error=loss_error,
        grad_error=grad_error,
    )


def split(packed: Mapping[str, Tensor], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Each document of a packed batch as a batch of its own."""
    count = packed["num_items_in_batch"]
    names = ("input_ids", "labels", "shift_labels")
    rows = zip(*(packed[name].split(list(lengths), dim=1) for name in names), strict=True)
    return [{**dict(zip(names, r, strict=True)), "num_items_in_batch": count} for r in rows]


def run(
    *,
    shape: Shape | None = None,
    lengths: Sequence[int] | None = None,
    short: Sequence[int] = (32,) * 256,
    rounds: int = 3,
) -> dict[str, Any]:
    """Run the bench.

    Args:
        shape (`Shape`, *optional*): The model; that of every published figure by default.
        lengths (`Sequence[int]`, *optional*): Documents of the first case; drawn by default.
        short (`Sequence[int]`, *optional*): Documents of the second case.
        rounds (`int`, *optional*, defaults to 3): Of each side but those in `ONCE`.

    Returns:
        Figures by name; those of the second case under `short`.
    """
    torch.set_num_threads(1)
    allocator = keep_pages()
    AttentionInterface.register("document_loop", document_loop)
    AttentionMaskInterface.register("document_loop", attention_mask)
    shape = shape or Shape()
    lengths = draw_lengths() if lengths is None else lengths
    rate = product_rate()
    sides = ("separate", "ours", "loop", "sdpa")
    long = measure(shape, lengths, sides=sides, rounds=rounds, rate=rate)
    few = measure(shape, short, sides=sides[:2], rounds=rounds, rate=rate)
    return {
        **setting(shape, processes=1, allocator=allocator, clock="CPU seconds of the process"),
        "rounds": rounds,
        **{f"rounds_{side}": 1 for side in ONCE},
        "product_gflops": rate / 1e9,
        **long.figures(),
        "speedup_vs_sdpa": long.ratio("sdpa", "ours"),
        "loop_speedup": long.ratio("sdpa", "loop"),
        "fraction_of_separate": long.ratio("separate", "ours"),
        "loop_fraction_of_separate": long.ratio("separate", "loop"),
        "short": {**few.figures(), "speedup_vs_separate": few.ratio("separate", "ours")},
    }
