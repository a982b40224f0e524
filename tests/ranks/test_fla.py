"""Compare models of flash-linear-attention on a CPU with the library's naive functions."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_loop import plain_loop
from recurrent_models import BATCHES, BOUNDS, EXACT, IDS, INDEX, LENGTHS, PACKED, each_alone, logits
from tiny import CONFIGS, alone, documents, run_ranks, tiny
from torch import nn
from train_cases import Case, arguments
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_longctx import LongCtxArguments, LongCtxTrainer, prepare
from hf_longctx.recurrent import packed_layer
from hf_longctx.recurrent.prepare import prepared
from hf_longctx.support import FLA_FAMILIES
from hf_longctx.verify.compare import verify
from hf_longctx.verify.fla_reference import load_fla, naive_kernels
from hf_longctx.verify.twins import REFERENCE, build

INSTALLED = {d.metadata["Name"] for d in importlib.metadata.distributions()}
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not {"flash-linear-attention", "triton"} <= INSTALLED,
        reason="no flash-linear-attention with triton: pip install hf-longctx[linear]",
    ),
]
DOCUMENTS = IDS.split(LENGTHS, dim=1)
PLAIN_LOSS = {"fuse_cross_entropy": False}  # the fused ones form no logits
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gla without its options": ("gla", {"use_short_conv": False, "num_kv_heads": None}),
    "gla with parts apart": ("gla", {"fuse_norm": False, "fuse_swiglu": False}),
    "gla without an output gate": ("gla", {"use_output_gate": False, "clamp_min": -0.02}),
    "gla with a feature map": ("gla", {"feature_map": "sigmoid"}),
    "retnet with convolutions": ("retnet", {"use_short_conv": True, "num_kv_heads": 1}),
    "delta_net with elu and sums": ("delta_net", {"qk_activation": "elu", "qk_norm": "sum"}),
    "delta_net with a gate": ("delta_net", {"use_gate": True, "use_short_conv": False}),
    "gated_deltanet negative": ("gated_deltanet", {"allow_neg_eigval": True, "use_gate": False}),
    "gated_deltanet alone": ("gated_deltanet", {"use_short_conv": False, "num_v_heads": None}),
    "kda with a bound": ("kda", {"safe_gate": True, "lower_bound": -2.0}),
    "kda without convolutions": ("kda", {"use_short_conv": False, "allow_neg_eigval": True}),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """The library for this file; other files' models must not find its kernels."""
    load_fla()
    yield
    sys.modules["fla"] = None  # type: ignore[assignment]


def small(family: str, **changes: Any) -> Any:
    return tiny("zeco_linear", family=family, **PLAIN_LOSS | changes)


def naive(family: str, batches: Any = BATCHES, **changes: Any) -> Any:
    model = tiny(REFERENCE, family=family, **PLAIN_LOSS | changes)
    with naive_kernels(model):
        return alone(model, batches)


@pytest.mark.parametrize("family", FLA_FAMILIES)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_b42_outputs_and_gradients_equal_documents_alone(family, reentrant):
    checkpointing = None if reentrant is None else {"use_reentrant": reentrant}
    model = prepare(small(family))
    found = run_ranks(model, BATCHES, ranks=1, layout="contiguous", checkpointing=checkpointing)
    assert found.error(naive(family)) <= EXACT
    account = found.runtimes[0].account
    assert account.calls == 2 * len(BATCHES)
    assert account.recomputed == (0 if reentrant is None else account.calls)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_the_naive_functions(option):
    family, changes = OPTIONS[option]
    rows = [documents((9, 1, 20))]
    found = run_ranks(prepare(small(family, **changes)), rows, ranks=1, layout="contiguous")
    assert found.error(naive(family, rows, **changes)) <= EXACT


def test_b42_wrong_boundaries_are_seen(monkeypatch):
    right = packed_layer.segment_lengths
    monkeypatch.setattr(packed_layer, "segment_lengths", lambda batch: [sum(right(batch))])
    found = run_ranks(prepare(small("gla")), BATCHES, ranks=1, layout="contiguous")
    assert found.error(naive("gla")) > 1e-3


@pytest.mark.parametrize("family", FLA_FAMILIES)
def test_boundaries_and_rows_of_a_plain_forward(family):
    """Also the library's own name for boundaries, and rows that are one document each."""
    model, stock = prepare(small(family)), small(family)
    with naive_kernels(stock):
        right = each_alone(stock)
        whole = torch.cat([logits(stock, input_ids=IDS[:, a : a + 20]) for a in (0, 20)])
    atol = EXACT * float(right.abs().max())
    for given in ({"position_ids": PACKED}, {"cu_seqlens": BOUNDS}, {"seq_idx": INDEX}):
        found = logits(model, input_ids=IDS, **given)
        torch.testing.assert_close(found, right, rtol=0, atol=atol)
    rows = IDS[0, :40].view(2, 20)
    found = logits(model, input_ids=rows, attention_mask=torch.ones_like(rows))
    torch.testing.assert_close(found, whole, rtol=0, atol=atol)


