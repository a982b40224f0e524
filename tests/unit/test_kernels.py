"""Compare tiles, calls, kernels and merge with the naive reference, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SCALE,
    Results,
    Rows,
    assert_bf16_rule,
    differentiate,
    examples,
    nan_memory,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_longctx.kernels import softmax
from hf_longctx.kernels.kernel_calls import CAUSAL, FULL, KernelTask, Tile, calls, tiles
from hf_longctx.kernels.reference import partial, visible
from hf_longctx.kernels.softmax import Scoring, merge

HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
WINDOWS = [0, 1, 2, 7, 64, 200, 4096]
Sees = dict[str, Any]  # window and causal
RUN = st.tuples(st.integers(0, 60), st.integers(1, 60))  # position and length of rows or keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task of the tests: `q_len` rows from position `q_pos` on at row `q` of the arrays, and the
    same of keys."""

    q_pos: int
    q_len: int
    k_pos: int
    k_len: int
    q: int = 0
    k: int = 0

    def task(self, *, backward: bool = False) -> KernelTask:
        mine, theirs = ("q", "grad", "dq") if backward else ("q", "into"), ("kv", "dkv")
        rows = dict.fromkeys(mine, self.q) | dict.fromkeys(theirs[: 1 + backward], self.k)
        return KernelTask(rows, self.q_pos, self.q_len, self.k_pos, self.k_len)


def whole_documents(lengths: Sequence[int]) -> list[Span]:
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return [
        Span(q_pos=0, q_len=n, k_pos=0, k_len=n, q=start, k=start)
        for start, n in zip(starts, lengths, strict=True)
    ]


def empty_partial(q: Tensor) -> dict[str, Tensor]:
    """A partial of rows that have seen no key yet, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return {
        "out": torch.zeros(q.shape, dtype=wide),
        "lse": torch.full((*q.shape[:2], 1), float("-inf"), dtype=wide),
    }


def forward(
    rows: Rows, spans: Sequence[Span], *, window: int, causal: bool = True
) -> dict[str, Tensor]:
    """The kernels' partial of each row over its span's keys."""
    into = empty_partial(rows.q)
    for call in calls([s.task() for s in spans], window=window, causal=causal):
        softmax.attend(
            call,
            q={"q": rows.q},
            kv={"k": rows.k, "v": rows.v},
            into=into,
            scoring=Scoring(scale=SCALE, window=window, causal=causal),
        )
    return into


def backward(
    rows: Rows,
    spans: Sequence[Span],
    final: dict[str, Tensor],
    *,
    window: int,
    causal: bool = True,
) -> Results:
    """The kernels' gradients, given the final out and lse."""
    wide = final["lse"].dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (rows.q, rows.k, rows.v))
    for call in calls([s.task(backward=True) for s in spans], window=window, causal=causal):
        softmax.attend_grad(
            call,
            q={"q": rows.q},
            kv={"k": rows.k, "v": rows.v},
            grad={"grad_out": rows.grad, "out": final["out"].to(rows.q.dtype), "lse": final["lse"]},
            dq={"dq": dq},
            dkv={"dk": dk, "dv": dv},
            scoring=Scoring(scale=SCALE, window=window, causal=causal),
        )
    return Results(out=final["out"], dq=dq, dk=dk, dv=dv)


def both(rows: Rows, spans: Sequence[Span], *, window: int = 0, causal: bool = True) -> Results:
    sees: Sees = {"window": window, "causal": causal}
    return backward(rows, spans, forward(rows, spans, **sees), **sees)


def seen(span: Span, *, window: int, causal: bool) -> Tensor:
    queries = torch.arange(span.q_pos, span.q_pos + span.q_len)
    keys = torch.arange(span.k_pos, span.k_pos + span.k_len)
    return visible(queries, keys, window=window, causal=causal)


def one_span(q_len: int, k_len: int, *, heads: int = 2, kv_heads: int = 1, seed: int = 0) -> Rows:
    """Rows of one task, which may have fewer or more keys than queries."""
    many = Rows.random(max(q_len, k_len), heads=heads, kv_heads=kv_heads, seed=seed)
    return Rows(q=many.q[:q_len], k=many.k[:k_len], v=many.v[:k_len], grad=many.grad[:q_len])


