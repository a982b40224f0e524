"""Linear attention by chunks against the token-by-token twin and the functions of Transformers.

Letters: T tokens, H heads, K heads of queries and keys, N rows of the state, V its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from hf_longctx.kernels import linear_attention, selective_scan
from hf_longctx.kernels import reference as twin
from hf_longctx.kernels.chunk_states import apply, chunk_grid, decayed

Inputs = dict[str, Tensor]
PACK = (63, 0, 1, 64, 3, 65)  # tokens of chunks are 64 and 32: one less, none, one, one more


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of recurrence, at a size that mixes up neither heads nor sides of the state."""

    heads: int = 4
    key_heads: int = 4
    rows: int = 3
    columns: int = 5
    per_row: bool = False
    delta: bool = False

    def inputs(
        self, tokens: int, *, decay: float = 0.05, dtype: torch.dtype = torch.float64
    ) -> Inputs:
        """Leaves: log decays down to `-2 * decay`, keys of norm 1, an entering state."""
        generator = torch.Generator().manual_seed(tokens)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        rows = (self.rows,) if self.per_row else ()
        found = {
            "q_THN": draw(tokens, self.key_heads, self.rows),
            "k_THN": normalize(draw(tokens, self.key_heads, self.rows), dim=-1),
            "v_THV": draw(tokens, self.heads, self.columns),
            "log_decay": -2 * decay * draw(tokens, self.heads, *rows).sigmoid(),
            "entering": draw(self.heads, self.rows, self.columns),
        }
        if self.delta:
            found["beta"] = draw(tokens, self.heads).sigmoid()
        return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


FAMILIES = {
    "lightning": Family(),
    "ssd": Family(key_heads=2),
    "gla": Family(per_row=True),
    "mamba1": Family(key_heads=1, columns=1, per_row=True),
    "mamba1-groups": Family(key_heads=2, columns=1, per_row=True),
    "gated-delta": Family(key_heads=2, delta=True),
    "kimi-delta": Family(per_row=True, delta=True),
    "one-row": Family(rows=1, delta=True),
}
HEADS_APART = pytest.param(0, id="heads-apart")
HEADS_TOGETHER = pytest.param(10**6, id="heads-together")
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def differentiate(
    out: Tensor, inputs: Inputs, *, weights: Tensor | None = None
) -> dict[str, Tensor]:
    """The output, and the gradient of each input of its sum under fixed random weights."""
    if weights is None:
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype)
    grads = torch.autograd.grad(out, list(inputs.values()), weights, materialize_grads=True)
    return {"out": out.detach()} | dict(zip(inputs, grads, strict=True))


def assert_close(
    found: dict[str, Tensor], right: dict[str, Tensor], *, tolerance: float = 1e-12
) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].shape == value.shape, name
        error = (found[name] - value).abs().max() if value.numel() else 0.0
        scale = value.abs().max().clamp(min=1.0) if value.numel() else 1.0
        assert error <= tolerance * scale, (name, float(error))


@every_family
@pytest.mark.parametrize("together", [HEADS_APART, HEADS_TOGETHER])
@pytest.mark.parametrize("decay", [0.05, 1.0, 50.0], ids="decay{}".format)
def test_b42_documents_equal_the_twin_token_by_token(
    family: Family, decay: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_attention, "_TOGETHER", together)
    inputs = family.inputs(sum(PACK), decay=decay)
    ours = linear_attention.linear_attention(**inputs, lengths=PACK)
    right = twin.linear_attention(**inputs, lengths=PACK)
    assert_close(differentiate(ours, inputs), differentiate(right, inputs))


@every_family
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (0, 5, 70), (129,), (2,) * 20], ids=str)
def test_segments_of_any_lengths(family: Family, lengths: Sequence[int]) -> None:
    inputs = family.inputs(sum(lengths))
    ours = linear_attention.linear_attention(**inputs, lengths=lengths)
    right = twin.linear_attention(**inputs, lengths=lengths)
    if sum(lengths):
        assert_close(differentiate(ours, inputs), differentiate(right, inputs))
    else:
        assert ours.shape == right.shape


