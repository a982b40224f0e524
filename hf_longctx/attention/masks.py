"""Make the masks that Transformers asks for under our names, and attend under a dense one.

Transformers calls `attention_mask` once per mask kind and forward. Causal, bidirectional, windowed
and packed batches without padding or cache need no mask tensor: the hook derives documents itself.
A padded batch, or one that decodes onto a cache, gets the dense mask that `sdpa` would get; it and
masks of the user's own are computed locally. Layer: attention.

Letters: B batch, S query rows, H query heads, V value head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import sdpa_mask

from ..kernels.softmax import Scoring


@dataclass(frozen=True, slots=True)
class LayerMask:
    """Stand for the mask of a layer whose rows see what their document and a window allow.

    Args:
        window (`int`, *optional*, defaults to 0): Keys that a row sees, itself included, on either
            side where it is not causal; 0 for all.
        causal (`bool`, *optional*, defaults to `True`): Rows see no later key.
    """

    # Transformers bounds the distance of bidirectional layers by `sliding_window`: a key at that
    # distance is seen in most families, so that `window` is one more, but not in Gemma 3
    window: int = 0
    causal: bool = True
    # `generate` asks for masks ahead of a forward and hands them back as the model's
    # `attention_mask`, whose number of axes Transformers looks at
    ndim: ClassVar[int] = 0


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | LayerMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | LayerMask | None:
    """Make the mask of one kind of layer, as Transformers calls it under our names.

    Args:
        batch_size, q_length, kv_length (`int`): Shape of the scores.
        q_offset, kv_offset (`int`): Position of the first query and key, with a cache.
        mask_function (`Callable`, *optional*): Says which pairs of tokens see each other.
        attention_mask (`Tensor`, *optional*): Padding, or what an earlier call returned.
        local_size (`int`, *optional*): Keys of a sliding window.
        use_vmap (`bool`, *optional*): Whether the mask function is an overlay of several.
        config (*optional*): The model's.

    Returns:
        `None` (causal without a window), a `LayerMask`, or a bool mask
        `[batch, 1, q_length, kv_length]`.

    Raises:
        ValueError: for overlays (image tokens, prefixes) and chunked layers.
    """
    # Gemma 3 makes bidirectional masks by overlays on causal ones. Other families make them by
    # functions that alone offer to skip a bidirectional mask.
    overlaid = use_vmap and getattr(config, "use_bidirectional_attention", None) is True
    bidirectional = overlaid or "allow_is_bidirectional_skip" in kwargs
    if use_vmap and not overlaid:
        raise ValueError(
            "this model overlays the causal mask (image tokens or a prefix), which hf_longctx does "
            "not compute yet; load it with attn_implementation='sdpa'"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is not None and chunk is not None:
        raise ValueError(
            f"attention_chunk_size={chunk}: chunked layers are not computed by hf_longctx yet; "
            "load the model with attn_implementation='sdpa'"
        )
    if isinstance(attention_mask, LayerMask):
        attention_mask = None  # made by an earlier call, which found no padding
    # a mask of ones hides nothing, so that packed batches may come with one
    padded = attention_mask is not None and not bool(attention_mask.all())
    if padded or q_length != kv_length or int(q_offset) or kv_offset:
        # without skips: None would mean causal to us, whatever `sdpa` takes it for
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            **(kwargs | skips),
        )
    device = kwargs.get("device")
    if bidirectional and mask_function is not None:
        return _bidirectional(mask_function, q_length, device, local_size, overlaid=overlaid)
    _validate_causal(mask_function, q_length, device)
    return None if local_size is None else LayerMask(local_size)


def _sees(function: Callable[..., Tensor], rows: Tensor, keys: Tensor) -> Tensor:
    """Whether each row sees its key, bool `[pairs]`."""
    zero = torch.zeros((), dtype=torch.long, device=rows.device)
    return torch.as_tensor(function(zero, zero, rows, keys)).expand(rows.shape)


def _validate_causal(
    mask_function: Callable[..., Tensor] | None, length: int, device: torch.device | None
) -> None:
    """Refuse a causal mask under which any token sees the next one."""
    if mask_function is None or length < 2:
        return
    rows = torch.arange(length - 1, device=device)
    if bool(_sees(mask_function, rows, rows + 1).any()):
        raise ValueError(
            "this model lets a token see a later one (a block overlay on its causal mask), which "
            "hf_longctx does not compute yet; load it with attn_implementation='sdpa'"
        )


def _bidirectional(
    mask_function: Callable[..., Tensor],
    length: int,
    device: torch.device | None,
    local_size: int | None,
    *,
    overlaid: bool,
) -> LayerMask:
    """Ask the mask function whether neighbours see each other, and how far a window reaches."""

    def pairs(distance: int) -> tuple[Tensor, Tensor]:
        # an overlaid function of packed documents indexes a tensor of the row's length
        rows = torch.arange(max(length - distance, 0 if overlaid else 1), device=device)
        return rows, rows + distance

    rows, following = pairs(1)
    forwards, backwards = (_sees(mask_function, *p) for p in ((rows, following), (following, rows)))
    inclusive = local_size is not None and bool(_sees(mask_function, *pairs(local_size)).any())
    if not torch.equal(forwards, backwards) or (overlaid and inclusive):
        raise ValueError(
            "this model's bidirectional mask differs between the two sides of a token, or from its "
            "window, which hf_longctx does not compute; load it with attn_implementation='sdpa'"
        )
    return LayerMask(0 if local_size is None else local_size + inclusive, causal=False)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Attend under a dense mask: `[B, S, H, V]` in the query's dtype.

    Args:
        query, key, value (`Tensor`): `[B, heads, rows, size]`.
        mask (`Tensor`): `[B, 1, S, keys]`, bool (True: seen) or additive; it holds any window.
        scoring (`Scoring`): Scale and softcap.
        sinks (`Tensor`, *optional*): `[H]`.
    """
    group = query.shape[1] // key.shape[1]
    # PyTorch's kernels know neither softcap nor sinks: with those the scores are written out
    if not scoring.softcap and sinks is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2).contiguous()
    k, v = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = (query @ k.transpose(-1, -2)) * scoring.scale
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()
