"""Packs documents for every family with recurrent layers; prints the README's table of leaks.

    python examples/packing_leaks.py [FAMILY ...]

Four documents in one row of `tests/configs/tiny_X.json`, told apart by `position_ids`, in float64
and with a decay of 0.05, on the CPU without further kernels. For plain Transformers (eager
attention) and for the same model after `hf_longctx.prepare`:

- error: how far the logits are from those of each document alone, by the largest;
- leak: the largest gradient of other documents' logits in one document's embeddings.
"""

import logging
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_longctx import prepare
from hf_longctx.support import RECURRENT_FAMILIES
from hf_longctx.verify.twins import build, precision

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "configs"
LENGTHS = (7, 1, 40, 65)
STARTS = (0, *accumulate(LENGTHS))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def packed_logits(model: Any, embeds: Tensor) -> Tensor:
    """`[T, vocabulary]` of all documents in one row."""
    found: Tensor = model(inputs_embeds=embeds, position_ids=POSITIONS, use_cache=False).logits[0]
    return found


def measured(model: Any, embeds: Tensor, right: Tensor) -> tuple[float, float]:
    """Error and leak of a model's packed logits."""
    out = packed_logits(model, embeds)
    leaks = []
    for start, stop in zip(STARTS, STARTS[1:], strict=False):
        others = torch.cat([out[:start], out[stop:]]).sum()
        (grad,) = torch.autograd.grad(others, embeds, retain_graph=True)
        leaks.append(float(grad[0, start:stop].abs().max()))
    return float((out - right).abs().max() / right.abs().max()), max(leaks)


def row(family: str) -> tuple[float, ...]:
    """Error and leak of plain Transformers, then of ours."""
    model = build(str(CONFIGS / f"tiny_{family}.json"), name="eager", dtype=torch.float64).eval()
    ids = torch.randint(0, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    with precision(torch.float64):
        alone = [
            model(inputs_embeds=e, use_cache=False).logits[0] for e in embeds.split(LENGTHS, 1)
        ]
        right = torch.cat(alone).detach()
        return *measured(model, embeds, right), *measured(prepare(model), embeds, right)


def main(families: list[str]) -> None:
    """Print the table, a row per family."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for family in families or [name.removesuffix("_text") for name in RECURRENT_FAMILIES]:
        cells = [f"{value:.1e}" if value else "0" for value in row(family)]
        print(f"| {family} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
