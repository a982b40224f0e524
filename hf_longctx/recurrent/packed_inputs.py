"""Read the packed documents that a model's keyword arguments describe, as one batch object.

Boundaries come from `longctx_batch`, else from `cu_seq_lens_q`, `position_ids` and `seq_idx`, which
must agree, so that convolutions, scans and softmax layers all use the same ones. Calls without
packed documents, also padded or cached ones, reach the model unchanged.
Layer: recurrent.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.boundaries import local_documents
from ..data.batch import KEY, LongCtxBatch
from ..data.documents import restarts
from ..planning.layouts.layout import cut
from ..support import validate_misspelt
from .adapter import wrap_packed_forward
from .context import activate_model, inside_active_model

_CACHES = ("cache", "past_key_values", "cache_params")  # its name by version and family
_IMAGES = (
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_encoder_outputs",
    "mm_token_type_ids",
)  # fmt: skip
OTHER_BOUNDARIES = ("cu_seqlens", "cu_seqlens_cpu")  # as flash-linear-attention spells them


def read_packed_inputs(model: nn.Module, *, needs_gpu: bool) -> None:
    """Make a model's forward look for packed documents, for all layers in it.

    Args:
        model (`nn.Module`): A model that Transformers made, or one within it, which then looks only
            when it is called by itself. Only this instance changes; a second time changes nothing.
        needs_gpu (`bool`): Its layers' own functions do not run on a CPU. There ours run instead,
            with each row as one document if no documents are given.
    """
    names = tuple(inspect.signature(model.forward).parameters)
    wrap_packed_forward(model, partial(_model_forward, names=names, needs_gpu=needs_gpu))


def _model_forward(
    original: Callable[..., Any], *, names: Sequence[str], needs_gpu: bool
) -> Callable[..., Any]:
    known = {*names, *OTHER_BOUNDARIES}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside_active_model(self):
            return original(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False), **kwargs)
        validate_misspelt(given, known=known)
        batch = find_batch(given, always=needs_gpu and _on_cpu(given))
        if batch is not None:
            # On a copy: a mark on the caller's object would open other, unprepared models to it.
            batch = replace(batch, prepared=True)
        with activate_model(self, batch, given.get("shift_labels")):
            if batch is None:
                return original(self, *args, **kwargs)
            return original(self, **_with_batch(batch, given))

    return forward


def find_batch(given: Mapping[str, Any], *, always: bool = False) -> LongCtxBatch | None:
    """Return the batch object in a forward's arguments, or make one from what they describe.

    Args:
        given (`Mapping`): The arguments by name.
        always (`bool`, *optional*, defaults to `False`): Make one also if every row is a document.

    Returns:
        `None` if no boundaries are given, or if every row is one document, padded or not, or goes
        on from a cache; unless `always` is set.

    Raises:
        ValueError: if packed documents come with padding or a cache, or if boundaries do not fit
            the rows, differ from each other, or are in a mask alone.
    """
    batch: LongCtxBatch | None = given.get(KEY)
    # With a cache the mask also covers keys before these rows, and its form tells nothing.
    if _cached(given) is None:
        for mask in _masks(given):
            _validate_mask_documents(mask)
    lengths = _documents(given) if batch is None else None
    packed = batch is not None or lengths is not None
    if not packed and not always:
        return None
    if batch is None:
        each = (_rows(given).shape[1],) * len(_rows(given))
        batch = LongCtxBatch(cut(lengths or each, ranks=1, layout="contiguous"), 0)
    held, rows = batch.layout.rows(batch.rank), _rows(given).shape[:2].numel()
    if held != rows:
        raise ValueError(
            f"longctx_batch describes {held} tokens of rank {batch.rank}, but the input has "
            f"{rows}; pass one row of exactly those tokens"
        )
    padded = _hiding_mask(given) is not None
    if padded or given.get("use_cache") or _cached(given) is not None:
        what = "padding or a mask of scores in attention_mask" if padded else "a cache"
        why = f"packed documents came with {what}, which knows nothing of their boundaries"
        if not packed:
            why = f"{what} reached layers whose kernels need a GPU; on a CPU each row starts anew"
        raise ValueError(
            f"{why}; leave out attention_mask and the padding, and set use_cache=False"
        )
    return batch


def _with_batch(batch: LongCtxBatch, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the batch, and with positions, which some softmax layers read."""
    changed = {**given, KEY: batch, "use_cache": False}
    changed.pop("attention_mask", None)  # all ones, which would hide boundaries in position_ids
    changed.pop("cu_seqlens", None)  # the layers would choose other functions by it
    positions = given.get("position_ids")
    if positions is None or positions.dim() == 2:
        _validate_images(given)
    own = torch.from_numpy(batch.layout.positions(batch.rank)).to(_rows(given).device)
    own = own.view(_rows(given).shape[:2])
    if positions is None:
        changed["position_ids"] = own
    elif positions.dim() == 3 and len(positions) == 3:
        # Qwen's models take a fourth axis, of text positions, before time, height and width.
        text = _text_positions(positions)
        changed["position_ids"] = torch.cat([(own if text is None else text)[None], positions])
    return changed


