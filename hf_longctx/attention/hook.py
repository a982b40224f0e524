"""One attention call of a model -> the rows of this rank, run by a plan.

Layer: attention. With a batch object the rows are this rank's share of its group's documents.
Without one the hook is local, whatever groups exist: each document by itself, or the dense mask of
a padded or cached call. Letters: B batch, S tokens of a row, H query heads, K key/value heads, D
head size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.bridge import BridgedChannel
from ..data.batch import KEY, LongCtxBatch
from ..data.documents import restarts
from ..kernels.softmax import Scoring
from ..planning.layouts.cost import LayerKind
from ..planning.planners.plan import local_plan
from ..runtime.autograd import Layer, attend
from ..runtime.executor import Runtime
from ..runtime.requests import send_requests
from ..support import recurrent_family, validate_call
from .boundaries import local_documents, validate_padding
from .masks import Bidirectional, SlidingWindow, dense

Mask = SlidingWindow | Bidirectional | None


def run(
    algorithm: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention under one of our names.

    Args:
        algorithm (`str`): The planner, one of `plan.plans.ALGORITHMS`.
        module (`nn.Module`): The attention module that calls.
        query (`Tensor`): `[B, H, S, D]`, rotated.
        key, value (`Tensor`): `[B, K, S, D]`; longer than S when decoding onto a cache.
        attention_mask: What `masks.attention_mask` returned, or a user's own 4D mask.
        scaling (`float`, *optional*, defaults to D ** -0.5): Factor on the scores.
        dropout (`float`, *optional*, defaults to 0.0): Must be 0.
        kwargs: What the model passed on; allow-listed by name.

    Returns:
        `[B, S, H, D]` in the query's dtype, and no weights.

    Raises:
        ValueError: for anything that would not be computed exactly; see `support`.
    """
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")  # rotary leaves queries and keys in float32
        query, key, value = query.to(low), key.to(low), value.to(low)
    causal = not isinstance(attention_mask, Bidirectional)
    dense_mask = isinstance(attention_mask, Tensor)  # holds causality and window already
    validate_call(
        module,
        query=query,
        key=key,
        value=value,
        dropout=dropout,
        causal=None if dense_mask else causal,
        arguments=kwargs,
    )
    scoring = Scoring(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_window(attention_mask, kwargs.get("sliding_window")),
        causal=causal,
        softcap=float(kwargs.get("softcap") or 0.0),
    )
    sinks: Tensor | None = kwargs.get("s_aux")
    batch: LongCtxBatch | None = kwargs.get(KEY)
    if isinstance(attention_mask, Tensor):
        _validate_mask(batch, kwargs, attention_mask)
        return dense(query, key, value, attention_mask, scoring=scoring, sinks=sinks), None
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    if batch is None:
        lengths = _local_lengths(query, key, kwargs)
        if len(lengths) != len(query):
            _validate_prepared(module)
        program = local_plan(lengths, scoring.window, causal=causal).program(0)
        out = attend(Layer(program, None, scoring, Runtime().account), *rows, sinks=sinks)[0]
    else:
        if not batch.prepared:
            _validate_prepared(module)
        _validate_positions(batch, kwargs.get("position_ids"), rows=len(query))
        out = _with_batch(algorithm, module, batch, rows, scoring, sinks)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _window(mask: Tensor | Mask, sliding_window: int | None) -> int:
    """The window that the mask and the layer's argument agree on; 0 for none."""
    if isinstance(mask, Tensor):
        return 0
    masked = mask.window or None if isinstance(mask, Bidirectional) else mask and mask.size
    if sliding_window is not None and masked != sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} of the layer and window {masked} of its mask differ; "
            "hf_longctx needs both to be the same"
        )
    return masked or 0


def _validate_mask(batch: LongCtxBatch | None, kwargs: dict[str, Any], mask: Tensor) -> None:
    if batch is not None or kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "attention_mask arrived together with document boundaries (longctx_batch or "
            "cu_seq_lens_q): a padded batch was handed to a packed path; drop attention_mask"
        )
    validate_padding(kwargs.get("position_ids"), mask)


