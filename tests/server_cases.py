"""Training runs with extra attention servers, in one `accelerate launch` -> what came of them.

accelerate launch --config_file accelerate_configs/cpu_2.yaml tests/server_cases.py FOLDER CASES
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import train_cases

LENGTHS = (900, 30, 17, 1, 364, 640, 9, 96, 2, 833)
OPTIONS = {
    "longctx_max_tokens_per_rank": 640,
    "num_train_epochs": 2,
    "longctx_server_timeout": 20.0,
}


def case(servers: int, **options: Any) -> train_cases.Case:
    """Documents long enough for the planner to move pieces of them."""
    given = OPTIONS | {"longctx_servers": servers} | options
    return train_cases.Case(lengths=LENGTHS, options=given)


CASES = {
    "in_place": case(0),
    "one_server": case(1),
    "alone_in_place": case(0, longctx_group_size=1),
    "each_its_own": case(2, longctx_group_size=1),
}


def perform(name: str, folder: Path) -> dict[str, Any]:
    """Train a case; see `train_cases.run`."""
    train_cases.CASES[name] = CASES[name]
    return train_cases.run(name, folder)


if __name__ == "__main__":
    train_cases.main(Path(sys.argv[1]), sys.argv[2:], perform=perform)
