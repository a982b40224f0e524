"""Attention with soft-capped scores, `softcap * tanh(score / softcap)`, in plain PyTorch.

Floor: kernels. The aten kernel has no softcap. Rows are taken in tiles, so that scores need
`tile x keys` of memory. Letters: n pieces, H query heads, K key/value heads, L rows, D head size.
Computed in float32 or wider.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """How the scores of one call are formed.

    Args:
        causal (`bool`): Row i sees keys up to i.
        mask (`Tensor`, *optional*): Additive, `[L, keys]`.
        scale (`float`): Factor on the products.
        softcap (`float`): Bound of the scores, above 0.
    """

    causal: bool
    mask: Tensor | None
    scale: float
    softcap: float

    def _tiles(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Each tile's rows, `tanh(score / softcap)`, masked scores (`[n, K, H/K, rows, keys]`)."""
        for start in range(0, query.shape[3], _TILE):
            rows = slice(start, min(start + _TILE, query.shape[3]))
            products = query[..., rows, :] @ key[:, :, None].transpose(-1, -2)
            bounded = torch.tanh(products * (self.scale / self.softcap))
            scores = bounded * self.softcap
            if self.mask is not None:
                scores = scores + self.mask[rows].to(scores.dtype)
            if self.causal:
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(start)
                scores = scores.masked_fill(~seen, float("-inf"))
            yield rows, bounded, scores

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`out [n, H, L, D]` in the query's dtype and `lse [n, H, L]` in a wide one."""
        q, k, v = _wide(query, key.shape[1]), _wide(key), _wide(value)
        outs, lses = [], []
        for _, _, scores in self._tiles(q, k):
            lse = torch.logsumexp(scores, dim=-1)
            outs.append(torch.exp(scores - lse[..., None]) @ v[:, :, None])
            lses.append(lse)
        out = torch.cat(outs, dim=3).flatten(1, 2)
        return out.to(query.dtype), torch.cat(lses, dim=3).flatten(1, 2)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, wide, from the final out and lse of each row."""
        groups = key.shape[1]
        q, k, v = _wide(query, groups), _wide(key), _wide(value)
        given, final = _wide(grad_out, groups), _wide(out, groups)
        delta = (given * final).sum(-1)
        norm = lse.unflatten(1, (groups, -1))
        d_query, d_key, d_value = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, bounded, scores in self._tiles(q, k):
            weights = torch.exp(scores - norm[..., rows, None])
            pull = given[..., rows, :] @ v[:, :, None].transpose(-1, -2) - delta[..., rows, None]
            d_products = weights * pull * (1 - bounded * bounded) * self.scale
            d_query[..., rows, :] = d_products @ k[:, :, None]
            d_key += (d_products.transpose(-1, -2) @ q[..., rows, :]).sum(2)
            d_value += (weights.transpose(-1, -2) @ given[..., rows, :]).sum(2)
        return d_query.flatten(1, 2), d_key, d_value


def _wide(tensor: Tensor, groups: int = 0) -> Tensor:
    """In float32 or wider; with `groups`, query heads as `[n, K, H/K, L, D]`."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.unflatten(1, (groups, -1)) if groups else tensor
