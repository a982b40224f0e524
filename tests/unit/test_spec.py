"""One description of a layer's attention, from its config and from a call's tensors."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import collate, documents, tiny

from hf_longctx.attention import hook
from hf_longctx.attention.spec import AttentionSpec, layer_specs, validate_spec
from hf_longctx.data.batch import KEY
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.recurrent.prepare import prepare

SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=8, value_dim=6, window=3, softcap=5.0)


def test_all_descriptions_follow_from_a_spec() -> None:
    kind = LayerKind(window=3, causal=True, query_width=32, key_value_width=28, kv_heads=2, heads=4)
    assert SPEC.kind == kind
    assert SPEC.scoring(0.5) == Scoring(scale=0.5, window=3, causal=True, softcap=5.0)
    widths = SPEC.widths(torch.bfloat16)
    assert [widths.row(k) for k in ("q", "kv", "dq")] == [64, 56, 128]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_next"])
def test_calls_are_those_that_the_config_describes(family: str, monkeypatch: Any) -> None:
    name = "zeco_linear" if family == "qwen3_next" else "distca"
    model = prepare(tiny(name, family=family, dtype=torch.float32))
    seen: list[AttentionSpec] = []
    monkeypatch.setattr(hook, "validate_spec", lambda spec, config, layer: seen.append(spec))
    inputs = collate(documents([9, 5]))
    model(**{name: x for name, x in inputs.items() if name in ("input_ids", "position_ids", KEY)})
    assert seen, "no layer was compared"
    described = layer_specs(model.config)
    assert {replace(spec, sinks=False) for spec in seen} == {*described}
    assert {spec.sinks for spec in seen} == {family == "gpt_oss"}
    assert {spec.softcap > 0 for spec in seen} == {family == "gemma2"}
    assert len(seen) == len({*described}), "each kind of layer is compared once a batch"


CHANGED = {
    "heads": 2, "kv_heads": 4, "head_dim": 16, "value_dim": 16, "window": 7, "causal": False,
    "softcap": 3.0,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_call_that_the_config_does_not_describe_is_refused(name: str) -> None:
    assert {*CHANGED} == {f.name for f in fields(AttentionSpec)} - {"sinks"}
    config = tiny("distca").config
    (described, *_) = layer_specs(config)
    validate_spec(replace(described, sinks=True), config, layer=1)
    other = replace(described, **{name: CHANGED[name]})
    before = getattr(described, name)
    with pytest.raises(ValueError) as refusal:
        validate_spec(other, config, layer=1)
    assert str(refusal.value).startswith(
        f"layer 1 attends with {name}={CHANGED[name]}, but the model's config describes {name}="
        f"{before}; ranks compare plans of what the config describes, so correct the config, or "
    )


def test_the_hook_refuses_it_at_the_first_call() -> None:
    model = tiny("distca")
    batch = collate(documents([6]))[KEY]
    heads = model.config.num_attention_heads
    head_dim = layer_specs(model.config)[0].head_dim
    module = SimpleNamespace(is_causal=True, training=False, layer_idx=1, config=model.config)
    rows = [torch.zeros(1, heads, 6, head_dim) for _ in range(3)]
    with pytest.raises(ValueError, match=f"layer 1 attends with kv_heads={heads}, but the model"):
        hook.run("distca", module, *rows, None, longctx_batch=batch)  # type: ignore[arg-type]


def test_a_model_without_softmax_layers_is_described_as_such() -> None:
    config = tiny("zeco_linear", family="mamba2").config
    assert layer_specs(config) == []
    with pytest.raises(
        ValueError,
        match="0 attends with softmax, but the model's config describes no softmax layer; rank",
    ):
        validate_spec(SPEC, config, layer=0)
