"""Probe a model with a few tokens for what no config tells: which inputs it ignores."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny import documents, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import LongCtxTrainer, LongCtxTrainingArguments
from hf_longctx.support.model_rules import PROBE_RULES
from hf_longctx.training.checks import position_limit, validate_positions
from hf_longctx.training.probe import probe, uses_all_parameters
from hf_longctx.verify.check import small_model


class Wrapped(torch.nn.Module):
    """A causal language model with something wrong on the way to its attention or loss."""

    def __init__(self, model: Any, **drop: Any) -> None:
        super().__init__()
        self.model, self.config, self.drop = model, model.config, drop

    def forward(self, **given: Any) -> Any:
        return self.model(**(given | self.drop))


class Closed(Wrapped):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:  # no **kwargs
        return self.model(input_ids=input_ids, labels=labels)


class Sharded(Wrapped):
    tp_size = 2


class WithoutCounts(Wrapped):
    accepts_loss_kwargs = False


class Twice(Wrapped):
    def forward(self, **given: Any) -> Any:
        self.model(**given)
        return self.model(**given)


class Auxiliary(Wrapped):
    """Adds a term that every target would count again."""

    def forward(self, **given: Any) -> Any:
        output = self.model(**given)
        targets = given["shift_labels"].ne(-100).sum()
        return SimpleNamespace(logits=output.logits, loss=output.loss + 0.01 * targets)


class ShortConvolution(Wrapped):
    """Adds the token before to each one, whatever document it is of."""

    def forward(self, **given: Any) -> Any:
        embedded = self.model.get_input_embeddings()(given.pop("input_ids"))
        moved = embedded + 0.01 * embedded.roll(1, dims=1)
        return self.model(inputs_embeds=moved, **given)


class Unrotated(Wrapped):
    """Takes positions and does nothing with them."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.model.rotary_emb.inv_freq.zero_()


class ByTwos(Wrapped):
    """Numbers tokens 0, 2, 4 where no positions come."""

    def forward(self, **given: Any) -> Any:
        own = 2 * torch.arange(given["input_ids"].shape[1])[None]
        return self.model(**({"position_ids": own} | given))


class CountsFromTheStart(Wrapped):
    """Scales tokens by their place among all tokens of the batch."""

    def forward(self, **given: Any) -> Any:
        output = self.model(**given)
        place = torch.arange(output.logits.shape[1])[:, None]
        return SimpleNamespace(logits=output.logits * (1 + 0.01 * place), loss=output.loss)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda m: Closed(m), "Closed.forward takes no **kwargs"),
        (lambda m: Sharded(m), "tp_size=2: ranks that share weights"),
        (lambda m: WithoutCounts(m), "WithoutCounts.accepts_loss_kwargs=False: ranks' losses"),
        (lambda m: Wrapped(m, longctx_batch=None), "has 2 layers but called distca 0 times"),
        (lambda m: Twice(m), "has 2 layers but called distca 4 times for its documents: a layer's"),
        (lambda m: Wrapped(m, shift_labels=None), "Wrapped ignores shift_labels"),
        (lambda m: Wrapped(m, num_items_in_batch=None), "Wrapped's loss over one target of 4 is"),
        (lambda m: Auxiliary(m), "Auxiliary's loss over one target of 4 is"),
        (lambda m: ShortConvolution(m), "ShortConvolution's logits move by"),
        (lambda m: CountsFromTheStart(m), "something beside attention"),
        (lambda m: ByTwos(m), "ByTwos without position_ids gives other logits"),
        (lambda m: Unrotated(m), "Unrotated ignores position_ids"),
    ],
)
def test_models_that_ignore_our_inputs_are_refused(model, message):
    probe(Wrapped(tiny("distca")), name="distca")
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        probe(model(tiny("distca")), name="distca")
    (rule,) = [rule for rule in PROBE_RULES if rule.rule in str(refusal.value)]
    assert str(refusal.value).endswith(f"{rule.rule}; {rule.remedy}")


def test_models_that_number_tokens_themselves_are_refused():
    with pytest.raises(ValueError, match="position_ids are not the positions that longctx_batch"):
        probe(Wrapped(tiny("distca"), position_ids=None), name="distca")