@given(q=RUN, k=RUN, window=st.sampled_from([0, 1, 2, 3, 20, 59, 300]), causal=st.booleans())
@examples(200)
def test_tiles_cover_each_visible_pair_once(
    q: tuple[int, int], k: tuple[int, int], window: int, causal: bool
) -> None:
    span = Span(q_pos=q[0], q_len=q[1], k_pos=k[0], k_len=k[1])
    mask = seen(span, window=window, causal=causal)
    done = torch.zeros_like(mask, dtype=torch.int64)
    written: set[int] = set()
    for tile in tiles(*q, *k, window=window, causal=causal):
        rows = slice(tile.q, tile.q + tile.q_len)
        keys = slice(tile.k, tile.k + tile.k_len)
        if tile.mask == CAUSAL:
            assert tile.q_len == tile.k_len and q[0] + tile.q == k[0] + tile.k
        covers = mask[rows, keys]
        assert covers.any(dim=1).all()  # the kernel gives lse 0 for a row without keys
        assert tile.mask != FULL or covers.all()
        done[rows, keys] += covers
        of_tile = set(range(tile.q, tile.q + tile.q_len))
        assert tile.merges == bool(of_tile & written)
        assert not tile.merges or of_tile <= written
        written |= of_tile
    assert (done == mask).all()


def test_rows_without_keys_are_in_no_tile() -> None:
    assert tiles(0, 4, 4, 4, window=0) == []
    assert tiles(9, 4, 0, 4, window=3) == []
    assert tiles(0, 4, 7, 4, window=4, causal=False) == []
    assert len(tiles(0, 4, 6, 4, window=4, causal=False)) == 1  # row 3 sees key 6
    assert tiles(2, 4, 4, 8, window=0) == [Tile(CAUSAL, 2, 2, 0, 2, 0, False)]


def test_short_documents_share_calls() -> None:
    same = calls([s.task() for s in whole_documents([32] * 64)], window=0)
    assert [len(call.q_lens) for call in same] == [64]
    mixed = calls([s.task() for s in whole_documents([*range(16, 32)] * 4)], window=0)
    assert len(mixed) < 8
    assert all(call.q_lens.max() <= 1.125 * call.q_lens.min() for call in mixed)
    long = calls([s.task() for s in whole_documents([600, 600])], window=0)
    assert [len(call.q_lens) for call in long] == [1, 1]


@given(
    q=RUN,
    k=RUN,
    window=st.sampled_from([0, 1, 5, 40, 300]),
    causal=st.booleans(),
    heads=st.sampled_from([(2, 2), (2, 1), (6, 3)]),
    seed=st.integers(0, 99),
)
@examples(120)
def test_any_rows_against_any_keys(
    q: tuple[int, int],
    k: tuple[int, int],
    window: int,
    causal: bool,
    heads: tuple[int, int],
    seed: int,
) -> None:
    span = Span(q_pos=q[0], q_len=q[1], k_pos=k[0], k_len=k[1])
    rows = one_span(q[1], k[1], heads=heads[0], kv_heads=heads[1], seed=seed)
    sees: Sees = {"window": window, "causal": causal}
    mask = seen(span, **sees)
    right = differentiate(lambda *qkv: partial(*qkv, mask=mask, scale=SCALE)[0], rows)
    with nan_memory():
        into = forward(rows, [span], **sees)
        ours = backward(rows, [span], into, **sees)
    assert ours.error(right) < 1e-12
    lse = partial(rows.q, rows.k, rows.v, mask=mask, scale=SCALE)[1]
    blind = ~mask.any(dim=1)
    assert (into["lse"][..., 0] - lse)[~blind].abs().sum() < 1e-10
    assert into["lse"][blind].isneginf().all() and into["out"][blind].eq(0).all()
    assert ours.dq[blind].eq(0).all()


