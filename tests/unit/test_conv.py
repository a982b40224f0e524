"""Compare the short causal convolution of packed documents with its twin and `conv1d`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from hf_longctx.kernels.conv import causal_conv
from hf_longctx.kernels.reference import causal_conv as twin

CHANNELS, TAPS = 3, 4


def inputs(tokens: int, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "x_TC": (tokens, CHANNELS),
        "weight_CW": (CHANNELS, TAPS),
        "bias": (CHANNELS,),
        "halo": (TAPS - 1, CHANNELS),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def differentiate(out: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    """The output and the gradients of its sum under fixed weights."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    leaves = list(given.values())
    grads = torch.autograd.grad(out, leaves, weights.to(out.dtype), materialize_grads=True)
    return [out.detach(), *grads]


@pytest.mark.parametrize(
    "lengths", [(1,), (5, 0, 2, 3, 1), (0, 4), (1,) * 9, (40,), (3, 4, 5)], ids=str
)
@pytest.mark.parametrize("without", [(), ("bias",), ("halo",), ("bias", "halo")], ids=str)
def test_b46_segments_shorter_than_the_taps_equal_the_twin(
    lengths: Sequence[int], without: Sequence[str]
) -> None:
    given = {name: x for name, x in inputs(sum(lengths)).items() if name not in without}
    ours, right = (differentiate(f(**given, lengths=lengths), given) for f in (causal_conv, twin))
    for found, value in zip(ours, right, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_no_tokens_give_no_rows(lengths: Sequence[int]) -> None:
    assert causal_conv(**inputs(0), lengths=lengths).shape == (0, CHANNELS)


def test_b42_nothing_leaks_into_other_documents() -> None:
    given = inputs(12)
    out = causal_conv(**given, lengths=[5, 2, 5])
    for i, document in enumerate((slice(0, 5), slice(5, 7), slice(7, 12))):
        weights = torch.zeros_like(out)
        weights[document] = 1
        leaves = given["x_TC"], given["halo"]
        d_x, d_halo = torch.autograd.grad(out, leaves, weights, retain_graph=True)
        assert d_halo.any() == (i == 0)
        assert d_x[document].all()
        d_x[document] = 0
        assert not d_x.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_document_equals_conv1d(dtype: torch.dtype) -> None:
    given = inputs(20, dtype=dtype)
    del given["halo"]
    ours = causal_conv(**given, lengths=[20])
    x, weight, bias = given.values()
    right = conv1d(x.T[None], weight[:, None], bias, padding=TAPS - 1, groups=CHANNELS)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, right[0, :, :20].T)
