"""A model's keyword arguments -> the packed documents that they describe, as one batch object.

Layer: recurrent. Boundaries come from `longctx_batch`, else from `cu_seq_lens_q`, `position_ids` and
`seq_idx`, which must agree; convolutions, scans and softmax layers share them. Calls without packed
documents (also padded or cached ones) go on as they came.
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
from ..planning.layouts.layout import cut
from ..support import validate_misspelt
from .adapter import wrap_forward
from .running import part_of_model_under_way, running_model

_CACHES = ("cache", "past_key_values", "cache_params")  # its name by version and family
_IMAGES = (
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_encoder_outputs",
    "mm_token_type_ids",
)  # fmt: skip
OTHER_BOUNDARIES = ("cu_seqlens", "cu_seqlens_cpu")  # as flash-linear-attention spells them


def read_packed_inputs(model: nn.Module, *, plain: bool = True) -> None:
    """Have a model's forward find out about packed documents, for all layers in it.

    Args:
        model (`nn.Module`): A model that Transformers made, or one within it, which then only
            looks where it is called by itself. Only this instance changes; a second time changes
            nothing.
        plain (`bool`, *optional*): Its layers can run without documents on a CPU. If not, each row
            is described as one document there.
    """
    names = tuple(inspect.signature(model.forward).parameters)
    wrap_forward(model, partial(_forward, names=names, plain=plain))


def _forward(
    original: Callable[..., Any], *, names: Sequence[str], plain: bool
) -> Callable[..., Any]:
    known = {*names, *OTHER_BOUNDARIES}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if part_of_model_under_way(self):
            return original(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False), **kwargs)
        validate_misspelt(given, known=known)
        batch = batch_in(given, plain=plain or not _on_cpu(given))
        if batch is not None:  # a mark on the caller's object would let it into other models, too
            batch = replace(batch, prepared=True)
        with running_model(self, batch, given.get("shift_labels")):
            if batch is None:
                return original(self, *args, **kwargs)
            return original(self, **_handed_on(batch, given))

    return forward


def batch_in(given: Mapping[str, Any], *, plain: bool = True) -> LongCtxBatch | None:
    """The batch object in a forward's arguments, or one of the documents that they describe.

    Args:
        given (`Mapping`): The arguments by name.
        plain (`bool`, *optional*): The layers can run without documents.

    Returns:
        `None` where no boundaries are given, every row is one document, padded or not, or goes on
        from a cache, and the layers can do without.

    Raises:
        ValueError: where packed documents come with padding or a cache, boundaries do not fit the
            rows, or are in a mask alone.
    """
    batch: LongCtxBatch | None = given.get(KEY)
    if _cached(given) is None:
        for mask in _masks(given):
            _validate_mask_documents(mask)
    lengths = _documents(given) if batch is None else None
    packed = batch is not None or lengths is not None
    if not packed and plain:
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
    padded = _mask(given) is not None
    if padded or given.get("use_cache") or _cached(given) is not None:
        what = "padding or a mask of scores in attention_mask" if padded else "a cache"
        why = f"packed documents came with {what}, which knows nothing of their boundaries"
        if not packed:
            why = f"{what} reached layers whose kernels need a GPU; on a CPU each row starts anew"
        raise ValueError(
            f"{why}; leave out attention_mask and the padding, and set use_cache=False"
        )
    return batch


def _handed_on(batch: LongCtxBatch, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the batch, and with positions for softmax layers that look at no more."""
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
    elif positions.dim() == 3 and len(positions) == 3:  # a row of text goes before the others
        text = _text(positions)
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
    """Refuse images and videos, whose places only three axes of positions tell.

    Raises:
        ValueError: naming what shows them.
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
    """What is given as attention mask, of each kind of layer where they differ."""
    mask = given.get("attention_mask")
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return [mask for mask in masks if mask is not None]


def _mask(given: Mapping[str, Any]) -> Tensor | None:
    """The attention mask, or the first of several, that hides anything."""
    masks = (mask for mask in _masks(given) if isinstance(mask, Tensor))
    return next((mask for mask in masks if not bool(mask.all())), None)


def _seen(scores: Tensor) -> Tensor:
    """Where a mask of scores, bool or added to them, lets a query see a key."""
    return scores if scores.dtype == torch.bool else scores == 0


def _validate_mask_documents(mask: Any) -> None:
    """Refuse a mask that tells documents apart, which recurrent layers do not look at.

    Raises:
        ValueError: where it numbers documents, hides a token from the next one of its row, or has
            a form that is not known, so that it may do either.
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
            "position_ids that start again with each document, cu_seq_lens_q or seq_idx"
        )


