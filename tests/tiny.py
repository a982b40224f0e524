"""Make tiny models and documents, and run them on one process or on R ranks as threads.

Batches come from the collator that training uses; both sides sum token losses and divide by all
targets. Letters: R ranks, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import threads
from torch import Tensor, nn
from transformers import AutoConfig

import hf_longctx  # noqa: F401  (registers the attention names)
from hf_longctx.comm.channels import Hub
from hf_longctx.data.batch import KEY, LongCtxBatch
from hf_longctx.data.collator import LongCtxCollator
from hf_longctx.data.documents import IGNORE
from hf_longctx.data.packing import Piece
from hf_longctx.planning.layouts.cost import CostTable
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.runtime.executor import Runtime
from hf_longctx.training.measurements import cost_file, save_costs
from hf_longctx.verify.twins import (
    REFERENCE,
    auto_class,
    backward,
    convert,
    draw_at_unit_gain,
    precision,
    register_reference,
)

CONFIGS = Path(__file__).parent / "configs"
VOCABULARY = 64
Document = dict[str, list[int]]


def tiny(
    name: str, *, family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any
) -> Any:
    """A model of `tests/configs/tiny_<family>.json` with unit gain, the same weights each time."""
    register_reference()
    given = json.loads((CONFIGS / f"tiny_{family}.json").read_text()) | changes
    config = AutoConfig.for_model(**given)
    auto = auto_class(config)
    options = {"attn_implementation": name, "experts_implementation": "eager"}
    model = auto.from_config(config, dtype=torch.float32, **options)
    draw_at_unit_gain(model)
    model.config.use_cache = False
    return convert(model, dtype)


def keep_table(model: Any, table: CostTable) -> Path:
    """Leave a cost table where trainers of a float32 model on CPU look for theirs."""
    config = model.config
    path = cost_file(
        device="cpu",
        dtype="float32",
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    save_costs(table, path)
    return path


def documents(lengths: Sequence[int], *, seed: int = 0) -> list[Document]:
    """Rows of a data set: random ids."""
    noise = np.random.default_rng(seed)
    return [{"input_ids": noise.integers(0, VOCABULARY, n).tolist()} for n in lengths]


def positions(*lengths: int) -> Tensor:
    """`[1, T]`: packed documents, each from 0."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def whole(rows: Sequence[Document]) -> tuple[Piece, ...]:
    """All rows as one pack."""
    return tuple(
        Piece(document=d, start=0, stop=len(row["input_ids"])) for d, row in enumerate(rows)
    )


def collate(
    rows: Sequence[Document], *, rank: int = 0, ranks: int = 1, layout: str = "spread"
) -> dict[str, Any]:
    """One rank's inputs of a batch that holds all rows."""
    budget = sum(len(row["input_ids"]) for row in rows)
    collator = LongCtxCollator(
        rank=rank, ranks=ranks, options=PlanOptions(layout=layout, tolerance=0.0), budget=budget
    )
    return collator([(whole(rows), rows)])


def targets(rows: Sequence[Document]) -> int:
    """Targets of the documents: each token's label but the first one's, where not ignored."""
    labels = (row.get("labels", row["input_ids"]) for row in rows)
    return sum(label != IGNORE for of_row in labels for label in of_row[1:])


@dataclass(slots=True)
class Outcome:
    """Of some batches together.

    Args:
        logits (`list[Tensor]`): `[T, V]` of each batch, documents end to end.
        loss (`float`): Sum of the token losses over the number of targets.
        grads (`dict[str, Tensor]`): Of the parameters.
        runtimes (`list[Runtime]`): Of the ranks, with what they counted.
        batches (`list[LongCtxBatch]`): Of all ranks.
    """

    logits: list[Tensor]
    loss: float
    grads: dict[str, Tensor]
    runtimes: list[Runtime] = field(default_factory=list)
    batches: list[LongCtxBatch] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the ranks sent each other."""
        return sum(runtime.sent_bytes for runtime in self.runtimes)

    def error(self, right: Outcome) -> float:
        """Largest difference in logits, loss and gradients, each relative to its largest entry; a
        gradient's counts as at least a thousandth of the model's largest."""
        pairs = [(a, b, 0.0) for a, b in zip(self.logits, right.logits, strict=True)]
        largest = max(float(grad.abs().max()) for grad in right.grads.values())
        pairs += [(self.grads[name], b, 1e-3 * largest) for name, b in right.grads.items()]
        found = [float((a - b).abs().max()) / max(float(b.abs().max()), c) for a, b, c in pairs]
        found.append(abs(self.loss - right.loss) / abs(right.loss))
        return float(np.max(found))  # NaN where there is one; max would hide it


class Errors:
    """Relative errors over many samples: of one sample they are mostly luck (C29).

    A gradient's error is divided by the larger of its own root mean square and a thousandth of the
    largest such figure in the model.
    """

    def __init__(self) -> None:
        self.squares: dict[str, list[float]] = {"logits": [], "loss": [], "grads": []}

    def add(self, found: Outcome, right: Outcome) -> None:
        """Add one sample's errors against the exact outcome."""
        pairs = zip(found.logits, right.logits, strict=True)
        self.squares["logits"] += [_square(a - b) / _square(b) for a, b in pairs]
        self.squares["loss"].append((found.loss / right.loss - 1) ** 2)
        least = 1e-6 * max(map(_square, right.grads.values()))
        self.squares["grads"] += [
            _square(found.grads[name] - b) / max(_square(b), least)
            for name, b in right.grads.items()
        ]

    def root_mean_square(self, key: str) -> float:
        """Over the samples, and for gradients over the parameters."""
        return float(np.sqrt(np.mean(self.squares[key])))

    def assert_bf16_rule(self, plain: Errors) -> None:
        """Check that errors stay within twice, for gradients three times, the plain path's."""
        for key, factor in (("logits", 2), ("loss", 2), ("grads", 3)):
            error, bound = self.root_mean_square(key), plain.root_mean_square(key)
            assert error <= factor * bound, (key, error, bound)


