"""The tensors of a message's blocks -> its bytes, and back.

Floor: runtime. A message holds its blocks' fields end to end, whatever their dtypes and strides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' bytes, uint8, each copied once."""
    data = torch.empty(size(tensors), dtype=torch.uint8)
    start = 0
    for tensor in tensors:
        part = data[start : start + size([tensor])]
        if start % tensor.element_size():  # a view in another dtype must be aligned
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        else:
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += len(part)
    return data


def unpack(data: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill the tensors from a message's bytes."""
    start = 0
    for tensor in tensors:
        part = data[start : start + size([tensor])]
        if start % tensor.element_size():
            part = part.clone()  # a view in another dtype must be aligned
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        start += len(part)
