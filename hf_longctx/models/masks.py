"""A modeling file whose causal masks know no positions -> one whose masks keep documents apart.

Floor: models. The library's own masks (of eager attention, say) see packed documents by positions
that start again; a file that passes none on leaves them joined.
"""

from functools import wraps
from types import ModuleType
from typing import Any

import torch

from .running import batch_of_model


def show_documents(home: ModuleType) -> None:
    """Have a modeling file's `create_causal_mask` see the documents of the forward under way.

    Args:
        home (`ModuleType`): The modeling file; a second time changes nothing.
    """
    original: Any = home.create_causal_mask
    if hasattr(original, "hf_longctx_original"):
        return

    @wraps(original)
    def create_causal_mask(*args: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        batch = batch_of_model()
        if batch is not None:
            own = torch.from_numpy(batch.layout.positions(batch.rank)).to(inputs_embeds.device)
            kwargs["position_ids"] = own.view(inputs_embeds.shape[:2])
        return original(*args, inputs_embeds=inputs_embeds, **kwargs)

    create_causal_mask.hf_longctx_original = original  # type: ignore[attr-defined]
    home.create_causal_mask = create_causal_mask  # type: ignore[attr-defined]
