"""Tokenise conversations, prompts with completions and texts into `input_ids` and target masks.

Rows are tokenised as TRL's `SFTTrainer` does it, so that a data set gives the same tokens and
targets under both. `documents` turns the masks into labels. Layer: data.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

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
    """Tokenise a data set of text. The columns of its first row decide how rows are read.

    - `messages` or `conversations`: the tokens of the chat template, with the row's `tools` if it
      has them. All tokens are targets, or only the assistant's.
    - `prompt` and `completion`, each text or messages: the tokens of both, joined. The completion's
      tokens are targets.
    - `text_field`: the tokens of the text and the end-of-text token. All are targets.
    - `input_ids`: as they are. `labels`, `completion_mask` and `assistant_masks` give the targets.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): Rows of text. A stream is
            tokenised as it is read.
        tokenizer (`PreTrainedTokenizerBase`): The model's. Chats need its chat template.
        text_field (`str`, *optional*, defaults to `"text"`): Column of plain text.
        assistant_only_loss (`bool`, *optional*, defaults to `False`): Whether only what the
            assistant says is a target, by the template's `{% generation %}` marks. If the template
            has none, the one that TRL ships for this family is used, and that is logged.
        completion_only_loss (`bool`, *optional*, defaults to `True`): Whether only completions are
            targets, not prompts.
        description (`str`, *optional*): What to call the data set in messages.

    Returns:
        As `dataset`, with `input_ids` and, unless all tokens are targets, `completion_mask` or
        `assistant_masks`, 1 for targets.

    Raises:
        ValueError: No rows; none of these columns; no chat template; assistant-only loss without
            messages, without marks, or for a row in which the assistant says nothing.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"{description} has no rows; pass a data set with at least one document")
    kind = _kind(first, text_field=text_field, description=description)
    logger.info("%s: columns %s, read as %s", description, sorted(first), kind)
    chats = isinstance(first[kind], list) and kind != "input_ids"  # both are lists
    if assistant_only_loss and not chats and "assistant_masks" not in first:
        raise ValueError(
            f"assistant_only_loss=True, but {description} holds {kind}, no messages and no column "
            "assistant_masks; leave it out, or give messages"
        )
    if kind == "input_ids":
        # a mask that is left in the rows would be read
        drop = [] if completion_only_loss else ["completion_mask"]
        return dataset.remove_columns([name for name in drop if name in first])
    read = ("prompt", "completion") if kind == "prompt" else (kind,)
    tokenize = _RowTokenizer(
        tokenizer=tokenizer,
        template=_template(tokenizer, marked=assistant_only_loss) if chats else None,
        types={name: type(first[name]) for name in read},
        marked=assistant_only_loss,
        masked=completion_only_loss,
        description=description,
    )
    columns = dataset.column_names or sorted(first)
    shown = {"desc": f"Tokenising {description}"} if isinstance(dataset, Dataset) else {}
    return dataset.map(tokenize, with_indices=True, remove_columns=columns, **shown)


