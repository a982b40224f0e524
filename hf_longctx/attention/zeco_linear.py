"""`attn_implementation="zeco_linear"`: the softmax layers of a model with recurrent layers.

Floor: attention. The recurrent layers are adapted by `models.prepare`, as Transformers looks no
name up for them; here the name stands for the attention that `--longctx_softmax` picks.
"""

from typing import Any

from torch import Tensor, nn

from ..data.batch import KEY, LongCtxBatch
from . import hook
from .documents import local_documents


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
        ValueError: where documents are packed and the model was not prepared, so that its recurrent
            layers would run on from one to the next.
    """
    batch: LongCtxBatch | None = kwargs.get(KEY)
    packed = batch is not None and not batch.prepared
    if batch is None and not isinstance(attention_mask, Tensor):
        names = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k")
        described = {name: kwargs.get(name) for name in names}
        lengths = local_documents(batch=query.shape[0], rows=query.shape[2], **described)
        packed = len(lengths) != query.shape[0]
    if packed:
        raise ValueError(
            "packed documents reached attn_implementation='zeco_linear' in a model whose recurrent "
            "layers do not know of them; call hf_longctx.prepare(model) once it is loaded"
        )
    algorithm = batch.softmax if batch is not None else "distca"
    return hook.run(algorithm, module, query, key, value, attention_mask, **kwargs)
