"""Bidirectional attention: plans that know its cost, masks that are told apart, models that equal
eager, and what stays refused."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LENGTHS, WINDOWS, examples, threads
from hypothesis import given
from hypothesis import strategies as st
from tiny import alone, collate, documents, positions, run_ranks, tiny, twin
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_sliding_window_causal_mask,
)

from hf_longctx.attention import hook
from hf_longctx.attention.masks import LayerMask, attention_mask
from hf_longctx.attention.spec import layer_specs
from hf_longctx.comm.channels import Hub
from hf_longctx.data.batch import KEY, Binding, LongCtxBatch
from hf_longctx.kernels.reference import attention, visible
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.runtime.executor import Runtime
from hf_longctx.training.probe import probe

NAMES = pytest.mark.parametrize("name", ["distca", "ring"])
# full and windowed layers (window 21 and 21), encoder and decoder classes; all layers full, GQA
FAMILIES = pytest.mark.parametrize(
    ("family", "changes"),
    [("modernbert", {}), ("gemma3_bidirectional", {}), ("llama", {"is_causal": False})],
    ids=["modernbert", "gemma3", "llama"],
)
EXACT = 1e-10


# Plans


@given(length=st.integers(1, 60), window=st.sampled_from([0, 1, 2, 7, 60]), causal=st.booleans())
@examples(60)
def test_a_layer_kind_counts_what_each_row_sees(length: int, window: int, causal: bool) -> None:
    kind = LayerKind(window=window, causal=causal)
    at = torch.arange(length)
    mask = visible(at, at, window=window, causal=causal).numpy()
    for start, stop in ((0, length), (0, 1), (length - 1, length), (length // 3, length // 2)):
        assert kind.entries(start, stop, length=length) == mask[start:stop].sum()
        if start < stop:
            seen = np.flatnonzero(mask[start:stop].any(0))
            assert kind.keys_seen((start, stop), length=length) == (seen[0], seen[-1] + 1)


def test_a_bidirectional_row_costs_its_document() -> None:
    layout = cut([4096, *[512] * 8], ranks=2, layout="contiguous")
    plan = make_plan(layout, kind=LayerKind(causal=False), options=PlanOptions(tolerance=0.05))
    assert plan.work(balanced=False).tolist() == [4096**2, 8 * 512**2]
    assert plan.work(balanced=True).sum() == 4096**2 + 8 * 512**2
    assert plan.attention_max_over_mean(balanced=False) > 1.7
    assert plan.attention_max_over_mean() <= 1.05


@given(lengths=LENGTHS, ranks=st.integers(1, 5), window=WINDOWS)
@examples(40)
def test_work_is_conserved(lengths: list[int], ranks: int, window: int) -> None:
    kind = LayerKind(window=window, causal=False)
    layout = cut(lengths, ranks=ranks, layout="spread")
    plan = make_plan(layout, kind=kind, options=PlanOptions(tolerance=0.0))
    total = sum(int(kind.entries(0, n, length=n)) for n in lengths)
    assert plan.work(balanced=True).sum() == plan.work(balanced=False).sum() == total


# Masks, as Transformers asks for them


def asked(create: Any, *, tokens: int, window: int | None = None, **given: Any) -> Any:
    """What a mask function of Transformers returns under our name."""
    config = SimpleNamespace(_attn_implementation="distca", sliding_window=window)
    config.use_bidirectional_attention = given.pop("overlaid", None)
    return create(
        config=config, inputs_embeds=torch.zeros(1, tokens, 4), attention_mask=None, **given
    )


@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 40])
def test_windows_of_encoders_hold_their_bound(tokens: int) -> None:
    assert asked(create_bidirectional_mask, tokens=tokens) == LayerMask(causal=False)
    found = asked(create_bidirectional_sliding_window_mask, tokens=tokens, window=8)
    assert found == LayerMask(9, causal=False)


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (5,), (9, 12), (30, 1, 9)])
def test_windows_of_overlaid_masks_leave_it_out(lengths: tuple[int, ...]) -> None:
    def within(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return abs(q - kv) < 8

    known = inspect.signature(create_sliding_window_causal_mask).parameters
    cache = "cache" if "cache" in known else "past_key_values"  # its name before Transformers 5.24
    given = {"position_ids": positions(*lengths), cache: None, "or_mask_function": within}
    found = asked(
        create_sliding_window_causal_mask, tokens=sum(lengths), window=8, overlaid=True, **given
    )
    assert found == LayerMask(8, causal=False)
    with pytest.raises(ValueError, match="overlays the causal mask"):
        asked(create_sliding_window_causal_mask, tokens=sum(lengths), window=8, **given)


def test_overlaid_masks_of_another_shape_are_refused() -> None:
    def image(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) | ((q < 4) & (kv < 4))

    def further(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return abs(q - kv) <= 4

    given = {"use_vmap": True, "config": SimpleNamespace(use_bidirectional_attention=True)}
    with pytest.raises(ValueError, match="differs between the two sides of a token"):
        attention_mask(1, 9, 9, mask_function=image, **given)
    with pytest.raises(ValueError, match="or from its window"):
        attention_mask(1, 9, 9, mask_function=further, local_size=4, **given)
    with pytest.raises(ValueError, match="overlays the causal mask"):
        asked(create_bidirectional_mask, tokens=9, or_mask_function=image)


# Whole models over ranks


@NAMES
@FAMILIES
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, "spread"), (2, "contiguous"), (3, "zigzag"), (4, "spread")]
)
def test_whole_models_of_all_ranks_equal_the_twin(name, family, changes, ranks, layout):
    batches = [documents([131, 1, 60, 37]), documents([2, 300], seed=1)]
    ours = run_ranks(tiny(name, family=family, **changes), batches, ranks=ranks, layout=layout)
    assert ours.error(twin(batches, family=family, **changes)) < EXACT
    kinds = {spec.kind for spec in layer_specs(tiny(name, family=family, **changes).config)}
    for batch in ours.batches:
        assert {plan.kind for plan in batch.binding.plans.values()} == kinds
        assert not any(kind.causal for kind in kinds)


@NAMES
@FAMILIES
def test_whole_models_equal_eager(name, family, changes):
    batches = [documents([131, 1, 60, 37])]
    options = {"family": family, "dtype": torch.float32, **changes}
    ours = run_ranks(tiny(name, **options), batches, ranks=3)
    assert ours.error(alone(tiny("eager", **options), batches)) < 1e-5
    assert ours.sent_bytes > 0


@NAMES
def test_b37_both_ends_of_a_window_over_two_ranks(name):
    # ModernBERT halves `local_attention`: a row sees up to four tokens on either side
    model = tiny(
        name,
        family="modernbert",
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        local_attention=8,
    )
    rows = documents([16])
    base = run_ranks(model, [rows], ranks=2).logits[0]
    for token, moves in ((3, False), (4, True), (12, True), (13, False)):
        changed = [{"input_ids": list(rows[0]["input_ids"])}]
        changed[0]["input_ids"][token] ^= 1
        moved = run_ranks(model, [changed], ranks=2).logits[0]
        assert torch.equal(moved[8], base[8]) is not moves, token


@NAMES
def test_no_token_moves_another_document(name):
    rows = documents([40, 33, 23])
    changed = [*rows[:1], {"input_ids": [i ^ 1 for i in rows[1]["input_ids"]]}, *rows[2:]]
    model = tiny(name, family="modernbert")
    before, after = (run_ranks(model, [x], ranks=2).logits[0] for x in (rows, changed))
    assert torch.equal(before[:40], after[:40]) and torch.equal(before[73:], after[73:])
    assert not torch.equal(before[40:73], after[40:73])


@NAMES
def test_causal_and_bidirectional_layers_of_one_batch(name):
    lengths, layout = [90, 7, 33], cut([90, 7, 33], ranks=2, layout="contiguous")
    noise = torch.Generator().manual_seed(0)
    rows = [torch.randn(130, h, 8, generator=noise, dtype=torch.float64) for h in (4, 2, 2)]
    channels = Hub(2, timeout=20.0).channels()
    outs: dict[int, list[Tensor]] = {}

    def work(rank: int) -> None:
        own = torch.from_numpy(layout.flat_rows(rank))
        batch = LongCtxBatch(layout, rank, binding=Binding(runtime=Runtime(channel=channels[rank])))
        outs[rank] = [
            hook.run(
                name,
                SimpleNamespace(is_causal=causal, training=False, layer_idx=layer),
                *(x[own].transpose(0, 1)[None] for x in rows),
                None if causal else LayerMask(window, causal=False),
                longctx_batch=batch,
            )[0][0]
            for layer, (causal, window) in enumerate(((True, 0), (False, 0), (False, 9)))
        ]
        assert len(batch.binding.plans) == 3

    threads(work, ranks=2)
    order = torch.from_numpy(layout.inverse())
    for layer, (causal, window) in enumerate(((True, 0), (False, 0), (False, 9))):
        ours = torch.cat([outs[rank][layer] for rank in range(2)])[order]
        sees = {"window": window, "causal": causal}
        right = attention(*rows, lengths=lengths, scale=8**-0.5, **sees)
        assert (ours - right).abs().max() < 1e-12


# Without a runtime


@NAMES
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "gemma3_bidirectional"])
def test_padded_batches_equal_eager(name, family, side):
    models = [
        bert(n) if family == "bert" else tiny(n, family=family, dtype=torch.float32)
        for n in (name, "eager")
    ]
    ids = torch.randint(0, 64, (3, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 5, 58)):
        mask[row, slice(0, pads) if side == "left" else slice(60 - pads, 60)] = 0
    for options in ({}, {"attention_mask": mask}):
        ours, right = (m(ids, **options).logits for m in models)
        torch.testing.assert_close(ours[mask.bool()], right[mask.bool()], rtol=0, atol=1e-4)
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(1))
    for logits in (ours, right):
        (logits * weights * mask[..., None]).sum().backward()
    for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
        if theirs.grad is not None:
            bound = 1e-5 * max(1.0, float(theirs.grad.abs().max()))
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=bound)


def bert(name: str) -> Any:
    """A tiny BERT, with absolute positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model("bert", num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(config, attn_implementation=name).eval()


@NAMES
def test_documents_of_bert_over_ranks_equal_eager(name):
    lengths, layout = [40, 1, 23], cut([40, 1, 23], ranks=2, layout="zigzag")
    ids = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0))
    channels, model = Hub(2, timeout=20.0).channels(), bert(name)
    outs: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        own = torch.from_numpy(layout.flat_rows(rank))
        batch = LongCtxBatch(layout, rank, binding=Binding(runtime=Runtime(channel=channels[rank])))
        at = torch.from_numpy(layout.positions(rank))[None]
        with torch.no_grad():
            outs[rank] = model(ids[own][None], position_ids=at, **{KEY: batch}).logits[0]

    threads(work, ranks=2)
    ours = torch.cat([outs[0], outs[1]])[torch.from_numpy(layout.inverse())]
    stock = bert("eager")
    with torch.no_grad():
        right = torch.cat([stock(part[None]).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)


@NAMES
def test_boundaries_keep_documents_apart(name):
    model = tiny(name, family="modernbert")
    ids = torch.tensor([documents([17])[0]["input_ids"]])
    bounds = torch.tensor([0, 9, 10, 17], dtype=torch.int32)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": positions(9, 1, 7)}
    packed = model(ids, **given).logits[0]
    parts = [model(part).logits[0] for part in ids.split([9, 1, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=0, atol=EXACT)


# What stays refused


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # its layers say 40 and its mask lets tokens at a distance of 40 see each other
        ("mistral", {"is_causal": False}, "sliding_window=40 of the layer and window 41 of its"),
        # its flag reaches the layers but not the masks
        ("gemma2", {"use_bidirectional_attention": True}, "is_causal=False but a causal mask"),
    ],
)
def test_layers_and_masks_that_disagree_are_refused(family, changes, message):
    if family == "mistral":
        changes = changes | {"sliding_window": 40}
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny("distca", family=family, **changes)(torch.arange(9)[None])


def test_losses_that_do_not_shift_are_refused_before_training():
    with pytest.raises(ValueError, match="ModernBertForMaskedLM ignores shift_labels"):
        probe(tiny("distca", family="modernbert"), name="distca")
    probe(tiny("distca", family="gemma3_bidirectional"), name="distca")


def test_documents_with_a_padding_mask_are_refused():
    inputs = collate(documents([5, 3]))
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -1] = 0
    with pytest.raises(ValueError, match="a padded batch was handed to a packed path"):
        tiny("distca", family="modernbert")(**inputs, attention_mask=mask)