def _local_lengths(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Tokens of each document that this call holds whole."""
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries met {key.shape[2]} keys without a mask; hf_longctx needs "
            "the mask that Transformers makes for a cache"
        )
    positions = kwargs.get("position_ids")
    bounds = {name: kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    return local_documents(
        batch=query.shape[0], rows=query.shape[2], position_ids=positions, **bounds
    )


def _validate_prepared(module: nn.Module) -> None:
    """Refuse packed documents in a model whose recurrent layers would run on from one to the next.

    Raises:
        ValueError: with what shows those layers.
    """
    config = getattr(module, "config", None)
    found = None if config is None else recurrent_family(config)
    if found is not None:
        raise ValueError(
            f"packed documents reached a model whose recurrent layers ({found}) do not know of "
            "them; call hf_longctx.prepare(model) once it is loaded"
        )


def _validate_positions(batch: LongCtxBatch, position_ids: Tensor | None, *, rows: int) -> None:
    """Refuse positions that are not those of the batch's rows: a model that is given none numbers
    its rows from 0, which rotates a document's later parts, and all but the first, wrongly."""
    if position_ids is None or position_ids.dim() != 2:
        return
    expected = torch.from_numpy(batch.layout.positions(batch.rank)).to(position_ids.device)
    given = position_ids.expand(rows, -1).flatten().to(expected.dtype)
    if batch.layout.ranks == 1:  # whole documents, each from any position on
        given, expected = restarts(given), restarts(expected)
    if not torch.equal(given, expected):
        raise ValueError(
            f"position_ids are not the positions that longctx_batch gives rank {batch.rank}'s rows "
            "in their documents; pass the collator's position_ids with its batch object"
        )


def _with_batch(
    algorithm: str,
    module: nn.Module,
    batch: LongCtxBatch,
    rows: list[Tensor],
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """This rank's rows of a group's batch; in a recompute, what the first forward saved."""
    held = batch.layout.rows(batch.rank)
    if len(rows[0]) != held or len(rows[1]) != held:
        raise ValueError(
            f"longctx_batch describes {held} tokens of rank {batch.rank}, but the model attends "
            f"{len(rows[0])} queries to {len(rows[1])} keys; pass one row of exactly those tokens"
        )
    runtime: Runtime = batch.runtime or Runtime()
    if batch.layout.ranks > 1 and runtime.channel is None:
        raise ValueError(
            f"a batch cut over {batch.layout.ranks} ranks reached attention without a channel; "
            "train with LongCtxTrainer, which binds one to each batch"
        )
    kind = LayerKind(
        window=scoring.window,
        causal=scoring.causal,
        query_width=rows[0].shape[1:].numel(),  # also of no rows: all ranks plan the same
        key_value_width=rows[1].shape[1:].numel() + rows[2].shape[1:].numel(),
        kv_heads=rows[1].shape[1],
        heads=rows[0].shape[1],
    )
    plan = batch.plan(algorithm, kind)
    program = plan.program(batch.rank)
    account, index = runtime.account, getattr(module, "layer_idx", None)
    index = None if index == -1 else index  # Zamba2 numbers all of them -1
    name = id(module) if index is None else index
    recompute = torch._C._current_graph_task_id() != -1  # inside a backward pass
    layer = Layer(program, runtime.channel, scoring, account, half=batch.half, index=index)
    if batch.speeds:
        assert isinstance(runtime.channel, BridgedChannel), "servers are reached over bridges"
        layer.call = partial(send_requests, runtime.channel, runtime.senders, plan)
    before = runtime.sent_bytes
    if recompute:
        layer.saved = batch.saved.take(name)
    else:
        layer.forget = lambda: batch.saved.drop(name)
        layer.turn = batch.turn
    out, lse = attend(layer, *rows, sinks=sinks)
    if recompute:
        account.recomputed += 1
        account.recompute_bytes += runtime.sent_bytes - before
    else:
        account.calls += 1
        account.layers.add(name)
        if module.training or out.requires_grad:
            batch.saved.keep(name, (out.detach(), lse))
    return out
