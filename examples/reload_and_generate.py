"""Reload a fine-tuned checkpoint where hf_longctx is not imported, and generate a line.

    python examples/reload_and_generate.py outputs/smollm2-distca-cpu

Exit code 1 when the checkpoint does not load, carries a foreign attention name, or generates
nothing.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "Fellow citizens of the Senate and of the House of Representatives:"


def main(folder: str) -> int:
    """Load, generate, print."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    except (OSError, ValueError) as error:
        print(f"{folder} does not load: {error}", file=sys.stderr)
        return 1
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    line = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    name = model.config._attn_implementation
    print(f"{folder} loaded with {name} attention, without hf_longctx:\n{PROMPT}{line}")
    return 1 if "hf_longctx" in sys.modules or name != "sdpa" or not line.strip() else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/reload_and_generate.py CHECKPOINT_FOLDER")
    sys.exit(main(sys.argv[1]))
