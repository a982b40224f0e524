"""A model or config -> for every attention name of ours, whether it works, and why not.

Floor: verify. The rules look at the config; where none applies, the probe runs a few tokens
through the model, or through a small instance of a config's family.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..models.prepare import prepared
from ..models.watch import watch
from ..support import NAMES, model_problems
from ..training.probe import probe
from .shrink import small_model


@dataclass(frozen=True, slots=True)
class Row:
    """One attention name.

    Args:
        name (`str`): What `attn_implementation` would be.
        works (`bool`): Whether training under it is exact.
        rule (`str`): Why it is refused; every reason, joined by ` | `. Empty where it works.
        remedy (`str`): What to do about each reason, joined likewise.
    """

    name: str
    works: bool
    rule: str = ""
    remedy: str = ""


def check(model: Any) -> list[Row]:
    """Whether a model can be trained under each attention name, before anything is trained.

    The model's attention name and its training mode are what they were afterwards.

    Args:
        model: A Transformers causal language model, also wrapped by PEFT or on the meta device, or
            a config. For the last two a small instance of the family is probed; see `small_model`.

    Returns:
        A row for every name. Nothing is raised: what goes wrong stands in `rule`.
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
    """A refusal by the model's config, if one applies."""
    try:
        problems = model_problems(getattr(model, "config", model), name=name)
    except Exception as error:
        return _refused(name, error)
    if not problems:
        return None
    rules = " | ".join(f"{rule.feature}: {value}: {rule.rule}" for rule, value in problems)
    return Row(name, False, rules, " | ".join(rule.remedy for rule, _ in problems))


def _subject(model: Any) -> Any:
    """The model itself where it holds values, else a small instance of its family."""
    if not hasattr(model, "config"):
        return small_model(model)
    if next(model.parameters()).is_meta:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return small_model(base.config, build=type(base))
    return model


def _probed(name: str, model: Any) -> Row:
    try:
        with _running(model, name):
            probe(model, name=name)
    except Exception as error:
        return _refused(name, error)
    return Row(name, True)


def _refused(name: str, error: Exception) -> Row:
    """A refusal of ours ends in "; remedy"; other errors have none."""
    rule, _, remedy = str(error).rpartition("; ")
    if not isinstance(error, ValueError) or not rule:
        rule, remedy = f"{type(error).__name__}: {error}", "train it with its own attention"
    return Row(name, False, rule, remedy)


@contextmanager
def _running(model: Any, name: str) -> Iterator[None]:
    """The model prepared and under an attention name; afterwards it is what it was."""
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    model.set_attn_implementation(name)
    try:
        with prepared(model):
            yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
        watch(model)