def _rows(given: Mapping[str, Any]) -> Tensor:
    ids = given.get("input_ids")
    rows: Tensor = given["inputs_embeds"] if ids is None else ids
    return rows


def _on_cpu(given: Mapping[str, Any]) -> bool:
    rows = (given.get("input_ids"), given.get("inputs_embeds"))
    return any(isinstance(x, Tensor) and x.device.type == "cpu" for x in rows)


def _validate_images(given: Mapping[str, Any]) -> None:
    """Reject images and videos without three axes of positions, which alone tell their places.

    Raises:
        ValueError: naming the argument that shows them.
    """
    for name in _IMAGES:
        value = given.get(name)
        if value is not None and (name != "mm_token_type_ids" or bool(value.any())):
            raise ValueError(
                f"{name} came with packed documents whose positions have no three axes, so images "
                "would be rotated as text; give position_ids [3, batch, tokens], as the model's "
                "get_rope_index forms them for each document alone, and cu_seq_lens_q"
            )


def _masks(given: Mapping[str, Any]) -> list[Any]:
    """Return the attention masks: one, or one per kind of layer."""
    mask = given.get("attention_mask")
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return [mask for mask in masks if mask is not None]


def _hiding_mask(given: Mapping[str, Any]) -> Tensor | None:
    """Return the first attention mask that hides anything."""
    masks = (mask for mask in _masks(given) if isinstance(mask, Tensor))
    return next((mask for mask in masks if not bool(mask.all())), None)


def _seen(mask: Tensor) -> Tensor:
    """Return where a 4-D mask, bool or added to scores, lets a query see a key."""
    return mask if mask.dtype == torch.bool else mask == 0


def _validate_mask_documents(mask: Any) -> None:
    """Reject a mask that separates documents, since recurrent layers do not read it.

    Raises:
        ValueError: if it numbers documents, hides a token from the next one of its row, or has an
            unknown form, so that it may do either.
    """
    found = ""
    if not isinstance(mask, Tensor):
        found = f"is a {type(mask).__name__}"
    elif mask.dim() == 2 and bool((mask > 1).any()):
        found = f"numbers documents (up to {int(mask.max())})"
    elif mask.dim() not in (2, 4):
        found = f"has {mask.dim()} axes, not 2 or 4"
    elif mask.dim() == 4 and mask.dtype != torch.bool and bool((mask > 0).any()):
        found = f"is of {mask.dtype} with entries above 0, which would be added to scores"
    elif mask.dim() == 4 and mask.shape[-2] == mask.shape[-1]:
        real, before = (_seen(mask).diagonal(offset, -2, -1) for offset in (0, -1))
        if bool((real[..., 1:] & real[..., :-1] & ~before).any()):
            found = "keeps tokens of a row from those right before them"
    if found:
        raise ValueError(
            f"attention_mask {found}, which recurrent layers cannot see; drop it and give "
            "position_ids that restart with each document, cu_seq_lens_q or seq_idx"
        )


