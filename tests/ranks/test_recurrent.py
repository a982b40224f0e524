"""Run recurrent layers on one process: packed documents equal each alone, other calls stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recurrent_models import (
    BATCHES,
    BOUNDS,
    DESCRIPTIONS,
    EXACT,
    FAMILIES,
    IDS,
    INDEX,
    LENGTHS,
    PACKED,
    WITHOUT_SOFTMAX,
    each_alone,
    ids_of,
    logits,
)
from tiny import alone, documents, positions, run_ranks, tiny, twin
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hf_longctx import prepare
from hf_longctx.attention.spec import layer_specs
from hf_longctx.recurrent import packed_layer
from hf_longctx.recurrent.prepare import prepared, recurrent_layers
from hf_longctx.verify.twins import REFERENCE, precision

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_b42_b48_outputs_and_gradients_equal_documents_alone(family, reentrant):
    """Two batches are in flight, with and without recompute, each with its own documents."""
    model = prepare(tiny("zeco_linear", family=family))
    checkpointing = None if reentrant is None else {"use_reentrant": reentrant}
    found = run_ranks(model, BATCHES, ranks=1, layout="contiguous", checkpointing=checkpointing)
    assert found.error(twin(BATCHES, family=family)) <= EXACT
    account = found.runtimes[0].account
    layers = len(layer_specs(model.config)) + len(recurrent_layers(model))
    assert account.calls == len(BATCHES) * layers
    assert account.recomputed == (0 if reentrant is None else account.calls)


@pytest.mark.parametrize("family", ["qwen3_next", "minimax", "lfm2"])
@pytest.mark.parametrize("wrong", ["runs on", "restarts"])
def test_b42_wrong_boundaries_are_seen(family, wrong, monkeypatch):
    right = packed_layer.segment_lengths
    variants = {
        "runs on": lambda batch: [sum(right(batch))],
        "restarts": lambda batch: [part for n in right(batch) for part in (n - 1, 1)],
    }
    monkeypatch.setattr(packed_layer, "segment_lengths", variants[wrong])
    model = prepare(tiny("zeco_linear", family=family))
    found = run_ranks(model, BATCHES, ranks=1, layout="contiguous")
    assert found.error(twin(BATCHES, family=family)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_moves_no_other(family):
    """Not by a bit: one of the routed families would, as shapes follow the routing."""
    model = prepare(tiny("zeco_linear", family=family))
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    with precision(model.dtype):
        out = model.train()(inputs_embeds=embeds, position_ids=PACKED, use_cache=False).logits
    for document in range(len(LENGTHS)):
        inside = (document == INDEX)[0]
        (grad,) = torch.autograd.grad(out[0, ~inside].square().sum(), embeds, retain_graph=True)
        assert float(grad[0, inside].abs().max()) == 0.0 < float(grad[0, ~inside].abs().max())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in FAMILIES
        for name in ("eager", "sdpa", "zeco_linear")
        if name != "sdpa" or family not in WITHOUT_SOFTMAX
    ],
)
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_boundaries_of_a_plain_forward(family, name, description):
    """Softmax layers of the library's own names see the same documents."""
    model = prepare(tiny(name, family=family))
    right = each_alone(tiny(REFERENCE, family=family))
    found = logits(model, input_ids=IDS, **DESCRIPTIONS[description])
    torch.testing.assert_close(found, right, rtol=0, atol=EXACT * float(right.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "jamba"])
def test_packed_documents_in_a_call_of_an_inner_model(family):
    """As a fused loss makes it: the model without its head, past the outermost forward."""
    model = prepare(tiny("eager", family=family)).eval()
    with torch.no_grad(), precision(model.dtype):
        found = model.base_model(input_ids=IDS, position_ids=PACKED)[0]
        right = [model.base_model(input_ids=part)[0] for part in IDS.split(LENGTHS, dim=1)]
    torch.testing.assert_close(found, torch.cat(right, 1), rtol=0, atol=1e-9)


def test_a_model_in_a_wrapper_of_a_user_keeps_documents_apart():
    model = tiny("sdpa", family="qwen3_next")
    prepare(torch.nn.ModuleDict({"policy": model}))
    right = each_alone(tiny(REFERENCE, family="qwen3_next"))
    found = logits(model, input_ids=IDS, position_ids=PACKED)
    torch.testing.assert_close(found, right, rtol=0, atol=EXACT * float(right.abs().max()))


def test_two_rows_of_packed_documents():
    model = prepare(tiny("zeco_linear", family="qwen3_next"))
    rows = IDS.repeat(2, 1)[:, :48]
    apart = torch.cat([positions(7, 1, 40), positions(20, 28)])
    found = logits(model, input_ids=rows, position_ids=apart)
    parts = [row.split(n, 1) for row, n in zip(rows[:, None], ([7, 1, 40], [20, 28]), strict=True)]
    right = torch.stack([torch.cat([logits(model, input_ids=p)[0] for p in row]) for row in parts])
    torch.testing.assert_close(found, right, rtol=0, atol=EXACT * float(right.abs().max()))


