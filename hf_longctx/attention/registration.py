"""Register our attention names with Transformers, each as an attention and a mask function.

Both registries are needed: a name without a mask function silently loses causality.
Layer: attention.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..data.batch import KEY, LongCtxBatch
from ..support import recurrent_family, validate_model
from . import hook
from .masks import attention_mask


def _zeco_linear(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Run a softmax layer of a model with recurrent layers by the planner of its batch.

    Raises:
        ValueError: in a model without recurrent layers.
    """
    if recurrent_family(module.config) is None:
        validate_model(module.config, name="zeco_linear")
    batch: LongCtxBatch | None = kwargs.get(KEY)
    algorithm = batch.options.algorithm if batch is not None else "distca"
    return hook.run(algorithm, module, *args, **kwargs)


# Attention name -> the function that Transformers calls; its arguments are those of `hook.run`.
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    # Keys and values cross each slow link once and spread behind it; queries stay at home. Our own
    # design: of CHARM+, arXiv 2611.05906, only the abstract is public. Planner: `planners.charm`.
    "charm": partial(hook.run, "charm"),
    # Attention is cut into tasks that are balanced over the ranks; each rank serves in place.
    # Source: arXiv 2510.18121. Planner: `planners.distca`.
    "distca": partial(hook.run, "distca"),
    # Keys and values travel once around the ranks; queries stay at home. Source: arXiv 2310.01889.
    # Planner: `planners.ring`.
    "ring": partial(hook.run, "ring"),
    # Ranks exchange heads for tokens, attend, and exchange back. Source: arXiv 2309.14509.
    # Planner: `planners.ulysses`.
    "ulysses": partial(hook.run, "ulysses"),
    # The recurrent layers are adapted by `recurrent.prepare`, as Transformers looks no name up for
    # them; the name stands for the softmax layers, which `--longctx_softmax` plans.
    "zeco_linear": _zeco_linear,
}


def register(names: Iterable[str] | None = None) -> None:
    """Make our names known to Transformers.

    Importing `hf_longctx` registers all of them; a second call changes nothing.

    Args:
        names (`Iterable[str]`, *optional*): Which names; all by default.

    Raises:
        ValueError: on a name that is not ours.
    """
    for name in FUNCTIONS if names is None else names:
        if name not in FUNCTIONS:
            raise ValueError(f"{name!r} is not ours; use one of {sorted(FUNCTIONS)}")
        AttentionInterface.register(name, FUNCTIONS[name])
        AttentionMaskInterface.register(name, attention_mask)
