"""Conversations, prompts with completions, texts -> rows of `input_ids`, and of masks of targets.

Floor: data. Rows are tokenised as TRL's `SFTTrainer` does it, so that a data set gives the same
tokens and targets under both. Masks become labels in `documents`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant"}  # of from/value conversations


def tokenize_rows(
    dataset: Any,
    tokenizer: Any,
    *,
    text_field: str = "text",
    assistant_only_loss: bool = False,
    completion_only_loss: bool = True,
    description: str = "train_dataset",
) -> Any:
    """Turn a data set of text into one of tokens, by the columns that its first row has.

    - `messages` or `conversations`: the tokens of the chat template, with `tools` where a row has
      them; all are targets, or the assistant's.
    - `prompt` and `completion`, each text or messages: both, joined; the completion's are targets.
    - `text_field`: the text's, ended by the end-of-text token; all are targets.
    - `input_ids`: as they are; `labels`, `completion_mask` and `assistant_masks` tell the targets.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): Rows of text. A stream is
            tokenised as it is read.
        tokenizer (`PreTrainedTokenizerBase`): The model's. Chats need its chat template.
        text_field (`str`, *optional*, defaults to `"text"`): Column of plain text.
        assistant_only_loss (`bool`, *optional*, defaults to `False`): Whether only what the
            assistant says is a target, by the template's `{% generation %}` marks. For a template
            without them, the one that TRL ships for this family is used, and that is logged.
        completion_only_loss (`bool`, *optional*, defaults to `True`): Whether prompts are no
            targets.
        description (`str`, *optional*): What to call the data set in messages.

    Returns:
        As `dataset`, with `input_ids` and, where not all tokens are targets, `completion_mask` or
        `assistant_masks`, 1 for targets.

    Raises:
        ValueError: No rows; columns that are none of these; assistant-only loss without messages,
            without marks, or for a row in which the assistant says nothing; no chat template.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"{description} has no rows; pass a data set with at least one document")
    kind = _kind(first, text_field=text_field, description=description)
    logger.info("%s: columns %s, read as %s", description, sorted(first), kind)
    if assistant_only_loss and kind == "input_ids" and "assistant_masks" not in first:
        raise ValueError(
            f"assistant_only_loss=True, but {description} is tokenised already, without a column "
            "assistant_masks; add it, or give messages"
        )
    if kind == "input_ids":
        drop = [] if completion_only_loss else ["completion_mask"]
        return dataset.remove_columns([name for name in drop if name in first])
    template = None
    chats = isinstance(first[kind], list)
    if assistant_only_loss and not chats:
        raise ValueError(
            f"assistant_only_loss=True, but {description} holds {kind}, not messages; leave it out"
        )
    if chats:
        template = _template(tokenizer, marked=assistant_only_loss)

    read = ("prompt", "completion") if kind == "prompt" else (kind,)

    def tokenize(row: Mapping[str, Any], index: int) -> dict[str, list[int]]:
        for name in read:
            if type(row[name]) is not type(first[name]):
                raise ValueError(
                    f"{description}: row {index} holds a {type(row[name]).__name__} as {name}, but "
                    f"row 0 a {type(first[name]).__name__}; drop such rows, or make them alike"
                )
        options = _options(row, template=template, marked=assistant_only_loss)
        try:
            if kind == "prompt":
                found = _completion(row, tokenizer, options=options, mask=completion_only_loss)
            elif chats:
                found = _rendered(_messages(row[kind]), tokenizer, options)
            else:
                found = {"input_ids": _ended(_plain(row[kind], tokenizer), tokenizer)}
        except TemplateError as error:
            raise ValueError(
                f"{description}: the chat template refuses row {index} ({error}); drop such rows, "
                "or use a template that takes them"
            ) from error
        if assistant_only_loss and 1 not in found["assistant_masks"]:
            raise ValueError(
                f"{description}: row {index} has no word of the assistant, so assistant-only loss "
                "finds no target in it; drop such rows, or leave assistant_only_loss out"
            )
        return found

    columns = dataset.column_names or sorted(first)
    shown = {"desc": f"Tokenising {description}"} if isinstance(dataset, Dataset) else {}
    return dataset.map(tokenize, with_indices=True, remove_columns=columns, **shown)


