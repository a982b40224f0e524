"""Reject packed documents in recurrent models that are not prepared, or no longer."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from typing import Any

import pytest
import torch
from recurrent_models import (
    DESCRIPTIONS,
    FAMILIES,
    IDS,
    LENGTHS,
    PACKED,
    WITHOUT_SOFTMAX,
    each_alone,
    logits,
)
from tiny import positions, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_longctx
from hf_longctx.data.batch import KEY, LongCtxBatch
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.recurrent.unprepared_guard import guard_by_name
from hf_longctx.support import NAMES

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = LongCtxBatch(cut(LENGTHS, ranks=1, layout="contiguous"), 0)
DOCUMENTS = {"input_ids": IDS, "position_ids": PACKED}
REMEDY = re.escape("call hf_longctx.prepare(model) once it is loaded")
NO_LONGER = re.escape("(pickles do not keep it); call hf_longctx.prepare(model) again")
every_family = pytest.mark.parametrize("family", WITHOUT_SOFTMAX)


@every_family
@pytest.mark.parametrize("name", NAMES)
def test_b42_documents_are_refused_by_class_before_a_model_is_prepared(family, name):
    model = tiny(name, family=family)
    for part in (model, model.backbone):
        refusal = rf"reached {type(part).__name__}, whose recurrent .*={family}\) .*{REMEDY}"
        for given in (*DESCRIPTIONS.values(), {KEY: BATCH}):
            with pytest.raises(ValueError, match=refusal):
                part(input_ids=IDS, **given)
        with pytest.raises(ValueError, match=refusal):
            part(IDS, **DESCRIPTIONS["position_ids"])


@every_family
def test_other_calls_and_a_later_prepare_are_as_without_the_name(family):
    stock, ours = (tiny(name, family=family) for name in ("eager", "zeco_linear"))
    rows = torch.stack([IDS[0, :24], IDS[0, 24:48]])
    mask = torch.ones_like(rows)
    mask[0, :5] = 0
    for given in ({}, {"attention_mask": mask}, {"position_ids": positions(24)}):
        assert torch.equal(*(logits(model, input_ids=rows, **given) for model in (stock, ours)))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "use_cache": True}
    assert torch.equal(*(model.generate(rows, **options) for model in (stock, ours)))
    found = logits(hf_longctx.prepare(ours), **DOCUMENTS)
    torch.testing.assert_close(found, each_alone(stock), rtol=0, atol=1e-9)


@every_family
def test_the_watch_comes_and_goes_with_the_name(family, tmp_path):
    model = tiny("eager", family=family)
    right = logits(model, **DOCUMENTS)
    model.set_attn_implementation("distca")
    with pytest.raises(ValueError, match=REMEDY):
        model(**DOCUMENTS)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="zeco_linear")
    for kept in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        with pytest.raises(ValueError, match=REMEDY):
            kept(**DOCUMENTS)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, **DOCUMENTS), right)
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_check_leaves_no_watch():
    model = tiny("eager", family="mamba", dtype=torch.float32)
    assert [row.name for row in hf_longctx.check(model) if row.works] == ["zeco_linear"]
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_hybrids_are_watched_and_softmax_models_are_not():
    seq_idx = DESCRIPTIONS["seq_idx"]  # which softmax layers do not look at
    with pytest.raises(ValueError, match=f"reached BambaForCausalLM, .*{REMEDY}"):
        tiny("zeco_linear", family="bamba")(input_ids=IDS, **seq_idx)
    assert not any(part._forward_pre_hooks for part in tiny("distca").modules())


def test_registering_again_changes_nothing():
    asked = PreTrainedModel._check_and_adjust_attn_implementation
    hf_longctx.register()
    guard_by_name()
    assert PreTrainedModel._check_and_adjust_attn_implementation is asked
    model = tiny("zeco_linear", family="mamba")
    model.set_attn_implementation("distca")
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("missing", [True, False])
def test_a_library_that_asks_otherwise_is_told_of(missing, monkeypatch, caplog):
    name = "_check_and_adjust_attn_implementation"

    def other(self: Any, name: str) -> str:
        """Not what is known."""
        return name

    if missing:
        monkeypatch.delattr(PreTrainedModel, name)
    else:
        monkeypatch.setattr(PreTrainedModel, name, other)
    guard_by_name()
    assert getattr(PreTrainedModel, name, other) is other
    ((_, level, message),) = caplog.record_tuples
    found = "no such function" if missing else "self name"
    assert level == logging.WARNING and f"has parameters ({found}), but " in message
    assert message.startswith("models without softmax layers do not refuse packed documents")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_model_refuses_documents_until_it_is_prepared_again(family):
    """Layers and blocks of every kind come out of a pickle; what was done to them does not."""
    model = hf_longctx.prepare(tiny("eager", family=family))
    right = logits(model, **DOCUMENTS)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(loaded, input_ids=IDS), logits(model, input_ids=IDS))
    for part in (loaded, loaded.base_model):
        with pytest.raises(ValueError, match=f"{type(part).__name__}, which was .*{NO_LONGER}"):
            part(**DOCUMENTS)
    assert torch.equal(logits(hf_longctx.prepare(loaded), **DOCUMENTS), right)
    assert torch.equal(logits(copy.deepcopy(loaded), **DOCUMENTS), right)


def test_a_model_under_mixed_precision_is_still_prepared():
    """Accelerate puts its own forward over the one that looks for documents."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = hf_longctx.prepare(tiny("zeco_linear", family="mamba"))
    right = logits(model, **DOCUMENTS)
    model.forward = convert_outputs_to_fp32(model.forward)
    assert not hasattr(model.forward, "hf_longctx_original")
    assert torch.equal(logits(model, **DOCUMENTS), right)
