"""Report how even the work of a run was and what it moved: log entries, a summary, a table.

A callback also logs at the start what the run will do. Layer: training.
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

logger = logging.getLogger(__name__)

LEVEL = "longctx_bytes_level_"  # followed by the number of the level
LOGGED_KEYS = {
    "longctx_tokens": "tokens of the batches, without filler",
    "longctx_fill": "those tokens over what the batches could hold",
    "longctx_attention_before": "attention work of the busiest rank over the mean (max/mean), with "
    "every task on the rank that holds its queries. Softmax layers only: the work of recurrent "
    "layers follows the tokens, which are even",
    "longctx_attention_after": "the same, as planned. Only `distca` and `ulysses` change it. "
    "Attention servers count",
    "longctx_bytes_moved": "bytes that all trainers sent",
    "longctx_wait_seconds": "the longest time that any rank waited for messages",
    f"{LEVEL}N": "in nested domains, the bytes that crossed level N; 0 is the outermost. With "
    "`--longctx_topology 2x4`, level 0 is between the nodes, level 1 inside them",
    "longctx_halved": "with `--longctx_overlap pingpong`, the share of batches that ran as two "
    "halves",
    "longctx_servers": "attention servers at the last batch",
    "longctx_server_tasks": "the share of attention work that the servers did",
}
"""Keys that each logged step adds, over all trainers and batches since the last log; meanings."""
SUMMARY_KEYS = {
    "ranks": "ranks of a group",
    "spanning_documents": "documents of all batches with tokens on several ranks",
    "bytes_moved": "bytes that all trainers sent, over all logged steps",
    "servers": "attention servers at the last step",
    "steps": "the last logged step",
    "loss_first": "loss of the first logged step; null if there is none",
    "loss_last": "loss of the last logged step; null if there is none",
    "losses": "losses of all logged steps",
}
"""Keys of `longctx_summary`; meanings."""


@dataclass(slots=True)
class StepReport:
    """Sums over the micro-batches since the last log, as this rank's group saw them.

    Args:
        tokens (`int`): Tokens of the group's batches, without filler.
        budget (`int`): Tokens the batches could have held.
        spanning (`int`): Documents with tokens on several ranks.
        busiest_before, busiest_after (`float`): Score entries of the busiest rank, without and with
            balancing, summed over layers and batches. Attention servers count by their speed, and
            lower the mean too.
        mean (`float`): Score entries over the number of ranks.
        batches, halved (`int`): Micro-batches, and those that ran as two halves.
        servers (`int`): Attention servers at the last batch.
        served (`float`): Score entries that they computed, over the number of ranks.
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
        """Add one micro-batch.

        Args:
            batch (`LongCtxBatch`): Bound to this process.
            algorithm (`str`): The algorithm that plans its softmax layers.
            kinds (`Sequence[LayerKind]`): The kind of each softmax layer.
        """
        self.tokens += int(batch.layout.lengths.sum()) - batch.filler
        self.budget += batch.budget
        self.spanning += batch.layout.spanning_documents
        self.batches += 1
        self.halved += bool(batch.halves)
        self.servers, ranks = len(batch.options.speeds), batch.layout.ranks
        # The busiest rank is taken batch by batch and layer by layer, since ranks wait for each
        # other in every layer: an uneven batch is not made up for by the next one.
        for part, kind in product(batch.parts, set(kinds)):
            plan, layers = part.plan(algorithm, kind), kinds.count(kind)
            work = plan.work(balanced=True)
            mean = layers * float(work.sum()) / ranks
            self.busiest_before += layers * float(plan.work(balanced=False).max())
            self.busiest_after += mean * plan.attention_max_over_mean()
            self.mean += mean
            self.served += layers * float(work[ranks:].sum()) / ranks

    def of_all_groups(self, accelerator: Any, *, ranks: int) -> "StepReport":
        """Combine the reports of all groups; a collective call of all trainers.

        Args:
            accelerator: Gathers over the trainers.
            ranks (`int`): Ranks of a group, whose reports are all the same.
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
        """Return the log entries that are known without asking other trainers."""
        mean = self.mean or 1.0  # 0 without softmax layers, which leave nothing to balance
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
    """Summarise a whole run in one object; see `SUMMARY_KEYS`.

    Args:
        history (`Sequence[dict]`): `trainer.state.log_history`.
        ranks (`int`): Ranks of a group.
        spanning (`int`): Documents of all batches with tokens on several ranks.
    """
    steps = [entry for entry in history if "longctx_tokens" in entry]
    found = {
        "ranks": ranks,
        "spanning_documents": spanning,
        "bytes_moved": sum(entry["longctx_bytes_moved"] for entry in steps),
        "servers": steps[-1].get("longctx_servers", 0) if steps else 0,
        "steps": steps[-1]["step"] if steps else 0,
        "loss_first": steps[0]["loss"] if steps else None,
        "loss_last": steps[-1]["loss"] if steps else None,
        "losses": [entry["loss"] for entry in steps],
    }
    assert found.keys() == SUMMARY_KEYS.keys(), found.keys()
    return found


def table(history: Sequence[dict[str, Any]]) -> str:
    """Format the logged steps as a table, one line for each."""
    served = any("longctx_servers" in entry for entry in history)
    levels = sorted({key for entry in history for key in entry if key.startswith(LEVEL)})
    columns = ("step", "tokens", "fill", "attention max/mean", "moved", "waiting", "loss")
    rows = [columns + ("by servers",) * served + ("by level",) * bool(levels)]
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
            + (_over_levels(entry, levels),) * bool(levels)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def _over_levels(entry: dict[str, Any], keys: Sequence[str]) -> str:
    """Format the bytes that crossed each level of nested domains, the outermost first."""
    return " + ".join(f"{entry.get(key, 0) / 2**20:,.1f}" for key in keys) + " MiB"


class LongCtxCallback(TrainerCallback):
    """Logs what a run will do at its start and the table of its steps at its end.

    Args:
        trainer: The `LongCtxTrainerMixin` that it reports on.
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
