"""What each optimizer step moved and how even its work was -> log entries and a summary.

Layer: training.
Says at the start what a run will do, and at the end how evenly it ran.
"""

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import torch
from transformers import TrainerCallback

from ..data.batch import LongCtxBatch
from ..planning.layouts.cost import LayerKind

LEVEL = "longctx_bytes_level_"  # and the level that they crossed, the outermost 0


@dataclass(slots=True)
class StepReport:
    """Sums over the micro-batches since the last log, as this rank's group saw them.

    Args:
        tokens (`int`): Tokens of the group's batches, filler left out.
        budget (`int`): Tokens the batches could have held.
        spanning (`int`): Documents with tokens on several ranks.
        busiest_before, busiest_after (`float`): Score entries of the busiest rank, by home and by
            server, added up over layers and batches: ranks meet in every layer, so an uneven batch
            is not made good by the next one. Extra servers count by their speed, and take from the
            mean too.
        mean (`float`): Those of the mean rank, by home.
        batches, halved (`int`): Micro-batches, and those that ran as two halves.
        servers (`int`): Extra servers at the last batch.
        served (`float`): What they attended to, in units of `mean`.
    """

    tokens: int = 0
    budget: int = 0
    spanning: int = 0
    busiest_before: float = 0.0
    busiest_after: float = 0.0
    mean: float = 0.0
    batches: int = 0
    halved: int = 0
    servers: int = 0
    served: float = 0.0

    def add(self, batch: LongCtxBatch, *, algorithm: str, kinds: Sequence[LayerKind]) -> None:
        """Count one micro-batch, with the kind of each layer."""
        self.tokens += int(batch.layout.lengths.sum()) - batch.filler
        self.budget += batch.budget
        self.spanning += batch.layout.spanning_documents
        self.batches += 1
        self.halved += bool(batch.halves)
        self.servers, ranks = len(batch.options.speeds), batch.layout.ranks
        for part, kind in product(batch.parts, set(kinds)):
            plan, layers = part.plan(algorithm, kind), kinds.count(kind)
            work = plan.work(balanced=True)
            mean = layers * float(work.sum()) / ranks
            self.busiest_before += layers * float(plan.work(balanced=False).max())
            self.busiest_after += mean * plan.attention_max_over_mean()
            self.mean += mean
            self.served += layers * float(work[ranks:].sum()) / ranks

    def of_all_groups(self, accelerator: Any, *, ranks: int) -> "StepReport":
        """Sums over the groups, with the busiest rank of any; a collective call of all trainers.

        Args:
            accelerator: Gathers over the trainers.
            ranks (`int`): Ranks of a group, which all report the same.
        """
        mine = torch.tensor(astuple(self), dtype=torch.float64, device=accelerator.device)
        columns = accelerator.gather(mine[None])[::ranks].T.cpu()
        tokens, budget, spanning = (int(column.sum()) for column in columns[:3])
        before, after, mean, batches, halved, servers, served = columns[3:]
        return StepReport(
            tokens, budget, spanning, float(before.max()), float(after.max()), float(mean.mean()),
            int(batches.sum()), int(halved.sum()), int(servers.sum()), float(served.mean()),
        )  # fmt: skip

    def logs(self) -> dict[str, float]:
        """Log entries: tokens, fill, attention max/mean before and after balancing; with extra
        servers how many there are, and the share of attention work that they did."""
        mean = self.mean or 1.0  # no softmax layers: nothing to balance
        before, after = (self.busiest_before, self.busiest_after) if self.mean else (1.0, 1.0)
        with_servers = {
            "longctx_servers": self.servers,
            "longctx_server_tasks": round(self.served / mean, 4),
        }
        return {
            "longctx_tokens": self.tokens,
            "longctx_fill": round(self.tokens / self.budget, 4) if self.budget else 0.0,
            "longctx_attention_before": round(before / mean, 4),
            "longctx_attention_after": round(after / mean, 4),
            **(with_servers if self.servers else {}),
        }


