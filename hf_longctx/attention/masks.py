"""The mask side of our names: what Transformers asks for -> nothing, a window, or a dense mask.

Floor: attention. Transformers calls `attention_mask` once per mask kind and forward. Causal,
windowed and packed batches without padding or cache need no mask tensor: the hook derives documents
itself. A padded batch, or one that decodes onto a cache, gets the dense mask that `sdpa` would get.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Stands for the mask of a layer whose rows see `size` keys, themselves included.

    `generate` asks for masks ahead of a forward and hands them back as the model's
    `attention_mask`, whose number of axes Transformers looks at.
    """

    size: int
    ndim: ClassVar[int] = 0


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | SlidingWindow | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | SlidingWindow | None:
    """The mask function that Transformers calls under our names.

    Returns:
        `None` (causal), a `SlidingWindow`, or a bool mask `[batch, 1, q_length, kv_length]`.

    Raises:
        ValueError: for overlays (image tokens, prefixes), chunked layers and bidirectional masks.
    """
    if use_vmap:
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
    if isinstance(attention_mask, SlidingWindow):
        attention_mask = None  # made by an earlier call, which found no padding
    padded = attention_mask is not None and not bool(attention_mask.all())
    if padded or q_length != kv_length or int(q_offset) or kv_offset:
        kwargs.pop("allow_is_causal_skip", None)
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            **kwargs,
        )
    _refuse_unless_causal(mask_function, q_length, kwargs.get("device"))
    return None if local_size is None else SlidingWindow(local_size)


def _refuse_unless_causal(
    mask_function: Callable[..., Tensor] | None, length: int, device: torch.device | None
) -> None:
    """Ask the mask function whether any token sees the next one."""
    if mask_function is None or length < 2:
        return
    rows = torch.arange(length - 1, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    seen = torch.as_tensor(mask_function(zero, zero, rows, rows + 1))
    if bool(seen.any()):
        raise ValueError(
            "this model lets a token see a later one (a bidirectional mask or block overlay), "
            "which hf_longctx does not compute yet; load it with attn_implementation='sdpa'"
        )