@pytest.mark.parametrize("family", FLA_FAMILIES)
def test_one_document_moves_no_other(family):
    model = prepare(small(family))
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    out = model.train()(inputs_embeds=embeds, position_ids=PACKED).logits
    for document in range(len(LENGTHS)):
        inside = (document == INDEX)[0]
        (grad,) = torch.autograd.grad(out[0, ~inside].square().sum(), embeds, retain_graph=True)
        assert float(grad[0, inside].abs().max()) == 0.0 < float(grad[0, ~inside].abs().max())


@pytest.mark.parametrize("family", FLA_FAMILIES)
@pytest.mark.parametrize("given", [{}, {"fuse_linear_cross_entropy": True}], ids=str)
def test_b07_losses_take_shifted_targets(family, given):
    """The heads drop `shift_labels`; without them a document's last token has the next's first."""
    if given:
        given = given | {"fuse_cross_entropy": False}  # the library takes one of them
    model = prepare(tiny("zeco_linear", family=family, dtype=torch.float32, **given)).train()
    labels = torch.cat([nn.functional.pad(d[:, 1:], (0, 1), value=-100) for d in DOCUMENTS], 1)
    call = {"input_ids": IDS, "position_ids": PACKED, "labels": IDS, "num_items_in_batch": 7}
    found = model(**call, shift_labels=labels).loss
    rows = logits(model, input_ids=IDS, position_ids=PACKED)[0]
    right = nn.functional.cross_entropy(rows, labels[0], reduction="sum") / 7
    torch.testing.assert_close(found, right)
    assert abs(float(model.train()(**call).loss - right)) > 1e-3
    found.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("FusedCrossEntropyLoss", {"label_smoothing": 0.1}),
        ("FusedCrossEntropyLoss", {"lse_square_scale": 1e-4}),
        ("FusedCrossEntropyLoss", {"return_z_loss": True}),
        ("FusedLinearCrossEntropyLoss", {"logit_scale": 0.5}),
        ("FusedLinearCrossEntropyLoss", {"logit_softcapping": 30.0}),
        ("FusedLinearCrossEntropyLoss", {"use_l2warp": True}),
    ],
    ids=str,
)
def test_options_of_a_loss_are_not_dropped(loss, options):
    ((name, value),) = options.items()
    linear_loss = loss == "FusedLinearCrossEntropyLoss"
    given = {"fuse_linear_cross_entropy": linear_loss, "fuse_cross_entropy": not linear_loss}
    model = prepare(tiny("zeco_linear", family="gla", dtype=torch.float32, **given)).train()
    model.criterion = getattr(sys.modules["fla.modules"], loss)()
    call = {"input_ids": IDS, "position_ids": PACKED, "labels": IDS}
    assert model(**call).loss.isfinite()
    model.criterion = getattr(sys.modules["fla.modules"], loss)(**options)
    with pytest.raises(ValueError, match=f"has {name}={value}, which nothing here computes on a C"):
        model(**call)


def test_generation_without_a_cache_goes_on_as_whole_rows():
    model = prepare(small("gla", dtype=torch.float32)).eval()
    rows = IDS[0, :18].view(2, 9)
    tokens = model.generate(rows, max_new_tokens=4, do_sample=False, use_cache=False)
    for end in range(9, 13):
        following = logits(model, input_ids=tokens[:, :end])[:, -1].argmax(-1)
        assert torch.equal(following, tokens[:, end])


def test_what_starts_no_row_anew_is_refused():
    model = prepare(small("gla")).eval()
    mask = torch.ones_like(IDS)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="scores in attention_mask reached layers whose kernels"):
        model(input_ids=IDS, attention_mask=mask)
    with pytest.raises(ValueError, match="a cache reached layers .* set use_cache=False"):
        model.generate(IDS, max_new_tokens=2, use_cache=True)
    with pytest.raises(ValueError, match="packed documents came with a cache"):
        model(input_ids=IDS, position_ids=PACKED, use_cache=True)