def summary(history: Sequence[dict[str, Any]], *, ranks: int, spanning: int) -> dict[str, Any]:
    """One object for a whole run, from the trainer's log history.

    Args:
        history (`Sequence[dict]`): `trainer.state.log_history`.
        ranks (`int`): Ranks of a group.
        spanning (`int`): Documents of all batches with tokens on several ranks.

    Returns:
        `ranks`, `spanning_documents`, `bytes_moved` (over ranks and steps), `servers` (at the last
        step), `steps`, `loss_first`, `loss_last` (`None` without a logged step), and the
        `losses` of all logged steps.
    """
    steps = [entry for entry in history if "longctx_tokens" in entry]
    return {
        "ranks": ranks,
        "spanning_documents": spanning,
        "bytes_moved": sum(entry["longctx_bytes_moved"] for entry in steps),
        "servers": steps[-1].get("longctx_servers", 0) if steps else 0,
        "steps": steps[-1]["step"] if steps else 0,
        "loss_first": steps[0]["loss"] if steps else None,
        "loss_last": steps[-1]["loss"] if steps else None,
        "losses": [entry["loss"] for entry in steps],
    }


def table(history: Sequence[dict[str, Any]]) -> str:
    """The logged steps as text: one line a step, for people."""
    served = any("longctx_servers" in entry for entry in history)
    crossed = sorted({key for entry in history for key in entry if key.startswith(LEVEL)})
    columns = ("step", "tokens", "fill", "attention max/mean", "moved", "waiting", "loss")
    rows = [columns + ("by servers",) * served + ("by level",) * bool(crossed)]
    for entry in (e for e in history if "longctx_tokens" in e):
        before, after = entry["longctx_attention_before"], entry["longctx_attention_after"]
        rows.append(
            (
                str(entry["step"]),
                f"{entry['longctx_tokens']:,}",
                f"{entry['longctx_fill']:.0%}",
                f"{before:.2f} -> {after:.2f}",
                f"{entry['longctx_bytes_moved'] / 2**20:,.1f} MiB",
                f"{entry['longctx_wait_seconds']:.2f} s",
                f"{float(entry['loss']):.4f}",
            )
            + (f"{entry.get('longctx_server_tasks', 0.0):.0%}",) * served
            + (_over_levels(entry, crossed),) * bool(crossed)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def _over_levels(entry: dict[str, Any], keys: Sequence[str]) -> str:
    """Bytes over each level of nested domains, from the outside in."""
    return " + ".join(f"{entry.get(key, 0) / 2**20:,.1f}" for key in keys) + " MiB"


logger = logging.getLogger(__name__)


class LongCtxCallback(TrainerCallback):
    """Start-up arithmetic and the final balance table, on the main process.

    Args:
        trainer: The `LongCtxTrainerMixin` it reports on.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the model, groups, packs and steps."""
        if not state.is_world_process_zero:
            return
        group = self.trainer.longctx_group
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        logger.info(
            "%s: %s, %s parameters; %d trainers = %d group(s) of %d ranks; a batch holds %d x %d = "
            "%d tokens; %s, accumulated %d at a time, %d steps; overlap %s, %d server(s)",
            self.trainer.longctx_attention,
            type(model).__name__,
            f"{sum(p.numel() for p in model.parameters()):,}",
            group.trainers,
            group.groups,
            group.size,
            group.size,
            args.longctx_max_tokens_per_rank,
            group.size * args.longctx_max_tokens_per_rank,
            self.trainer.longctx_sampler.describe(),
            args.gradient_accumulation_steps,
            state.max_steps,
            args.longctx_overlap,
            args.longctx_servers,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the table of steps."""
        if state.is_world_process_zero and any("longctx_tokens" in x for x in state.log_history):
            logger.info(
                "steps (attention max/mean: of softmax layers):\n%s", table(state.log_history)
            )