def _kind(row: Mapping[str, Any], *, text_field: str, description: str) -> str:
    """The column that says how rows are read: the first that there is."""
    for name in ("input_ids", "messages", "conversations"):
        if name in row:
            return name
    if "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], str) is not isinstance(row["completion"], str):
            raise ValueError(
                f"{description}: prompt and completion must both be text or both be messages, got "
                f"{type(row['prompt']).__name__} and {type(row['completion']).__name__}"
            )
        return "prompt"
    if text_field in row:
        return text_field
    raise ValueError(
        f"{description} has the columns {sorted(row)}, but needs messages, conversations, prompt "
        f"and completion, input_ids, or {text_field} (another name for it: --text_field)"
    )


def _template(tokenizer: Any, *, marked: bool) -> str | None:
    """The chat template to apply; `None` for the tokenizer's own."""
    own = tokenizer.chat_template
    own = own.get("default") if isinstance(own, dict) else own
    if own is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template, but the data set holds messages; "
            "set tokenizer.chat_template, or give prompt and completion as text"
        )
    if not marked or _GENERATION.search(own):
        return None
    if importlib.util.find_spec("trl") is not None:
        from trl.chat_template_utils import get_training_chat_template

        try:
            found = get_training_chat_template(tokenizer)
        except ValueError:  # no template for this family
            found = None
        if found is not None:
            logger.warning("chat template without {%% generation %%} marks: TRL's is used instead")
            return str(found)
    raise ValueError(
        "assistant_only_loss=True needs {% generation %} marks in the chat template, which this "
        "one has not; put them around what the assistant says (tokenizer.chat_template), or "
        "install trl, which ships marked templates for some families"
    )


def _options(row: Mapping[str, Any], *, template: str | None, marked: bool) -> dict[str, Any]:
    """Keyword arguments of `apply_chat_template` for one row."""
    tools = row.get("tools")
    options = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }
    if template is not None:
        options["chat_template"] = template
    if marked:
        options["return_assistant_tokens_mask"] = True
    return options


def _messages(given: Iterable[Mapping[str, Any]]) -> Messages:
    """Messages with role and content, also from those with from and value."""
    named = [{"role": m["from"], "content": m["value"]} if "from" in m else dict(m) for m in given]
    return [m | {"role": _ROLES.get(m["role"], m["role"])} for m in named]


def _rendered(messages: Messages, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as the chat template renders it."""
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return {name: found[name] for name in ("input_ids", "assistant_masks") if name in found}


def _completion(
    row: Mapping[str, Any], tokenizer: Any, *, options: dict[str, Any], mask: bool
) -> dict[str, list[int]]:
    """A prompt with its completion, which starts where the tokens of the prompt alone diverge."""
    if isinstance(row["prompt"], str):
        prompt = _plain(row["prompt"], tokenizer)
        both = _plain(row["prompt"] + row["completion"], tokenizer)
        whole = {"input_ids": _ended(both, tokenizer)}
    else:
        alone = {k: v for k, v in options.items() if k != "return_assistant_tokens_mask"}
        asked = _messages(row["prompt"])
        prompt = _rendered(asked, tokenizer, alone | {"add_generation_prompt": True})["input_ids"]
        whole = _rendered(asked + _messages(row["completion"]), tokenizer, options)
    if mask:
        ids = whole["input_ids"]
        same = zip(prompt, ids, strict=False)
        asked_tokens = next((at for at, (a, b) in enumerate(same) if a != b), len(prompt))
        whole["completion_mask"] = [0] * asked_tokens + [1] * (len(ids) - asked_tokens)
    return whole


def _plain(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, truncation=False)["input_ids"])


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """With the end-of-text token, if the tokenizer has one and did not add it itself."""
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]