@pytest.mark.parametrize("described", ["cu_seq_lens_q", "seq_idx"])
def test_boundaries_of_one_document(described):
    """As a collator gives them where a pack holds no more; the library's functions raise."""
    model = prepare(tiny("sdpa", family="qwen3_next"))
    bounds = {"cu_seq_lens_q": torch.tensor([0, 40]), "seq_idx": torch.zeros(1, 40).long()}
    ids = IDS[:, 8:48]
    found = logits(
        model, input_ids=ids, position_ids=positions(40), **{described: bounds[described]}
    )
    right = logits(model, input_ids=ids)
    torch.testing.assert_close(found, right, rtol=0, atol=EXACT * float(right.abs().max()))


def test_b13_documents_may_start_at_any_position():
    rows, starts = IDS[:, :5], torch.tensor([[3, 4, 0, 1, 2]])
    found = logits(
        prepare(tiny("zeco_linear", family="qwen3_next")), input_ids=rows, position_ids=starts
    )
    stock = tiny(REFERENCE, family="qwen3_next")
    parts = zip(rows.split([2, 3], 1), starts.split([2, 3], 1), strict=True)
    right = torch.cat([logits(stock, input_ids=i, position_ids=p) for i, p in parts], 1)
    torch.testing.assert_close(found, right, rtol=0, atol=EXACT * float(right.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("axes", [3, 4])
def test_positions_with_several_axes(family, axes):
    model = prepare(tiny("sdpa", family=family))
    found = logits(model, input_ids=IDS, position_ids=PACKED.expand(axes, -1, -1))
    right = logits(model, input_ids=IDS, position_ids=PACKED)
    assert torch.equal(found, right)


def test_positions_of_images_in_packed_documents():
    """Three axes that differ say nothing of documents: refused, unless boundaries come along."""
    model = prepare(tiny("sdpa", family="qwen3_5"))
    axes = PACKED.expand(3, -1, -1).clone()
    axes[1, 0, 2:5] = 2  # an image of the first document
    logits(model, input_ids=IDS[:, :7], position_ids=axes[..., :7])
    with pytest.raises(ValueError, match="restart within a row, and no row of them counts"):
        logits(model, input_ids=IDS, position_ids=axes)
    found = logits(model, input_ids=IDS, position_ids=axes, cu_seq_lens_q=BOUNDS)
    right = logits(model, input_ids=IDS[:, 8:48], position_ids=axes[..., 8:48])
    torch.testing.assert_close(found[:, 8:48], right, rtol=0, atol=1e-9)


def images() -> Any:
    """A tiny Qwen3.5 that sees, and a row with an image of four tokens between two texts."""
    text = tiny("sdpa", family="qwen3_5").config.to_dict()
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": text["hidden_size"], "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=3)
    kinds = torch.zeros_like(IDS)
    kinds[0, 2:6] = 1
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    seen = {
        "input_ids": torch.where(kinds.bool(), 3, IDS.where(IDS != 3, 4)),
        "pixel_values": patches, "mm_token_type_ids": kinds,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }  # fmt: skip
    config._attn_implementation = "sdpa"
    return prepare(Qwen3_5ForConditionalGeneration(config)), seen


def test_images_in_packed_documents_need_their_three_axes():
    model, seen = images()
    first = {n: x[:, :7] if n in ("input_ids", "mm_token_type_ids") else x for n, x in seen.items()}
    alone = logits(model, **first)
    for given in ({}, {"position_ids": PACKED}):
        with pytest.raises(ValueError, match="pixel_values came with packed documents whose posit"):
            logits(model, **seen, **given, cu_seq_lens_q=BOUNDS)
    axes = PACKED.expand(3, -1, -1).clone()
    grid = {"image_grid_thw": seen["image_grid_thw"], "attention_mask": None}
    axes[..., :7], _ = model.model.get_rope_index(
        first["input_ids"], mm_token_type_ids=first["mm_token_type_ids"], **grid
    )
    assert not torch.equal(axes[0], axes[1])
    found = logits(model, **seen, position_ids=axes, cu_seq_lens_q=BOUNDS)
    torch.testing.assert_close(found[:, :7], alone, rtol=1e-4, atol=1e-4)
    text = {"input_ids": seen["input_ids"].clamp(4), "cu_seq_lens_q": BOUNDS}
    kinds = torch.zeros_like(IDS)  # as a processor gives them for text alone
    assert torch.equal(logits(model, **text, mm_token_type_ids=kinds), logits(model, **text))


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_without_packed_documents_are_as_before(family):
    """To the last bit: whole rows, padded ones, and a cache that goes on."""
    name = "eager" if family in WITHOUT_SOFTMAX else "sdpa"
    stock = tiny(name, family=family, dtype=torch.float32)
    ours = prepare(copy.deepcopy(stock))
    rows = torch.stack([IDS[0, :24], IDS[0, 24:48]])
    mask = torch.ones_like(rows)
    mask[0, :5] = 0
    for given in ({}, {"attention_mask": mask}, {"position_ids": positions(24)}):
        calls = [logits(model, input_ids=rows, **given) for model in (stock, ours)]
        assert torch.equal(*calls)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "use_cache": True}
    tokens = [model.eval().generate(rows, **options) for model in (stock, ours)]
    assert torch.equal(*tokens) and tokens[0].shape == (2, 30)


