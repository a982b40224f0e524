"""Compare plans made under different hash seeds, which order sets of strings differently."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

from helpers import GOLDEN_1

ROOT = Path(__file__).resolve().parents[2]
PRINT_DIGESTS = f"""
import sys

from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan

kind = LayerKind(query_width=8192, key_value_width=4096)
for algorithm in ("distca", "ring"):
    for layout in ("contiguous", "spread"):
        held = cut({[*chain(*GOLDEN_1)]}, ranks=4, layout=layout)
        options = PlanOptions(algorithm=algorithm, tolerance=0.1)
        digest = make_plan(held, kind=kind, options=options).digest
        sys.stdout.write(str(digest) + chr(10))
"""


def printed(*, seed: int) -> list[int]:
    """Digests that a new interpreter computes under this hash seed."""
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_DIGESTS],
        env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [int(line) for line in ran.stdout.split()]


def test_digests_ignore_the_hash_seed() -> None:
    first = printed(seed=12345)
    assert first == printed(seed=0) and len(set(first)) == 4
