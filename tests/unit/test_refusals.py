"""Reject what is not computed exactly, with the value, the rule and the remedy."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import collate, documents, positions, tiny
from transformers import AutoConfig

from hf_longctx import LongCtxTrainingArguments
from hf_longctx.attention import hook
from hf_longctx.attention.masks import LayerMask, attention_mask
from hf_longctx.attention.registration import FUNCTIONS, register
from hf_longctx.data.batch import KEY, LongCtxBatch
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.support import (
    NAMES,
    RULES,
    SOFTMAX_NAMES,
    validate_arguments,
    validate_model,
    validate_pingpong,
)
from hf_longctx.support import table as support_table
from hf_longctx.support.argument_rules import ARGUMENT_RULES
from hf_longctx.support.model_rules import FLA_RULE, MODEL_RULES
from hf_longctx.support.rules import validate_rules
from hf_longctx.support.trainer_rules import PINGPONG_RULES

ONE_ROW = [torch.zeros(1, heads, 6, 8) for heads in (4, 2, 2)]
DENSE = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
BOUNDS = torch.tensor([0, 6], dtype=torch.int32)


def call(*rows: torch.Tensor, mask: Any = None, causal: bool = True, **given: Any) -> Any:
    """One attention call of a layer."""
    module = SimpleNamespace(is_causal=causal, training=False, layer_idx=0)
    return hook.run("distca", module, *(rows or ONE_ROW), mask, **given)


def batch(*lengths: int, ranks: int = 1) -> LongCtxBatch:
    return LongCtxBatch(cut(lengths, ranks=ranks, layout="contiguous"), 0)


def test_what_is_refused_below_runs_without_the_refused_value():
    allowed = {"position_ids": positions(6), "use_cache": False, "seq_idx": None, "dropout": 0.0}
    assert call(**allowed)[0].shape == (1, 6, 4, 8)
    assert call(mask=DENSE)[0].shape == (1, 6, 4, 8)
    assert call(mask=LayerMask(4), sliding_window=4)[0].shape == (1, 6, 4, 8)
    assert call(mask=LayerMask(causal=False), causal=False)[0].shape == (1, 6, 4, 8)
    assert call(mask=LayerMask(causal=False), is_causal=False)[0].shape == (1, 6, 4, 8)
    assert call(longctx_batch=batch(4, 2))[0].shape == (1, 6, 4, 8)
    assert call(position_bias=None)[0].shape == (1, 6, 4, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias=Tensor is not on"),
        ({"indices": torch.zeros(4)}, "indices=Tensor is not on"),
        ({"cu_seqlens": BOUNDS}, "nothing reads it, so documents would see each other; write cu_"),
        ({"cu_seq_len_k": BOUNDS}, "keyword cu_seq_len_k=Tensor: nothing reads it"),
        ({"seq_id": positions(6)}, "write seq_idx"),
        ({"output_router_logits": True}, "output_router_logits=bool is not on"),
        ({"dropout": 0.1}, "dropout=0.1 is refused; set attention_dropout=0.0"),
        ({"is_causal": False}, "has is_causal=False but a causal mask, or none"),
        ({"causal": False}, "has is_causal=False but a causal mask, or none"),
        ({"mask": LayerMask(causal=False)}, "has is_causal=True but a bidirectional mask"),
        (
            {"mask": LayerMask(5, causal=False), "causal": False, "sliding_window": 4},
            "window 5 of its mask",
        ),
        ({"output_attentions": True}, "use attn_implementation='eager'"),
        ({"mask": DENSE, "longctx_batch": batch(6)}, "a padded batch was handed to a packed path"),
        ({"mask": DENSE, "cu_seq_lens_q": BOUNDS}, "a padded batch was handed to a packed path"),
        ({"mask": DENSE, "position_ids": positions(4, 2)}, "restart between unpadded tokens"),
        ({"sliding_window": 4}, "sliding_window=4 of the layer and window None of its mask"),
        ({"sliding_window": 4, "mask": LayerMask(5)}, "window 5 of its mask differ"),
        ({"longctx_batch": batch(6, 6, ranks=2)}, "cut over 2 ranks reached attention without"),
        ({"longctx_batch": batch(4, 2), "position_ids": positions(6)}, "not the positions that"),
        ({"longctx_batch": batch(7)}, "describes 7 tokens of rank 0, but the model attends 6"),
    ],
)
def test_attention_calls_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**given)


def test_rows_that_no_kernel_takes_are_refused():
    q, k, v = ONE_ROW
    assert call(q, k, v[..., :4])[0].shape == (1, 6, 4, 4)
    with pytest.raises(ValueError, match=re.escape("torch.float64, torch.float32; cast")):
        call(q, k.double(), v)
    with pytest.raises(ValueError, match="attention on meta: only the CPU kernels"):
        call(*(x.to("meta") for x in ONE_ROW))
    with pytest.raises(ValueError, match="2 queries met 6 keys without a mask"):
        call(q[:, :, :2], k, v)


def causal(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv <= q


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_vmap": True, "mask_function": causal}, "overlays the causal mask"),
        (
            {"local_size": 4, "config": SimpleNamespace(attention_chunk_size=4)},
            "attention_chunk_size=4: chunked layers",
        ),
        ({"mask_function": lambda b, h, q, kv: kv >= 0}, "lets a token see a later one"),
        ({"mask_function": lambda b, h, q, kv: (kv <= q) | (kv == 3)}, "see a later one"),
    ],
)
def test_overlaid_masks_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        attention_mask(1, 6, 6, **given)
    assert attention_mask(1, 6, 6, mask_function=causal) is None
    assert attention_mask(1, 6, 6, mask_function=causal, local_size=4) == LayerMask(4)


@pytest.mark.parametrize("name", SOFTMAX_NAMES)
def test_a_padded_batch_handed_to_a_packed_path_is_refused_by_the_model(name):
    inputs = collate(documents([5, 3]))
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -1] = 0
    with pytest.raises(ValueError, match="a padded batch was handed to a packed path"):
        tiny(name)(**inputs, attention_mask=mask)
    inputs.pop(KEY)
    with pytest.raises(ValueError, match="restart between unpadded tokens"):
        tiny(name)(**inputs, attention_mask=mask)


# The table of support.py: each rule with a real config, or arguments, that trigger it

# Transformers 5.17 calls it deepseek_sparse_attention.
SPARSE = AutoConfig.for_model("deepseek_v32").layer_types[0]
CONFIGS = {
    "no attention interface": ("bloom", {}, "model_type=bloom"),
    "recurrent layers": ("qwen3_next", {}, "model_type=qwen3_next"),
    "recurrent layers without an adapter": ("recurrent_gemma", {}, "model_type=recurrent_gemma"),
    "no recurrent layers": ("llama", {}, "model_type=llama"),
    "options of flash-linear-attention": (
        SimpleNamespace(model_type="gla", attn={"layers": [1]}),
        {},
        "attn={'layers': [1]}",
    ),
    "RoPE longrope or dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type=dynamic",
    ),
    "temperature from positions": ("llama4", {}, "attn_temperature_tuning=True"),
    "chunked attention": ("llama4", {}, "attention_chunk_size=8192"),
    "attention dropout": ("gpt2", {}, "attn_pdrop=0.1"),
    "MoE auxiliary loss": ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
    "layer dropping": ("opt", {"layerdrop": 0.1}, "layerdrop=0.1"),
    "sparse or compressed keys": ("deepseek_v32", {}, f"layer_types ['{SPARSE}']"),
    "encoder-decoder": ("bart", {}, "is_encoder_decoder=True"),
    "router noise": ("phimoe", {}, "router_jitter_noise=0.01"),
    "attention weights": ("llama", {"output_attentions": True}, "output_attentions=True"),
}
ARGUMENTS = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "per-device batch sizes": {"per_device_eval_batch_size": 2},
    "loss not averaged over devices": {"average_tokens_across_devices": False},
    "automatic batch size": {"auto_find_batch_size": True},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "other sampling strategies": {"train_sampling_strategy": "batch_rebalance"},
    "metrics of each batch": {"batch_eval_metrics": True},
    "predictions as lists": {"eval_do_concat_batches": False},
    "losses in metrics": {"include_for_metrics": ["inputs", "loss"]},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "float16": {"fp16": True},
    "torch.compile": {"torch_compile": True},
    "DeepSpeed beyond ZeRO 0, 1 and 2": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "attention servers under DeepSpeed": {"longctx_servers": 1, "deepspeed": {}},
    "attention servers and debug=underflow_overflow": {
        "longctx_servers": 1,
        "debug": "underflow_overflow",
    },
    "attention servers and optimizers that step within backward": {
        "longctx_servers": 1,
        "optim": "galore_adamw_layerwise",
    },
}
FOREIGN = {  # no fields of our arguments
    "DataParallel": SimpleNamespace(n_gpu=2),
    "generation as prediction": SimpleNamespace(predict_with_generate=True),
    "wrapped packing": SimpleNamespace(packing=True, packing_strategy="wrapped"),
}


def test_each_rule_has_a_case_below():
    assert CONFIGS.keys() == {rule.feature for rule in MODEL_RULES}
    assert ARGUMENTS.keys() | FOREIGN.keys() == {rule.feature for rule in ARGUMENT_RULES}


@pytest.mark.parametrize("rule", MODEL_RULES, ids=lambda rule: rule.feature)
def test_models_are_refused_with_value_rule_and_remedy(rule):
    family, changes, value = CONFIGS[rule.feature]
    config = AutoConfig.for_model(family, **changes) if isinstance(family, str) else family
    with pytest.raises(ValueError, match=re.escape(value)) as refusal:
        validate_model(config, name=rule.names[0])
    assert rule.rule in str(refusal.value) and rule.remedy in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}),
        ("qwen3", {}),
        ("mistral", {}),
        ("mixtral", {}),
        ("gemma3_text", {}),
    ],
)
@pytest.mark.parametrize("name", SOFTMAX_NAMES)
def test_other_models_are_not_refused(name, family, changes):
    validate_model(AutoConfig.for_model(family, **changes), name=name)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"model_type": "gla", "attn_mode": "fused_chunk"}, "attn_mode=fused_chunk"),
        ({"safe_gate": True, "lower_bound": -8.0}, "safe_gate=True with lower_bound=-8.0"),
        ({"safe_gate": True}, "safe_gate=True with lower_bound=None"),
    ],
)
def test_what_flash_linear_attention_refuses_itself_is_refused_before_a_batch(given, value):
    with pytest.raises(ValueError, match=re.escape(f"flash-linear-attention: {value}: ")):
        validate_rules((FLA_RULE,), SimpleNamespace(**{"model_type": "kda"} | given))
    for lower in (-5.0, -0.1):
        validate_rules(
            (FLA_RULE,), SimpleNamespace(model_type="kda", safe_gate=True, lower_bound=lower)
        )
    validate_rules((FLA_RULE,), SimpleNamespace(model_type="retnet", attn_mode="fused_chunk"))


def test_longrope_is_refused_per_layer_type_too():
    nested = {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}}
    with pytest.raises(ValueError, match="rope_type=longrope"):
        validate_model(SimpleNamespace(rope_parameters=nested), name="ring")


@pytest.mark.parametrize("rule", ARGUMENT_RULES, ids=lambda rule: rule.feature)
def test_training_arguments_are_refused_with_value_rule_and_remedy(rule, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{rule.rule}; {rule.remedy}")):
        if rule.feature in FOREIGN:
            validate_arguments(FOREIGN[rule.feature])
        else:
            given = ARGUMENTS[rule.feature]
            LongCtxTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "sdpa",
            "attn_implementation='sdpa' is not a name of hf_longctx; use one of distca, charm, ",
        ),
        ("distac", "zeco_linear; did you mean 'distca'?"),
    ],
)
def test_names_are_refused(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_model(AutoConfig.for_model("llama"), name=name)


def test_names_that_are_not_registered():
    assert FUNCTIONS.keys() == {*NAMES}
    register(NAMES)
    with pytest.raises(ValueError, match="'distac' is not ours; use one of"):
        register(["distca", "distac"])
    with pytest.raises(ValueError, match="distac"):
        tiny("distac")


def wrapped(*, version: int = 0, reshards: bool = False, **given: Any) -> Any:
    """A trainer, as much of it as the rules of overlap look at."""
    plugin = SimpleNamespace(fsdp_version=version, reshard_after_forward=reshards)
    return SimpleNamespace(
        model=torch.nn.Identity(),
        is_fsdp_enabled=version > 0,
        accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)),
        args=SimpleNamespace(
            world_size=2, activation_checkpointing=True, activation_checkpointing_kwargs=given
        ),
    )


PINGPONG = {  # native FSDP2 is in test_pingpong_training.py
    "overlap `pingpong` without phases": ("ring", None, "attn_implementation=ring"),
    "overlap `pingpong` with FSDP that reshards after forward": (
        "distca",
        wrapped(version=2, reshards=True),
        "fsdp_version=2, reshard_after_forward=True",
    ),
    "overlap `pingpong` with re-entrant checkpointing over several trainers": (
        "distca",
        wrapped(use_reentrant=True),
        "use_reentrant=True",
    ),
}


@pytest.mark.parametrize("rule", PINGPONG_RULES, ids=lambda rule: rule.feature)
def test_pingpong_is_refused_with_value_rule_and_remedy(rule):
    name, trainer, value = PINGPONG[rule.feature]
    with pytest.raises(ValueError, match=re.escape(rule.message(value))):
        validate_pingpong(name, trainer=trainer)


def test_pingpong_is_not_refused_otherwise():
    validate_pingpong("distca", trainer=wrapped(version=2, use_reentrant=False))
    for name in {*NAMES} - {"distca"}:
        with pytest.raises(ValueError, match=f"without phases: attn_implementation={name}"):
            validate_pingpong(name)
    with pytest.raises(ValueError, match="fsdp_version=1"):
        validate_pingpong("distca", trainer=wrapped(version=1))


def test_the_table_lists_each_rule():
    lines = support_table().splitlines()
    rules = [rule for group in RULES.values() for rule in group]
    for rule in rules:
        (line,) = [x for x in lines if x.startswith(f"| {rule.feature} |")]
        refused = {*rule.names} & {*NAMES}
        assert line.count(" refused |") == len(refused) and rule.remedy in line
    assert len({rule.feature for rule in rules}) == len(rules) > 40
    for rule in ARGUMENT_RULES:
        (line,) = [x for x in lines if x.startswith(f"| {rule.feature} |")]
        assert line.count("refused") == len(NAMES) and rule.remedy in line
