"""Reject what recurrent layers cannot do exactly, by name, instead of a wrong number."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from recurrent_models import BOUNDS, IDS, INDEX, LENGTHS, PACKED
from tiny import positions, tiny
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next as home

from hf_longctx import LongCtxTrainer, prepare
from hf_longctx.data.batch import KEY, LongCtxBatch
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.recurrent import packed_layer
from hf_longctx.recurrent import prepare as preparing
from hf_longctx.recurrent.adapter import Replacement
from hf_longctx.recurrent.context import ActiveLayer

pytestmark = pytest.mark.filterwarnings("ignore")

PADDED = torch.ones_like(IDS)
PADDED[0, :3] = 0
TOKENS = torch.arange(113)
BLOCKS = ((INDEX[0][:, None] == INDEX[0]) & (TOKENS[:, None] >= TOKENS))[None, None]
CAUSAL = torch.ones(113, 113, dtype=torch.bool).tril()[None, None]
FLEX = create_block_mask(lambda b, h, q, kv: BLOCKS[0, 0, q, kv], None, None, 113, 113, "cpu")
CU = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}


def hybrid(name: str = "zeco_linear", **changes: Any) -> Any:
    return tiny(name, family="qwen3_next", dtype=torch.float32, **changes)


def batch(*lengths: int, ranks: int = 1) -> LongCtxBatch:
    return LongCtxBatch(cut(lengths, ranks=ranks, layout="contiguous"), 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"position_ids": PACKED, "attention_mask": PADDED},
            "came with padding or a mask of scores",
        ),
        ({**CU, "attention_mask": PADDED}, "came with padding or a mask of scores"),
        ({"position_ids": PACKED, "use_cache": True}, "came with a cache"),
        ({**CU, "past_key_values": DynamicCache()}, "came with a cache"),
        ({"seq_idx": INDEX, "cache": DynamicCache()}, "came with a cache"),
        ({"position_ids": PACKED, "past_key_values": DynamicCache()}, "came with a cache"),
        (
            {"position_ids": PACKED, "attention_mask": CAUSAL},
            "came with padding or a mask of scores",
        ),
        (
            {"attention_mask": BLOCKS},
            "attention_mask keeps tokens of a row from those right before",
        ),
        (
            {"attention_mask": torch.zeros(1, 1, 113, 113).masked_fill(~BLOCKS, float("-inf"))},
            "attention_mask keeps tokens of a row from those right before",
        ),
        (
            {"attention_mask": {"full_attention": BLOCKS, "linear_attention": None}},
            "attention_mask keeps tokens of a row from those right before",
        ),
        ({"attention_mask": FLEX}, "attention_mask is a BlockMask, which recurrent layers cannot"),
        (
            {"attention_mask": {"full_attention": FLEX, "linear_attention": None}},
            "attention_mask is a BlockMask, which recurrent layers cannot see; drop it and give",
        ),
        ({"position_ids": PACKED, "attention_mask": FLEX}, "attention_mask is a BlockMask"),
        ({KEY: batch(*LENGTHS), "attention_mask": {"mamba": FLEX}}, "attention_mask is a BlockM"),
        ({"attention_mask": INDEX + 1}, "attention_mask numbers documents (up to 4)"),
        ({**CU, "position_ids": positions(113)}, "cu_seq_lens_q and position_ids describe differe"),
        ({"seq_idx": INDEX, "position_ids": positions(113)}, "position_ids and seq_idx describe"),
        ({"seq_idx": INDEX, "position_ids": positions(3, 110)}, "describe different documents"),
        ({"cu_seq_lens_q": BOUNDS[:-1]}, "describes rows 0 to 48, but the input has 113 rows"),
        ({KEY: batch(5, 6)}, "longctx_batch describes 11 tokens of rank 0, but the input has 113"),
        (
            {KEY: batch(100, 126, ranks=2)},
            "cut over 2 ranks reached a recurrent layer without a channel",
        ),
    ],
)
def test_forwards_are_refused_by_name(given, message):
    for name in ("zeco_linear", "sdpa"):
        model = prepare(hybrid(name))
        with pytest.raises(ValueError, match=re.escape(message)):
            model(input_ids=IDS, **given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cu_seqlens_q", "cu_seq_lens_q"),
        ("document_ids", "seq_idx"),
        ("cu_seq_len_q", "cu_seq_lens_q"),
        ("cu_seqlens_k", "cu_seq_lens_k"),
        ("seqidx", "seq_idx"),
        ("seq_ids", "seq_idx"),
        ("positions_ids", "position_ids"),
        ("longctxbatch", "longctx_batch"),
    ],
)
def test_misspelt_boundaries_are_refused_where_transformers_would_swallow_them(name, meant):
    model = prepare(hybrid("sdpa"))
    with pytest.raises(ValueError, match=f"keyword {name}=Tensor: nothing reads it.*write {meant}"):
        model(input_ids=IDS, **{name: BOUNDS})


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"attention_mask": BLOCKS.long()}, "is of torch.int64 with entries above 0"),
        ({"attention_mask": BLOCKS[:, 0]}, "has 3 axes, not 2 or 4"),
        ({"position_ids": PACKED[0]}, "give them as"),
        ({"cu_seq_lens_k": BOUNDS}, "cu_seq_lens_k came without cu_seq_lens_q"),
    ],
    ids=["integers", "three axes", "one axis", "keys alone"],
)
def test_boundaries_in_a_form_that_recurrent_layers_would_not_see_are_refused(given, what):
    for family in ("mamba2", "jamba"):
        with pytest.raises(ValueError, match=what):
            prepare(tiny("eager", family=family))(input_ids=IDS, use_cache=False, **given)


def test_misspelt_boundaries_are_refused_before_a_model_is_prepared_too():
    with pytest.raises(ValueError, match="keyword seqidx=Tensor: nothing reads it"):
        tiny("zeco_linear", family="mamba2")(input_ids=IDS, seqidx=INDEX)


def test_other_keywords_pass_the_door():
    model = prepare(hybrid("sdpa"))
    right = model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits
    for given in ({"cu_seqlens": BOUNDS}, {"position_ids": PACKED, "position_bias": None}):
        assert torch.equal(model(input_ids=IDS, use_cache=False, **given).logits, right)


@pytest.mark.parametrize("given", [{"position_ids": PACKED}, CU, {KEY: batch(*LENGTHS)}], ids=str)
def test_a_model_that_was_not_prepared_is_refused_at_its_softmax_layers(given):
    model = tiny("sdpa", family="minimax")  # takes any of them without a word
    model.config._attn_implementation = "zeco_linear"  # set where Transformers does not ask
    with pytest.raises(ValueError, match=re.escape("call hf_longctx.prepare(model) once")):
        model(input_ids=IDS, use_cache=False, **given)
    model(input_ids=IDS, use_cache=False)


def test_a_batch_that_a_prepared_model_had_is_still_refused_by_another():
    given = {"input_ids": IDS, "use_cache": False, KEY: batch(*LENGTHS)}
    prepare(tiny("zeco_linear", family="minimax"))(**given)
    with pytest.raises(ValueError, match=re.escape("call hf_longctx.prepare(model) once")):
        tiny("zeco_linear", family="minimax")(**given)


def test_a_module_without_a_model_of_transformers_is_refused():
    with pytest.raises(ValueError, match="Linear holds no Transformers model"):
        prepare(nn.Linear(2, 2))


def test_unknown_recurrent_layers_are_refused_by_class():
    config = AutoConfig.for_model(
        "recurrent_gemma", hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, lru_width=32, vocab_size=64,
    )  # fmt: skip
    # Before Transformers 5.24 the config of this family lists no layer types.
    named = "DecoderLayer" if hasattr(config, "layer_types") else "ForCausalLM"
    with pytest.raises(ValueError, match=f"RecurrentGemma{named} .* has recurrent layers that h"):
        prepare(AutoModelForCausalLM.from_config(config))


def test_a_layer_type_without_a_known_layer_is_refused_by_class(monkeypatch):
    model = hybrid()
    model.model.layers[1].linear_attn = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="Qwen3NextDecoderLayer .layer_types 'linear_attention'. has"
    ):
        prepare(model)
    monkeypatch.setattr(preparing, "ADAPTERS", ())
    with pytest.raises(
        ValueError, match="Qwen3NextDecoderLayer .* and Qwen3NextForCausalLM .*model_type=qwen3"
    ):
        prepare(hybrid())


def test_functions_with_other_arguments_are_refused_with_the_version_known(monkeypatch):
    def changed(query, key, value, gate):
        """Not what is known."""

    monkeypatch.setattr("transformers.__version__", "5.24.0")
    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", changed)
    with pytest.raises(
        ValueError,
        match=r"gated_delta_rule has parameters \(query key value gate\), but .*; transformers 5.24"
        r"\S* is known, so something has changed \S*gated_delta_rule since; undo that",
    ):
        prepare(hybrid())
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    with pytest.raises(ValueError, match="; transformers is 5.3.0, install 5.24"):
        prepare(hybrid())
    monkeypatch.delattr(home, "torch_chunk_gated_delta_rule")
    with pytest.raises(ValueError, match=r"has parameters \(no such function\), but .* 5.24"):
        prepare(hybrid())


def test_a_layer_with_another_forward_is_refused(monkeypatch):
    (adapter,) = (a for a in preparing.ADAPTERS if a.layer == "LightningAttention")
    other = Replacement(adapter.forward.function, "hidden_states gate")
    monkeypatch.setattr(preparing, "ADAPTERS", (replace(adapter, forward=other),))
    with pytest.raises(
        ValueError, match="MiniMaxLightningAttention.forward has parameters .* 5.24"
    ):
        prepare(tiny("zeco_linear", family="minimax"))


def test_a_layer_that_bypasses_our_functions_is_refused(monkeypatch):
    model = prepare(hybrid())
    stock = home.causal_conv1d_fn.hf_longctx_original
    monkeypatch.setattr(home, "causal_conv1d_fn", stock)
    with pytest.raises(ValueError, match="called .'gated delta rule'. of hf_longctx where"):
        model(input_ids=IDS, position_ids=PACKED)


def test_a_forward_that_is_no_method_is_refused():
    model = hybrid()
    model.forward = functools.partial(model.forward)
    with pytest.raises(ValueError, match="forward of Qwen3NextForCausalLM was replaced by a part"):
        prepare(model)


def test_a_batch_that_is_lost_on_its_way_is_no_plain_forward():
    model = prepare(hybrid())
    layer = model.model.layers[0]
    inner = type(layer).forward
    layer.forward = lambda *args, **kwargs: inner(layer, *args, **{**kwargs, KEY: None})
    with pytest.raises(ValueError, match="longctx_batch was lost on its way to Qwen3NextGated"):
        model(input_ids=IDS, position_ids=PACKED)


def test_other_rows_and_arguments_than_a_layer_takes_are_refused_by_class():
    layer = ActiveLayer(nn.Identity(), batch(6))
    layer.begin("convolution", torch.zeros(6, 2))
    with pytest.raises(ValueError, match="Identity gave its convolution 5 rows of packed docum"):
        layer.begin("convolution", torch.zeros(5, 2))
    layer.validate_unset(mask=None, output_final_state=False)
    with pytest.raises(ValueError, match="Identity was given mask and cache with packed documents"):
        layer.validate_unset(mask=torch.zeros(2), output_final_state=False, cache=())


@pytest.mark.parametrize("given", [{"attention_mask": PADDED}, {"cache": DynamicCache()}], ids=list)
def test_a_layer_that_is_given_a_mask_or_a_cache_after_all_is_refused(given):
    """By whatever lies between the model's forward and the layer's."""
    model = prepare(tiny("zeco_linear", family="minimax", dtype=torch.float32))
    layer, _ = preparing.recurrent_layers(model)[0]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, **given})
    with pytest.raises(ValueError, match=f"MiniMaxLightningAttention was given {[*given][0]} with"):
        model(input_ids=IDS, position_ids=PACKED)


def test_rows_that_no_kernel_takes_are_refused():
    rows = torch.zeros(6, 2, device="meta")
    with pytest.raises(ValueError, match="on meta: only the CPU kernels are built yet"):
        packed_layer.run_convolution(batch(6), nn.Identity(), rows, rows)
    with pytest.raises(ValueError, match="on meta: only the CPU kernels are built yet"):
        packed_layer.run_recurrence("", batch(6), nn.Identity(), rows, rows, rows, rows)


def test_a_trainer_refuses_softmax_models_under_the_name(tmp_path):
    from train_cases import Case, arguments

    with pytest.raises(ValueError, match="no recurrent layers: model_type=llama: .* use distca or"):
        LongCtxTrainer(
            model=tiny("zeco_linear", dtype=torch.float32),
            args=arguments(Case(lengths=(9,)), tmp_path),
            train_dataset=[{"input_ids": [1, 2, 3]}],
        )


def test_states_are_not_multiplied_in_bf16_under_autocast():
    q, k, v = torch.randn(3, 70, 2, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    decay = -torch.rand(70, 2)
    given = ("", batch(70), nn.Identity(), q, k, v, decay, decay.exp())
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(q[0] @ k[0].T, (q[0].double() @ k[0].T.double()).float())
        found = packed_layer.run_recurrence(*given)
    assert torch.equal(found, packed_layer.run_recurrence(*given))