def _kind(row: Mapping[str, Any], *, text_field: str, description: str) -> str:
    """Return the column that decides how rows are read: the first of these that there is."""
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
    """Return the chat template to apply; `None` for the tokenizer's own."""
    own = tokenizer.chat_template
    own = own.get("default") if isinstance(own, dict) else own
    if own is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template, but the data set holds messages; "
            "set tokenizer.chat_template, or give prompt and completion as text"
        )
    if not marked or _GENERATION.search(own):
        return None
    with_trl = importlib.util.find_spec("trl") is not None
    if with_trl:
        from trl.chat_template_utils import get_training_chat_template

        try:
            found = get_training_chat_template(tokenizer)
        except ValueError:  # no template for this family
            found = None
        if found is not None:
            logger.warning("chat template without {%% generation %%} marks: TRL's is used instead")
            return str(found)
    remedy = "" if with_trl else ", or install trl, which ships marked templates for some families"
    raise ValueError(
        "assistant_only_loss=True needs {% generation %} marks in the chat template, which has "
        "none; put {% generation %} and {% endgeneration %} around what the assistant says "
        f"(tokenizer.chat_template){remedy}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowTokenizer:
    """Tokenises a row of text, called with the row and its number.

    Args:
        tokenizer: The model's.
        template (`str` or `None`): A chat template to use in place of the tokenizer's.
        types (`dict[str, type]`): The columns that are read, and the type of their values.
        marked (`bool`): Whether only what the assistant says is a target.
        masked (`bool`): Whether only completions are targets.
        description (`str`): What to call the data set in messages.
    """

    tokenizer: Any
    template: str | None
    types: dict[str, type]
    marked: bool
    masked: bool
    description: str

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, list[int]]:
        where = f"{self.description}: row {index}"
        for name, kind in self.types.items():
            if type(row[name]) is not kind:
                raise ValueError(
                    f"{where} holds a {type(row[name]).__name__} as {name}, but row 0 a "
                    f"{kind.__name__}; drop such rows, or make them alike"
                )
        try:
            found = self._completion(row) if "prompt" in self.types else self._document(row)
        except TemplateError as error:
            raise ValueError(
                f"{where} is refused by the chat template ({error}); drop such rows, or use a "
                "template that takes them"
            ) from error
        if self.marked and 1 not in found["assistant_masks"]:
            raise ValueError(
                f"{where} has no word of the assistant, so assistant-only loss finds no target in "
                "it; drop such rows, or leave assistant_only_loss out"
            )
        return found

    def _document(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Tokenise a conversation or a text."""
        (given,) = (row[name] for name in self.types)
        return self._ended(given) if isinstance(given, str) else self._chat(_messages(given), row)

    def _completion(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Tokenise a prompt with its completion."""
        if isinstance(row["prompt"], str):
            prompt = self.tokenizer(row["prompt"], truncation=False)["input_ids"]
            found = self._ended(row["prompt"] + row["completion"])
        else:
            asked = _messages(row["prompt"])
            prompt = self._chat(asked, row, add_generation_prompt=True)["input_ids"]
            found = self._chat(asked + _messages(row["completion"]), row)
        if self.masked:
            ids = found["input_ids"]
            # The completion starts at the first token that differs from the prompt's own: the
            # tokenizer may join the end of a prompt with the beginning of its completion.
            pairs = enumerate(zip(prompt, ids, strict=False))
            start = next((at for at, (a, b) in pairs if a != b), min(len(prompt), len(ids)))
            found["completion_mask"] = [0] * start + [1] * (len(ids) - start)
        return found

    def _chat(
        self, messages: Messages, row: Mapping[str, Any], **options: Any
    ) -> dict[str, list[int]]:
        """Tokenise messages by the chat template, with the tools and settings that the row has."""
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        given = {"chat_template": self.template} if self.template is not None else {}
        given |= (row.get("chat_template_kwargs") or {}) | options
        if self.marked:
            return self._marked_chat(messages, tools, given)
        found = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, **given
        )
        return {"input_ids": found["input_ids"]}

    def _marked_chat(
        self, messages: Messages, tools: Any, given: dict[str, Any]
    ) -> dict[str, list[int]]:
        """Tokenise messages, and mark the tokens that overlap what the assistant says."""
        # Not by return_assistant_tokens_mask: before Transformers 5.24 it marks everything to the
        # end where a span ends in a character without a token, such as a space.
        template = self.tokenizer.get_chat_template(given.pop("chat_template", None), tools)
        (text,), (spans,) = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map | given,
        )
        found = self.tokenizer(
            text, add_special_tokens=False, truncation=False, return_offsets_mapping=True
        )
        masks = [
            int(any(first < stop and last > start for start, stop in spans))
            for first, last in found["offset_mapping"]
        ]
        return {"input_ids": found["input_ids"], "assistant_masks": masks}

    def _ended(self, text: str) -> dict[str, list[int]]:
        """Tokenise a text and end it with the end-of-text token."""
        ids = list(self.tokenizer(text, truncation=False)["input_ids"])
        end = self.tokenizer.eos_token_id  # some tokenizers have none, some add it themselves
        return {"input_ids": ids if end is None or ids[-1:] == [end] else [*ids, end]}


def _messages(given: Iterable[Mapping[str, Any]]) -> Messages:
    """Return messages with role and content, also for those with from and value."""
    named = [{"role": m["from"], "content": m["value"]} if "from" in m else dict(m) for m in given]
    return [m | {"role": _ROLES.get(m["role"], m["role"])} for m in named]
