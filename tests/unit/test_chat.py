"""Make of chats, prompts with completions and texts the tokens and targets of TRL's SFTTrainer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import transformers
from datasets import Dataset
from packaging.version import Version
from tiny import tiny
from trl import SFTConfig, SFTTrainer
from words import TEMPLATE, UNMARKED, WORDS, said, tokenizer

from hf_longctx.data.chat import tokenize_rows
from hf_longctx.data.validate import validate_documents

CHATS = [
    {"messages": said("hello", "hello how are you", "fine thanks", "bye")},
    {"messages": said("how are you", "I am fine")},
    {"messages": [{"role": "system", "content": "you are fine"}, *said("hello", "bye")]},
]
TALKS = [{"prompt": m["messages"][:-1], "completion": m["messages"][-1:]} for m in CHATS]
TEXTS = [
    {"prompt": "hello how", "completion": " are you"},
    {"prompt": "I am", "completion": " fine <end>"},
]
PLAIN = [{"text": "hello how are you"}, {"text": "bye <end>"}]


def documents(rows: list[dict[str, Any]], **options: Any) -> list[dict[str, list[int]]]:
    """Rows as the trainer sees them: ids, and labels where not all ids are."""
    tokens = tokenize_rows(Dataset.from_list(rows), tokenizer(), **options)
    found = validate_documents(tokens, vocab_size=len(WORDS), description="train_dataset")
    return [{k: v.tolist() for k, v in found[at].items()} for at in range(len(found))]


def of_trl(rows: list[dict[str, Any]], folder: Any, **options: Any) -> list[dict[str, list[int]]]:
    """The same from TRL."""
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_length=None,
        **options,
    )
    trainer = SFTTrainer(
        model=tiny("sdpa"),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    return [
        {"input_ids": row["input_ids"], "labels": labels(row, **options)}
        for row in trainer.train_dataset
    ]


def labels(row: dict[str, list[int]], **options: Any) -> list[int]:
    """Labels of a row of TRL; its first versions have masks, which its collator turns to labels."""
    used = ("completion_mask", "assistant_masks")[not options.get("completion_only_loss", True) :]
    masks = [row[name] for name in used if name in row]
    made = [i if all(kept) else -100 for i, *kept in zip(row["input_ids"], *masks, strict=True)]
    return row.get("labels", made)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing.:FutureWarning")  # TRL's default
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (CHATS, {}),
        (CHATS, {"assistant_only_loss": True}),
        (TALKS, {}),
        (TALKS, {"completion_only_loss": False}),
        (TALKS, {"assistant_only_loss": True}),
        (TEXTS, {}),
        (TEXTS, {"completion_only_loss": False}),
        (PLAIN, {}),
    ],
)
def test_chat_tokens_and_targets_are_those_of_trl(tmp_path, rows, options):
    if rows is CHATS and options and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("Transformers marks user turns where a span ends in a character without token")
    ours = documents(rows, **options)
    assert [{"labels": row["input_ids"]} | row for row in ours] == of_trl(rows, tmp_path, **options)


def test_chat_targets_are_what_the_assistant_says():
    (row, *_) = documents(CHATS, assistant_only_loss=True)
    words = [WORDS[label] for label in row["labels"] if label != -100]
    assert words == ["hello", "how", "are", "you", "<end>", "bye", "<end>"]
    (row, *_) = documents(TEXTS)
    assert [WORDS[label] for label in row["labels"] if label != -100] == ["are", "you", "<end>"]


def test_chat_with_from_and_value_is_the_same_chat():
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    talks = [
        {
            "conversations": [
                {"from": names[m["role"]], "value": m["content"]} for m in c["messages"]
            ]
        }
        for c in CHATS
    ]
    assert documents(talks, assistant_only_loss=True) == documents(CHATS, assistant_only_loss=True)


@pytest.mark.parametrize("given", [[{"name": "fine"}], json.dumps([{"name": "fine"}])])
def test_chat_tools_reach_the_template(given):
    (row,) = documents([{"messages": said("hello", "bye"), "tools": given}])
    assert [WORDS[i] for i in row["input_ids"][:3]] == ["tool", ":", "fine"]


def test_chat_streams_are_tokenised_as_they_are_read():
    stream = Dataset.from_list(CHATS).to_iterable_dataset()
    tokens = tokenize_rows(stream, tokenizer(), assistant_only_loss=True)
    whole = tokenize_rows(Dataset.from_list(CHATS), tokenizer(), assistant_only_loss=True)
    assert [*tokens] == [*whole]


def test_chat_without_marks_takes_the_template_of_trl(monkeypatch, caplog):
    unmarked = tokenizer(template=UNMARKED)
    monkeypatch.setattr(
        "trl.chat_template_utils.get_training_chat_template", lambda given: TEMPLATE
    )
    rows = Dataset.from_list(CHATS)
    found = tokenize_rows(rows, unmarked, assistant_only_loss=True)
    assert [*found] == [*tokenize_rows(rows, tokenizer(), assistant_only_loss=True)]
    assert "TRL's is used instead" in caplog.text and unmarked.chat_template == UNMARKED


ONE = said("hello")
REFUSED = {
    "no marks": (CHATS, {"assistant_only_loss": True}, "needs {% generation %} marks"),
    "no assistant": (
        [*CHATS, {"messages": ONE}],
        {"assistant_only_loss": True},
        "train_dataset: row 3 has no word of the assistant",
    ),
    "no template": (CHATS, {}, "has no chat template, but the data set holds messages"),
    "text": (PLAIN, {"assistant_only_loss": True}, "holds text, no messages"),
    "columns": ([{"a": 1}], {}, "has the columns ['a'], but needs messages"),
    "halves": ([{"prompt": "hello", "completion": ONE}], {}, "must both be text or both"),
    "empty": ([], {}, "train_dataset has no rows"),
    "missing text": (
        [*PLAIN, {"text": None}],
        {},
        "row 2 holds a NoneType as text, but row",
    ),
    "tokens": (
        [{"input_ids": [1]}],
        {"assistant_only_loss": True},
        "holds input_ids, no messages and no column",
    ),
    "template": (CHATS, {}, "row 0 is refused by the chat template (no)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_chat_refusals(name):
    rows, options, message = REFUSED[name]
    templates = {
        "no marks": UNMARKED,
        "no template": None,
        "template": "{{ raise_exception('no') }}",
    }
    chosen = tokenizer(template=templates.get(name, TEMPLATE))
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenize_rows(Dataset.from_list(rows), chosen, **options)


def test_chat_of_tokens_keeps_its_masks_unless_told_otherwise():
    rows = [{"input_ids": [7, 8, 9], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}]
    assert documents(rows) == [{"input_ids": [7, 8, 9], "labels": [-100, 8, -100]}]
    assert documents(rows, completion_only_loss=False)[0]["labels"] == [7, 8, -100]