@every_family
def test_without_an_entering_state_all_segments_start_from_zeros(family: Family) -> None:
    inputs = family.inputs(70)
    del inputs["entering"]
    ours = linear_attention.linear_attention(**inputs, lengths=[66, 4])
    right = twin.linear_attention(**inputs, lengths=[66, 4])
    assert_close(differentiate(ours, inputs), differentiate(right, inputs))


@every_family
def test_b42_nothing_leaks_into_other_documents(family: Family) -> None:
    inputs, lengths = family.inputs(150), (70, 3, 77)
    for i, document in enumerate((slice(0, 70), slice(70, 73), slice(73, 150))):
        out = linear_attention.linear_attention(**inputs, lengths=lengths)
        weights = torch.zeros_like(out)
        weights[document] = 1
        grads = differentiate(out, inputs, weights=weights)
        assert grads.pop("entering").any() == (i == 0)
        for name in inputs.keys() & grads.keys():
            assert grads[name][document].any(), name
            grads[name][document] = 0
            assert not grads[name].any(), name


@every_family
@pytest.mark.parametrize("decay", [50.0, 1e4], ids="decay{}".format)
def test_fast_decay_is_finite_in_float32(family: Family, decay: float) -> None:
    inputs = family.inputs(sum(PACK), decay=decay, dtype=torch.float32)
    found = differentiate(linear_attention.linear_attention(**inputs, lengths=PACK), inputs)
    bad = [name for name, x in found.items() if not x.isfinite().all()]
    assert not bad


@every_family
def test_float32_is_float64_rounded(family: Family) -> None:
    inputs = family.inputs(sum(PACK))
    right = differentiate(twin.linear_attention(**inputs, lengths=PACK), inputs)
    inputs = {name: x.detach().float().requires_grad_() for name, x in inputs.items()}
    found = differentiate(linear_attention.linear_attention(**inputs, lengths=PACK), inputs)
    assert_close(found, right, tolerance=1e-5)


@every_family
@pytest.mark.parametrize("fast", [-20.0, -800.0], ids="log_decay{}".format)
def test_a_fast_token_leaves_the_slow_ones_their_digits_in_float32(
    family: Family, fast: float
) -> None:
    inputs = family.inputs(sum(PACK), decay=0.01, dtype=torch.float32)
    with torch.no_grad():
        inputs["log_decay"][[2, 70, 100, 150]] = fast
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    found, right = (
        differentiate(function(**given, lengths=PACK), given)
        for function, given in (
            (linear_attention.linear_attention, inputs),
            (twin.linear_attention, wide),
        )
    )
    assert_close(found, right, tolerance=1e-5)
    found, right = (
        differentiate(summarize(**run).state, run)
        for summarize, given in ((linear_attention.summarize, inputs), (twin.summarize, wide))
        for run in [{n: x for n, x in given.items() if n not in ("q_THN", "entering")}]
    )
    assert_close(found, right, tolerance=1e-5)


@every_family
def test_the_gradient_of_a_decay_parameter_keeps_its_digits_in_float32(family: Family) -> None:
    """Fast tokens among slow ones: log decays as a parameter of the model scales them."""
    inputs = family.inputs(256, decay=0.01, dtype=torch.float32)
    with torch.no_grad():
        inputs["log_decay"][::10] *= 2e5
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    found, right = (
        (given["log_decay"].grad * given["log_decay"]).detach().double().sum(0)
        for function, given in (
            (linear_attention.linear_attention, inputs),
            (twin.linear_attention, wide),
        )
        if function(**given, lengths=(256,)).square().sum().backward() is None
    )
    assert float(((found - right) / right).abs().max()) < 1e-3


@every_family
def test_bfloat16_is_rounded_at_the_edges_only(family: Family) -> None:
    """States and sums are float32: in bfloat16 only inputs, outputs and gradients are rounded."""
    inputs = family.inputs(sum(PACK), dtype=torch.bfloat16)
    wide = {name: x.detach().float().requires_grad_() for name, x in inputs.items()}
    found = differentiate(linear_attention.linear_attention(**inputs, lengths=PACK), inputs)
    right = differentiate(linear_attention.linear_attention(**wide, lengths=PACK), wide)
    for name, value in right.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], value.bfloat16()), name


