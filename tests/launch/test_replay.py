"""Replay a window that lost a server: weights, log and counts are those of an undisturbed run.

One launch runs this file as its script. The server is simulated: from some exchange on, some ranks
receive NaN until the roster drops it. Plans stay the same, so a run that replays well is bit-equal
to the undisturbed one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny, with_lora
from train_cases import UNEVEN, Case, arguments, launch, main, sharded, trainer_of

from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.channels import Channel, ExchangeError, Payload
from hf_longctx.servers.replay import ReplayMixin
from hf_longctx.servers.server_pool import MAX_SERVERS
from hf_longctx.training.groups import Group, servers_per_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """When a server is lost.

    Args:
        micro (`int`): Micro-batch, counted over the run; a replay's count too.
        direction (`str`): `forward` or `backward`, in whose first exchange it happens.
        ranks (`tuple[int, ...]`): Who notices.
    """

    micro: int
    direction: str = "forward"
    ranks: tuple[int, ...] = (0, 1)


ACCUMULATED = {
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.3,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "num_train_epochs": 2,
}
RECOMPUTED = ACCUMULATED | {"activation_checkpointing": True, "include_num_input_tokens_seen": True}
CASES = {
    "lora": Case(lengths=UNEVEN, options=ACCUMULATED | {"logging_nan_inf_filter": True}),
    "reentrant": Case(
        lengths=UNEVEN,
        options=RECOMPUTED | {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "nonreentrant": Case(
        lengths=UNEVEN,
        options=RECOMPUTED | {"activation_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    "fsdp2": Case(lengths=UNEVEN, options=ACCUMULATED),
    "own": Case(lengths=UNEVEN, options=ACCUMULATED | {"max_steps": 1}),
}
# Windows have 3 and 2 micro-batches in turn. "again" loses one in the third, and one in its replay.
STRIKES = {
    "none": [],
    "first": [Strike(micro=3, ranks=(0,))],
    "middle": [Strike(micro=1, direction="backward")],
    "last": [Strike(micro=7, direction="backward", ranks=(1,))],
    "again": [Strike(micro=6, ranks=(1,)), Strike(micro=9, direction="backward", ranks=(0,))],
}
STRUCK = {
    "lora": ("none", "first", "middle", "last", "again"),
    "reentrant": ("none", "middle", "last"),
    "nonreentrant": ("none", "first", "again"),
    "fsdp2": ("none", "middle", "last"),
    "sft": ("none", "middle"),
    "own": ("none",),
}


@dataclass
class Poisoned:
    """The group's channel and a server that dies at each strike."""

    peers: Channel
    strikes: Sequence[Strike]
    micro: int = -1
    lost: dict[int, ExchangeError] = field(default_factory=dict)
    dead: int = 0

    def __post_init__(self) -> None:
        self.rank, self.sent, self.more = self.peers.rank, self.peers.sent, self.peers.more

    def agree(self, number: int, *, what: str) -> None:
        self.micro += 1
        self.peers.agree(number, what=what)

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        strike = self.strikes[self.dead] if self.dead < len(self.strikes) else None
        at = strike and (strike.micro, strike.direction in what, self.rank in strike.ranks)
        if at == (self.micro, True, True):
            self.lost[0] = ExchangeError(f"strike in {what}")
        exchange = self.peers.post(sends, recvs, what=what)
        return _Void(exchange, recvs) if self.lost else exchange


@dataclass(frozen=True)
class _Void:
    exchange: Exchange
    recvs: Sequence[Payload]

    def done(self) -> bool:
        return self.exchange.done()

    def wait(self, *, since: float | None = None) -> None:
        self.exchange.wait(since=since)
        for _, data in self.recvs:
            data.fill_(0xFF)


class Roster:
    """A group's servers as the trainer sees them.

    Attributes:
        dropped (`list[list[int]]`): Numbers of each call.
        poisoned (`list[bool]`): Whether some gradient was NaN then.
    """

    def __init__(self, trainer: Any, strikes: Sequence[Strike]) -> None:
        self.trainer, self.count, self.speeds = trainer, 1, ()
        self.admitted: list[int] = []
        self.channel = Poisoned(trainer.longctx_runtime.channel, strikes)
        self.dropped: list[list[int]] = []
        self.poisoned: list[bool] = []
        trainer.longctx_servers, trainer.longctx_runtime.channel = self, self.channel

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self.channel.lost)

    def start(self) -> None:
        """It is there already."""

    def __enter__(self) -> Roster:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def drop(self, numbers: frozenset[int]) -> None:
        grads = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        grads = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        self.poisoned.append(any(bool(g.isnan().any()) for g in grads))
        self.dropped.append(sorted(numbers))
        self.channel.lost, self.channel.dead = {}, self.channel.dead + 1

    def joining(self) -> int:
        state = self.trainer.state
        return int(self.trainer.longctx_group.rank == 0 and state.global_step == 1)

    def admit(self) -> None:
        self.admitted.append(self.trainer.state.global_step)


def made(name: str, folder: Path) -> Any:
    """The trainer of a case, with the same weights each time."""
    if name == "sft":
        from evaluate_cases import sft  # takes seconds to import

        return sft(folder, accumulated=2)
    case = CASES[name]
    torch.manual_seed(0)
    if name == "fsdp2":
        arguments(case, folder)  # makes the default group
        return trainer_of(case, folder, model=sharded(case.name, folder))
    return trainer_of(case, folder, model=with_lora(tiny(case.name, dtype=torch.float32)))


def run(name: str, folder: Path) -> dict[str, Any]:
    """Train a case once for each of its strikes."""
    import torch

    found: dict[str, Any] = {}
    for strike in STRUCK[name]:
        trainer = made(name, folder)
        roster = Roster(trainer, STRIKES[strike])
        if name == "own":
            next(trainer.model.parameters()).data.fill_(float("nan"))
        trainer.train()
        trained = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
        weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in trained]
        found[strike] = {
            "history": trainer.state.log_history,
            "replayed": trainer.longctx_replayed,
            "dropped": roster.dropped,
            "poisoned": roster.poisoned,
            "admitted": roster.admitted,
            "batches": roster.channel.micro + 1,
            "weights": torch.cat([w.flatten() for w in weights]).tolist(),
        }
    return found


BESIDE = ("longctx_bytes_moved", "longctx_wait_seconds")  # of all exchanges, also void ones
DISTURBED = [(case, s) for case, strikes in STRUCK.items() for s in strikes if s != "none"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replay")
    ended = launch(folder, *STRUCK, processes=2, script=__file__)
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
    assert min(norms) > ACCUMULATED["max_grad_norm"]


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], perform=run)