@HEADS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_packed_documents(
    heads: int, kv_heads: int, window: int, dtype: torch.dtype, causal: bool
) -> None:
    lengths = [700, 1, 3, 29, 30, 31, 2, 257, 1, 130]
    rows = Rows.random(sum(lengths), heads=heads, kv_heads=kv_heads, head_dim=8)
    sees: Sees = {"window": window, "causal": causal}
    right = reference(rows, lengths, **sees)
    ours = both(rows.to(dtype), whole_documents(lengths), **sees)
    assert ours.error(right) < TOLERANCES[dtype] * max(1.0, float(right.dv.abs().max()))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    window=st.sampled_from([0, 1, 9]),
    order=st.randoms(use_true_random=False),
)
@examples(40)
def test_many_short_documents_in_any_order(lengths: list[int], window: int, order: Random) -> None:
    rows = Rows.random(sum(lengths))
    spans = whole_documents(lengths)
    order.shuffle(spans)
    with nan_memory():
        ours = both(rows, spans, window=window)
    assert ours.error(reference(rows, lengths, window=window)) < 1e-12


def test_tasks_touch_only_their_own_rows() -> None:
    lengths, starts = [5, 40, 41, 1], [3, 11, 54, 98]
    own = torch.cat([start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)])
    rows = Rows.random(102)
    tight = Rows(**{name: getattr(rows, name)[own] for name in Rows.__slots__})
    others = torch.ones(102, dtype=torch.bool).index_fill(0, own, False)
    for name in Rows.__slots__:
        getattr(rows, name)[others] = float("nan")
    spans = [
        Span(q_pos=0, q_len=n, k_pos=0, k_len=n, q=start, k=start)
        for start, n in zip(starts, lengths, strict=True)
    ]
    ours, right = both(rows, spans), reference(tight, lengths)
    for name in Results.__slots__:
        assert (getattr(ours, name)[own] - getattr(right, name)).abs().max() < 1e-12
        assert getattr(ours, name)[others].eq(0).all()


def test_strided_rows_and_an_expanded_gradient() -> None:
    lengths = [130, 20, 21, 1]
    rows = Rows.random(172, heads=4, kv_heads=2)
    rows = Rows(q=rows.q, k=rows.k, v=rows.v, grad=torch.ones(1, 1, 1).double().expand(172, 4, 4))
    strided = {n: getattr(rows, n).transpose(0, 1).contiguous().transpose(0, 1) for n in "qkv"}
    ours = both(Rows(**strided, grad=rows.grad), whole_documents(lengths))
    assert ours.error(reference(rows, lengths)) < 1e-12


