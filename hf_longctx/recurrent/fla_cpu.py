"""Replace norms, activations and losses of flash-linear-attention by PyTorch's on a CPU.

The library has Triton kernels alone, which need a GPU; on one they run as before.
Layer: recurrent.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..runtime.wrapping import Function
from .adapter import Replacement, replace_function
from .context import targets_of_model


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize rows, in the input's dtype; with `prenorm` return also what was normalized."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # The library normalizes the sum with the residual, and hands that sum on.
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    out = F.rms_norm(total, total.shape[-1:], eps=eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    # The sum goes on to the next block, in the dtype in which the library keeps it.
    kept = wide if residual_in_fp32 else x.dtype
    return (out.to(x.dtype), total.to(kept)) if prenorm else out.to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Normalize rows and multiply them by an activation of `g`, in the input's dtype."""
    assert residual is None and not prenorm, "no adapted layer sets these"
    wide = torch.promote_types(x.dtype, torch.float32)
    out = rms_norm(x.to(wide), weight, bias, eps=eps)
    assert isinstance(out, Tensor)
    # "swish" and "silu" name one function.
    gate = g.to(wide)
    return (out * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))).to(x.dtype)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Return `silu(x) * y` in the input's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.silu(x.to(wide)) * y.to(wide)).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear map after `swiglu`."""
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def cross_entropy(self: Any, input: Tensor, target: Tensor) -> Tensor:
    """Stand in for `FusedCrossEntropyLoss.forward`, in float32 or wider.

    Raises:
        ValueError: if it has options that the models do not set.
    """
    _validate_options(vars(self))  # the criterion keeps its options as attributes
    return _token_loss(input, target, self.ignore_index, self.reduction)


def linear_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    **kwargs: Any,
) -> Tensor:
    """Return the loss of hidden states `[T, hidden]`, in float32 or wider.

    Raises:
        ValueError: on options that the models do not set.
    """
    _validate_options(kwargs)
    return _token_loss(F.linear(x, weight, bias), target, ignore_index, reduction)


def _validate_options(given: Mapping[str, Any]) -> None:
    options = {name: given.get(name, plain) for name, plain in _PLAIN.items()}
    changed = [f"{name}={value}" for name, value in options.items() if value != _PLAIN[name]]
    if changed:
        raise ValueError(
            f"the loss of flash-linear-attention has {' and '.join(changed)}, which nothing here "
            "computes on a CPU; leave the model's criterion to its default"
        )


def _token_loss(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    # A mean over many tokens of a large vocabulary: bf16 would have two digits of it.
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), target, ignore_index=ignore_index, reduction=reduction)


_PLAIN = {  # the options with which the loss is the cross entropy alone
    "label_smoothing": 0.0,
    "logit_scale": 1.0,
    "logit_softcapping": None,
    "lse_square_scale": 0.0,
    "return_z_loss": False,
    "use_l2warp": False,
    "process_group": None,
}
# By module and name. Each module looks these up when it calls them, so replacing them is enough.
_KERNELS = {
    ("fla.modules.norm.layernorm", "rms_norm"): Replacement(
        rms_norm, "x weight bias residual eps prenorm residual_in_fp32"
    ),
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"): Replacement(
        rms_norm_gated, "x g weight bias activation residual prenorm residual_in_fp32 eps"
    ),
    ("fla.modules.mlp", "swiglu"): Replacement(swiglu, "args kwargs"),
    ("fla.modules.mlp", "swiglu_linear"): Replacement(swiglu_linear, "x y weight bias"),
    ("fla.layers.delta_net", "elu_p1"): Replacement(lambda x: F.elu(x) + 1, "x"),
    ("fla.modules.fused_cross_entropy.ops", "FusedCrossEntropyLoss.forward"): Replacement(
        cross_entropy, "self input target"
    ),
    ("fla.modules.fused_linear_cross_entropy.ops", "fused_linear_cross_entropy_loss"): Replacement(
        linear_cross_entropy,
        "x target weight bias ignore_index label_smoothing logit_scale logit_softcapping "
        "num_chunks reduction use_l2warp l2_penalty_factor accumulate_grad_in_fp32 process_group",
    ),
}
_HEAD = "fla.models.modeling_utils", "FLAPreTrainedModel._compute_logits_and_loss"
_HEAD_PARAMETERS = (
    "self hidden_states labels logits_to_keep shift_labels num_items_in_batch "
    "fuse_linear_cross_entropy use_l2warp"
)
_ACTIVATIONS: dict[str, Function] = {
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
}


def replace_kernels(layer: nn.Module) -> None:
    """Make the library use PyTorch's functions on a CPU; a second time changes nothing.

    Args:
        layer (`nn.Module`): A recurrent layer, which may hold activations of its own.

    Raises:
        ValueError: if a function of the library takes other arguments than ours knows.
    """
    for (module, name), plain in _KERNELS.items():
        _replace(module, name, partial(_by_device, plain=plain.function), plain.parameters)
    _replace(*_HEAD, _with_targets, _HEAD_PARAMETERS)
    # Layers keep their activations in attributes, where replacing the module's has no effect.
    activations = sys.modules["fla.modules.activations"]
    for part in ("gate_fn", "feature_map_fn"):
        for name, function in _ACTIVATIONS.items():
            fused: Function = getattr(activations, name)
            if getattr(layer, part, None) is fused:
                setattr(layer, part, _Activation(fused, function))


def _replace(module: str, name: str, wrapper: Callable[[Function], Function], known: str) -> None:
    """Wrap a function of a module of the library, or a method of one of its classes."""
    holder, _, own = name.rpartition(".")
    found = attrgetter(holder)(sys.modules[module]) if holder else sys.modules[module]
    replace_function(found, own, wrapper, place=f"{module}.{name}", known=known)


@dataclass(frozen=True, slots=True)
class _Activation:
    """The library's activation on a GPU, else PyTorch's."""

    # A class, not a closure, so that layers that hold one still pickle.
    fused: Function
    plain: Function

    def __call__(self, x: Tensor) -> Any:
        return (self.plain if x.device.type == "cpu" else self.fused)(x)


def _by_device(original: Function, *, plain: Function) -> Function:
    """Run the original if the first tensor is on a GPU, else PyTorch's."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # At each call: a model may move to another device after it was prepared.
        first = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        return (plain if first.device.type == "cpu" else original)(*args, **kwargs)

    return dispatch


def _with_targets(original: Function) -> Function:
    """Give the loss the targets that were shifted before: the heads do not hand them on."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        if (targets := targets_of_model()) is not None:
            kwargs["shift_labels"] = targets
        return original(*args, **kwargs)

    return compute
