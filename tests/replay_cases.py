"""Runs that lose a server, beside undisturbed ones, in one `accelerate launch` -> results as JSON.

It is started as `tests/train_cases.py` is, by `train_cases.launch(..., script=__file__)`. The
server is made up: from some exchange on, what comes to some ranks is NaN, until the roster is told
to drop it. Plans stay, so a run that replays well is bit-equal to the undisturbed one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_cases import UNEVEN, Case, arguments, main, trainer_of
from wrapper_cases import sharded

from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.channels import Channel, ExchangeError, Payload


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
    import torch
    from tiny import tiny

    if name == "sft":
        from evaluate_cases import sft  # takes seconds to import

        return sft(folder, accumulated=2)
    case = CASES[name]
    torch.manual_seed(0)
    if name == "fsdp2":
        arguments(case, folder)  # makes the default group
        return trainer_of(case, folder, model=sharded(case.name, folder))
    return trainer_of(case, folder, model=with_lora(tiny(case.name, dtype=torch.float32)))


def with_lora(model: Any) -> Any:
    """The model with adapters that drop a fifth of their input, so that random state counts."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj", "up_proj"])
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)  # B starts at zero, which would hide dropout
    return adapted


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], perform=run)