def _cached(given: Mapping[str, Any]) -> Any:
    return next((given[name] for name in _CACHES if given.get(name) is not None), None)


def _documents(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Tokens of each document; `None` where rows are documents and only positions could tell."""
    if given.get("input_ids") is None and given.get("inputs_embeds") is None:
        return None  # the model says so itself
    batch, rows = _rows(given).shape[:2]
    found: dict[str, tuple[int, ...]] = {}
    for name, described in _descriptions(given).items():
        found[name] = local_documents(batch=batch, rows=rows, **described)
    if len({*found.values()}) > 1:
        raise ValueError(
            f"{' and '.join(found)} describe different documents; give hf_longctx one of them, or "
            "the same boundaries in all"
        )
    lengths = next(iter(found.values()), None)
    whole = found.keys() <= {"position_ids"} and lengths == (rows,) * batch
    return None if whole else lengths  # the library refuses boundaries, of one document too


def _descriptions(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What tells documents apart: argument -> how `local_documents` takes it."""
    found: dict[str, dict[str, Any]] = {}
    if given.get("cu_seq_lens_q") is not None:
        bounds = {name: given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
        found["cu_seq_lens_q"] = {"position_ids": None, **bounds}
    elif given.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_k came without cu_seq_lens_q; give cu_seq_lens_q, too")
    if given.get("cu_seqlens") is not None:
        found["cu_seqlens"] = {"position_ids": None, "cu_seq_lens_q": given["cu_seqlens"]}
    positions = _text(given.get("position_ids"))
    hidden = _mask(given)
    if positions is not None and hidden is not None:
        positions = _without_padding(positions, hidden)
    if positions is not None:
        found["position_ids"] = {"position_ids": positions}
    if given.get("seq_idx") is not None:
        found["seq_idx"] = {"position_ids": _since(given["seq_idx"])}
    if not found and given.get("position_ids") is not None and positions is None:
        _validate_restarts(given["position_ids"], hidden)
    return found


def _validate_restarts(positions: Tensor, mask: Tensor | None) -> None:
    """Refuse documents that only the axes of images and text together tell apart.

    Raises:
        ValueError: where time, the first of three axes, goes back between two real tokens.
    """
    if positions.dim() != 3:
        return
    back = positions[0, :, 1:] < positions[0, :, :-1]
    if mask is not None and mask.dim() == 2:
        real = mask[:, -positions.shape[-1] :].bool()
        back = back & real[:, 1:] & real[:, :-1]
    if bool(back.any()):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} start again within a row, and no row "
            "of them counts tokens; give cu_seq_lens_q too"
        )


def _text(positions: Tensor | None) -> Tensor | None:
    """The row of text positions, `[batch, rows]`; none where several rows differ and none is it."""
    if positions is not None and positions.dim() not in (2, 3):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: give them as [batch, tokens]"
        )
    if positions is None or positions.dim() == 2:
        return positions
    if len(positions) == 4 or bool((positions == positions[0]).all()):
        text: Tensor = positions[0]
        return text
    return None


def _without_padding(positions: Tensor, mask: Tensor) -> Tensor | None:
    """Positions as they are where two real tokens of a row do not follow each other, else none."""
    if mask.dim() == 2:
        real = mask[:, -positions.shape[-1] :].bool()  # the first columns are of a cache
    else:
        real = _seen(mask)[:, 0].diagonal(0, -2, -1)
    if real.shape[-1] != positions.shape[-1]:
        return None
    jumps = positions[:, 1:] - positions[:, :-1] != 1
    return positions if bool((jumps & real[:, 1:] & real[:, :-1]).any()) else None


def _since(index: Tensor) -> Tensor:
    """Document numbers `[batch, rows]` -> how many tokens of the same one lie before each."""
    place = torch.arange(index.shape[1], device=index.device).expand(index.shape)
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[:, 1:] = index[:, 1:] != index[:, :-1]
    return place - torch.where(starts, place, 0).cummax(1).values