def _cached(given: Mapping[str, Any]) -> Any:
    return next((given[name] for name in _CACHES if given.get(name) is not None), None)


def _documents(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the tokens of each document; `None` if no argument tells rows apart any further."""
    if given.get("input_ids") is None and given.get("inputs_embeds") is None:
        return None  # the model says so itself
    batch, rows = _rows(given).shape[:2]
    # Lengths, not positions, are compared: documents may begin at any position.
    found: dict[str, tuple[int, ...]] = {}
    for name, described in _descriptions(given).items():
        found[name] = local_documents(batch=batch, rows=rows, **described)
    if len({*found.values()}) > 1:
        raise ValueError(
            f"{' and '.join(found)} describe different documents; give hf_longctx one of them, or "
            "the same boundaries in all"
        )
    lengths = next(iter(found.values()), None)
    # Boundaries other than positions are packed input even for one document per row: the stock
    # layers reject them.
    unpacked = found.keys() <= {"position_ids"} and lengths == (rows,) * batch
    return None if unpacked else lengths


def _descriptions(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Collect what tells documents apart: by argument, the arguments of `local_documents`."""
    found: dict[str, dict[str, Any]] = {}
    if given.get("cu_seq_lens_q") is not None:
        bounds = {name: given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
        found["cu_seq_lens_q"] = {"position_ids": None, **bounds}
    elif given.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_k came without cu_seq_lens_q; give cu_seq_lens_q, too")
    if given.get("cu_seqlens") is not None:
        found["cu_seqlens"] = {"position_ids": None, "cu_seq_lens_q": given["cu_seqlens"]}
    positions, mask = _text_positions(given.get("position_ids")), _hiding_mask(given)
    # Positions of a padded row jump at its padding; they count only if real tokens restart.
    if positions is not None and mask is not None and not _real_tokens_restart(positions, mask):
        positions = None
    if positions is not None:
        found["position_ids"] = {"position_ids": positions}
    if given.get("seq_idx") is not None:
        found["seq_idx"] = {"position_ids": _positions_of(given["seq_idx"])}
    if not found and given.get("position_ids") is not None and positions is None:
        _validate_time_axis(given["position_ids"], mask)
    return found


def _validate_time_axis(positions: Tensor, mask: Tensor | None) -> None:
    """Reject documents that only multimodal positions, `[axes, batch, rows]`, tell apart.

    Raises:
        ValueError: if time, the first of three axes, goes back between two real tokens.
    """
    if positions.dim() != 3:
        return
    real = None
    if mask is not None and mask.dim() == 2:
        real = mask[:, -positions.shape[-1] :].bool()
    if bool(restarts(positions[0], real=real, backwards_only=True).any()):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} restart within a row, and no row of "
            "them counts tokens; give cu_seq_lens_q too"
        )


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """Return the axis of text positions, `[batch, rows]`, or `None` if it is unknown."""
    if positions is not None and positions.dim() not in (2, 3):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: give them as [batch, tokens]"
        )
    if positions is None or positions.dim() == 2:
        return positions
    # Of four axes the first is text. Three axes are alike when there are no images.
    if len(positions) == 4 or bool((positions == positions[0]).all()):
        text: Tensor = positions[0]
        return text
    return None


def _real_tokens_restart(positions: Tensor, mask: Tensor) -> bool:
    """Return whether positions restart between two tokens that the mask does not hide."""
    if mask.dim() == 2:
        real = mask[:, -positions.shape[-1] :].bool()  # the first columns are of a cache
    else:
        real = _seen(mask)[:, 0].diagonal(0, -2, -1)
    same = real.shape[-1] == positions.shape[-1]
    return same and bool(restarts(positions, real=real).any())


def _positions_of(seq_idx: Tensor) -> Tensor:
    """Return each token's position in its document, from document numbers `[batch, rows]`."""
    place = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand(seq_idx.shape)
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return place - torch.where(starts, place, 0).cummax(1).values
