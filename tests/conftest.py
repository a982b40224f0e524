"""Settings that must hold before any test module imports torch or a Hugging Face library."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hf_longctx.comm.processes import RankPool

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that asks the hub for a file fails at once
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores; sums keep one order


@pytest.fixture(scope="session")
def rank_pool() -> Iterator["RankPool"]:
    """Four gloo ranks, started by the first test that sends them a job."""
    from hf_longctx.comm.processes import RankPool  # after the settings above

    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint with its tokenizer, and texts, for scripts that know nothing of us."""
    from run_scripts import make_checkpoint  # after the settings above

    place: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(place)
    return place