def _square(x: Tensor) -> float:
    return float(x.double().square().mean())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters' gradients; zero where none came."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def alone(model: Any, batches: Sequence[Sequence[Document]]) -> Outcome:
    """Each document by itself through a model, in one process."""
    model = copy.deepcopy(model).train()
    count = max(1, sum(targets(rows) for rows in batches))
    outcome = Outcome([], 0.0, {})
    with precision(model.dtype):
        for rows in batches:
            logits = []
            for row in rows:
                ids = torch.tensor([row["input_ids"]])
                labels = torch.tensor([row.get("labels", row["input_ids"])])
                output = model(input_ids=ids, labels=labels, num_items_in_batch=count)
                backward(output.loss)
                outcome.loss += output.loss.item()
                logits.append(output.logits[0].detach())
            outcome.logits.append(torch.cat(logits))
    outcome.grads = gradients(model)
    return outcome


def twin(batches: Sequence[Sequence[Document]], **options: Any) -> Outcome:
    """Each document by itself through the naive attention, in float64."""
    return alone(tiny(REFERENCE, **options), batches)


def enable_checkpointing(model: Any, **options: bool) -> None:
    """Turn activation checkpointing on, which had another name before Transformers 5.24."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(options)


def run_ranks(
    model: Any,
    batches: Sequence[Sequence[Document]],
    *,
    ranks: int,
    layout: str = "spread",
    checkpointing: dict[str, Any] | None = None,
) -> Outcome:
    """All batches forward, then all backward, on R copies of a model that exchange as threads.

    Args:
        model: Under one of our names.
        batches: The documents of each batch.
        ranks (`int`): Threads.
        layout (`str`, *optional*): How documents are cut.
        checkpointing (`dict`, *optional*): Keyword arguments of activation checkpointing; off when
            left out.
    """
    channels = Hub(ranks, timeout=20.0).channels()
    outcome = Outcome([], 0.0, {}, [Runtime(channel=channel) for channel in channels])
    models = [copy.deepcopy(model).train() for _ in range(ranks)]
    count = max(1, sum(targets(rows) for rows in batches))
    logits: dict[tuple[int, int], Tensor] = {}
    losses = [0.0] * ranks

    def work(rank: int) -> None:
        mine = models[rank]
        if checkpointing is not None:
            # random state belongs to the process, and threads would restore it over each other
            enable_checkpointing(mine, preserve_rng_state=False, **checkpointing)
            mine.enable_input_require_grads()
        inputs = [collate(rows, rank=rank, ranks=ranks, layout=layout) for rows in batches]
        with precision(mine.dtype):
            outputs = []
            for index, given in enumerate(inputs):
                given[KEY].bind(outcome.runtimes[rank])
                outputs.append(mine(**given, num_items_in_batch=count))
                logits[rank, index] = outputs[-1].logits[0].detach()
            for output in outputs:
                backward(output.loss)
        losses[rank] = sum(output.loss.item() for output in outputs)
        outcome.batches.extend(given[KEY] for given in inputs)

    threads(work, ranks=ranks)
    for index in range(len(batches)):
        rows = torch.cat([logits[rank, index] for rank in range(ranks)])
        layout_of = next(b.layout for b in outcome.batches[index :: len(batches)])
        outcome.logits.append(rows[torch.from_numpy(layout_of.inverse())])
    each = [gradients(m) for m in models]
    outcome.grads = {name: torch.stack([g[name] for g in each]).sum(0) for name in each[0]}
    outcome.loss = sum(losses)
    return outcome


def decode_two(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Logits of two tokens decoded at once onto the prompt's cache."""
    parameter = "cache" if "cache" in inspect.signature(model.forward).parameters else None
    with torch.no_grad():
        first = model(input_ids=prompt, use_cache=True)
        kept = getattr(first, "cache", None) or first.past_key_values
        given = {parameter or "past_key_values": kept}
        return model(input_ids=prompt[:, :2], use_cache=True, **given).logits


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


def fill(packs: Any, *, capacity: int) -> float:
    """Tokens in packs over the tokens they have room for."""
    return sum(piece.length for pack in packs for piece in pack) / (len(packs) * capacity)
