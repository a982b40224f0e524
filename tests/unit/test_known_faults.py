"""Show known faults at the scale of one kernel, cut or registration, with their wrong values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Rows, reference, run_threads
from tiny import documents, run_ranks, tiny, twin
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_longctx.kernels.softmax import merge
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.checker import check

NAMES = pytest.mark.parametrize("name", ["distca", "ring"])


@NAMES
@pytest.mark.parametrize("lengths", [[2], [1, 7], [1]], ids=str)
def test_b19_the_loss_of_documents_shorter_than_a_zigzag(name, lengths):
    batches = [documents(lengths), documents([5], seed=1)]  # [1] has no target of its own
    ours = run_ranks(tiny(name), batches, ranks=2, layout="zigzag")
    right = twin(batches)
    assert abs(ours.loss - right.loss) < 1e-10
    for key, grad in right.grads.items():
        torch.testing.assert_close(ours.grads[key], grad, rtol=0, atol=1e-10)


@NAMES
def test_b23_an_uneven_zigzag_is_exact_and_never_stalls(name):
    layout = cut([2999], ranks=4, layout="zigzag")
    plan = make_plan(layout, kind=LayerKind(), options=PlanOptions(algorithm=name))
    check(plan)
    rows = Rows.random(2999, heads=1, kv_heads=1, head_dim=8)
    assert run_threads(plan, rows).results.error(reference(rows, [2999])) < 1e-10


def test_b30_the_textbook_merge_overflows():
    low, high = torch.tensor(0.0), torch.tensor(100.0)
    assert torch.log(low.exp() + high.exp()).isinf()
    out, lse = merge(torch.tensor([1.0]), low, torch.tensor([5.0]), high)
    assert (out.item(), lse.item()) == (5.0, 100.0)


def partials(q: Tensor, k: Tensor, v: Tensor, *, parts: int) -> list[tuple[Tensor, Tensor]]:
    """`(out [H, T, D], lse [H, T])` over equal ranges of the keys before each query."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    found = []
    for piece, values in zip(scores.chunk(parts, -1), v.chunk(parts, -2), strict=True):
        lse = piece.logsumexp(-1)
        weights = (piece - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        found.append((weights @ values, lse))
    return found


def test_b31_only_partials_rounded_at_each_hop_lose_more_with_every_hop():
    noise = torch.Generator().manual_seed(0)
    qkv = [torch.randn(8, 1024, 64, generator=noise).bfloat16() for _ in range(3)]
    right = scaled_dot_product_attention(*(x.double()[None] for x in qkv), is_causal=True)[0]

    def error(hops: int, rounded: torch.dtype) -> float:
        """Of the output in bf16, root mean square."""
        out, lse = torch.zeros(8, 1024, 64), torch.full((8, 1024), -torch.inf)
        for part in partials(*(x.float() for x in qkv), parts=hops):
            out, lse = merge(out, lse, *part)
            out = out.to(rounded).float()
        return float((out.bfloat16() - right).norm())

    once = error(1, torch.float32)
    assert error(8, torch.float32) / once == pytest.approx(1.0, abs=0.01)
    assert error(8, torch.bfloat16) / once > 1.2


def test_b33_the_textbook_merge_of_rows_without_keys_is_nan():
    nothing = torch.tensor(float("-inf"))
    assert (nothing - torch.logaddexp(nothing, nothing)).exp().isnan()
    out, lse = merge(torch.zeros(1), nothing, torch.zeros(1), nothing)
    assert out.item() == 0.0 and lse.isneginf()


def test_b39_an_attention_function_without_its_mask_is_not_causal():
    def half_registered(*args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(*args, **kwargs)

    AttentionInterface.register("half_registered", half_registered)
    ids = torch.tensor([documents([6])[0]["input_ids"]])
    changed = ids.clone()
    changed[0, 5] ^= 1
    moved = {}
    for name in ("half_registered", "distca", "ring"):
        with torch.no_grad():
            before, after = (tiny(name)(input_ids=x).logits[0] for x in (ids, changed))
        moved[name] = not torch.equal(before[:5], after[:5])
    assert moved == {"half_registered": True, "distca": False, "ring": False}
