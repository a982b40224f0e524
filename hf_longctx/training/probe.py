"""Run a few tokens through a model to find out whether it does what hf_longctx relies on.

Five tokens, without any exchange, before the first step: does attention reach our hook with the
batch object? Is the loss a sum over `shift_labels`? Do positions matter? Does anything beside
attention see the neighbouring document? And one token: does it reach all parameters?
Layer: training.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..attention.spec import layer_specs
from ..data.batch import KEY, Binding, LongCtxBatch
from ..data.documents import IGNORE
from ..planning.layouts.layout import cut
from ..recurrent.prepare import recurrent_layers
from ..runtime.executor import Runtime
from ..support.model_rules import (
    BYPASSED,
    IGNORES_POSITIONS,
    IGNORES_TARGETS,
    NEIGHBOURS,
    NO_KEYWORDS,
    OTHER_LOSS,
    OTHER_POSITIONS,
    REPEATED,
    TENSOR_PARALLEL,
)

_COUNT = 4  # targets that the loss is divided by; the batch itself has at most one


def probe(model: Any, *, name: str) -> None:
    """Raise for a model that would accept our inputs and ignore some of them.

    Args:
        model: A Transformers causal language model under `name`, before any wrapper but PEFT's.
        name (`str`): Its attention name.

    Raises:
        ValueError: Names the model's class and what it ignores; see `support.model_rules`.
    """
    of = type(model).__name__
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ValueError(
            f"{of} with {adapter.peft_type.value} puts virtual tokens before each row, but not "
            "every row begins a document; use an adapter of weights, such as LoRA"
        )
    forward = inspect.signature(model.forward).parameters.values()
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in forward):
        raise ValueError(NO_KEYWORDS.message(f"{of}.forward takes no **kwargs"))
    size = getattr(model, "tp_size", None) or 1
    if size > 1:
        raise ValueError(TENSOR_PARALLEL.message(f"tp_size={size}"))
    if getattr(model, "accepts_loss_kwargs", True) is False:
        raise ValueError(OTHER_LOSS.message(f"{of}.accepts_loss_kwargs=False"))
    try:
        with torch.no_grad(), _unchanged(model):
            _probe_outputs(model, of, name)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{of} fails under {name} on five tokens ({type(error).__name__}: {error}); train it "
            "with attn_implementation='sdpa'"
        ) from error


def uses_all_parameters(model: Any) -> bool:
    """Return whether every batch reaches all trained parameters, which DDP otherwise checks.

    Args:
        model: A Transformers causal language model, or PEFT's wrapper of one.

    Returns:
        `False` also if it cannot be found out: the weights are sharded, or the forward fails.
    """
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return False
    # A rank holds at least one token of a batch, so what one token reaches is reached by every
    # batch, also if tokens choose experts.
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.enable_grad(), _unchanged(model):
            model.eval()
            todo = [model(input_ids=token, use_cache=False).logits.grad_fn]
    except Exception:  # the probe or the first step reports it
        return False
    seen: set[Any] = set()
    reached: set[int] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))  # AccumulateGrad's parameter
            todo += [before for before, _ in node.next_functions]
    return reached.issuperset(id(p) for p in model.parameters() if p.requires_grad)


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Restore a model's training modes and the random state at the end."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, training in modes:
            part.training = training


def _probe_outputs(model: Any, of: str, name: str) -> None:
    """Compare outputs on documents alone, beside others, and with other positions."""
    config = model.config.get_text_config(decoder=True)
    # The ids differ: among equal values, attention weights (and so positions) do not matter.
    before, document, after = (
        torch.tensor(ids, device=next(model.parameters()).device) % config.vocab_size
        for ids in ((3, 4), (0, 1, 2), (6, 5))
    )
    second = _inputs(before, document)
    model.train()  # only here, to meet attention dropout; the comparisons run without dropout
    output = model(**second)
    model.eval()
    layers, account = _calls(model), second[KEY].binding.runtime.account
    calls = f"{of} has {layers} layers but called {name} {account.calls} times for its documents"
    if account.calls > len(account.layers):
        raise ValueError(REPEATED.message(calls))
    if account.calls != layers:
        raise ValueError(BYPASSED.message(calls))
    if float(output.loss) > 0:
        loss = f"{of} ignores shift_labels: its loss over no target is {float(output.loss)}, not 0"
        raise ValueError(IGNORES_TARGETS.message(loss))

    first = _inputs(document, after)
    first["shift_labels"][0, 0] = document[1]
    alone = model(**first)
    expected = float(cross_entropy(alone.logits[0, 0].float(), document[1])) / _COUNT
    if not abs(float(alone.loss) - expected) <= 1e-3 * abs(expected):  # true for NaN, too
        loss = f"{of}'s loss over one target of {_COUNT} is {float(alone.loss)}, not {expected}"
        raise ValueError(OTHER_LOSS.message(loss))
    here = alone.logits[0, : len(document)]
    moved = _relative_difference(model(**_inputs(before, document)).logits[0, len(before) :], here)
    if moved:
        logits = f"{of}'s logits move by {moved:.1g} of the largest with the documents beside"
        raise ValueError(NEIGHBOURS.message(logits))

    if name not in IGNORES_POSITIONS.names:
        return
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32, device=document.device)
    apart = {**first, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    del apart[KEY]  # the hook would refuse positions other than those of the batch
    apart["position_ids"] = 2 * first["position_ids"]
    if torch.equal(model(**apart).logits, alone.logits):
        raise ValueError(IGNORES_POSITIONS.message(f"{of} ignores position_ids"))
    del apart["position_ids"]
    if _relative_difference(model(**apart).logits[0, : len(document)], here):
        raise ValueError(OTHER_POSITIONS.message(f"{of} without position_ids gives other logits"))


def _calls(model: Any) -> int:
    """Return how often one forward must call our functions: in each softmax or recurrent layer."""
    return len(layer_specs(model.config)) + len(recurrent_layers(model))


def _relative_difference(logits: Tensor, right: Tensor) -> float:
    """Return the largest difference over the largest logit; 0 if it is only rounding."""
    error = float((logits - right).float().abs().max() / right.float().abs().max())
    return error if error > (1e-4 if right.dtype.itemsize > 2 else 0.05) else 0.0


def _inputs(*documents: Tensor) -> dict[str, Any]:
    """Make a batch of one rank from two documents, without targets."""
    layout = cut([len(ids) for ids in documents], ranks=1, layout="contiguous")
    tokens = torch.cat(documents)[None]
    return {
        "input_ids": tokens,
        "labels": tokens,
        "shift_labels": torch.full_like(tokens, IGNORE),
        "position_ids": torch.from_numpy(layout.positions(0)).to(tokens.device)[None],
        "num_items_in_batch": torch.tensor(_COUNT, device=tokens.device),
        "use_cache": False,
        KEY: LongCtxBatch(layout, 0, binding=Binding(runtime=Runtime())),
    }
