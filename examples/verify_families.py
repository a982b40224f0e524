"""Verifies every softmax family over ranks and layouts; prints the README's table of worst errors.

    python examples/verify_families.py [FAMILY ...]

Each row is the worst of 1, 2 and 3 ranks under the layouts contiguous, zigzag and spread: what
`hf-longctx verify --model tests/configs/tiny_FAMILY.json` prints for one of them.
"""

import sys
from itertools import product
from pathlib import Path

import torch

from hf_longctx import LongCtxArguments
from hf_longctx.comm.processes import RankPool
from hf_longctx.verify.compare import verify

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "configs"
FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "phi3", "olmo3", "glm4",
    "smollm3", "mixtral",
)  # fmt: skip
RANKS = (1, 2, 3)
LAYOUTS = ("contiguous", "zigzag", "spread")
KEYS = ("logit_error", "loss_error", "grad_error", "leak")


def row(family: str, *, name: str, pool: RankPool) -> str:
    """The worst figures of one family under one attention name, as a line of the table."""
    reports = [
        verify(
            model=str(CONFIGS / f"tiny_{family}.json"),
            name=name,
            ranks=ranks,
            arguments=LongCtxArguments(longctx_layout=layout),
            pool=pool,
        )
        for ranks, layout in product(RANKS, LAYOUTS)
    ]
    worst = [max(report[key] for report in reports) for key in KEYS]
    stock = max(report[f"{key}_vs_transformers"] for report in reports for key in KEYS[:3])
    failed = [reason for report in reports for reason in report["failed"]]
    cells = [f"{value:.1e}" if value else "0" for value in (*worst, stock)]
    return f"| {family} | `{name}` | {' | '.join(cells)} |" + "".join(f" {f}" for f in failed)


def main(families: list[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with RankPool(max(RANKS)) as pool:
        for family, name in product(families or FAMILIES, ("distca", "ring")):
            print(row(family, name=name, pool=pool), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
