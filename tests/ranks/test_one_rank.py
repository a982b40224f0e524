"""Run a model on one rank process: it generates alone, and refuses documents after unpickling."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from recurrent_models import IDS, PACKED, logits
from tiny import tiny

import hf_longctx

pytestmark = pytest.mark.filterwarnings("ignore")

DOCUMENTS = {"input_ids": IDS, "position_ids": PACKED}
NO_LONGER = re.escape("(pickles do not keep it); call hf_longctx.prepare(model) again")


def generate_alone(context: Any, *, name: str) -> list[int]:
    """Rank 0 generates and the others do nothing: any exchange would time out."""
    if context.rank:
        return []
    model = tiny(name, dtype=torch.float32).eval()
    prompt = torch.arange(7)[None] * 9 % 64
    given = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "max_new_tokens": 4}
    tokens = model.generate(prompt, do_sample=False, **given)
    assert not context.channel.sent
    stock = tiny("sdpa", dtype=torch.float32).eval()
    assert torch.equal(tokens, stock.generate(prompt, do_sample=False, **given))
    return tokens[0].tolist()


def test_b52_one_rank_alone_generates(rank_pool):
    ours, others = rank_pool.run(generate_alone, ranks=2, name="distca")
    assert others == [] and len(ours) == 11


def refused(context: Any, *, file: str) -> str:
    """A rank's job: what a process that has prepared nothing makes of a model that was."""
    model = torch.load(file, weights_only=False)
    try:
        model(**DOCUMENTS)
    except ValueError as error:
        return f"{error} {bool(logits(hf_longctx.prepare(model), **DOCUMENTS).isfinite().all())}"
    return "nothing was refused"


@pytest.mark.parametrize("family", ["jamba", "mamba2"])
def test_a_model_saved_whole_refuses_documents_in_another_process(family, tmp_path, rank_pool):
    torch.save(hf_longctx.prepare(tiny("eager", family=family)), tmp_path / "whole.pt")
    (found,) = rank_pool.run(refused, ranks=1, file=str(tmp_path / "whole.pt"))
    assert re.search(f"{NO_LONGER} True$", found)
