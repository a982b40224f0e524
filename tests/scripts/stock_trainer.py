"""A Trainer script that knows nothing of hf_longctx, as anyone might have written it."""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    """What to train on what."""

    model: str
    data: str
    attention: str = "sdpa"


def main() -> None:
    """Tokenise, train, save."""
    script, arguments = HfArgumentParser(
        (ScriptArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model, attn_implementation=script.attention)
    rows = load_dataset("json", data_files=script.data, split="train")
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows.map(lambda row: tokenizer(row["text"]), remove_columns=["text"]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = json.dumps(trainer.state.log_history)
        Path(arguments.output_dir, "history.json").write_text(history)


if __name__ == "__main__":
    main()
