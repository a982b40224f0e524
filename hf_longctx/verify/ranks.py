"""Run one rank of a verification: the model on this rank's rows, and the values to compare.

Layer: verify. Letters: T rows of this rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import hf_longctx.attention.registration as registry

from ..attention.spec import layer_specs
from ..data.batch import KEY, LongCtxBatch, halved
from ..planning.layouts.layout import Halves, Layout, cut, halve
from ..planning.planners.options import PlanOptions
from ..planning.program.counts import sent_in_layer
from ..recurrent.prepare import prepare
from ..runtime.executor import Runtime
from ..runtime.pingpong import enable_pingpong
from ..servers.server_pool import ServerPool
from ..training.measurements import BY_LINK, find_link
from .rank_pool import RankContext
from .twins import DTYPES, backward, build, precision

COLUMNS = 4096  # logits kept per row; all 150,000 of a large vocabulary would fill the memory


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every rank runs.

    Args:
        model (`str`): Checkpoint folder or config JSON.
        name (`str`): Attention name.
        options (`PlanOptions`): What plans depend on, and the name of the layout.
        dtype (`str`): `float64`, `float32` or `bf16`.
        lengths (`tuple[tuple[int, ...], ...]`): Documents of each batch.
        vocab_size (`int`): Ids are drawn below it.
        checkpointing (`str`): `none`, `reentrant` or `nonreentrant`.
        servers (`int`): Extra attention servers beside the ranks.
    """

    model: str
    name: str
    options: PlanOptions
    dtype: str
    lengths: tuple[tuple[int, ...], ...]
    vocab_size: int
    checkpointing: str = "none"
    servers: int = 0

    @property
    def halves(self) -> bool:
        """Whether each batch that can be split runs as two halves."""
        return self.options.overlap == "pingpong"

    def cut(self, batch: int, *, ranks: int) -> tuple[Layout, Halves | None]:
        """Cut a batch over the ranks; also returns its halves, where it has any."""
        lengths, name = self.lengths[batch], self.options.layout
        halves = halve(lengths, ranks=ranks, layout=name) if self.halves else None
        if halves:
            return halves.whole, halves
        return cut(lengths, ranks=ranks, layout=name, levels=self.options.topology), None

    def documents(self, batch: int) -> list[np.ndarray]:
        """Draw the ids of a batch's documents; the same in every process."""
        noise = np.random.default_rng([7, batch])
        return [noise.integers(0, self.vocab_size, n) for n in self.lengths[batch]]

    @property
    def columns(self) -> Tensor:
        """Return the logit columns to compare, int64: at most `COLUMNS` of a large vocabulary.

        With more columns than hidden units every unit still counts; loss and gradients, which are
        compared in full, cover the other columns.
        """
        count = min(self.vocab_size, COLUMNS)
        drawn = np.random.default_rng(7).choice(self.vocab_size, count, replace=False)
        return torch.from_numpy(np.sort(drawn))

    @property
    def targets(self) -> int:
        """Count the targets of all batches: every token but the first of each document."""
        return sum(n - 1 for lengths in self.lengths for n in lengths)


@dataclass
class RankResult:
    """The values of one rank; the caller forms sums over ranks.

    Args:
        logits (`list[Tensor]`): Logits of each batch, `[T, columns]`.
        loss (`float`): This rank's part of the loss.
        grads (`dict[str, Tensor]`): Parameter gradients summed over ranks (rank 0 only).
        leak (`float`): Largest gradient of other documents' logits in a document's embeddings.
        attention_calls, bytes_planned, bytes_sent, recompute_bytes, switches (`int`): Counts of the
            main run; rank 0 adds those of servers.
        head_groups (`int`): Largest number of head groups of an exchange.
        tasks_on_servers (`int`): Tasks of the main run that ran on servers (rank 0 only).
        scans (`dict[str, dict[str, Any]]`): Figures of the longest scan, by state.
    """

    logits: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    grads: dict[str, Tensor] = field(default_factory=dict)
    leak: float = 0.0
    attention_calls: int = 0
    bytes_planned: int = 0
    bytes_sent: int = 0
    recompute_bytes: int = 0
    switches: int = 0
    head_groups: int = 0
    tasks_on_servers: int = 0
    scans: dict[str, dict[str, Any]] = field(default_factory=dict)


