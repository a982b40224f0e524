"""Fine-tune a causal language model on long, uneven documents.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/sft.py \\
        --config recipes/smollm2/distca_cpu.yaml --max_steps 20

A YAML file gives defaults, flags win over it. Data is a folder of text files, a JSONL file with a
text field, or the name or path of a data set that `datasets` loads.
"""

import argparse
import importlib.util
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
import yaml
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from hf_longctx import LongCtxTrainer, LongCtxTrainingArguments


@dataclass
class ModelArguments:
    """Which model, and how its attention runs."""

    model_name_or_path: str = field(
        default="", metadata={"help": "Checkpoint folder or name, or package:NAME[/FOLDER]."}
    )
    gguf_file: str | None = field(default=None, metadata={"help": "A GGUF file in that folder."})
    dtype: Literal["float32", "bfloat16", "auto"] = field(
        default="float32", metadata={"help": "Of the weights. auto: as the checkpoint has them."}
    )
    attn_implementation: str = field(
        default="distca", metadata={"help": "How attention runs across ranks: distca or ring."}
    )


@dataclass
class DataArguments:
    """Which documents."""

    data: str = field(
        default="",
        metadata={
            "help": "A folder of .txt files, a .jsonl file, a data set name or path, or "
            "package:NAME[/FOLDER]."
        },
    )
    split: str = field(default="train", metadata={"help": "Split of a data set."})
    text_field: str = field(default="text", metadata={"help": "Column that holds the text."})
    max_documents: int | None = field(
        default=None, metadata={"help": "Use the first so many documents only."}
    )
    summary_json: str | None = field(
        default=None, metadata={"help": "Write what the run did there, as one JSON object."}
    )


def in_package(path: str) -> str:
    """`package:NAME/FOLDER` -> the folder inside an installed package, which is not imported."""
    if not path.startswith("package:"):
        return path
    name, *parts = path.removeprefix("package:").split("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{path}: no package {name!r} is installed; run `make setup`")
    return str(Path(spec.submodule_search_locations[0], *parts))


def parse(argv: list[str]) -> tuple[ModelArguments, DataArguments, LongCtxTrainingArguments]:
    """Flags, over the values of `--config FILE`."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config")
    known, flags = first.parse_known_args(argv)
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, LongCtxTrainingArguments),
        description="Fine-tune on long, uneven documents. --config FILE: a YAML file of defaults "
        "for all flags below.",
    )
    if known.config:
        if not Path(known.config).is_file():
            raise ValueError(f"--config {known.config}: no such file")
        values = yaml.safe_load(Path(known.config).read_text())
        allowed = {action.dest for action in parser._actions}
        unknown = sorted(set(values) - allowed)
        if unknown:
            raise ValueError(f"{known.config}: unknown keys {unknown}; --help lists the flags")
        parser.set_defaults(**values)
    model, data, training = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    for name, value in (("model_name_or_path", model.model_name_or_path), ("data", data.data)):
        if not value:
            raise ValueError(f"--{name} is missing; give it as a flag or in --config")
    return model, data, training


def documents(arguments: DataArguments, tokenizer: Any) -> Dataset:
    """Tokenised documents: one row of `input_ids` each, ended by the end-of-text token."""
    place = Path(in_package(arguments.data))
    if place.is_dir() and sorted(place.glob("*.txt")):
        texts = [file.read_text() for file in sorted(place.glob("*.txt"))]
        rows = Dataset.from_dict({arguments.text_field: texts})
    elif place.suffix in (".jsonl", ".json"):
        if not place.is_file():
            raise ValueError(f"--data {arguments.data}: no such file")
        rows = load_dataset("json", data_files=str(place), split="train")
    else:
        rows = load_dataset(str(place), split=arguments.split)
    if arguments.text_field not in rows.column_names:
        raise ValueError(
            f"--text_field {arguments.text_field} is not among the columns {rows.column_names}"
        )
    if arguments.max_documents is not None:
        rows = rows.select(range(min(arguments.max_documents, len(rows))))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return rows.map(
        lambda row: {
            "input_ids": tokenizer(row[arguments.text_field], truncation=False)["input_ids"] + end
        },
        remove_columns=rows.column_names,
        desc="Tokenising",
    )


def load_model(arguments: ModelArguments, folder: str) -> Any:
    """The model; a GGUF is unpacked to dense weights, which can be trained and saved."""
    options: dict[str, Any] = {"dtype": arguments.dtype}
    if arguments.gguf_file:
        options["gguf_file"] = arguments.gguf_file
        if hasattr(transformers, "GgufConfig"):  # older versions always unpack
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=arguments.attn_implementation, **options
    )


def main(argv: list[str]) -> None:
    """Load, train, save."""
    model_arguments, data_arguments, training_arguments = parse(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_longctx").setLevel(logging.INFO)
    set_seed(training_arguments.seed)
    folder = in_package(model_arguments.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=model_arguments.gguf_file)
    model = load_model(model_arguments, folder)
    trainer = LongCtxTrainer(
        model=model,
        args=training_arguments,
        train_dataset=documents(data_arguments, tokenizer),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero() and data_arguments.summary_json:
        text = json.dumps(trainer.longctx_summary(), indent=2)
        Path(data_arguments.summary_json).write_text(text + "\n")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
