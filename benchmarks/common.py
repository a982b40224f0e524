"""A shape and document lengths -> the model and inputs that a bench runs, and what it reports.

Letters: T tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama-shaped model; the defaults are the shape of every published figure."""

    layers: int = 4
    hidden: int = 512
    mlp: int = 1408
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 1024

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())

    def model(self) -> Any:
        """The model in float32 under `sdpa`, in training mode; the same weights everywhere."""
        torch.manual_seed(SEED)
        config = LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            use_cache=False,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config).train()

    def operations(self, lengths: Sequence[int]) -> float:
        """Floating-point operations of a forward and backward of these documents, each alone.

        A backward takes two products per weight, and five per score entry where a forward takes
        two: scores are not kept.
        """
        attended = self.heads * self.head_dim
        projected = self.hidden * (2 * attended + 2 * self.kv_heads * self.head_dim)
        weights = self.layers * (projected + 3 * self.hidden * self.mlp)
        weights += self.hidden * self.vocabulary
        entries = sum(n * (n + 1) / 2 for n in lengths)
        return 6.0 * weights * sum(lengths) + 14.0 * self.layers * attended * entries


def inputs(
    lengths: Sequence[int], *, vocabulary: int, rows: np.ndarray | None = None
) -> dict[str, Tensor]:
    """A packed batch as a collator makes it: ids, positions, and targets shifted per document.

    Args:
        lengths (`Sequence[int]`): Tokens of each document.
        vocabulary (`int`): Ids are drawn below it; the same for the same lengths.
        rows (`np.ndarray`, *optional*): int64, which of the T tokens to keep, in which order.

    Returns:
        int64 tensors `[1, rows]`, and `num_items_in_batch`: the targets of all documents.
    """
    documents = np.split(
        np.random.default_rng(SEED).integers(0, vocabulary, sum(lengths)), np.cumsum(lengths)[:-1]
    )
    columns = {
        "input_ids": np.concatenate(documents),
        "position_ids": np.concatenate([np.arange(n) for n in lengths]),
        "shift_labels": np.concatenate([np.append(d[1:], -100) for d in documents]),
    }
    kept = slice(None) if rows is None else rows
    tensors = {name: torch.from_numpy(column[kept])[None] for name, column in columns.items()}
    tensors["labels"] = tensors["input_ids"]
    return tensors | {"num_items_in_batch": torch.tensor(sum(lengths) - len(lengths))}


def differentiate(model: Any, batches: Sequence[Mapping[str, Any]]) -> float:
    """Forward and backward of each batch in turn; gradients add up. Returns the summed loss."""
    loss = 0.0
    for batch in batches:
        output = model(**batch)
        output.loss.backward()
        loss += float(output.loss.detach())
    return loss


def gradients(model: Any) -> list[Tensor]:
    """Copies of all parameter gradients."""
    return [parameter.grad.clone() for parameter in model.parameters()]


def gradient_error(ours: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The worst tensor's `max|a - b|`, over the larger of its `max|b|` and 1e-3 of the model's."""
    largest = max(float(b.abs().max()) for b in right)
    return max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest)
        for a, b in zip(ours, right, strict=True)
    )


def product_rate(size: int = 1024) -> float:
    """Floating-point operations per CPU second of one float32 matrix product, the best of ten."""
    a, b = torch.randn(2, size, size)
    taken = []
    for _ in range(10):
        started = time.process_time()
        torch.mm(a, b)
        taken.append(time.process_time() - started)
    return 2.0 * size**3 / min(taken)
