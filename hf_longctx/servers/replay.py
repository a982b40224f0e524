"""Run an accumulation window again when it lost an attention server.

What a lost server owes arrives as NaN, so gradient reduction carries it to all trainers. Before the
optimizer step the trainers tell each other which servers they lost. If there are any, they discard
the window's gradients, losses and counts, restore random state, and run its micro-batches again
under plans without these servers. A NaN of another origin stays. A run without servers pays
nothing. Layer: servers.
"""

import copy
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..data.batch import KEY, SavedAttention
from ..runtime.thread_state import RandomState
from .server_pool import MAX_SERVERS, ServerPool

logger = logging.getLogger(__name__)

_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it

# Attributes that micro-batches add to: Trainer's loss, our report, TRL's metrics and token count.
_COUNTS = ("_tr_loss", "_report", "_metrics", "_total_train_tokens")


@dataclass(slots=True)
class _AccumulationWindow:
    """The micro-batches since the last optimizer step, and the state before the first of them."""

    random: RandomState
    counts: dict[str, Any]
    steps: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )

    @classmethod
    def begin(cls, trainer: Any) -> "_AccumulationWindow":
        counts = {name: getattr(trainer, name) for name in _COUNTS if hasattr(trainer, name)}
        return cls(RandomState.capture(torch_only=False), copy.deepcopy(counts))

    def rewind(self, trainer: Any, model: nn.Module) -> None:
        """Undo all micro-batches. May be called more than once."""
        model.zero_grad()
        self.random.restore()
        # A copy each time: the replay adds to what it finds, and may have to be undone as well.
        for name, value in copy.deepcopy(self.counts).items():
            setattr(trainer, name, value)
        for inputs, _, _ in self.steps:
            for part in inputs[KEY].parts:
                part.binding.saved = (
                    SavedAttention()
                )  # its results were computed with the lost server


@dataclass(frozen=True, slots=True)
class _WindowStatus:
    """What the trainers know together at the end of a window.

    Args:
        any_lost (`bool`): A trainer of some group lost a server.
        lost (`frozenset[int]`): Servers that this group lost.
        joining (`bool`): A server waits to join this group.
    """

    any_lost: bool
    lost: frozenset[int]
    joining: bool


class ReplayMixin(_Base):
    """Replays a Trainer's accumulation window when it lost a server; see `LongCtxTrainerMixin`.

    Attributes:
        longctx_replayed (`int`): Windows that were run again.
    """

    longctx_servers: ServerPool
    longctx_replayed = 0
    # Kept by training_step and not by get_batch_samples: Trainer calls that one before it restores
    # random state on a resume, and at the end of a stream a window spans two of its calls.
    _window: _AccumulationWindow | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does, without a window that an earlier call left unfinished."""
        self._window = None
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run one micro-batch. The last of a window returns once the window lost no server."""
        servers = self.longctx_servers
        if not servers.count:
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss
        if self._window is None:
            self._window = _AccumulationWindow.begin(self)
        window = self._window
        window.steps.append((dict(inputs), args, kwargs))  # a step may change its dictionary
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not self.accelerator.sync_gradients:
            # A NaN that will be discarded must not reach Trainer's nan filter or the log.
            return torch.zeros_like(loss) if servers.lost else loss
        # A server may be lost in the replay too, so the trainers ask each other again.
        while (status := self._gather_status(servers)).any_lost:
            self._drop_lost(servers, status.lost)
            loss = self._replay(model, window)
        self._window = None
        if status.joining and len(servers.speeds) < MAX_SERVERS:
            servers.admit()
        return loss

    def _gather_status(self, servers: ServerPool) -> _WindowStatus:
        """Exchange with all trainers what each one lost; one small collective."""
        own = [sum(1 << number for number in servers.lost), servers.joining()]
        sent = torch.tensor([own], dtype=torch.int64, device=self.accelerator.device)
        rows: list[list[int]] = self.accelerator.gather(sent).tolist()
        group = self.longctx_group
        in_group = rows[group.index * group.size :][: group.size]
        lost = {n for n in range(MAX_SERVERS) for mask, _ in in_group if mask >> n & 1}
        # Other groups replay as well: their gradients were reduced together with the NaN.
        any_lost = any(mask for mask, _ in rows)
        return _WindowStatus(any_lost, frozenset(lost), in_group[0][1] > 0)

    def _drop_lost(self, servers: ServerPool, lost: frozenset[int]) -> None:
        """Drop the group's lost servers, and log it once per group."""
        if not lost:
            return
        servers.drop(lost)
        if self.longctx_group.rank == 0:
            left = len(servers.speeds)
            logger.warning(
                "group %d lost %d attention server(s) in step %d, which runs again %s",
                self.longctx_group.index,
                len(lost),
                self.state.global_step + 1,
                f"with the {left} left" if left else "without servers, as do all later steps",
            )

    def _replay(self, model: nn.Module, window: _AccumulationWindow) -> Tensor:
        """Run all micro-batches of the window again; return the loss of the last one."""
        self.longctx_replayed += 1
        window.rewind(self, model)
        state = self.accelerator.gradient_state
        *before, last = window.steps
        for inputs, args, kwargs in before:
            # Trainer's own loop does both for every micro-batch but the last, and is not run here.
            state._set_sync_gradients(False)
            with self._without_reduction(model):
                self._tr_loss += super().training_step(model, dict(inputs), *args, **kwargs)
        state._set_sync_gradients(True)
        inputs, args, kwargs = last
        loss: Tensor = super().training_step(model, dict(inputs), *args, **kwargs)
        return loss

    def _without_reduction(self, model: nn.Module) -> Any:
        """Return the context of a micro-batch whose gradients are not reduced yet, as Trainer's."""
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        if self.is_distributed_loading_by_transformers:  # FSDP2 that Accelerate did not set up
            return self._defer_fsdp_gradient_reduction()
        return self.accelerator.no_sync(model=model)