@every_family
@pytest.mark.parametrize("tokens", [0, 1, 64, 150])
def test_summaries_say_what_a_run_does(family: Family, tokens: int) -> None:
    """`M S + E`, and its gradients, are the twin's state after the run."""
    inputs = family.inputs(tokens, decay=0.5)
    run = {name: x for name, x in inputs.items() if name not in ("q_THN", "entering")}
    ours, right = linear_attention.summarize(**run), twin.summarize(**run)
    assert ours.decay.shape == right.decay.shape
    given = run | {"entering": inputs["entering"]}
    left = [apply(s, inputs["entering"]) for s in (ours, right)]
    assert_close(*(differentiate(x, given) for x in left))
    if tokens:  # the state after a token is what unit queries of that token read
        unit = torch.eye(family.rows, dtype=torch.float64)[:, None, None].expand(
            -1, tokens, family.key_heads, -1
        )
        rows = [
            linear_attention.linear_attention(q, **given, lengths=[tokens])[-1].detach()
            for q in unit
        ]
        assert_close({"state": torch.stack(rows, 1)}, {"state": left[0].detach()})


@pytest.mark.parametrize("block", [1, 100, 10**6], ids="block{}".format)
@pytest.mark.parametrize("name", ["mamba1", "mamba1-groups"])
def test_vector_states_are_summed_up_in_blocks_of_rows(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two equal columns are, which are states like any other."""
    monkeypatch.setattr(selective_scan, "_BLOCK", block)
    inputs = FAMILIES[name].inputs(150, decay=0.5)
    run = {name: x for name, x in inputs.items() if name != "q_THN"}
    given = {name: x for name, x in run.items() if name != "entering"}
    columns = given | {"v_THV": given["v_THV"].expand(-1, -1, 2)}
    ours = apply(linear_attention.summarize(**given), run["entering"])
    right = apply(linear_attention.summarize(**columns), run["entering"])[..., :1]
    assert_close(differentiate(ours, run), differentiate(right, run))


class Counted(TorchDispatchMode):
    """How many functions ran, and the storages of more than some bytes that came of them."""

    def __init__(self, *, above: int) -> None:
        super().__init__()
        self.above, self.calls, self.large = above, 0, dict[int, Tensor]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **kwargs or {})
        self.calls += 1
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() > self.above:
                self.large[x.untyped_storage().data_ptr()] = x
        return out


def test_a_summary_of_vector_states_forms_nothing_as_large_as_their_decays() -> None:
    """At the size of mamba-130m, also within backward, but for the gradient itself."""
    tokens, heads, rows = 1024, 1536, 16
    k, v = torch.randn(tokens, 1, rows), torch.randn(tokens, heads, 1)
    log_decay = -torch.rand(tokens, heads, rows)
    leaves = [x.requires_grad_() for x in (k, v, log_decay)]
    given = {x.untyped_storage().data_ptr() for x in leaves}
    bound = 8 * selective_scan._BLOCK
    assert 10 * bound < log_decay.nbytes
    with Counted(above=bound) as there:
        state = apply(
            linear_attention.summarize(k, v, log_decay=log_decay), torch.ones(heads, rows, 1)
        )
    with Counted(above=bound) as back:
        *_, grad = torch.autograd.grad(state.sum(), leaves)
    assert not there.large.keys() - given
    assert back.large.keys() - given == {grad.untyped_storage().data_ptr()}
    assert there.calls + back.calls < 2000


@every_family
def test_summaries_compose_in_order(family: Family) -> None:
    inputs = family.inputs(100)
    run = {name: x for name, x in inputs.items() if name not in ("q_THN", "entering")}
    parts = [
        linear_attention.summarize(**{name: x[rows] for name, x in run.items()})
        for rows in (slice(0, 30), slice(30, 100))
    ]
    whole, (early, late) = linear_attention.summarize(**run), parts
    composed = {"state": apply(late, early.state), "decay": decayed(late.decay, early.decay)}
    assert_close(composed, {"state": whole.state, "decay": whole.decay})


@every_family
@pytest.mark.parametrize("together", [HEADS_APART, HEADS_TOGETHER])
@pytest.mark.parametrize("cut", [1, 64, 99])
def test_b44_a_cut_document_equals_the_whole_one(
    family: Family, cut: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later part starts from what the earlier one leaves, and hands its gradient back."""
    monkeypatch.setattr(linear_attention, "_TOGETHER", together)
    inputs = family.inputs(100)
    early = {name: x[:cut] for name, x in inputs.items() if name != "entering"}
    late = {name: x[cut:] for name, x in inputs.items() if name != "entering"}
    entering = inputs["entering"]
    summary = linear_attention.summarize(
        **{name: x for name, x in early.items() if name != "q_THN"}
    )
    between = apply(summary, entering)
    out = torch.cat(
        [
            linear_attention.linear_attention(**early, lengths=[cut], entering=entering),
            linear_attention.linear_attention(**late, lengths=[100 - cut], entering=between),
        ]
    )
    whole = linear_attention.linear_attention(**inputs, lengths=[100])
    assert_close(differentiate(out, inputs), differentiate(whole, inputs))


@examples(100)
@given(st.lists(st.integers(0, 40), max_size=8), st.sampled_from([1, 4, 16]), st.booleans())
def test_grids_hold_each_row_once_and_one_segment_a_chunk(
    lengths: list[int], chunk: int, closed: bool
) -> None:
    found = chunk_grid(lengths, chunk=chunk, closed=closed)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    rows = torch.arange(1.0, len(segment) + 1)[:, None, None]
    (laid,) = found.to_chunks(rows)
    assert torch.equal(found.to_rows([laid]), rows)
    assert int((laid != 0).sum()) == len(segment)
    chunks = [row[row > 0].int().numpy() - 1 for row in laid.flatten(1)]
    assert all(len(set(segment[rows])) <= 1 for rows in chunks)
    assert sum(found.widths) == len(chunks)
    for _, kept, later in found.steps():  # a chunk is continued by the next one of its segment
        for before, after in zip(chunks[kept], chunks[later], strict=True):
            assert before[-1] + 1 == after[0] if len(after) else closed
            assert not len(after) or segment[before[0]] == segment[after[0]]


def qwen3_next(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    q = q * q.shape[-1] ** 0.5  # the function scales queries
    if Version(transformers.__version__) < Version("5.24"):  # the layer repeats heads itself
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    return qwen.torch_chunk_gated_delta_rule(*(x[None] for x in (q, k, v, log_decay, beta)))[0][0]


def kimi_linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    q = q * q.shape[-1] ** 0.5
    return kimi.chunk_kimi_delta_attention(*(x[None] for x in (q, k, v, log_decay, beta)))[0][0]


def mamba2_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """With steps of 1, the rate A is the log decay, if all tokens have the same."""
    ones = torch.ones_like(log_decay)
    found = mamba2.mamba2_chunk_scan(
        *(v[None], ones[None], log_decay[0], k[None], q[None]), chunk_size=32
    )
    return found[0]


def mamba_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    steps = torch.ones_like(v[..., 0]).T[None]
    found = mamba.mamba_selective_scan(
        *(v[..., 0].T[None], steps, log_decay[0], k[:, 0].T[None], q[:, 0].T[None])
    )
    return found[0].T[..., None]


@pytest.mark.parametrize(
    ("family", "stock"),
    [
        ("gated-delta", qwen3_next),
        ("kimi-delta", kimi_linear),
        ("ssd", mamba2_scan),
        ("mamba1", mamba_scan),
    ],
)
def test_one_document_equals_the_functions_of_transformers(
    family: str, stock: Callable[..., Tensor]
) -> None:
    inputs = FAMILIES[family].inputs(70, decay=0.5, dtype=torch.float32)
    del inputs["entering"]
    if "delta" not in family:  # decays of their own only by token-wise steps
        with torch.no_grad():
            inputs["log_decay"][:] = inputs["log_decay"][:1].clone()
    ours = linear_attention.linear_attention(**inputs, lengths=[70])
    found, right = differentiate(ours, inputs), differentiate(stock(*inputs.values()), inputs)
    if "delta" not in family:  # one parameter there, a row per token here
        found["log_decay"] = found["log_decay"].sum(0)
        right["log_decay"] = right["log_decay"].sum(0)
    assert_close(found, right, tolerance=1e-5)
