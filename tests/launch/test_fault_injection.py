"""Kill a server under `hf-longctx verify --kill`: what it reports, and what it rejects."""

from __future__ import annotations

import json

import pytest

from hf_longctx.cli.main import main
from hf_longctx.verify import fault_injection

MODEL = ["verify", "--model", "tests/configs/tiny_llama.json", "--ranks", "2"]
DISTCA = [*MODEL, "--attn_implementation", "distca"]


def test_a_server_killed_in_a_backward_leaves_the_losses_alone(tmp_path, capsys):
    report = tmp_path / "report.json"
    flags = ["--servers", "1", "--kill", "backward", "--json", str(report)]
    assert main([*DISTCA, *flags]) == 0, capsys.readouterr().err
    found = json.loads(report.read_text())
    assert found["steps"] == fault_injection.STEPS >= 3 and found["replayed_steps"] == 1
    assert found["loss_difference"] <= 1e-5 and found["weights_difference"] <= 1e-4
    assert found["orphans"] == 0 and found["failed"] == []


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ([*DISTCA, "--kill", "stall"], "--kill stall with --servers 0 under distca: it needs a"),
        (
            [*MODEL, "--attn_implementation", "ring", "--servers", "1", "--kill", "forward"],
            "which only distca has; use --attn_implementation distca --servers 1",
        ),
        (
            [*DISTCA, "--servers", "1", "--kill", "forward", "--dtype", "bf16"],
            "it trains in float32; leave --dtype out",
        ),
    ],
    ids=["no server", "ring", "bf16"],
)
def test_what_cannot_be_tried_is_refused(flags, error, capsys):
    assert main(flags) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "failure"),
    [
        ("loss_difference", 2e-5, "loss_difference 2e-05 > 1e-05"),
        ("loss_difference", float("inf"), "loss_difference inf > 1e-05"),
        ("replayed_steps", 0, "replayed_steps 0 < 1: nothing was lost"),
        ("orphans", 1, "orphans 1 > 0"),
    ],
)
def test_each_bound_fails_a_report(key, value, failure):
    good = {"loss_difference": 1e-6, "replayed_steps": 1, "orphans": 0}
    assert fault_injection._failed(good) == []
    (found,) = fault_injection._failed(good | {key: value})
    assert found.startswith(failure)
