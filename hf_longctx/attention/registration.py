"""`attn_implementation="distca"`: attention cut into tasks and balanced over the ranks of a group.

Layer: attention. Source: arXiv 2510.18121. The plan is `plan.distca`; each rank serves in place.

`attn_implementation="charm"`: keys and values cross each slow link once and spread behind it. Source: our own design; of CHARM+, arXiv 2611.05906, only the abstract is public.
The plan is `plan.charm`; queries stay at home.

`attn_implementation="ring"`: keys and values travel once around the ranks of a group. Source: arXiv 2310.01889. The plan is `plan.ring`; queries stay at home.

`attn_implementation="ulysses"`: ranks exchange heads for tokens, attend, and exchange back. Source: arXiv 2309.14509. The plan is `plan.ulysses`.

`attn_implementation="zeco_linear"`: the softmax layers of a model with recurrent layers. The recurrent layers are adapted by `models.prepare`, as Transformers looks no
name up for them; here the name stands for the attention that `--longctx_softmax` picks.

Our attention names in the two registries of Transformers. Both halves are needed: a name without a mask function silently loses causality.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..data.batch import KEY, LongCtxBatch
from ..support import recurrent_family, validate_model
from . import hook
from .masks import attention_mask


def distca_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, with balanced tasks."""
    return hook.run("distca", module, query, key, value, attention_mask, **kwargs)


def charm_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, level by level."""
    return hook.run("charm", module, query, key, value, attention_mask, **kwargs)


def ring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, in ring order."""
    return hook.run("ring", module, query, key, value, attention_mask, **kwargs)


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, each rank over its share of the heads."""
    return hook.run("ulysses", module, query, key, value, attention_mask, **kwargs)


def zeco_linear_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `hook.run` describes it, by the batch's plans for softmax layers.

    Raises:
        ValueError: in a model without recurrent layers.
    """
    if recurrent_family(module.config) is None:
        validate_model(module.config, name="zeco_linear")
    batch: LongCtxBatch | None = kwargs.get(KEY)
    algorithm = batch.options.algorithm if batch is not None else "distca"
    return hook.run(algorithm, module, query, key, value, attention_mask, **kwargs)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "charm": charm_attention,
    "distca": distca_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "zeco_linear": zeco_linear_attention,
}


def register(names: Iterable[str] | None = None) -> None:
    """Make names known to Transformers: attention function and mask function.

    Importing `hf_longctx` does this for all of them; calling it again changes nothing.

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
