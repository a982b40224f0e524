"""Bench recurrent layers at tiny sizes: bytes, equal results, closed forms, never times."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import packed_linear, scanned, zeco
from benchmarks.__main__ import main
from benchmarks.common import inputs
from benchmarks.packed import split
from benchmarks.scanned import GLOO, Case, Measured, Way, time_scans
from hf_longctx.comm.channels import Hub
from hf_longctx.runtime.executor import Account
from hf_longctx.runtime.state_scans import ScanCall

if TYPE_CHECKING:
    from hf_longctx.verify.rank_pool import RankPool

TINY = Case(heads=4, rows=3, columns=8)
WAYS = {"chain": Way("chain", 8)} | {
    name: Way(name) for name in ("allgather", GLOO, "serial", "tree")
}
MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def measured(rank_pool: RankPool) -> dict[int, list[Measured]]:
    return {
        ranks: rank_pool.run(
            time_scans, ranks=ranks, case=TINY, ways=WAYS, rounds=2, layers=[0.0, 1e-3]
        )
        for ranks in (2, 4)
    }


def test_every_way_gives_the_same_states_and_gradients(measured: dict[int, list[Measured]]) -> None:
    for runs in measured.values():
        for run in runs:
            assert run.errors.keys() == WAYS.keys()
            assert max(run.errors.values()) < 1e-6


def test_a_chain_sends_one_state_a_pass_whatever_the_ranks(
    measured: dict[int, list[Measured]],
) -> None:
    size = 4 * 4 * 3 * 8
    for ranks, runs in measured.items():
        assert all(run.sent[name] == run.planned[name] for run in runs for name in run.planned)
        first, *middle, last = [run.sent["chain"] for run in runs]
        assert (first, last) == ((size, 0), (0, size))
        assert middle == [(size, size)] * (ranks - 2)
        assert runs[0].sent["allgather"] == ((ranks - 1) * size, 0)
    counted = zeco._bytes(measured)
    assert counted["bytes_per_rank"] == {"2": size, "4": size}
    assert counted["bytes_sent"] == counted["bytes_planned"]


def test_every_side_runs_every_round(measured: dict[int, list[Measured]]) -> None:
    for run in (run for runs in measured.values() for run in runs):
        assert {name: len(rounds) for name, rounds in run.seconds.items()} == dict.fromkeys(WAYS, 2)
        assert [{n: len(r) for n, r in each.items()} for each in run.layers] == [
            {"none": 2, "scan": 2}
        ] * 2


def test_a_layer_computes_while_its_scan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 in this thread, rank 1 in another; backward is run by the thread that calls it.
    done: list[str] = []

    def note(what: str) -> None:
        if threading.current_thread() is threading.main_thread():
            done.append(what)

    for name in ("start", "finish"):
        real = getattr(ScanCall, name)

        def noted(self: Any, *args: Any, name: str = name, real: Any = real, **given: Any) -> Any:
            note(name)
            return real(self, *args, **given)

        monkeypatch.setattr(ScanCall, name, noted)
    monkeypatch.setattr(time, "sleep", lambda seconds: note(f"{seconds:.0f}"))
    channels = Hub(2).channels()

    def run(rank: int) -> None:
        summary, grad = TINY.given(rank)
        program = TINY.program(WAYS["chain"], rank=rank, ranks=2)
        call = ScanCall(program=program, channel=channels[rank], account=Account())
        scanned.layer(summary, seconds=3.0, call=call).backward(grad)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert done == ["1", "start", "1", "finish", "1", "2", "start", "2", "finish", "2"]


def test_closed_forms() -> None:
    assert zeco.bounds(8, tau=1.0, pieces=16) == {
        "chain": 22 / 16, "allgather": 7.0, GLOO: 7.0, "serial": 7.0, "tree": 3.0
    }  # fmt: skip
    late = zeco.bounds(8, tau=1.0, pieces=16, saved=0.01)
    assert late == pytest.approx(
        {"chain": 1.305, "allgather": 6.99, GLOO: 6.99, "serial": 6.93, "tree": 2.97}
    )
    assert zeco._modelled(4.0, 1.375) == pytest.approx(8 / 3 + 1.375)
    assert zeco._modelled(4.0, 1.0) == pytest.approx(4.0)
    links = zeco.predicted()
    assert links.pop("link").keys() == {"hop_seconds", "gigabytes_per_second"}
    assert links.keys() == {"8", "64", "256"}
    for ranks, found in links.items():
        ways = {name: found[f"{name}_seconds"] for name in ("chain", "tree", "allgather")}
        assert ways[found["auto"]] == min(ways.values())
        if ranks != "8":  # the paper's few ranks have costs that do not grow with them
            assert found["chain_seconds"] == pytest.approx(found["paper_allscan_seconds"], rel=0.1)


def test_figures_are_those_of_the_last_rank_at_its_best() -> None:
    took = {"chain": 2.0, "allgather": 8.0, GLOO: 10.0, "serial": 9.0, "tree": 4.0}
    runs = [
        Measured(
            seconds={n: [(s - late, s), (s + 9, s + 1 - late)] for n, s in took.items()},
            layers=[{"none": [(3.0, 6.0)], "scan": [(5.0 - late, 7.0)]}],
            sent=dict.fromkeys(took, (1, 2)),
            planned=dict.fromkeys(took, (1, 2)),
            carried=dict.fromkeys(took, (3, 3)),
            errors=dict.fromkeys(took, late),
        )
        for late in (0.0, 0.5)
    ]
    found = zeco.scans(runs, dict.fromkeys(took, 1.0))
    assert found["scans"]["chain"] == {"forward_seconds": 2.0, "backward_seconds": 2.0}
    assert found["allscan_speedup_vs_allgather"] == 4.0
    assert found["allscan_fraction_of_bound"] == 0.5
    assert found["gloo_fraction_of_bound"] == 0.1
    assert found["error"]["tree"] == 0.5
    over = zeco.overheads(runs, chain=1.0, tau=1.0, ratios=[3.0])
    assert over["overhead_vs_no_comm"] == {"3": 12 / 9}
    assert over["overhead_by_direction"]["3"]["forward"] == 5 / 3
    assert over["overhead_model"] == {"3": 1.0}
    json.dumps(found | over, allow_nan=False)


def test_documents_are_log_uniform() -> None:
    lengths = packed_linear.draw_lengths()
    assert (len(lengths), min(lengths), max(lengths)) == (32, 16, 508)
    many = packed_linear.draw_lengths(20_000)
    assert (min(many), max(many)) == (16, 512)
    assert sum(n < 91 for n in many) / len(many) == pytest.approx(0.5, abs=0.02)  # sqrt(16 x 513)


def test_packed_recurrent_layers_compute_what_stock_computes() -> None:
    lengths = [20, 1, 70]
    found = packed_linear.run(shape=MODEL, lengths=lengths, rounds=1)
    assert found["errors"].keys() == {"padded", "ours"}
    assert found["loss_error"] < 1e-5
    assert found["grad_error"] < 1e-4
    assert (found["documents"], found["tokens"], found["tokens_padded"]) == (3, 91, 210)
    slower = min(found["speedup_vs_separate"], found["speedup_vs_padded"])
    assert found["speedup_vs_stock"] == slower
    json.dumps(found, allow_nan=False)


def test_padding_is_no_target() -> None:
    batch = packed_linear.padded(split(inputs([3, 1], vocabulary=9), [3, 1]))
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (batch["shift_labels"] == -100).tolist() == [[False, False, True], [True] * 3]
    assert int(batch["num_items_in_batch"]) == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["packed", "--model", "llama"], "use qwen3_next"),
        (["plan", "--model", "x"], "leave it out"),
    ],
)
def test_a_model_without_a_bench_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert why in capsys.readouterr().err
