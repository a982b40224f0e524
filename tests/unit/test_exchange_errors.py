"""Errors of exchanges name the layer, and gloo's are one line without source files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers import threads
from tiny import collate, documents, tiny

from hf_longctx import prepare
from hf_longctx.comm.channels import ExchangeError, Hub, cause
from hf_longctx.data.batch import KEY
from hf_longctx.runtime.executor import Runtime

pytestmark = pytest.mark.filterwarnings("ignore")


class Stopped(Exception):
    """What one rank meets before it sends anything for a layer."""


def stop(*given: Any) -> None:
    raise Stopped


def run(model: Any, *, layer: Any, ends_in: str) -> None:
    """Two ranks as threads; the first stops before a layer, or the second before its backward."""
    channels = Hub(2, timeout=1.0).channels()
    models = [copy.deepcopy(model).train() for _ in range(2)]
    if ends_in == "forward":
        layer(models[0]).register_forward_pre_hook(stop)

    def work(rank: int) -> None:
        inputs = collate(documents([40]), rank=rank, ranks=2, layout="contiguous")
        inputs[KEY].bind(Runtime(channel=channels[rank]))
        try:
            loss = models[rank](**inputs, num_items_in_batch=39).loss
        except Stopped:
            return
        if rank == 0:
            loss.backward()

    threads(work, ranks=2)


@pytest.mark.parametrize(
    ("family", "name", "layer", "number", "last"),
    [
        ("llama", "ring", lambda m: m.model.layers[1], 1, 1),
        ("mamba2", "zeco_linear", lambda m: m.backbone.layers[1], 1, 2),  # halo and scan
        ("qwen3_next", "zeco_linear", lambda m: m.model.layers[2], 2, 3),
    ],
)
@pytest.mark.parametrize("ends_in", ["forward", "backward"])
def test_a_lost_peer_is_named_with_the_layer(
    family: str, name: str, layer: Any, number: int, last: int, ends_in: str
) -> None:
    model = prepare(tiny(name, family=family))
    rank, at = (1, number) if ends_in == "forward" else (0, last)
    expected = (
        rf"rank {rank}: exchange \d+ of {ends_in} phase \d of layer {at} with rank {1 - rank} did "
    )
    with pytest.raises(ExchangeError, match=expected):
        run(model, layer=layer, ends_in=ends_in)


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
