"""`attn_implementation="zeco_linear"`: the softmax layers of a model with recurrent layers.

Floor: attention. The recurrent layers are adapted by `models.prepare`, as Transformers looks no
name up for them; here the name stands for the attention that `--longctx_softmax` picks.
"""

from typing import Any

from torch import Tensor, nn

from ..data.batch import KEY, LongCtxBatch
from ..support import recurrent_family, refuse_model
from . import hook


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
        refuse_model(module.config, name="zeco_linear")
    batch: LongCtxBatch | None = kwargs.get(KEY)
    algorithm = batch.softmax if batch is not None else "distca"
    return hook.run(algorithm, module, query, key, value, attention_mask, **kwargs)
