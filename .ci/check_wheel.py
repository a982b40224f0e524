"""Check an installed wheel where nothing of the repository is in reach, for `make wheel`.

Run by the Python of the environment that holds the wheel. In an empty folder:
`hf-longctx --version`, `init`, `check`, and two steps of the recipe on two CPU ranks, with a tiny
config, tokenizer and data set made here.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BIN = Path(sys.executable).parent
WORDS = [f"w{number}" for number in range(60)]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(WORDS) + 2,
}


def run(*command: str) -> str:
    """Run a command of the environment; its output, or the end of this process."""
    print("+", *command, flush=True)
    ended = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(ended.stdout)
    if ended.returncode:
        sys.exit(f"{command[0]} ended with {ended.returncode}")
    return ended.stdout


def make_inputs(folder: Path) -> None:
    """Write a tokenizer, a model config and a data set of uneven documents."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"text": " ".join(WORDS[:length])} for length in (50, 9, 30, 4, 21, 60, 13, 44)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Run every check in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="hf_longctx_wheel_") as name:
        os.chdir(name)
        make_inputs(Path(name))
        printed = run("hf-longctx", "--version")
        assert printed.startswith("hf-longctx ") and "unknown" not in printed, printed
        package = run("python", "-c", "import hf_longctx; print(hf_longctx.__file__)").strip()
        assert Path(package).is_relative_to(sys.prefix), f"{package} is not of this environment"
        assert (Path(package).parent / "py.typed").is_file(), "py.typed is missing"
        printed = run("hf-longctx", "init", "my_run")
        assert "accelerate launch --config_file my_run/cpu_2.yaml" in printed, printed
        printed = run("hf-longctx", "check", "--model", "config.json")
        assert "distca works" in " ".join(printed.split()), printed
        run(
            *("accelerate", "launch", "--config_file", "my_run/cpu_2.yaml", "-m", "hf_longctx.sft"),
            *(
                "--config",
                "my_run/distca_cpu.yaml",
                "--model_name_or_path",
                "tokenizer",
                "--gguf_file",
                "",
            ),
            *("--model_config", "config.json", "--data", "documents.jsonl", "--max_steps", "2"),
            *("--longctx_max_tokens_per_rank", "40", "--output_dir", "out"),
            *("--summary_json", "summary.json"),
        )
        summary = json.loads(Path("summary.json").read_text())
        assert summary["steps"] == 2, summary
        assert list(Path("out").glob("*.safetensors")), "no weights were saved"
    print("the wheel works alone")


if __name__ == "__main__":
    main()
