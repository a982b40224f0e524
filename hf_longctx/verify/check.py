"""Check, for a model or a config, which of our attention names work, and why the others do not.

The rules of `support` look at the config. Where none applies, the probe runs a few tokens through
the model or, for a config, through a small instance of its family: layer kinds, heads, rotary
settings, windows and flags are kept, so that it is supported exactly where the full model is.
Layers are cut to the first of each kind; vocabulary, experts and widths are cut too. Layer: verify.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..recurrent.prepare import prepared
from ..recurrent.unprepared_guard import guard
from ..support import NAMES, model_problems
from ..training.probe import probe
from .fla_reference import library_for, naive_kernels

MAX_LAYERS = 10_000  # far above any model; kinds of layers are told apart one by one
MAX_PARAMETERS = 300_000_000  # of an instance: about a gigabyte, and seconds to draw
VOCABULARY = 256
EXPERTS = 16  # a multiple of the usual numbers of expert groups, and at least the usual top-k
MLP_WIDTH = 64
WIDTH_PER_HEAD = 16
_EXPERTS = {"n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"}
_PER_TOKEN = {"num_experts_per_tok", "moe_k", "moe_topk"}


def small_model(config: Any, *, build: Callable[[Any], Any] | None = None) -> Any:
    """Build a small model of the config's family, on the CPU in float32.

    It has run once, under the family's own attention.

    Args:
        config: A Transformers config; left as it is.
        build (`Callable[[Any], Any]`, *optional*): Makes a model of a config; by default its
            causal language model.

    Raises:
        ValueError: for an impossible number of layers, and where neither a shrunk instance nor the
            config as given (up to `MAX_PARAMETERS`) can be built and run on three tokens.
    """
    validate_layers(getattr(config.get_text_config(decoder=True), "num_hidden_layers", None))
    build = build or AutoModelForCausalLM.from_config
    reasons = []
    for candidate in _candidates(config):
        candidate._attn_implementation = None  # the family must run under its own first
        try:
            # Count before building: a full-size config would fill the memory.
            with torch.device("meta"), library_for(candidate):
                size = sum(p.numel() for p in build(copy.deepcopy(candidate)).parameters())
            if size > MAX_PARAMETERS:
                raise ValueError(f"{size:,} parameters are above {MAX_PARAMETERS:,}")
            with library_for(candidate):
                model = build(candidate).float().eval()
            with torch.no_grad(), naive_kernels(model):
                model(input_ids=torch.arange(3)[None], use_cache=False)
        except Exception as error:  # families raise anything for sizes they were not made for
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            return model
    raise ValueError(
        f"nothing was run: no small instance of this family can be built ({reasons[0]}); load the "
        "model and pass it to hf_longctx.check"
    )


def validate_layers(layers: object) -> None:
    """Raise `ValueError` for an impossible number of layers; anything but an `int` passes."""
    if isinstance(layers, int) and not 1 <= layers <= MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers={layers:,}: a model has 1 to {MAX_LAYERS:,} layers; give the "
            "number that the checkpoint has"
        )


def _candidates(config: Any) -> Iterator[Any]:
    """Yield the smallest config, then one with the full residual width, then the config itself."""
    for with_width in (True, False):
        with suppress(Exception):
            yield shrink(config, width=with_width)
    yield copy.deepcopy(config)


def shrink(config: Any, *, width: bool = True) -> Any:
    """Copy a config with fewer layers, experts, tokens and channels.

    Args:
        config: A Transformers config; its text config is the one that is cut.
        width (`bool`, *optional*, defaults to True): Cut the residual stream too.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    _cut_layers(text)
    for name, value in text.to_dict().items():
        if "intermediate_size" in name or "ffn" in name:
            _cap(text, name, value, MLP_WIDTH)
        elif name in _EXPERTS or name in _PER_TOKEN:
            _cap(text, name, value, EXPERTS)
        elif "vocab_size" in name:
            _cap(text, name, value, VOCABULARY)
        elif name.endswith("_token_id"):
            # Ids of special tokens must stay inside the smaller vocabulary.
            ids = value if isinstance(value, list) else [value]
            kept = [i % VOCABULARY if isinstance(i, int) else i for i in ids]
            setattr(text, name, kept if isinstance(value, list) else kept[0])
    heads = getattr(text, "num_attention_heads", None)
    per_head = max(WIDTH_PER_HEAD, getattr(text, "rotary_dim", None) or 0)
    if width and heads and text.hidden_size > heads * per_head:
        text.hidden_size = heads * per_head
    return small


def _cap(config: Any, name: str, value: Any, limit: int) -> None:
    """Cap an integer field, or a list of integers, at `limit`."""
    if isinstance(value, list) and all(isinstance(v, int) for v in value):
        setattr(config, name, [min(v, limit) for v in value])
    elif isinstance(value, int) and not isinstance(value, bool):
        setattr(config, name, min(value, limit))


