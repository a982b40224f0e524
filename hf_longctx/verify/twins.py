"""Build the models to compare: under our name, with naive float64 attention, and as stock.

All have the same weights. Stock models cannot serve as a float64 reference: norms, routers and
softmax ask for float32. Both sides therefore run under `KeepFloat64`, and attention is the naive
reference. Recurrent layers of the reference run the library's own code, which shares nothing with
ours. Layer: verify. Letters: H heads, S tokens, D head size.
"""

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)

from ..attention.masks import LayerMask, attention_mask
from ..kernels.reference import attention
from ..support import FLA_FAMILIES
from .check import validate_layers
from .fla_reference import library_for, load_fla

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
REFERENCE = "hf_longctx_reference"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def reference_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute naive attention of one document: `[1, H, S, D]` to `[1, S, H, D]`."""
    rows = [t[0].transpose(0, 1) for t in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = mask if isinstance(mask, LayerMask) else LayerMask()
    out = attention(
        *rows,
        lengths=[query.shape[2]],
        scale=scale,
        window=seen.window,
        causal=seen.causal,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
    )
    return out[None], None


def register_reference() -> None:
    """Register the naive attention with Transformers, in this process."""
    AttentionInterface.register(REFERENCE, reference_attention)
    AttentionMaskInterface.register(REFERENCE, attention_mask)


# Products that, unlike elementwise operations, do not promote a float32 operand.
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__}


class KeepFloat64(TorchFunctionMode):
    """Turn every request for float32 on a float64 tensor into one for float64.

    Norms, routers and decays of stock modules ask for float32, which would hide errors below 1e-7.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.autograd.backward and kwargs["grad_tensors"]:
            with self:  # a recompute's own backward, in which another recompute may lie
                return _backward(args[0], kwargs["grad_tensors"])
        double = any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
        if double:
            if func is Tensor.float:
                return args[0]
            if func in _PRODUCTS:
                # Positions are integers turned to float32; rotary code before Transformers 5.24
                # multiplies them with frequencies, which stay in float64 here.
                args = tuple(a.double() if isinstance(a, Tensor) else a for a in args)
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the mode under which a model of `dtype` runs."""
    return KeepFloat64() if dtype == torch.float64 else nullcontext()


def backward(loss: Tensor) -> None:
    """Backpropagate with the precision mode still on.

    `Tensor.backward` and `torch.autograd.backward` call the mode's handler, inside which the mode
    is off, so layers that recompute there would fall back to float32. The engine is called
    directly, without the handler.
    """
    _backward((loss,), (torch.ones_like(loss),))


def _backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    _engine_run_backward(tuple(outputs), tuple(grads), False, False, (), True, True)


def load_config(path: str) -> Any:
    """Load the config of a checkpoint folder or of a config JSON.

    Raises:
        ValueError: where there is neither, or where the JSON is no config.
    """
    place = Path(path)
    if not (place.is_file() or (place / "config.json").is_file()):
        lacks = "a folder without config.json" if place.is_dir() else "no such file or folder"
        raise ValueError(
            f"--model {path}: {lacks}; give a config as JSON, or a checkpoint folder with one, on "
            "this machine"
        )
    try:
        given = json.loads((place / "config.json" if place.is_dir() else place).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {path}: no JSON ({error}); give a config as JSON") from error
    if not isinstance(given, dict):
        raise ValueError(
            f"--model {path}: holds a JSON {type(given).__name__}; a config is an object with a "
            'model_type, as {"model_type": "llama"}'
        )
    parts = [part for part in (given, given.get("text_config")) if isinstance(part, dict)]
    for layers in (part.get(name) for part in parts for name in _LAYERS):
        validate_layers(layers)  # config classes list every layer: a huge number would hang them
    if given.get("model_type") in FLA_FAMILIES:
        load_fla()
    if place.is_file() and "model_type" not in given:
        raise ValueError(f"--model {path}: no model_type in it; write one, as 'llama'")
    try:
        return AutoConfig.from_pretrained(path) if place.is_dir() else AutoConfig.for_model(**given)
    except Exception as error:  # config classes raise anything for wrong fields
        raise ValueError(f"--model {path}: no config can be read from it ({error})") from error


def dropout_fields(config: Any) -> list[str]:
    """Return the names of a config's dropout fields that are above 0."""
    text = config.get_text_config(decoder=True)
    found = {
        name: value
        for name, value in text.to_dict().items()
        if "drop" in name and isinstance(value, float)
    }
    return sorted(name for name, value in found.items() if value > 0)


def auto_class(config: Any) -> Any:
    """Return the auto class of causal models, or of masked ones for a family without them."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if causal else AutoModelForMaskedLM


def build(path: str, *, name: str, dtype: torch.dtype) -> Any:
    """Build a model under an attention name, with a folder's weights or weights at unit gain.

    Dropout is off: its masks differ between any two runs.

    Args:
        path (`str`): Checkpoint folder or config JSON.
        name (`str`): Attention implementation.
        dtype (`torch.dtype`): Dtype of all parameters.
    """
    options = {"attn_implementation": name, "experts_implementation": "eager"}
    config = load_config(path)
    for field in dropout_fields(config):
        setattr(config.get_text_config(decoder=True), field, 0.0)
    if config.model_type in FLA_FAMILIES:  # fused losses never form the logits to compare
        config.fuse_cross_entropy = config.fuse_linear_cross_entropy = False
    with library_for(config):
        if Path(path).is_dir():
            model = auto_class(config).from_pretrained(
                path, config=config, dtype=torch.float32, **options
            )
        else:
            model = auto_class(config).from_config(config, dtype=torch.float32, **options)
            draw_at_unit_gain(model)
    model.config.use_cache = False
    return convert(model, dtype)


def convert(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model to another dtype, and its precomputed tables with it."""
    model = model.to(dtype)
    for layer in model.modules():
        if hasattr(layer, "decay_factors"):  # MiniMax rounds powers of its decay to float32
            tables = layer.decay_factors(layer.slope_rate)
            layer.query_decay, layer.key_decay, layer.diagonal_decay = tables
    return model


def draw_at_unit_gain(model: nn.Module, seed: int = 0) -> None:
    """Redraw weights so that signals keep their size.

    The usual standard deviation of 0.02 makes attention nearly uniform, which hides leaks and wrong
    masks.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("A_log"):  # the usual decays forget a document within a few tokens
                parameter.copy_(math.log(0.05) + 0.1 * noise)
            elif parameter.dim() < 2:
                centre = 1.0 if name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.1 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
