"""Find the documents in the rows of a forward that came without a batch object.

Their lengths come from `cu_seq_lens_q`, else from where `position_ids` do not go on by one: what
stock Transformers reads too, so that packed batches need nothing of ours. Layer: attention.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..data.documents import restarts


def local_documents(
    *, batch: int, rows: int, position_ids: Tensor | None, **kwargs: Any
) -> tuple[int, ...]:
    """Find the tokens of each document in `batch` rows of `rows` tokens, laid end to end.

    Args:
        batch, rows (`int`): Shape of the model's input.
        position_ids (`Tensor`, *optional*): `[batch, rows]` or `[1, rows]`. Documents need not
            start at 0: any step that is not +1 begins one.
        kwargs: May hold `cu_seq_lens_q` and `cu_seq_lens_k` (int, `[documents + 1]`).

    Returns:
        The lengths, without those of empty documents.

    Raises:
        ValueError: where boundaries do not describe every row or differ for queries and keys, or
            positions have several axes.
    """
    # boundaries come first: positions may run on over documents, as under models without rotation
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is not None:
        return _from_bounds(bounds, kwargs.get("cu_seq_lens_k"), batch * rows)
    if position_ids is None:
        return (rows,) * batch
    if position_ids.dim() != 2:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} have several axes; give "
            "hf_longctx [batch, tokens], or cu_seq_lens_q"
        )
    positions = position_ids.expand(batch, rows)
    starts = torch.ones(batch, rows, dtype=torch.bool, device=positions.device)
    starts[:, 1:] = restarts(positions)  # each row starts a document
    first = starts.flatten().nonzero().flatten()
    end = first.new_tensor([batch * rows])
    return tuple(torch.diff(first, append=end).tolist())


def _from_bounds(bounds: Tensor, key_bounds: Tensor | None, rows: int) -> tuple[int, ...]:
    if key_bounds is not None and not torch.equal(bounds, key_bounds):
        raise ValueError(
            f"cu_seq_lens_q {bounds.tolist()} and cu_seq_lens_k {key_bounds.tolist()} differ; "
            "hf_longctx attends within documents, so give it one set of boundaries"
        )
    ends = bounds.flatten().tolist()
    if ends[0] != 0 or ends[-1] != rows:
        raise ValueError(
            f"cu_seq_lens_q describes rows {ends[0]} to {ends[-1]}, but the input has {rows} rows; "
            "boundaries must start at 0 and end at the number of rows"
        )
    lengths = [b - a for a, b in pairwise(ends)]
    if min(lengths) < 0:
        raise ValueError(f"cu_seq_lens_q {ends} must not decrease; it counts tokens from 0")
    # padding of static shapes repeats the last boundary
    return tuple(n for n in lengths if n)


def validate_padding(position_ids: Tensor | None, mask: Tensor) -> None:
    """Refuse a padded batch whose real tokens are several packed documents.

    Args:
        position_ids (`Tensor`, *optional*): `[batch, rows]` or `[1, rows]`.
        mask (`Tensor`): `[batch, 1, rows, rows]`, bool (True: seen) or additive.

    Raises:
        ValueError: where positions restart between two real tokens of a row: a padding mask cannot
            carry document boundaries, so documents would see each other.
    """
    if position_ids is None or position_ids.dim() != 2 or mask.shape[-1] != mask.shape[-2]:
        return
    itself = mask[:, 0].diagonal(dim1=-2, dim2=-1)  # only padding does not see itself
    real = itself if mask.dtype == torch.bool else itself == 0
    if bool(restarts(position_ids.expand(real.shape), real=real).any()):
        raise ValueError(
            "a padded batch with packed documents: position_ids restart between unpadded tokens, "
            "but a padding mask cannot carry boundaries; drop attention_mask and the padding"
        )
