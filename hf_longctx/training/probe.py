"""A model and a name -> a tiny forward that shows whether the model really does what we rely on.

Floor: training. Three tokens, no exchange, before the first step: does attention reach our hook
with the batch object, does the loss take `shift_labels`, do positions matter?
"""

import inspect
from typing import Any

import torch

from ..data.batch import KEY, LongCtxBatch
from ..data.targets import IGNORE
from ..plan.layout import cut
from ..runtime.binding import Runtime


def probe(model: Any, *, name: str) -> None:
    """Refuse a model that would take our inputs and ignore some of them.

    Args:
        model: A Transformers causal language model, before any wrapper.
        name (`str`): Its attention name.

    Raises:
        ValueError: naming the model's class and what it ignores.
    """
    of = type(model).__name__
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ValueError(
            f"{of} with {adapter.peft_type.value} puts virtual tokens before a row, which is not "
            "where a document begins; use an adapter of weights, such as LoRA"
        )
    forward = inspect.signature(model.forward).parameters.values()
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in forward):
        raise ValueError(
            f"{of}.forward takes no **kwargs, so documents cannot reach its attention; use a model "
            "class whose forward passes keyword arguments on"
        )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            _probe(model, of, name)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{of} fails under {name} on three tokens ({type(error).__name__}: {error}); train it "
            "with attn_implementation='sdpa'"
        ) from error
    finally:
        model.train(training)


def _probe(model: Any, of: str, name: str) -> None:
    device = next(model.parameters()).device
    batch = LongCtxBatch(cut([3], ranks=1, layout="contiguous"), 0, runtime=Runtime())
    config = model.config.get_text_config(decoder=True)
    # three different ones: among equal values, attention weights (and so positions) do not matter
    tokens = torch.arange(3, device=device)[None] % config.vocab_size
    inputs = {
        "input_ids": tokens,
        "labels": tokens,
        "shift_labels": torch.full_like(tokens, IGNORE),
        "num_items_in_batch": torch.ones((), device=device),
        "use_cache": False,
        KEY: batch,
    }
    positions = torch.arange(3, device=device)[None]
    output = model(**inputs, position_ids=positions)
    layers, called = config.num_hidden_layers, batch.runtime.account.calls
    if called != layers:
        raise ValueError(
            f"{of} has {layers} layers but called {name} {called} times with its batch object: "
            "some attention bypasses the interface or drops keyword arguments; train it with its "
            "own attention"
        )
    if float(output.loss) != 0.0:
        raise ValueError(
            f"{of} ignores shift_labels: its loss over no target is {float(output.loss)}, not 0; "
            "targets across ranks would be lost, so use a model whose loss takes shift_labels"
        )
    bounds = torch.tensor([0, 3], dtype=torch.int32, device=device)
    apart = {**inputs, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    del apart[KEY]  # it would refuse positions that are not its own
    spread = model(**apart, position_ids=2 * positions)
    if torch.equal(output.logits, spread.logits):
        raise ValueError(
            f"{of} ignores position_ids, so a document cut over ranks would be numbered anew on "
            "each; use a model that takes positions from its input"
        )
