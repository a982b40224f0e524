"""Whole runs over 2 and 3 trainers follow the curves that stock Trainer gave on one process.

`python tests/parity_cases.py` writes those curves again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import parity_cases
import pytest
from parity_cases import CASES, CURVES, STEPS, TOKENS, lengths, stock
from train_cases import launch

# float32 rounding moved no figure by more than 2.2e-7 and no mean by more than 4e-8 when these were
# chosen; the rest is room for kernels of other processors
EACH_STEP = 1e-5
MEAN = 5e-7
RIGHT = {key: np.array(curve) for key, curve in json.loads(CURVES.read_text()).items()}
RUNS = [(2, name) for name in CASES] + [(3, name) for name in CASES if name != "fsdp2"]


def residuals(found: dict[str, list[float]], key: str) -> np.ndarray:
    """Relative difference of each step from stock Trainer's."""
    return np.array(found[key]) / RIGHT[key] - 1


def biased(residual: np.ndarray) -> bool:
    """Whether the mean is further from zero than chance and rounding explain: a constant factor
    shifts every step alike, so it shows here long before it shows in one step."""
    error = residual.std(ddof=1) / np.sqrt(residual.size)
    return bool(abs(residual.mean()) > 4 * error + MEAN)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[int, str], dict[str, Any]]:
    """Our runs, in one launch for each number of trainers."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for world in (2, 3):
        folder: Path = tmp_path_factory.mktemp(f"parity{world}")
        names = [name for ranks, name in RUNS if ranks == world]
        ended = launch(folder, *names, processes=world, script=parity_cases.__file__)
        assert ended.code == 0, ended.output[-8000:]
        results = json.loads((folder / "results.json").read_text())
        assert results["world"] == world
        found |= {(world, name): case for name, case in results["cases"].items()}
    return found


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
@pytest.mark.parametrize(("world", "name"), RUNS)
def test_b07_b08_a_run_follows_stock_trainer(runs, world, name, key):
    residual = residuals(runs[world, name], key)
    assert residual.size == STEPS
    assert np.abs(residual).max() < EACH_STEP, f"step {np.abs(residual).argmax() + 1}"
    assert not biased(residual), residual.mean()


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4, 1 + 3e-6])
def test_b08_a_constant_factor_is_found(runs, factor):
    for case in runs.values():
        residual = (1 + residuals(case, "grad_norm")) * factor - 1
        assert biased(residual)
        if abs(factor - 1) < EACH_STEP:
            assert np.abs(residual).max() < EACH_STEP  # no single step tells


@pytest.mark.parametrize(("world", "name"), RUNS)
def test_each_step_has_the_same_documents(runs, world, name):
    of_step = np.array(lengths()).reshape(STEPS, 4).sum(1)
    assert runs[world, name]["tokens"] == of_step.tolist()
    assert of_step.max() <= TOKENS and len({*of_step.tolist()}) > 5


def test_the_committed_curves_are_those_of_stock_trainer(tmp_path):
    for key, curve in stock(tmp_path).items():
        assert np.abs(np.array(curve) / RIGHT[key] - 1).max() < EACH_STEP
    assert (
        RIGHT["loss"][-1] < RIGHT["loss"][0] / 2
    )  # the runs learn, so later steps tell of earlier
