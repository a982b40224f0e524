"""What users read of gloo's errors: a line, without its source files and general advice."""

import pytest

from hf_longctx.comm.channels import cause

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
ADVICE = "This is typically caused by a remote worker crashing. Check the logs of the remote worker"


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (f"{CLOSED}[10.0.0.2]:7315. {ADVICE}", "Connection closed by peer [10.0.0.2]:7315."),
        ("Wait timeout\nException raised from", "Wait timeout"),
        ("[10.0.0.2]:7315 is gone", "[10.0.0.2]:7315 is gone"),
        ("", "time-out"),
    ],
)
def test_a_cause_is_one_line_without_source_files(said: str, read: str) -> None:
    assert cause(RuntimeError(said)) == read
