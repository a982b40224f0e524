"""Run models of flash-linear-attention without a GPU, on the library's own naive functions.

The library replaces layers of Transformers: importing it makes `mamba`, `mamba2` and `bitnet` its
own, and modeling files that are imported while it is installed take its kernels, which no CPU runs.
So it is imported for its own models only, and hidden while others are built. Its naive functions
are the reference of its models. Layer: verify. Letters: B batch, S tokens of a row, H heads, N rows
of the state, V its columns.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

from ..recurrent.fla_cpu import replace_kernels
from ..support import FLA_FAMILIES


def load_fla() -> None:
    """Register the models of flash-linear-attention, without those that Transformers has itself.

    Raises:
        ValueError: where the package is not installed.
    """
    if sys.modules.get("fla", ...) is None:
        del sys.modules["fla"]  # `library_for` hid it
    try:
        importlib.import_module("fla.models")
    except ImportError as error:
        raise ValueError(
            f"{', '.join(FLA_FAMILIES)} are models of flash-linear-attention, which cannot be "
            f"imported ({error}); pip install hf-longctx[linear]"
        ) from error
    added = CONFIG_MAPPING._extra_content
    for name in [name for name in added if name in CONFIG_MAPPING._mapping]:
        if added[name].__module__.startswith("fla."):
            del added[name]


@contextmanager
def library_for(config: Any) -> Iterator[None]:
    """Hide flash-linear-attention while a model of another family is built without a GPU."""
    if config.model_type in FLA_FAMILIES or torch.cuda.is_available():
        yield
        return
    before = sys.modules.get("fla", ...)
    # None makes `import fla` fail, which modeling files take for "not installed".
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if before is not ...:
            sys.modules["fla"] = before  # type: ignore[assignment]


@contextmanager
def naive_kernels(model: nn.Module) -> Iterator[None]:
    """Run a model's layers of flash-linear-attention on the library's naive functions.

    Each row of a call is one document. Other models do not change.
    """
    layers = [m for m in model.modules() if type(m).__module__.startswith("fla.layers.")]
    with ExitStack() as stack:
        for layer in layers:
            replace_kernels(layer)
        for home in {sys.modules[type(layer).__module__] for layer in layers}:
            for name, function in _NAIVE.items():
                if hasattr(home, name):
                    stack.enter_context(_replaced(home, name, function))
        if layers:
            parts = sys.modules["fla.modules"]
            stack.enter_context(_replaced(parts.ShortConvolution, "forward", _short_convolution))
            stack.enter_context(_replaced(parts.RotaryEmbedding, "forward", _rotary))
        yield


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, original)


def _naive(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    return function


def _gla(
    q: Tensor, k: Tensor, v: Tensor, g: Any = None, gk: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    decay = gk if g is None else g
    return _naive("gla.naive", "naive_recurrent_gla")(q, k, v, decay)[0], None


def _retention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    return _naive("retention.naive", "naive_retention")(*by_head).transpose(1, 2), None


def _delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    if kwargs["use_qk_l2norm_in_kernel"]:
        q, k = _unit(q), _unit(k)
    by_head = (x.transpose(1, 2) for x in (q, k, v, beta))
    out, _ = _naive("delta_rule.naive", "delta_rule_recurrence")(*by_head)
    return out.transpose(1, 2), None


def _gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    gate = _naive("gated_delta_rule.gate", "naive_gdn_gate")
    log_decay = gate(g, kwargs["A_log"], kwargs["dt_bias"])
    shared = v.shape[2] // q.shape[2]
    q, k = (_unit(x).repeat_interleave(shared, dim=2) for x in (q, k))
    run = _naive("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")
    out, _ = run(q, k, v, _rate(beta, kwargs), log_decay)
    return out.to(v.dtype), None


def _kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    gate, bound = _naive("kda.gate", "naive_kda_gate"), {}
    if kwargs["lower_bound"] is not None:
        gate = _naive("kda.gate", "naive_kda_lowerbound_gate")
        bound = {"lower_bound": kwargs["lower_bound"]}
    log_decay = gate(g, kwargs["A_log"], kwargs["dt_bias"], **bound)
    run = _naive("kda.naive", "naive_recurrent_kda")
    return run(_unit(q), _unit(k), v, log_decay, _rate(beta, kwargs))[0], None


def _unit(rows: Tensor) -> Tensor:
    return rows / torch.sqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def _rate(beta: Tensor, given: Mapping[str, Any]) -> Tensor:
    return torch.sigmoid(beta.float()) * (2 if given["allow_neg_eigval"] else 1)


def _short_convolution(self: Any, x: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    out = nn.Conv1d.forward(self, x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
    return (out if self.activation is None else F.silu(out)), None


def _fused_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, **kwargs: Any
) -> tuple[Tensor, None]:
    rows = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    out = F.conv1d(rows, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    return (out if activation is None else F.silu(out)), None


def _rotary(self: Any, q: Tensor, k: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    self._update_cos_sin_cache(q.shape[1], device=q.device, dtype=q.dtype)
    tables = (self._cos_cached[: q.shape[1]], self._sin_cached[: q.shape[1]])
    turned = importlib.import_module("fla.modules.rotary.ops").rotary_embedding_ref
    return turned(q, *tables), turned(k, *tables)


_NAIVE = {
    "chunk_gla": _gla,
    "fused_recurrent_gla": _gla,
    "chunk_retention": _retention,
    "fused_recurrent_retention": _retention,
    "chunk_delta_rule": _delta,
    "fused_recurrent_delta_rule": _delta,
    "chunk_gated_delta_rule": _gated_delta,
    "fused_recurrent_gated_delta_rule": _gated_delta,
    "chunk_kda": _kda,
    "fused_recurrent_kda": _kda,
    "causal_conv1d": _fused_convolution,
}
