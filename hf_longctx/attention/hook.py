"""Run one attention call of a model under one of our names.

With a batch object the rows are this rank's share of its group's documents, and a plan says who
computes what. Without one the call is local, whatever process groups exist: each document by
itself, or the dense mask of a padded or cached call. Layer: attention.

Letters: B batch, S tokens of a row, T rows of this rank, H query heads, K key/value heads, D head
size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.bridge import BridgedChannel
from ..data.batch import KEY, LongCtxBatch
from ..data.documents import restarts
from ..kernels.softmax import Scoring
from ..planning.planners.plan import Plan, local_plan
from ..planning.program.program import Program
from ..runtime.autograd import Layer, attend
from ..runtime.executor import Runtime
from ..runtime.requests import send_requests
from ..support import recurrent_family, validate_call
from .boundaries import local_documents, validate_padding
from .masks import LayerMask, dense
from .spec import AttentionSpec, validate_spec


def run(
    algorithm: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LayerMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention under one of our names.

    Args:
        algorithm (`str`): The planner, one of `options.ALGORITHMS`.
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
    tensors = {"query": query, "key": key, "value": value}
    dense_mask, causal, mask = None, None, LayerMask()
    if isinstance(attention_mask, Tensor):
        dense_mask = attention_mask  # it holds causality and window itself
    else:
        mask = attention_mask or mask
        causal = mask.causal
    validate_call(module, **tensors, dropout=dropout, causal=causal, arguments=kwargs)
    if dense_mask is None:
        _validate_window(mask, kwargs.get("sliding_window"))
    sinks: Tensor | None = kwargs.get("s_aux")
    spec = AttentionSpec(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        window=mask.window,
        causal=mask.causal,
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=sinks is not None,
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    batch: LongCtxBatch | None = kwargs.get(KEY)
    if dense_mask is not None:
        _validate_mask(batch, kwargs, dense_mask)
        return dense(**tensors, mask=dense_mask, scoring=spec.scoring(scale), sinks=sinks), None
    # [B S, heads, size]: views, unless B is above 1
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    if batch is None:
        lengths = _local_lengths(query, key, kwargs)
        if lengths != (query.shape[2],) * len(query):  # packed: documents are not the rows
            _validate_prepared(module)
        program = local_plan(lengths, spec.window, causal=spec.causal).program(0)
        layer = Layer(program, None, spec.scoring(scale), Runtime().account)
        out = attend(layer, *rows, sinks=sinks)[0]
    else:
        bound = _bind(algorithm, module, batch, spec, scale)
        _validate_positions(batch, kwargs.get("position_ids"), rows=len(query))
        out = _with_batch(bound, module, batch, rows, sinks)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _validate_window(mask: LayerMask, sliding_window: int | None) -> None:
    # a layer that asks for a window its mask does not carry would silently see everything
    masked = mask.window or None
    if sliding_window is not None and masked != sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} of the layer and window {masked} of its mask differ; "
            "hf_longctx needs both to be the same"
        )


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
    """Refuse packed documents in a model whose recurrent layers would run on across boundaries.

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
    """Refuse positions that are not those of the batch's rows.

    A model that is given none numbers its rows from 0, which rotates all but the first part of a
    document wrongly. Every layer is given the same tensor, which is compared once.
    """
    if position_ids is None or position_ids.dim() != 2:
        return
    # Writing to a tensor raises its version. Inference tensors have none: compared each time.
    version = -1 if position_ids.is_inference() else position_ids._version
    compared, at = batch.binding.positions
    if compared is position_ids and at == version >= 0:
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
    batch.binding.positions = (position_ids, version)


@dataclass(frozen=True, slots=True)
class _BoundLayer:
    """What all calls of one spec make use of in one batch."""

    plan: Plan
    program: Program
    scoring: Scoring
    runtime: Runtime
    rows: int  # of this rank
    config: Any  # held, so that nothing else gets its id


def _bind(
    algorithm: str, module: nn.Module, batch: LongCtxBatch, spec: AttentionSpec, scale: float
) -> _BoundLayer:
    """Plan the batch for a spec, at the first call of its kind.

    Raises:
        ValueError: where the config does not describe the call, recurrent layers do not know of the
            documents, or the batch is cut over ranks that have no channel.
    """
    config = getattr(module, "config", None)
    # the same batch may go through other models, which are other configs
    key = algorithm, spec, scale, id(config), batch.prepared
    bound: _BoundLayer | None = batch.binding.layers.get(key)
    if bound is not None:
        return bound
    if not batch.prepared:
        _validate_prepared(module)
    if config is not None:
        validate_spec(spec, config, layer=getattr(module, "layer_idx", "?"))
    runtime: Runtime = batch.binding.runtime or Runtime()
    # without a channel this rank's rows would attend to each other alone: wrong, and no word of it
    if batch.layout.ranks > 1 and runtime.channel is None:
        raise ValueError(
            f"a batch cut over {batch.layout.ranks} ranks reached attention without a channel; "
            "train with LongCtxTrainer, which binds one to each batch"
        )
    plan, rows = batch.plan(algorithm, spec.kind), batch.layout.rows(batch.rank)
    program, scoring = plan.program(batch.rank), spec.scoring(scale)
    bound = _BoundLayer(plan, program, scoring, runtime, rows, config)
    batch.binding.layers[key] = bound
    return bound


def _with_batch(
    bound: _BoundLayer,
    module: nn.Module,
    batch: LongCtxBatch,
    rows: list[Tensor],
    sinks: Tensor | None,
) -> Tensor:
    """Attend this rank's rows of a group's batch; a recompute takes what the forward saved."""
    if len(rows[0]) != bound.rows or len(rows[1]) != bound.rows:
        raise ValueError(
            f"longctx_batch describes {bound.rows} tokens of rank {batch.rank}, but the model "
            f"attends {len(rows[0])} queries to {len(rows[1])} keys; pass one row of exactly those "
            "tokens"
        )
    runtime, saved = bound.runtime, batch.binding.saved
    account, index = runtime.account, getattr(module, "layer_idx", None)
    index = None if index == -1 else index  # Zamba2 numbers all of them -1
    # saved results are found again by layer, in whatever order the recompute runs
    name = id(module) if index is None else index
    layer = Layer(
        bound.program, runtime.channel, bound.scoring, account, half=batch.half, index=index
    )
    if batch.options.speeds:
        assert isinstance(runtime.channel, BridgedChannel), "servers are reached over bridges"
        layer.call = partial(send_requests, runtime.channel, runtime.senders, bound.plan)
    if torch._C._current_graph_task_id() != -1:  # inside a backward pass: a recompute
        before = runtime.sent_bytes
        layer.saved = saved.take(name)
        out, _ = attend(layer, *rows, sinks=sinks)
        account.recomputed += 1
        account.recompute_bytes += runtime.sent_bytes - before
        return out
    layer.forget = partial(saved.drop, name)
    # a recompute runs in backward, outside of the two coroutines, and must not hand over
    layer.turn = batch.binding.turn
    out, lse = attend(layer, *rows, sinks=sinks)
    account.calls += 1
    account.layers.add(name)
    if module.training or out.requires_grad:  # reentrant checkpointing runs without gradients
        saved.keep(name, (out.detach(), lse))
    return out
