"""An accumulation window that lost an attention server -> the same window, run without it.

Layer: servers. A mixin, part of `LongCtxTrainerMixin`. What a lost server owes is NaN, so its
window is poisoned, on all trainers once gradients are reduced. Before the optimizer step trainers
tell each other what they lost; where it is anything, the window's gradients, losses and counts go,
random state comes back, and its micro-batches run again under plans without the lost servers. A
NaN of another origin stays what it is. Runs without servers pay nothing.
"""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..data.batch import KEY, SavedAttention
from ..runtime.thread_state import RandomState
from .groups import MOST_SERVERS
from .manager import Servers

logger = logging.getLogger(__name__)

_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it

# What micro-batches add to: Trainer's loss, our report, and TRL's metrics and count of tokens.
_COUNTS = ("_tr_loss", "_report", "_metrics", "_total_train_tokens")


@dataclass(slots=True)
class _AccumulationWindow:
    """Micro-batches since the last optimizer step, and what stood before the first of them."""

    random: RandomState
    counts: dict[str, Any]
    steps: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )

    @classmethod
    def begin(cls, trainer: Any) -> "_AccumulationWindow":
        kept = {name: getattr(trainer, name) for name in _COUNTS if hasattr(trainer, name)}
        return cls(RandomState.capture(torch_only=False), copy.deepcopy(kept))

    def rewind(self, trainer: Any, model: nn.Module) -> None:
        """As if none of the micro-batches had run; callable more than once."""
        model.zero_grad()
        self.random.restore()
        for name, value in copy.deepcopy(self.counts).items():
            setattr(trainer, name, value)
        for inputs, _, _ in self.steps:
            for part in inputs[KEY].parts:
                part.saved = SavedAttention()


class ReplayMixin(_Base):
    """Runs a Trainer's accumulation window again where it lost a server.

    The window is kept here, not by `get_batch_samples`: that is called before Trainer restores
    random state on a resume, and at the end of a stream a window spans two of its calls.
    """

    longctx_servers: Servers
    longctx_replayed = 0  # windows that ran again
    _window: _AccumulationWindow | None = None  # under way

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; a window that an earlier call left unfinished is forgotten."""
        self._window = None
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """One micro-batch; the last of a window returns once no server was lost in it."""
        servers = self.longctx_servers
        if not servers.count:
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss
        if self._window is None:
            self._window = _AccumulationWindow.begin(self)
        window = self._window
        window.steps.append((dict(inputs), args, kwargs))  # a step may change its dictionary
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not self.accelerator.sync_gradients:  # a loss that is known to be void is not shown
            return torch.zeros_like(loss) if servers.lost else loss
        news = self._tell(servers)
        while news.anywhere:
            self._do_without(servers, news.mine)
            loss = self._run_again(model, window)
            news = self._tell(servers)
        self._window = None
        if news.joining and len(servers.speeds) < MOST_SERVERS:
            servers.admit()
        return loss

    def _tell(self, servers: Servers) -> "_News":
        """What all trainers found lost, and whether a server waits; one small collective."""
        mine = [sum(1 << number for number in servers.lost), servers.joining()]
        sent = torch.tensor([mine], dtype=torch.int64, device=self.accelerator.device)
        rows: list[list[int]] = self.accelerator.gather(sent).tolist()
        group = self.longctx_group
        ours = rows[group.index * group.size :][: group.size]
        lost = {n for n in range(MOST_SERVERS) for mask, _ in ours if mask >> n & 1}
        return _News(any(mask for mask, _ in rows), frozenset(lost), ours[0][1] > 0)

    def _do_without(self, servers: Servers, numbers: frozenset[int]) -> None:
        """Drop the group's lost servers, and say so once per group."""
        if not numbers:
            return
        servers.drop(numbers)
        if self.longctx_group.rank == 0:
            left = len(servers.speeds)
            logger.warning(
                "group %d lost %d attention server(s) in step %d, which runs again %s",
                self.longctx_group.index,
                len(numbers),
                self.state.global_step + 1,
                f"with the {left} left" if left else "in place, as all steps from now on do",
            )

    def _run_again(self, model: nn.Module, window: _AccumulationWindow) -> Tensor:
        """All micro-batches of the window; returns the loss of the last, as Trainer expects."""
        self.longctx_replayed += 1
        window.rewind(self, model)
        state = self.accelerator.gradient_state
        *before, last = window.steps
        for inputs, args, kwargs in before:
            state._set_sync_gradients(False)
            with self._without_reduction(model)():
                self._tr_loss += super().training_step(model, dict(inputs), *args, **kwargs)
        state._set_sync_gradients(True)
        inputs, args, kwargs = last
        loss: Tensor = super().training_step(model, dict(inputs), *args, **kwargs)
        return loss

    def _without_reduction(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
        """What Trainer runs micro-batches in whose gradients are not reduced yet."""
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext
        if self.is_distributed_loading_by_transformers:  # native FSDP2, which Accelerate knows not
            defer: Callable[[], AbstractContextManager[Any]] = self._defer_fsdp_gradient_reduction
            return defer
        return lambda: self.accelerator.no_sync(model=model)


@dataclass(frozen=True, slots=True)
class _News:
    """What trainers told each other at the end of a window.

    Args:
        anywhere (`bool`): Some trainer of any group lost a server.
        mine (`frozenset[int]`): Those that this group lost.
        joining (`bool`): A server waits to join this group.
    """

    anywhere: bool
    mine: frozenset[int]
    joining: bool
