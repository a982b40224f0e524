"""Plan by the first trainer's cost table on every trainer (`--longctx_cost measured`)."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import keep_table, tiny
from train_cases import Case, arguments, trainer_of

from hf_longctx.planning.layouts.cost import CostTable
from hf_longctx.training.measurements import shared_costs

TABLE = CostTable(rows=(16, 512), keys=(512,), per_entry=((8e-8,), (1e-8,)))


def test_batches_are_planned_by_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_table(tiny("distca"), TABLE)
    case = Case(lengths=(40, 9, 30), options={"longctx_cost": "measured"})
    trainer = trainer_of(case, tmp_path)
    bound = []
    bind = trainer._bind
    monkeypatch.setattr(trainer, "_bind", lambda *a, **k: bound.append(bind(*a, **k)) or bound[-1])
    trainer.train()
    assert bound and {batch.options.costs for batch in bound} == {TABLE}
    assert {plan.options.costs for batch in bound for plan in batch.binding.plans.values()} == {
        TABLE
    }


def test_a_missing_table_is_refused_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = arguments(Case(lengths=(8,)), tmp_path, longctx_cost="measured")
    model = tiny("distca", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"no cost table at .*costs-cpu-.*json; run hf-longctx pr"):
        shared_costs(given, model=model, device=torch.device("cpu"))
    given.longctx_cost = "entries"
    assert shared_costs(given, model=model, device=torch.device("cpu")) is None


def test_ring_has_nothing_to_balance(tmp_path):
    given = arguments(Case(lengths=(8,)), tmp_path, longctx_cost="measured")
    message = "longctx_cost='measured' balances distca, and 'ring' moves no work; leave it out"
    with pytest.raises(ValueError, match=re.escape(message)):
        shared_costs(given, model=tiny("ring"), device=torch.device("cpu"))


def share(context: Any, *, cache: str) -> CostTable | str | None:
    """On each rank: what it is given, where only the first one's cache is at `cache`."""
    os.environ["XDG_CACHE_HOME"] = cache if context.rank == 0 else f"{cache}/none"
    given = SimpleNamespace(
        longctx_cost="measured",
        process_index=context.rank,
        world_size=context.ranks,
        bf16=False,
    )
    model = tiny("distca", dtype=torch.float32)
    try:
        return shared_costs(given, model=model, device=torch.device("cpu"))
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["XDG_CACHE_HOME"]


def test_all_trainers_get_the_first_ones_table_or_its_refusal(tmp_path, monkeypatch, rank_pool):
    refusals = rank_pool.run(share, ranks=4, cache=str(tmp_path))
    assert len(set(refusals)) == 1 and "no cost table at" in refusals[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_table(tiny("distca"), TABLE)
    assert rank_pool.run(share, ranks=4, cache=str(tmp_path)) == [TABLE] * 4
