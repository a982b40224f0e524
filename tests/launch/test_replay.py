"""A window that lost a server runs again: weights, log and counts are those of a calm run."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import replay_cases
import torch
from replay_cases import STRIKES, STRUCK
from train_cases import launch

from hf_longctx.servers.replay import ReplayMixin
from hf_longctx.servers.server_pool import MAX_SERVERS
from hf_longctx.training.groups import Group, servers_per_group

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


@pytest.mark.parametrize(
    ("index", "lost", "joining"),
    [(0, set(), False), (1, {0, 2, 61}, True)],
    ids=["group0", "group1"],
)
def test_all_hear_of_a_loss_but_drop_only_their_own_group_s(index, lost, joining):
    told = []

    def gather(mine: torch.Tensor) -> torch.Tensor:
        told.append(mine.tolist())
        return torch.tensor([[0, 0], [0, 0], [1 << 61 | 1, 3], [4, 0]])

    trainer = object.__new__(ReplayMixin)
    trainer.longctx_group = Group(trainers=4, size=2, index=index, rank=0)
    trainer.accelerator = SimpleNamespace(device="cpu", gather=gather)
    servers: Any = SimpleNamespace(lost=frozenset({61, 0}), joining=lambda: 3)
    status = trainer._gather_status(servers)
    assert told == [[[1 << 61 | 1, 3]]]
    assert status.any_lost and status.lost == lost and status.joining == joining


def test_more_servers_than_one_number_names_are_refused():
    group = Group(trainers=1, size=1, index=0, rank=0)
    given = SimpleNamespace(longctx_servers=MAX_SERVERS, ddp_timeout=600)
    assert servers_per_group(given, group, name="distca") == MAX_SERVERS
    given.longctx_servers += 1
    with pytest.raises(ValueError, match="longctx_servers=63 .* a group has at most 62 servers"):
        servers_per_group(given, group, name="distca")
