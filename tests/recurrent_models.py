"""Inputs for models with recurrent layers: packed documents, their boundaries, each one alone."""

from __future__ import annotations

from typing import Any

import torch
from tiny import documents, positions
from torch import Tensor

from hf_longctx.support import RECURRENT_FAMILIES
from hf_longctx.verify.twins import precision

FAMILIES = [name.removesuffix("_text") for name in RECURRENT_FAMILIES]
WITHOUT_SOFTMAX = ("mamba2", "mamba", "falcon_mamba")  # Transformers has but "eager" for them
LENGTHS = (7, 1, 40, 65)
BATCHES = [documents(LENGTHS), documents([30, 3, 9], seed=1)]
EXACT = 1e-9
PACKED = positions(*LENGTHS)
BOUNDS = torch.tensor([0, 7, 8, 48, 113], dtype=torch.int32)
INDEX = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None]
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": PACKED},
    "cu_seq_lens": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS},
    "seq_idx": {"seq_idx": INDEX},
    "all": {"position_ids": PACKED, "cu_seq_lens_q": BOUNDS, "seq_idx": INDEX},
}


def ids_of(rows: list[dict[str, list[int]]]) -> Tensor:
    """`[1, T]`: the documents laid end to end."""
    return torch.tensor([token for row in rows for token in row["input_ids"]])[None]


IDS = ids_of(BATCHES[0])


def logits(model: Any, **given: Any) -> Tensor:
    """In evaluation; the dtype is kept."""
    with torch.no_grad(), precision(model.dtype):
        found: Tensor = model.eval()(**given).logits
        return found


def each_alone(model: Any, ids: Tensor = IDS) -> Tensor:
    return torch.cat([logits(model, input_ids=part) for part in ids.split(LENGTHS, dim=1)], 1)