def split(length: int, parts: int) -> list[Span]:
    """One document's rows against each of several key ranges."""
    edges = [length * at // parts for at in range(parts + 1)]
    return [
        Span(q_pos=0, q_len=length, k_pos=start, k_len=stop - start, k=start)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]


def merged(rows: Rows, spans: Sequence[Span], *, window: int = 0, causal: bool = True) -> Results:
    """Partials of the spans, merged in float32 or wider, and the sum of their gradients."""
    sees: Sees = {"window": window, "causal": causal}
    out, lse = (x for x in empty_partial(rows.q).values())
    for span in spans:
        part = forward(rows, [span], **sees)
        out, new = merge(out, lse[..., 0], part["out"], part["lse"][..., 0])
        lse = new[..., None]
    return backward(rows, spans, {"out": out, "lse": lse}, **sees)


@HEADS
@pytest.mark.parametrize("window", [0, 1, 30, 1000])
@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_split_keys_merge(heads: int, kv_heads: int, window: int, parts: int, causal: bool) -> None:
    rows = Rows.random(203, heads=heads, kv_heads=kv_heads, head_dim=8)
    sees: Sees = {"window": window, "causal": causal}
    ours = merged(rows, split(203, parts), **sees)
    assert ours.error(reference(rows, [203], **sees)) < 1e-12


def test_b30_merge_does_not_overflow() -> None:
    one, five = torch.tensor([1.0]), torch.tensor([5.0])
    low, high = torch.tensor(0.0), torch.tensor(100.0)
    for args in ((one, low, five, high), (five, high, one, low)):
        out, lse = merge(*args)
        assert out.dtype == lse.dtype == torch.float32
        assert (out.item(), lse.item()) == (5.0, 100.0)


LSE = st.sampled_from([float("-inf"), -200.0, -1.0, 0.0, 3.0, 88.0, 100.0])


@given(lse=st.lists(LSE, min_size=2, max_size=5))
@examples(100)
def test_merge_is_the_softmax_in_any_order(lse: list[float]) -> None:
    logs = torch.tensor(lse)
    outs = torch.where(logs.isneginf(), 0.0, torch.arange(1.0, len(lse) + 1))[:, None]
    weights = torch.softmax(logs.double(), 0).nan_to_num(0.0)
    for order in (list(range(len(lse))), list(reversed(range(len(lse))))):
        out, total = outs[order[0]], logs[order[0]]
        for i in order[1:]:
            out, total = merge(out, total, outs[i], logs[i])
        assert torch.allclose(out.double(), weights @ outs.double(), atol=1e-4)
        assert torch.allclose(total.double(), torch.logsumexp(logs.double(), 0))


def test_merge_of_extremes_is_finite() -> None:
    for low, high in ((-1e38, 1e38), (-3e38, -3e38), (3e38, 3e38)):
        out, lse = merge(torch.ones(1), torch.tensor(low), torch.ones(1), torch.tensor(high))
        assert out.item() == 1.0 and lse.item() == pytest.approx(high)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_b31_bf16_error_does_not_grow_with_the_partials(parts: int) -> None:
    def compute(rows: Rows) -> Results:
        return merged(rows, split(256, parts))

    assert_bf16_rule(compute, lengths=[256], heads=2, kv_heads=2, head_dim=64)


def test_b33_rows_without_keys() -> None:
    span = Span(q_pos=0, q_len=4, k_pos=3, k_len=1)
    rows = one_span(4, 1)
    with nan_memory():
        into = forward(rows, [span], window=0)
        ours = backward(rows, [span], into, window=0)
    assert into["out"][:3].eq(0).all() and into["lse"][:3].isneginf().all()
    assert torch.equal(into["out"][3, 0], rows.v[0, 0])
    assert ours.dq.eq(0).all()  # the last row has one key, whose weight is 1 whatever q is
    assert not any(getattr(ours, name).isnan().any() for name in Results.__slots__)
    nothing = torch.zeros(4), torch.tensor(float("-inf"))
    out, lse = merge(*nothing, *nothing)
    assert out.eq(0).all() and lse.isneginf()


def test_b35_partial_backward_takes_the_final_out_and_lse() -> None:
    rows = Rows.random(8, heads=2, kv_heads=2, head_dim=4)
    right = reference(rows, [8])
    assert merged(rows, split(8, 2)).error(right) < 1e-12
    alone = [both(rows, [span]) for span in split(8, 2)]  # each with its own lse: wrong
    assert (alone[0].dq + alone[1].dq - right.dq).abs().max() > 1e-2
    assert (alone[0].dv + alone[1].dv - right.dv).abs().max() > 1e-2


def test_reference_is_softmax() -> None:
    rows = Rows.random(9, heads=4, kv_heads=2)
    q, k, v = (x.transpose(0, 1)[None] for x in (rows.q, rows.k, rows.v))
    torchs = scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    assert (reference(rows, [9]).out - torchs[0].transpose(0, 1)).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_rows_that_see_one_key_get_no_gradient_by_delta(dtype: torch.dtype, softcap: float) -> None:
    """Their softmax is 1 whatever the score: what a narrow delta rounds off would be left over."""
    noise, rows = torch.Generator().manual_seed(0), 32
    q, grad_out = (torch.randn(rows, 4, 64, generator=noise).to(dtype) for _ in range(2))
    k, v = (torch.randn(rows, 2, 64, generator=noise).to(dtype) for _ in range(2))
    out = v.repeat_interleave(2, 1).float()
    scores = (q.float() * k.repeat_interleave(2, 1).float()).sum(-1, keepdim=True) / 8
    lse = softcap * torch.tanh(scores / softcap) if softcap else scores
    delta = (grad_out.float() * out).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    roles = ("q", "kv", "grad", "dq", "dkv")
    for call in calls(
        [KernelTask(dict.fromkeys(roles, i), 0, 1, 0, 1) for i in range(rows)], window=0
    ):
        softmax.attend_grad(
            call,
            q={"q": q},
            kv={"k": k, "v": v},
            grad={"grad_out": grad_out, "delta": delta, "lse": lse},
            dq={"dq": dq},
            dkv={"dk": dk, "dv": dv},
            scoring=Scoring(scale=1 / 8, softcap=softcap),
        )
    assert max(float(x.abs().max()) for x in (dq, dk)) < 1e-4
    right = grad_out.float().unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(dv, right, rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