def test_options_without_a_form_here_are_refused_by_name():
    for family, changes in (
        ("kda", {"use_l2warp": True}),
        ("kda", {"attnres_block_size": 2}),
        ("kda", {"hidden_act": "powlu"}),
        ("kda", {"safe_gate": True, "lower_bound": -8.0}),  # its kernel refuses that, too
        ("gla", {"attn_mode": "fused_chunk"}),
    ):
        model = small(family, **changes)
        with pytest.raises(ValueError, match="options of flash-linear-attention: .*; set attn"):
            prepare(model)


def test_another_version_of_the_library_is_refused(monkeypatch):
    import fla

    model = small("delta_net")
    home = sys.modules[type(model.model.layers[0].attn).__module__]
    monkeypatch.setattr(home, "chunk_delta_rule", lambda q, k: None)
    monkeypatch.setattr(fla, "__version__", "0.9")
    with pytest.raises(ValueError, match=r"chunk_delta_rule has parameters \(q k\).*fla is 0.9"):
        prepare(model)


def test_a_model_prepared_for_a_while_is_as_before():
    model = small("retnet")
    with prepared(model):
        assert logits(model, input_ids=IDS, position_ids=PACKED).isfinite().all()
    assert not any("forward" in vars(module) for module in model.modules())
    assert prepare(copy.deepcopy(model)) is not model


@pytest.mark.parametrize("family", FLA_FAMILIES)
def test_a_pickled_model_refuses_documents_until_it_is_prepared_again(family):
    model = prepare(small(family))
    right = logits(model, input_ids=IDS, position_ids=PACKED)
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match=r"call hf_longctx.prepare\(model\)"):
        loaded(input_ids=IDS, position_ids=PACKED)
    assert torch.equal(logits(prepare(loaded), input_ids=IDS, position_ids=PACKED), right)


def test_a_saved_model_knows_nothing_of_us(tmp_path):
    model = prepare(small("gated_deltanet", dtype=torch.float32))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "longctx" not in text and "zeco" not in text
    loaded = prepare(AutoModelForCausalLM.from_pretrained(tmp_path))
    found, right = (logits(m, input_ids=IDS) for m in (loaded, model))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_models_of_transformers_stay_its_own():
    """Not those of the library, and on torch's functions, wherever they are built afterwards."""
    for name in ("mamba", "mamba2", "bitnet"):
        assert CONFIG_MAPPING[name].__module__.startswith("transformers.")
    model = build(str(CONFIGS / "tiny_qwen3_next.json"), name="eager", dtype=torch.float32)
    assert model(input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("family", FLA_FAMILIES)
def test_verify_holds_its_bounds(rank_pool, family):
    report = verify(
        model=str(CONFIGS / f"tiny_{family}.json"),
        name="zeco_linear",
        ranks=1,
        document_lengths=(1, 70, 33),
        pool=rank_pool,
    )
    assert report["failed"] == [] and report["leak"] == 0.0
    assert report["bounds"]["grad_error"] == EXACT and report["attention_calls"] > 0


@pytest.mark.parametrize("family", FLA_FAMILIES)
def test_b07_steps_equal_those_of_documents_alone(tmp_path, family):
    """With the losses that the library takes by default."""
    case = Case(lengths=(150, 30, 17, 1, 64, 40), options={"longctx_max_tokens_per_rank": 128})
    stock = tiny("eager", family=family, dtype=torch.float32)
    trainer = LongCtxTrainer(
        model=tiny("zeco_linear", family=family, dtype=torch.float32),
        args=arguments(case, tmp_path),
        train_dataset=case.rows(),
    )
    trainer.train()
    with naive_kernels(stock):
        right = plain_loop(case, world=1, model=stock)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == len(right.losses) > 1
    for entry, loss, norm in zip(steps, right.losses, right.norms, strict=True):
        assert abs(entry["loss"] / loss - 1) < 1e-4 and abs(entry["grad_norm"] / norm - 1) < 1e-4
    for key, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, right.weights[key], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "ranks", "scan"),
    [("gla", 3, "chain"), ("retnet", 4, "tree"), ("delta_net", 2, "allgather"),
     ("gated_deltanet", 3, "auto"), ("kda", 3, "chain")],
)  # fmt: skip
def test_ranks_share_documents(rank_pool, family, ranks, scan):
    report = verify(
        model=str(CONFIGS / f"tiny_{family}.json"),
        name="zeco_linear",
        ranks=ranks,
        arguments=LongCtxArguments(longctx_scan=scan),
        document_lengths=(1, 40, 50, 29),
        checkpointing=True,
        pool=rank_pool,
    )
    assert report["failed"] == [] and report["leak"] == 0.0 == report["recompute_bytes"]
    assert report["bytes_sent"] == report["bytes_planned"] > 0