def test_a_probed_model_is_left_as_it_was():
    model = tiny("distca").train()
    model.model.norm.eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    probe(model, name="distca")
    assert {part.training for part in model.modules() if part is not model.model.norm} == {True}
    assert not model.model.norm.training and torch.equal(torch.get_rng_state(), random)
    assert all(
        torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters()
    )


def test_dropout_that_attention_meets_in_training_alone_is_refused():
    model = tiny("distca").eval()
    model.model.layers[1].self_attn.attention_dropout = 0.1  # as where no field of the config tells
    with pytest.raises(ValueError, match="attention dropout=0.1 is refused"):
        probe(model, name="distca")
    assert not model.training


def test_hidden_dropout_is_no_difference_between_documents():
    model = small_model(AutoConfig.for_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.5))
    model.set_attn_implementation("distca")
    random = torch.get_rng_state()
    probe(model, name="distca")
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral"])
def test_exact_models_pass_in_every_dtype(family, dtype):
    probe(tiny("ring", family=family, dtype=dtype), name="ring")


@pytest.mark.parametrize(
    ("family", "limit"), [("gpt2", 1024), ("opt", 2048), ("gptj", 2048), ("llama", None)]
)
def test_documents_longer_than_a_table_of_positions_are_refused(family, limit):
    model = small_model(AutoConfig.for_model(family))
    assert position_limit(model) == limit
    if limit is None:
        validate_positions([2049], limit=limit)
        return
    validate_positions([limit, 1], limit=limit)
    with pytest.raises(ValueError, match=f"2049 tokens is longer .* table of {limit} positions"):
        validate_positions([7, 2049], limit=limit)
    old_gptj = family == "gptj" and Version(transformers.__version__) < Version("5.24")
    error = RuntimeError if old_gptj else IndexError
    with pytest.raises(error), torch.no_grad():  # what they would meet in a step
        model(torch.zeros(1, 1, dtype=torch.long), position_ids=torch.tensor([[limit]]))


def test_a_trainer_refuses_them_before_it_trains(tmp_path):
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    config = AutoConfig.for_model("gpt2", attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    options = {"use_cpu": True, "report_to": [], "longctx_max_tokens_per_rank": 48}
    arguments = LongCtxTrainingArguments(output_dir=str(tmp_path), **options)
    LongCtxTrainer(model=model, args=arguments, train_dataset=documents([32, 3]))
    with pytest.raises(ValueError, match="33 tokens is longer than the model's table of 32 posi"):
        LongCtxTrainer(model=model, args=arguments, train_dataset=documents([33, 3]))
    later = [{"input_ids": [1, 2], "position_ids": [5, 6]}]
    with pytest.raises(ValueError, match="train_dataset has position_ids, but documents are numb"):
        LongCtxTrainer(model=model, args=arguments, train_dataset=later)


# What DDP must look for


class Routed(Wrapped):
    """A token chooses one of two experts, each with a parameter of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.experts = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])

    def forward(self, input_ids: Any, **given: Any) -> Any:
        expert = self.experts[int(input_ids[0, 0]) % 2]
        return SimpleNamespace(logits=self.model(input_ids=input_ids, **given).logits + expert)


def with_a_spare() -> Any:
    model = tiny("distca")
    model.spare = torch.nn.Linear(2, 2)
    return model


@pytest.mark.parametrize("name", ["distca", "zeco_linear"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_uses_all_it_has_needs_no_search(name, training):
    family = "qwen3_next" if name == "zeco_linear" else "llama"  # the first has experts
    model = tiny(name, family=family).train(training)
    assert uses_all_parameters(model)
    assert model.training is training and all(p.grad is None for p in model.parameters())


def test_parameters_that_some_batch_may_not_reach_are_looked_for():
    spare = with_a_spare()
    assert not uses_all_parameters(spare)
    spare.spare.requires_grad_(False)
    assert uses_all_parameters(spare)
    assert not uses_all_parameters(Routed(tiny("distca")))
    assert not uses_all_parameters(Closed(tiny("distca")))  # fails on use_cache
