"""Train a case on one process: document by document, with stock attention.

The packs come from the sampler, which has tests of its own; everything after them is written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import Document, tiny
from torch import Tensor
from train_cases import Case, arguments

from hf_longctx.data.documents import piece_targets
from hf_longctx.data.packing import GroupBatchSampler, Piece


def windows(case: Case, *, world: int) -> Iterator[list[Piece]]:
    """The pieces of each optimizer step, of all groups and micro-batches."""
    options = arguments(case, Path("unused"))
    size = options.longctx_group_size or world
    samplers = [
        GroupBatchSampler(
            case.lengths,
            capacity=size * options.longctx_max_tokens_per_rank,
            overflow=options.longctx_overflow,
            balance=options.longctx_balance,
            groups=world // size,
            group=group,
            seed=options.seed,
            shuffle=options.train_sampling_strategy == "random",
        )
        for group in range(world // size)
    ]
    for epoch in range(int(options.num_train_epochs)):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [[p for (pack,) in step for p in pack] for step in zip(*samplers, strict=True)]
        for start in range(0, len(batches), options.gradient_accumulation_steps):
            window = batches[start : start + options.gradient_accumulation_steps]
            yield [piece for batch in window for piece in batch]


def token_loss(model: Any, rows: list[Document], pieces: list[Piece]) -> Tensor:
    """Sum of the token losses of pieces, each alone, over the number of their targets."""
    losses, count = [torch.zeros(())], 0
    for piece in pieces:
        row = rows[piece.document]
        labels = np.asarray(row.get("labels", row["input_ids"]))
        wanted = torch.from_numpy(piece_targets(labels, piece=piece))
        logits = model(torch.tensor([row["input_ids"][piece.start : piece.stop]])).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        count += int((wanted != -100).sum())
    return torch.stack(losses).sum() / max(1, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What the plain loop found: figures after each step, and the weights after the last.

    Args:
        losses (`list[float]`): Mean over the step's targets.
        norms (`list[float]`): Of the gradient, before it is clipped.
        evaluations (`list[dict[str, float]]`): Mean over each evaluation set's targets.
        weights (`dict[str, Tensor]`): Of the model.
    """

    losses: list[float]
    norms: list[float]
    evaluations: list[dict[str, float]]
    weights: dict[str, Tensor]


def plain_loop(case: Case, *, world: int, model: Any = None) -> Plain:
    """Train as the case says, with stock attention, in one process, document by document."""
    model = model or tiny("sdpa", dtype=torch.float32)
    options, rows = arguments(case, Path("unused")), case.rows()
    steps = [*windows(case, world=world)]
    steps = steps[: options.max_steps] if options.max_steps > 0 else steps
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    slope = 1 / len(steps) if options.lr_scheduler_type == "linear" else 0.0
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - slope * step)
    losses, norms, evaluations = [], [], []
    for pieces in steps:
        model.zero_grad()
        loss = token_loss(model, rows, pieces)
        if loss.requires_grad:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
        norms.append(float(norm))
        with torch.no_grad():
            evaluations.append(
                {
                    key: token_loss(model, of_set, pieces_of(case, of_set, world)).item()
                    for key, of_set in case.evaluation_rows().items()
                }
            )
    weights = weights_of(model)
    return Plain(losses=losses, norms=norms, evaluations=evaluations, weights=weights)


def pieces_of(case: Case, rows: list[Document], world: int) -> list[Piece]:
    """Evaluation documents in pieces of at most one batch."""
    size = case.options.get("longctx_group_size") or world
    most = 48 * size
    return [
        Piece(document=d, start=start, stop=min(start + most, len(row["input_ids"])))
        for d, row in enumerate(rows)
        for start in range(0, len(row["input_ids"]), most)
    ]


def weights_of(model: Any) -> dict[str, Tensor]:
    """Of a model, without their graph."""
    return {name: p.detach() for name, p in model.named_parameters()}
