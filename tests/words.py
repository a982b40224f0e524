"""A tiny tokenizer of words, with a chat template that marks what the assistant says."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = [
    "<unk>",
    "<end>",
    "user",
    "assistant",
    "system",
    "tool",
    ":",
    "hello",
    "how",
    "are",
    "you",
    "I",
    "am",
    "fine",
    "thanks",
    "bye",
]
TEMPLATE = (
    "{% if tools %}{{ 'tool : ' + tools[0]['name'] + ' ' }}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ' : ' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <end> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <end> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """Splits at spaces; ids are places in `WORDS`."""
    model = WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>")
    splitter = Tokenizer(model)
    splitter.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=splitter, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    made.chat_template = template
    return made


def said(*turns: str) -> list[dict[str, str]]:
    """A conversation: user and assistant by turns."""
    return [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)
    ]
