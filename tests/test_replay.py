"""A window that lost a server runs again: weights, log and counts are those of a calm run."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import replay_cases
from replay_cases import STRIKES, STRUCK
from train_cases import launch

BESIDE = ("longctx_bytes_moved", "longctx_wait_seconds")  # of all exchanges, also void ones
DISTURBED = [(case, s) for case, strikes in STRUCK.items() for s in strikes if s != "none"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replay")
    ended = launch(folder, *STRUCK, processes=2, script=replay_cases.__file__)
    assert ended.code == 0, ended.output[-8000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["cases"]
    return found


def told(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The log without what depends on time or on void exchanges."""
    return [
        {
            k: v
            for k, v in entry.items()
            if k not in BESIDE and not k.endswith(("runtime", "second"))
        }
        for entry in run["history"]
    ]


@pytest.mark.parametrize(("case", "strike"), DISTURBED, ids="-".join)
def test_a_disturbed_run_is_bit_equal_to_a_calm_one(runs, case, strike):
    calm, run = runs[case]["none"], runs[case][strike]
    losses = len(STRIKES[strike])
    assert run["poisoned"] == [True] * losses  # else there was nothing to undo
    assert run["dropped"] == [[0]] * losses and run["replayed"] == losses
    assert run["batches"] > calm["batches"]
    assert run["weights"] == calm["weights"]
    assert told(run) == told(calm)  # losses, gradient norms, tokens, TRL's metrics


@pytest.mark.parametrize("case", STRUCK)
def test_a_calm_run_replays_nothing(runs, case):
    assert runs[case]["none"]["replayed"] == 0 and runs[case]["none"]["dropped"] == []


def test_gradients_were_clipped(runs):
    norms = [e["grad_norm"] for e in told(runs["lora"]["none"]) if "grad_norm" in e]
    assert min(norms) > replay_cases.ACCUMULATED["max_grad_norm"]


def test_nan_of_another_origin_stays(runs):
    run = runs["own"]["none"]
    assert math.isnan(told(run)[0]["loss"]) and all(map(math.isnan, run["weights"]))


@pytest.mark.parametrize("case", STRUCK)
def test_a_server_that_waits_joins_between_two_steps(runs, case):
    joined = [] if case == "own" else [1]  # its only step is the first
    assert all(run["admitted"] == joined for run in runs[case].values())
