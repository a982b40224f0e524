"""Compare families whose attention differs from Llama's, and the score features they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Rows, reference, run_threads
from test_verify import FLOAT32, FLOAT64, ZERO, verify
from tiny import positions, tiny
from torch import Tensor

from hf_longctx import LongCtxArguments
from hf_longctx.attention.masks import dense
from hf_longctx.kernels.reference import attention, partial
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import local_plan, make_plan
from hf_longctx.planning.program.checker import check
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Account

pytestmark = pytest.mark.usefixtures("references_once")

LENGTHS = (1, 300, 77, 5)
CASES = [
    ("gemma2", "distca", "zigzag"),  # softcap, window and full layers
    ("gemma2", "ring", "zigzag"),
    ("gpt_oss", "distca", "spread"),  # sinks, experts
    ("gpt_oss", "ring", "contiguous"),
    ("deepseek_v3", "distca", "contiguous"),  # value heads of another size, experts
    ("deepseek_v3", "ring", "zigzag"),
    ("phi3", "distca", "spread"),
    ("olmo3", "ring", "zigzag"),
    ("glm4", "distca", "zigzag"),
    ("smollm3", "ring", "spread"),
    ("mixtral", "distca", "spread"),
    ("modernbert", "distca", "spread"),  # bidirectional, full and windowed layers
    ("gemma3_bidirectional", "ring", "zigzag"),
]


@pytest.mark.parametrize(("family", "name", "layout"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_families_are_exact_over_three_ranks(
    rank_pool: Any, family: str, name: str, layout: str
) -> None:
    arguments = LongCtxArguments(longctx_layout=layout)
    report = verify(rank_pool, family, name=name, ranks=3, arguments=arguments)
    assert report["failed"] == []
    for key, bound in (FLOAT64 | FLOAT32 | ZERO).items():
        assert 0 <= report[key] <= bound, (key, report[key])
    assert report["bytes_sent"] == report["bytes_planned"] > 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("name", ["distca", "ring"])
def test_families_are_exact_under_checkpointing(rank_pool: Any, family: str, name: str) -> None:
    report = verify(rank_pool, family, name=name, ranks=2, checkpointing=True)
    assert report["failed"] == []


def gradients(work: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of a fixed loss."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = work(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("value_dim", [4, 8, 12])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_scores_features_equal_the_reference(
    window: int, softcap: float, value_dim: int, with_sinks: bool, causal: bool
) -> None:
    noise = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    given = [draw(total, 4, 8), draw(total, 2, 8), draw(total, 2, value_dim)]
    if with_sinks:
        given.append(draw(4))
    scores = {"scale": 0.7, "window": window, "causal": causal, "softcap": softcap}
    scoring = Scoring(**scores)  # type: ignore[arg-type]
    program = local_plan(LENGTHS, window, causal=causal).program(0)

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(Layer(program, None, scoring, Account()), q, k, v, sinks=sinks)[0]

    def right(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attention(q, k, v, lengths=LENGTHS, sinks=sinks, **scores)  # type: ignore[arg-type]

    for mine, expected in zip(gradients(ours, given), gradients(right, given), strict=True):
        assert (mine - expected).abs().max() < 1e-12


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_path_equals_the_reference(softcap: float, with_sinks: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, h, 8, generator=noise, dtype=torch.float64) for h in (4, 2, 2))
    sinks = torch.randn(4, generator=noise, dtype=torch.float64) if with_sinks else None
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    right = partial(q, k, v, mask=mask, scale=0.7, softcap=softcap, sinks=sinks)[0]
    scoring = Scoring(scale=0.7, softcap=softcap)
    rows = [t.transpose(0, 1)[None] for t in (q, k, v)]
    for given in (mask, torch.zeros(9, 9, dtype=q.dtype).masked_fill(~mask, float("-inf"))):
        out = dense(*rows, given[None, None], scoring=scoring, sinks=sinks)
        assert (out[0] - right).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_generate_equal_eager(family: str, side: str) -> None:
    ours, stock = (tiny(name, family=family, dtype=torch.float32) for name in ("distca", "eager"))
    ours.eval(), stock.eval()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    with torch.no_grad():
        found, right = (m(ids, attention_mask=mask).logits for m in (ours, stock))
        assert (found - right)[mask.bool()].abs().max() < 1e-4
        if side == "left":
            made = [
                m.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
                for m in (ours, stock)
            ]
            assert torch.equal(*made)


def test_packed_gpt_oss_does_not_leak_though_its_own_mask_does() -> None:
    model = tiny("distca", family="gpt_oss", dtype=torch.float32)
    ids = torch.arange(12)[None] % 64
    changed = ids.clone()
    changed[0, 2] = 40
    with torch.no_grad():
        before, after = (model(i, position_ids=positions(5, 7)).logits for i in (ids, changed))
    assert torch.equal(before[0, :2], after[0, :2])
    assert (before[0, 2:5] != after[0, 2:5]).any()
    # the experts' matrix shapes follow the routing, so the last bit may move
    assert (before[0, 5:] - after[0, 5:]).abs().max() < 1e-5


@pytest.mark.parametrize(("lengths", "rows"), [([2], [1, 1]), ([1, 7], [4, 4])])
def test_b19_documents_shorter_than_a_zigzag(lengths: list[int], rows: list[int]) -> None:
    layout = cut(lengths, ranks=2, layout="zigzag")
    assert [layout.rows(rank) for rank in range(2)] == rows
    for name in ("distca", "ring"):
        plan = make_plan(layout, kind=LayerKind(), options=PlanOptions(algorithm=name))
        check(plan)
        given = Rows.random(sum(lengths), heads=2, kv_heads=1)
        assert run_threads(plan, given).results.error(reference(given, lengths)) < 1e-12


def test_b23_uneven_zigzag_is_balanced_without_padding() -> None:
    layout = cut([2999], ranks=4, layout="zigzag")
    assert [layout.rows(rank) for rank in range(4)] == [750, 750, 750, 749]
    plan = make_plan(layout, kind=LayerKind(), options=PlanOptions(algorithm="ring"))
    check(plan)
    assert plan.attention_max_over_mean() < 1.001


@pytest.mark.parametrize("name", ["distca", "ring"])
def test_autocast_takes_the_dtype_that_sdpa_takes(name: str) -> None:
    ids = torch.arange(40)[None] % 64
    found = []
    for attention_name in (name, "sdpa"):
        model = tiny(attention_name, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), model.lm_head.weight.grad))
    (loss, grad), (right, right_grad) = found
    assert abs(loss - right) < 1e-2 * right
    assert (grad - right_grad).abs().max() < 2e-2 * right_grad.abs().max()
