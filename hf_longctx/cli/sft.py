"""The recipe: fine-tune a causal language model on long, uneven documents.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml -m hf_longctx.sft \\
        --config recipes/smollm2/distca_cpu.yaml --max_steps 20

A YAML file gives defaults, flags win over it. Data is a folder of text files, a JSONL file, or the
name or path of a data set that `datasets` loads; its columns tell whether it holds conversations,
prompts with completions, texts or tokens. `hf-longctx sft` runs it on one process. Layer: cli.
Exit codes: 0 trained, 1 refused.
"""

import argparse
import importlib.util
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers
import yaml
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from ..attention.registration import register
from ..config import LongCtxTrainingArguments, documented_flags, validate_removed_flags
from ..data.chat import tokenize_rows
from ..recurrent.unprepared_guard import guard_by_name
from ..support import validate_arguments, validate_name
from ..training.groups import find_group, servers_per_group
from ..training.trainer import LongCtxTrainer

# The other ranks wait this long before they report an error: most errors are every rank's, rank 0
# reports them, and the launcher then ends the others.
_OTHERS_WAIT = 15.0


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`; its flags are read by `parse`."""
    sft = commands.add_parser(
        "sft",
        add_help=False,
        help="fine-tune on this one process; over several: accelerate launch -m hf_longctx.sft",
    )
    sft.set_defaults(run=lambda arguments: main(arguments.unknown), takes_unknown=True)


@dataclass
@documented_flags
class ModelArguments:
    """The model, and how its attention runs.

    Args:
        model_name_or_path (`str`, *optional*): Checkpoint folder or name, or package:NAME[/FOLDER].
        gguf_file (`str`, *optional*): A GGUF file in that folder. "": none, over a --config with
            one.
        model_config (`str`, *optional*): A config as JSON: train such a model from scratch, with
            the tokenizer of --model_name_or_path.
        dtype (`str`, *optional*, defaults to `"float32"`): Of the weights. auto: as the checkpoint
            has them.
        attn_implementation (`str`, *optional*, defaults to `"distca"`): How attention runs across
            ranks: distca, charm, ring, ulysses or, for models with recurrent layers, zeco_linear.
    """

    model_name_or_path: str = ""
    gguf_file: str | None = None
    model_config: str | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    attn_implementation: str = "distca"


@dataclass
@documented_flags
class DataArguments:
    """The documents to train and evaluate on.

    Args:
        data (`str`, *optional*): A folder of .txt files, a .jsonl file, a data set name or path, or
            package:NAME[/FOLDER].
        split (`str`, *optional*, defaults to `"train"`): Split of a data set.
        eval_data (`str`, *optional*): As --data, to evaluate on. Default: none, or --eval_split of
            --data.
        eval_split (`str`, *optional*): Split to evaluate on, of --eval_data or else of --data.
        text_field (`str`, *optional*, defaults to `"text"`): Column that holds plain text.
        assistant_only_loss (`bool`, *optional*, defaults to `False`): Conversations: learn only
            what the assistant says.
        completion_only_loss (`bool`, *optional*, defaults to `True`): Prompts with completions:
            prompts are no targets (--no_completion_only_loss: they are).
        streaming (`bool`, *optional*, defaults to `False`): Read --data while training,
            --longctx_lookahead documents ahead.
        max_documents (`int`, *optional*): Use the first so many documents of --data only.
        summary_json (`str`, *optional*): Write what the run did there, as one JSON object.
    """

    data: str = ""
    split: str = "train"
    eval_data: str = ""
    eval_split: str | None = None
    text_field: str = "text"
    assistant_only_loss: bool = False
    completion_only_loss: bool = True
    streaming: bool = False
    max_documents: int | None = None
    summary_json: str | None = None


def in_package(path: str) -> str:
    """Find the folder that `package:NAME/FOLDER` names; the package is not imported."""
    if not path.startswith("package:"):
        return path
    name, *parts = path.removeprefix("package:").split("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{path}: no package {name!r} is installed; run `make setup`, or pip install "
            f"{name.replace('_', '-')}"
        )
    return str(Path(spec.submodule_search_locations[0], *parts))


def parse(argv: list[str]) -> tuple[ModelArguments, DataArguments, LongCtxTrainingArguments]:
    """Read the flags, with the values of `--config FILE` as their defaults.

    Raises:
        ValueError: for a file that is no YAML of flags, and for flags that are missing.
    """
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config")
    known, flags = first.parse_known_args(argv)
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, LongCtxTrainingArguments),
        prog="accelerate launch -m hf_longctx.sft",
        description="Fine-tune on long, uneven documents. --config FILE: a YAML file of defaults "
        "for all flags below.",
    )
    if known.config:
        if not Path(known.config).is_file():
            raise ValueError(f"--config {known.config}: no such file")
        try:
            values = yaml.safe_load(Path(known.config).read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"{known.config} is no YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"{known.config} holds {'nothing' if values is None else type(values).__name__}; "
                "write one `flag: value` a line"
            )
        validate_removed_flags(values)
        allowed = {action.dest for action in parser._actions}
        unknown = sorted(set(values) - allowed)
        if unknown:
            raise ValueError(f"{known.config}: unknown keys {unknown}; --help lists the flags")
        parser.set_defaults(**values)
    validate_removed_flags(flags)
    model, data, training = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    for name, value in (("model_name_or_path", model.model_name_or_path), ("data", data.data)):
        if not value:
            raise ValueError(f"--{name} is missing; give it as a flag or in --config")
    if data.streaming and training.max_steps < 1:
        raise ValueError(
            "--streaming needs --max_steps: a stream has no length; give the number of steps"
        )
    return model, data, training


def check_paths(data: DataArguments, training: LongCtxTrainingArguments) -> None:
    """Check before training that its outputs can be written and its checkpoint exists.

    Raises:
        ValueError: naming the flag and its value.
    """
    if data.summary_json:
        place = Path(data.summary_json)
        if place.is_dir() or not os.access(place.parent, os.W_OK):
            raise ValueError(f"--summary_json {place}: no file can be written there")
    try:
        Path(str(training.output_dir)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {training.output_dir}: {error}") from error
    resume = training.resume_from_checkpoint
    if resume and resume.lower() not in ("last", "true") and not Path(resume).is_dir():
        raise ValueError(
            f"--resume_from_checkpoint {resume}: no such folder; give one, or last for the newest "
            "in --output_dir"
        )


def load_rows(path: str, *, split: str, text_field: str, streaming: bool) -> Any:
    """Load rows as they are on disk: a `Dataset`, or an `IterableDataset` to stream."""
    place = Path(in_package(path))
    texts, lines = sorted(place.glob("*.txt")), place.suffix in (".jsonl", ".json")
    if (texts or lines) and split != "train":
        raise ValueError(f"{path} has no split {split!r}, only train; give --eval_data for another")
    if texts:
        rows = Dataset.from_dict({text_field: [file.read_text() for file in texts]})
        return rows.to_iterable_dataset() if streaming else rows
    if lines and not (place.is_file() and place.stat().st_size):
        raise ValueError(f"{path}: no such file, or an empty one")
    source = {"path": "json", "data_files": str(place)} if lines else {"path": str(place)}
    try:
        return load_dataset(**source, split=split, streaming=streaming)
    except (DatasetGenerationError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error}") from error


def documents(arguments: DataArguments, tokenizer: Any, *, evaluation: bool = False) -> Any:
    """Tokenise the documents to train or to evaluate on; `None` where there are none."""
    path, split, name = arguments.data, arguments.split, "train_dataset"
    if evaluation:
        if not arguments.eval_data and not arguments.eval_split:
            return None
        path, name = arguments.eval_data or path, "eval_dataset"
        split = arguments.eval_split or split
    streaming, most = arguments.streaming and not evaluation, arguments.max_documents
    rows = load_rows(path, split=split, text_field=arguments.text_field, streaming=streaming)
    if most is not None and not evaluation:
        rows = rows.take(most if streaming else min(most, len(rows)))
    # Long documents are the point here: no warning that they exceed the tokenizer's length.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return tokenize_rows(
        rows,
        tokenizer,
        text_field=arguments.text_field,
        assistant_only_loss=arguments.assistant_only_loss,
        completion_only_loss=arguments.completion_only_loss,
        description=name,
    )


def new_model(arguments: ModelArguments, tokenizer: Any) -> Any:
    """Build a model with random weights, with the tokenizer's vocabulary size."""
    place = Path(str(arguments.model_config))
    try:
        given = json.loads(place.read_text())
        config = AutoConfig.for_model(**given | {"vocab_size": len(tokenizer)})
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model_config {place} is no config as JSON: {error}") from error
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=arguments.attn_implementation, dtype=arguments.dtype
    )


def load_tokenizer(arguments: ModelArguments, folder: str) -> Any:
    """Load the tokenizer. A wrong model name is reported here, before anything else is read."""
    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=arguments.gguf_file or None)
    except (OSError, ValueError) as error:
        lacks = "no such folder, and no model of that name on the Hub"
        if Path(folder).is_dir():
            lacks = "no tokenizer can be read in that folder"
        why = str(error).splitlines()[0]
        raise ValueError(
            f"--model_name_or_path {folder}: {lacks} ({why}); give a checkpoint folder, a name on "
            "the Hub, or package:NAME[/FOLDER]"
        ) from error


def load_model(arguments: ModelArguments, folder: str, tokenizer: Any) -> Any:
    """Load the model; a GGUF is unpacked to dense weights, which can be trained and saved."""
    if arguments.model_config:
        return new_model(arguments, tokenizer)
    options: dict[str, Any] = {"dtype": arguments.dtype}
    if arguments.gguf_file:
        options["gguf_file"] = arguments.gguf_file
        if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=arguments.attn_implementation, **options
    )


def train(argv: list[str]) -> None:
    """Load, train, evaluate and save.

    Raises:
        ValueError: for flags, data or a model that training refuses.
    """
    # In a folder that holds a clone named `hf_longctx`, Python finds that folder first, as a
    # namespace package, and runs no `hf_longctx/__init__.py`, which would do this.
    register()
    guard_by_name()
    model_arguments, data_arguments, training_arguments = parse(argv)
    validate_name(model_arguments.attn_implementation)
    check_paths(data_arguments, training_arguments)
    # The trainer checks the same later; tokenising the data first may take minutes.
    validate_arguments(training_arguments)
    group, name = find_group(training_arguments), model_arguments.attn_implementation
    servers_per_group(training_arguments, group, name=name)
    logging.basicConfig(format="%(message)s")
    level = logging.INFO if training_arguments.process_index == 0 else logging.ERROR
    logging.getLogger("hf_longctx").setLevel(level)
    set_seed(training_arguments.seed)
    folder = in_package(model_arguments.model_name_or_path)
    tokenizer = load_tokenizer(model_arguments, folder)
    train_dataset = documents(data_arguments, tokenizer)
    eval_dataset = documents(data_arguments, tokenizer, evaluation=True)
    trainer = LongCtxTrainer(
        model=load_model(model_arguments, folder, tokenizer),
        args=training_arguments,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    resume = training_arguments.resume_from_checkpoint
    newest = resume is not None and resume.lower() in ("last", "true")
    trainer.train(resume_from_checkpoint=True if newest else resume)
    trainer.save_model()
    if eval_dataset is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    if trainer.is_world_process_zero() and data_arguments.summary_json:
        text = json.dumps(trainer.longctx_summary(), indent=2)
        Path(data_arguments.summary_json).write_text(text + "\n")
    trainer.accelerator.end_training()


def main(argv: list[str]) -> int:
    """Train; returns the exit code. Errors of the user's are one line of rank 0."""
    try:
        train(argv)
    except ValueError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_OTHERS_WAIT)
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