def _cut_layers(config: Any) -> None:
    """Keep the first layer of each kind; layers are of one kind if all per-layer fields agree."""
    layers, given = config.num_hidden_layers, config.to_dict()
    shared = getattr(config, "num_kv_shared_layers", None) or 0  # the last ones reuse keys
    own = {int(n): v for n, v in (given.get("per_layer_config") or {}).items()}
    fields = {name: list(v) for name, v in given.items() if isinstance(v, list | tuple)}
    # A list is either one value per layer (`layer_types`) or the numbers of some layers
    # (`attn_layer_indices`); both describe kinds of layers.
    numbers = {
        name: value
        for name, value in fields.items()
        if name.endswith(("_layers", "_idxs", "_indices")) and _numbers_layers(value, layers)
    }
    values = {n: v for n, v in fields.items() if len(v) == layers and n not in numbers}
    first: dict[str, int] = {}
    for layer in range(layers):
        listed = [layer in value for value in numbers.values()]
        kind = [value[layer] for value in values.values()]
        reuses = layer >= layers - shared
        first.setdefault(repr((kind, listed, own.get(layer), reuses)), layer)
    # With a single kind keep two layers: some faults show only from layer to layer.
    kept = [*first.values()] if len(first) > 1 else sorted({0, layers - 1})
    config.num_hidden_layers = len(kept)
    if shared:
        config.num_kv_shared_layers = sum(layer >= layers - shared for layer in kept)
    if own:
        config.per_layer_config = {n: own[old] for n, old in enumerate(kept) if old in own}
    for name, value in values.items():
        setattr(config, name, [value[layer] for layer in kept])
    for name, value in numbers.items():
        setattr(config, name, [new for new, layer in enumerate(kept) if layer in value])


def _numbers_layers(value: list[Any], layers: int) -> bool:
    """Tell whether a list holds distinct layer numbers, and not one flag per layer."""
    distinct = len(set(map(repr, value))) == len(value)
    return distinct and all(isinstance(v, int) and 0 <= v < layers for v in value)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a check for one attention name.

    Args:
        name (`str`): Value of `attn_implementation`.
        works (`bool`): Whether training under it is exact.
        rule (`str`): Why it is refused, every reason, joined by ` | `. Empty where it works.
        remedy (`str`): What to do about each reason, joined likewise.
    """

    name: str
    works: bool
    rule: str = ""
    remedy: str = ""


def check(model: Any) -> list[Row]:
    """Check whether a model can be trained under each attention name, before training.

    The model's attention name and training mode are restored.

    Args:
        model: A Transformers causal language model, also wrapped by PEFT or on the meta device, or
            a config. For the last two a small instance of the family is probed; see `small_model`.

    Returns:
        A row for every name. Nothing is raised: errors are reported in `rule`.
    """
    rows = [_by_rules(name, model) for name in NAMES]
    if all(rows):
        return [row for row in rows if row]
    try:
        subject = _subject(model)
    except Exception as error:
        return [row or _refused(name, error) for name, row in zip(NAMES, rows, strict=True)]
    return [row or _probed(name, subject) for name, row in zip(NAMES, rows, strict=True)]


def _by_rules(name: str, model: Any) -> Row | None:
    """Return the refusal by the rules on the model's config, or `None`."""
    try:
        problems = model_problems(getattr(model, "config", model), name=name)
    except Exception as error:
        return _refused(name, error)
    if not problems:
        return None
    rules = " | ".join(f"{rule.feature}: {value}: {rule.rule}" for rule, value in problems)
    return Row(name, False, rules, " | ".join(rule.remedy for rule, _ in problems))


def _subject(model: Any) -> Any:
    """Return the model itself if it holds values, else a small instance of its family."""
    if not hasattr(model, "config"):
        return small_model(model)
    if next(model.parameters()).is_meta:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return small_model(base.config, build=type(base))
    return model


def _probed(name: str, model: Any) -> Row:
    """Run the trainer's probe under a name."""
    try:
        with _running(model, name):
            probe(model, name=name)
    except Exception as error:
        return _refused(name, error)
    return Row(name, True)


def _refused(name: str, error: Exception) -> Row:
    """Make a row of an error.

    The message of one of our refusals ends in "; remedy"; other errors have no remedy.
    """
    rule, _, remedy = str(error).rpartition("; ")
    if not isinstance(error, ValueError) or not rule:
        rule, remedy = f"{type(error).__name__}: {error}", "train it with its own attention"
    return Row(name, False, rule, remedy)


@contextmanager
def _running(model: Any, name: str) -> Iterator[None]:
    """Prepare the model and set an attention name; restore both at the end."""
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    model.set_attn_implementation(name)
    try:
        with prepared(model):
            yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own  # the public setter checks the name anew
        guard(model)
