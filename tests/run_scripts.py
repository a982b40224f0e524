"""What tests of `hf_longctx.run` share: a checkpoint with texts, a launch, a plain loop.

A batch holds all documents, so that every step is a full batch, whatever the order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from launching import launching
from plain_loop import token_loss, weights_of
from tiny import Document, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_longctx.data.packing import Piece

LENGTHS = (150, 5, 60, 22, 1, 12)  # the first spans both ranks
STEPS = 3
RATE = 0.1


def make_checkpoint(place: Path) -> None:
    """A checkpoint with a tokenizer of 64 words, and texts of them as JSON lines."""
    words = {f"w{i}": i for i in range(60)} | {"<eos>": 60, "<pad>": 61, "<unk>": 62}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(place / "model")
    tiny("sdpa", dtype=torch.float32).save_pretrained(place / "model")
    noise = torch.Generator().manual_seed(5)
    texts = [
        " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (n,), generator=noise)) for n in LENGTHS
    ]
    (place / "texts").mkdir()
    lines = [json.dumps({"text": text}) for text in texts]
    (place / "texts" / "train.jsonl").write_text("\n".join(lines) + "\n")


def launch(*command: str, processes: int = 2, forked: bool = True) -> str:
    """Run a command under `accelerate launch` as the README says; what it printed."""
    words = ("--num_processes", str(processes), "-m", "hf_longctx.run", *command)
    with launching(*words, forked=forked, HF_HUB_DISABLE_TELEMETRY="1") as under_way:
        code = under_way.wait(seconds=240)
        assert code == 0, under_way.printed()[-6000:]
        return under_way.printed()


def documents_of(folder: Path, *, end: bool) -> list[Document]:
    """The texts tokenised, with the end token where the trainer adds one."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "texts" / "train.jsonl").read_text().splitlines()
    tail = [tokenizer.eos_token_id] if end else []
    return [
        {"input_ids": tokenizer(json.loads(line)["text"])["input_ids"] + tail} for line in lines
    ]


def full_batch(rows: Sequence[Document]) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses and gradient norms of SGD steps over all documents at once, and the weights after."""
    model = tiny("sdpa", dtype=torch.float32)
    pieces = [Piece(document=d, start=0, stop=len(r["input_ids"])) for d, r in enumerate(rows)]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, norms = [], []
    for _ in range(STEPS):
        model.zero_grad()
        loss = token_loss(model, list(rows), pieces)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, weights_of(model)


def training_flags(folder: Path, name: str, *, save: bool = False) -> list[str]:
    """Of a short run; with `save`, a checkpoint at the end."""
    flags = f"--output_dir {folder / name} --max_steps {STEPS} --learning_rate {RATE} --optim sgd"
    flags += " --lr_scheduler_type constant --logging_steps 1 --report_to none --use_cpu"
    flags += f" --save_strategy {'steps' if save else 'no'} --save_steps {STEPS} --seed 3"
    flags += " --longctx_max_tokens_per_rank 128"
    return flags.split()
