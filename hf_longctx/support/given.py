"""What a Trainer was given -> a refusal of models and data sets that are not what it needs.

Floor: support.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def refuse_given(model: Any, *, train_dataset: Any) -> None:
    """Refuse a model that Transformers did not make or that is wrapped, and a dict of splits.

    Args:
        model: The trainer's model: a `PreTrainedModel`, with PEFT adapters or without.
        train_dataset: The trainer's data set.

    Raises:
        ValueError: naming the class, the rule and the remedy.
    """
    from transformers import PreTrainedModel  # plans, and so servers, do without it

    of = type(model).__name__
    if isinstance(model, _WRAPPERS):
        raise ValueError(
            f"model is wrapped in {of}, but the trainer wraps it itself; pass model.module"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"model is a {of}, but only a Transformers PreTrainedModel looks attention up by name; "
            "load it with AutoModelForCausalLM"
        )
    if isinstance(train_dataset, Mapping):
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__} of {sorted(train_dataset)}, but "
            "training takes one data set; pass one of them, as train_dataset=data['train']"
        )
