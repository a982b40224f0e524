"""Verifies every family over ranks and layouts; prints the README's tables of worst errors.

    python examples/verify_families.py [FAMILY ...]

Each row is the worst of logits, loss and gradients: of softmax families under `distca` and `ring`
over 1, 2 and 3 ranks and the layouts contiguous, zigzag and spread; of families with recurrent
layers under `zeco_linear` over 1 to 4 ranks. For one of them `hf-longctx verify` prints the same.
"""

import sys
from itertools import product
from pathlib import Path

import torch

from hf_longctx import LongCtxArguments
from hf_longctx.verify.compare import verify
from hf_longctx.verify.rank_pool import RankPool

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "configs"
SOFTMAX = ("distca", "ring")
FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "phi3", "olmo3", "glm4",
    "smollm3", "mixtral",
)  # fmt: skip
RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "minimax", "lfm2",
    "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "mamba",
    "falcon_mamba", "jamba",
)  # fmt: skip
RUNS = {name: tuple(product((1, 2, 3), ("contiguous", "zigzag", "spread"))) for name in SOFTMAX}
RUNS["zeco_linear"] = tuple(product((1, 2, 3, 4), ("contiguous",)))
ERRORS = ("logit_error", "loss_error", "grad_error")


def worst(family: str, *, name: str, pool: RankPool) -> list[float]:
    """The worst error against the float64 twin, the worst against Transformers, and the leak.

    Raises:
        RuntimeError: where a bound does not hold.
    """
    reports = [
        verify(
            model=str(CONFIGS / f"tiny_{family}.json"),
            name=name,
            ranks=ranks,
            arguments=LongCtxArguments(longctx_layout=layout),
            pool=pool,
        )
        for ranks, layout in RUNS[name]
    ]
    failed = [reason for report in reports for reason in report["failed"]]
    if failed:
        raise RuntimeError(f"{family} under {name}: {'; '.join(failed)}")
    return [
        max(report[key] for report in reports for key in ERRORS),
        max(report[f"{key}_vs_transformers"] for report in reports for key in ERRORS),
        max(report["leak"] for report in reports),
    ]


def main(families: list[str]) -> None:
    """Print the table, a row per family."""
    torch.set_num_threads(1)
    with RankPool(4) as pool:
        for family in families or FAMILIES + RECURRENT:
            names = ("zeco_linear",) if family in RECURRENT else SOFTMAX
            figures = [value for name in names for value in worst(family, name=name, pool=pool)]
            cells = [f"{value:.1e}" if value else "0" for value in figures]
            print(f"| {family} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