def run_rank(context: RankContext, *, case: Case) -> RankResult:
    """Run forward on all batches, then backward on all of them; then measure the leak."""
    registry.register()
    dtype = DTYPES[case.dtype]
    model = build(case.model, name=case.name, dtype=dtype)
    prepare(model)
    model.train()
    if case.checkpointing != "none":
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable  # before Transformers 5.24
        enable({"use_reentrant": case.checkpointing == "reentrant"})
        model.enable_input_require_grads()
    if case.halves:
        enable_pingpong(model)
    if case.name == "zeco_linear" and case.options.scan in BY_LINK and context.ranks > 1:
        link = find_link(context.channel, ranks=context.ranks)
        case = replace(case, options=replace(case.options, link=link))
    result, runtime = RankResult(), Runtime(channel=context.channel)
    probed = runtime.sent_bytes  # of measuring the link, which no plan has
    with precision(dtype), _servers(case, context, runtime) as servers:
        losses = []
        batches = [_inputs(case, context, servers, i) for i in range(len(case.lengths))]
        for inputs in batches:
            output = model(**inputs, num_items_in_batch=torch.tensor(case.targets))
            losses.append(output.loss)
            result.logits.append(output.logits[0].detach()[:, case.columns])
        # All batches are in flight before the first backward: mixed-up plans would show.
        total = torch.stack(losses).sum()
        backward(total)
        result.loss = float(total.detach())
        result.attention_calls = runtime.account.calls
        result.recompute_bytes = runtime.account.recompute_bytes
        result.bytes_sent = runtime.sent_bytes - probed
        result.switches = runtime.account.switches
        parts = [part for inputs in batches for part in inputs[KEY].parts]
        result.bytes_planned = sum(
            _planned(part, model, dtype, process=context.rank) for part in parts
        )
        result.bytes_planned += runtime.account.planned_bytes
        assert all(not part.binding.saved.results for part in parts), (
            "saved attention was not dropped"
        )
        plans = [plan for part in parts for plan in part.binding.plans.values()]
        result.head_groups = max((len(plan.groups) for plan in plans), default=0)
        scans = sorted(
            (s for part in parts for s in part.binding.scans.values()), key=lambda s: s.ranks
        )
        result.scans = {str(scan.sizes): scan.figures() for scan in scans}
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # Ranks' parts add up in float32 or wider: bf16 sums would hide errors of our own.
            grad = grad.to(torch.promote_types(dtype, torch.float32), copy=True)
            dist.all_reduce(grad, group=context.group)
            if context.rank == 0:
                result.grads[name] = grad
        if context.rank == 0 and case.servers:
            _count_servers(result, servers, parts, model, dtype)
        result.leak = _leak(model, case, context, servers)
    return result


@contextmanager
def _servers(case: Case, context: RankContext, runtime: Runtime) -> Iterator[ServerPool]:
    """Start the case's servers from the ranks, as trainers start theirs."""
    with (
        TemporaryDirectory(prefix="hf_longctx_servers_") as folder,
        ServerPool(
            runtime, ranks=context.ranks, rank=context.rank, count=case.servers, folder=Path(folder)
        ) as servers,
    ):
        servers.start()
        yield servers


def _count_servers(
    result: RankResult, servers: ServerPool, batches: list[LongCtxBatch], model: Any, dtype: Any
) -> None:
    """Add the bytes and tasks planned for servers, and the bytes that they report as sent."""
    result.bytes_sent += sum(int(report["sent"]) for report in servers.report())
    for batch in batches:
        ranks = batch.layout.ranks
        for number in range(len(batch.options.speeds)):
            result.bytes_planned += _planned(batch, model, dtype, process=ranks + number)
        for spec in layer_specs(model.config):
            plan = batch.plan("distca", spec.kind)
            result.tasks_on_servers += int((plan.tasks[:, 4] >= ranks).sum())


def _inputs(case: Case, context: RankContext, servers: ServerPool, index: int) -> dict[str, Any]:
    """Make the model's arguments for this rank's rows of a batch, as the collator does."""
    documents = case.documents(index)
    layout, halves = case.cut(index, ranks=context.ranks)
    rows = layout.flat_rows(context.rank)
    ids = np.concatenate(documents)
    targets = np.concatenate([np.append(d[1:], -100) for d in documents])
    options = replace(case.options, speeds=servers.speeds)
    parts = halved(halves, context.rank, options=options) if halves else ()
    batch = LongCtxBatch(layout, context.rank, options, halves=parts)
    batch.bind(servers.runtime)
    return {
        "input_ids": torch.from_numpy(ids[rows])[None],
        "labels": torch.from_numpy(ids[rows])[None],
        "shift_labels": torch.from_numpy(targets[rows])[None],
        "position_ids": torch.from_numpy(layout.positions(context.rank))[None],
        KEY: batch,
    }


def _planned(batch: LongCtxBatch, model: Any, dtype: torch.dtype, *, process: int) -> int:
    """Count the bytes that a rank's or server's programs send for one batch, over all layers."""
    plans = {plan.kind: plan for plan in batch.binding.plans.values()}
    return sum(
        sent_in_layer(plans[spec.kind].program(process), spec.widths(dtype))
        for spec in layer_specs(model.config)
    )


def _leak(model: Any, case: Case, context: RankContext, servers: ServerPool) -> float:
    """Compute the largest |d(other documents' logits) / d(a document's embeddings)|."""
    leaks = [0.0]
    index = len(case.lengths) - 1
    for document in _suspects(case.lengths[index]):
        inputs = _inputs(case, context, servers, index)
        ids = inputs.pop("input_ids")
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        mine = np.concatenate(
            [
                np.full(s.stop - s.start, s.document == document)
                for s in inputs[KEY].layout.of_rank(context.rank)
            ]
        )
        inside = torch.from_numpy(mine)
        for label in ("labels", "shift_labels"):
            inputs.pop(label)
        logits = model(inputs_embeds=embeds, **inputs).logits[0]
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        backward((logits * weights.to(logits.dtype))[~inside].sum())
        grad = embeds.grad if embeds.grad is not None else torch.zeros_like(embeds)
        leaks.append(float(grad[0][inside].abs().max()) if inside.any() else 0.0)
    return float(np.max(leaks))


def _suspects(lengths: Sequence[int]) -> list[int]:
    """Pick the longest document, the shortest and the last: the likeliest to leak."""
    order = sorted(range(len(lengths)), key=lambda d: lengths[d])
    return sorted({order[0], order[-1], len(lengths) - 1})