def test_generation_after_training_on_packs():
    """A cache is decoded onto by the library's functions, the same objects as before."""
    from transformers.models.qwen3_next import modeling_qwen3_next as home

    model = prepare(tiny("zeco_linear", family="qwen3_next", dtype=torch.float32))
    before = home.torch_recurrent_gated_delta_rule
    assert not hasattr(before, "hf_longctx_original")
    replaced = home.torch_chunk_gated_delta_rule
    assert replaced.hf_longctx_original.__wrapped__.__module__ == home.__name__
    prepare(model)
    assert home.torch_chunk_gated_delta_rule is replaced
    model.train()(input_ids=IDS, position_ids=PACKED).logits.sum().backward()
    with torch.no_grad():
        tokens = model.eval().generate(
            IDS[:, :9], max_new_tokens=5, do_sample=False, use_cache=True
        )
        for end in range(9, 14):
            (following,) = (
                model(input_ids=tokens[:, :end], use_cache=False).logits[:, -1].argmax(-1)
            )
            assert following == tokens[0, end]


def test_b40_a_saved_model_knows_nothing_of_us(tmp_path):
    model = prepare(tiny("zeco_linear", family="qwen3_next", dtype=torch.float32))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "longctx" not in text and "zeco" not in text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.config._attn_implementation == "sdpa"
    assert "forward" not in vars(loaded)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(
        logits(loaded, input_ids=IDS), logits(model, input_ids=IDS), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_a_prepared_model_is_its_own(family):
    model = prepare(prepare(tiny("zeco_linear", family=family)))
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = logits(twice, input_ids=IDS, position_ids=PACKED)
    assert float(found.abs().max()) > 0.0
    torch.testing.assert_close(found, each_alone(twice), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="came with a cache"):
        model(input_ids=IDS, position_ids=PACKED, use_cache=True)


def test_prepared_for_a_while():
    model = tiny("sdpa", family="qwen3_next")
    right = logits(model, input_ids=IDS, position_ids=PACKED)
    with prepared(model):
        assert not torch.equal(logits(model, input_ids=IDS, position_ids=PACKED), right)
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(logits(model, input_ids=IDS, position_ids=PACKED), right)


def test_a_model_without_recurrent_layers_is_left_alone():
    model = tiny("distca")
    assert prepare(model) is model
    assert all("forward" not in vars(module) for module in model.modules())


def test_float32_and_bf16_are_as_close_as_the_plain_path():
    """Root mean square over 20 samples: the quotient of one sample's largest errors is luck."""
    family, squares = "qwen3_next", {}
    exact = tiny(REFERENCE, family=family)
    dtypes = (torch.float32, torch.bfloat16)
    stock = {dtype: tiny("eager", family=family, dtype=dtype) for dtype in dtypes}
    ours = {dtype: prepare(tiny("zeco_linear", family=family, dtype=dtype)) for dtype in dtypes}
    for seed in range(20):
        ids = ids_of(documents(LENGTHS, seed=seed))
        right = each_alone(exact, ids)
        for dtype in dtypes:
            packed = logits(ours[dtype], input_ids=ids, position_ids=PACKED)
            assert packed.dtype == dtype
            for key, found in (("ours", packed), ("plain", each_alone(stock[dtype], ids))):
                square = (found.double() - right).square().mean()
                squares.setdefault((key, dtype), []).append(square)
    error = {key: float(torch.stack(found).mean().sqrt()) for key, found in squares.items()}
    for dtype in dtypes:
        assert error["ours", dtype] <= 2 * error["plain", dtype], dtype


def test_labels_may_be_left_to_the_model():
    """Without a batch object the loss of a plain forward is the library's own."""
    model = prepare(tiny("zeco_linear", family="qwen3_next"))
    stock = tiny(REFERENCE, family="qwen3_next")
    rows = [BATCHES[0][2]]
    ids = ids_of(rows)
    with precision(model.dtype):
        loss = model.train()(input_ids=ids, labels=ids, num_items_in_batch=39).loss
    assert float(loss) == pytest.approx(alone(stock, [rows]).loss, rel=1e-12)
