"""Other libraries' attention across ranks that runs on CPU over gloo, forward and backward.

Nothing of hf_longctx runs in it. Each takes a rank's rows `[T, H, D]` of one causal
document, as it lays them out, and gives the output and all gradients. Letters: T rows of a rank, H
query heads, K key/value heads, D head size, R ranks.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attended = tuple[Tensor, Tensor, Tensor, Tensor]  # out, dq, dk, dv
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Attended]  # q, k, v, grad_out


def contiguous_rows(tokens: int, ranks: int, rank: int) -> np.ndarray:
    """Which tokens a rank of Ulysses holds."""
    return np.arange(tokens * rank // ranks, tokens * (rank + 1) // ranks)


def head_tail_rows(tokens: int, ranks: int, rank: int) -> np.ndarray:
    """Which tokens a rank of torch's ring holds: block `rank` from both ends."""
    blocks = np.arange(tokens).reshape(2 * ranks, -1)
    return np.concatenate([blocks[rank], blocks[-1 - rank]])


def torch_ring(group: dist.ProcessGroup) -> Attention:
    """PyTorch's ring, which `context_parallel` runs, over the flash kernel of the CPU.

    It is private there: the public context manager reaches no CPU kernel that is causal.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    aten: Any = torch.ops.aten

    def forward(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask["is_causal"]
        )
        return found

    def backward(query: Tensor, key: Tensor, value: Tensor, **kept: Any) -> tuple[Tensor, ...]:
        rows = kept["grad_out"], query, key, value, kept["out"], kept["logsumexp"]
        found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, 0.0, kept["is_causal"]
        )
        return found

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Attended:
        query, key, value, grad_out = (_heads_first(x) for x in (q, k, v, grad))
        out, lse, *_ = private._templated_ring_attention(
            group, 2, forward, query, key, value, is_causal=True
        )
        dq, dk, dv, *_ = private._templated_ring_attention_backward(
            group, 2, backward, grad_out, "grad_out", query, key, value, out, lse, True
        )
        out, dq, dk, dv = (x[0].transpose(0, 1) for x in (out, dq, dk, dv))
        return out, dq, dk, dv

    return attend


def deepspeed_ulysses(group: dist.ProcessGroup) -> Attention:
    """DeepSpeed's `DistributedAttention` over torch's causal attention.

    Raises:
        ValueError: where DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed.ops
        from deepspeed.sequence.layer import DistributedAttention
    except ImportError as error:
        raise ValueError("this bench needs DeepSpeed for a peer; run `make setup`") from error
    # Else it compiles a C++ extension, whose all-reduce its all-to-all does not use, and waits
    # forever where a killed build left a lock.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo", verbose=False)

    def local(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    layer: Any = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Attended:
        given = [x[None].detach().requires_grad_() for x in (q, k, v)]
        out = layer(*given, 0)
        gradients: Sequence[Tensor] = torch.autograd.grad(out, given, grad[None])
        dq, dk, dv = (x[0] for x in gradients)
        return out[0].detach(), dq, dk, dv

    return attend


def _heads_first(x_THD: Tensor) -> Tensor:
    """`[T, H, D]` -> `[1, H, T, D]`, as torch's kernels take it."""
    return x_THD.transpose(0, 1)[None].contiguous()
