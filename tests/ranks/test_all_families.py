"""Check each causal family of Transformers, as a small instance of its default config: it is exact
over two ranks, or rejected by name before anything runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny import alone, documents, run_ranks
from transformers import AutoConfig

import hf_longctx
from hf_longctx.attention.spec import layer_specs
from hf_longctx.verify.check import small_model
from hf_longctx.verify.twins import draw_at_unit_gain

LENGTHS = (1, 37, 9, 26, 3)
WINDOW = 10  # shorter than the documents, so that windows count
EXACT = {  # family: what is set beside dropout and windows
    "bert": {"is_decoder": True},  # a learned table of positions
    "cohere": {},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "exaone4": {},
    "fuyu": {},  # a text model inside
    "gemma3n_text": {},  # layers that reuse keys
    "gemma4_text": {},  # larger heads in full layers
    "glm4_moe_lite": {},
    "gpt2": {},
    "gptj": {},
    "gpt_neox": {},
    "granite_swa": {},
    "granitemoe": {},
    "helium": {},
    "lfm2": {},  # softmax layers alone, unless its config lists others
    "ministral3": {},  # temperature, but from position_ids
    "nanochat": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phimoe": {"router_jitter_noise": 0.0},
    "qwen2_moe": {},
    "starcoder2": {},
}
REFUSED = {  # family: a part of the rule
    "whisper": "encoder-decoder: is_encoder_decoder=True",
    "bloom": "no attention interface: model_type=bloom",
    "falcon": "no attention interface: model_type=falcon",
    "gpt_neo": "no attention interface: model_type=gpt_neo",
    "deepseek_v32": "sparse or compressed keys: layer_types ['indexed_attention']",
    "deepseek_v4": "sparse or compressed keys: layer_types ['compressed_sparse_attention'",
    "minimax_m3_vl_text": "sparse or compressed keys: index_topk_blocks=16",
    "doge": "sparse or compressed keys: keep_window_size=",
    "diffllama": "several attention calls in a layer: DiffLlamaForCausalLM has 2 layers but called",
    "hrm_text": "several attention calls in a layer",
    "llama4": "temperature from positions",
    "zaya": "recurrent layers without an adapter: layer_types ['hybrid']",
    "openai-gpt": "attention outside the interface: OpenAIGPTLMHeadModel has 2 layers but called",
    "mllama": "attention outside the interface",
    "roberta": "positions of its own: RobertaForCausalLM without position_ids",
    "stablelm": "attention outside the interface: StableLmForCausalLM",
}


def config_of(family: str, **changes: Any) -> Any:
    """A family's default config, without dropout and with short windows."""
    config = AutoConfig.for_model(family)
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in part.to_dict().items():
            if ("drop" in name or name == "attn_pdrop") and isinstance(value, float):
                setattr(part, name, 0.0)
            elif name == "sliding_window" and value:
                part.sliding_window = WINDOW
            elif name in changes:
                setattr(part, name, changes[name])
    return config


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", EXACT)
def test_families_that_work_are_exact(family: str) -> None:
    config = config_of(family, **EXACT[family])
    assert [row.works for row in hf_longctx.check(config)[:2]] == [True, True]
    stock = small_model(config)
    draw_at_unit_gain(stock)
    stock.set_attn_implementation("eager")
    rows = [documents(LENGTHS)]
    right = alone(stock, rows)
    stock.set_attn_implementation("distca")
    found = run_ranks(stock, rows, ranks=2)
    assert found.error(right) < 1e-4
    used = {plan.kind for batch in found.batches for plan in batch.binding.plans.values()}
    assert used == {
        spec.kind for spec in layer_specs(stock.config)
    }  # what training plans and compares ahead


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_do_not_work_are_refused_by_name(family: str) -> None:
    rows = hf_longctx.check(config_of(family, is_decoder=True))
    assert all(not row.works and row.rule and row.remedy for row in rows)
    for row in rows[:2]:
        assert REFUSED[family] in row.rule
