"""Scripts that know nothing of the package, started by `hf_longctx.run`, beside a plain loop."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import token_loss, weights_of
from tiny import Document, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
)

from hf_longctx.data.packing import Piece
from hf_longctx.run import Launch, main, read
from hf_longctx.training.trainer import LongCtxTrainerMixin

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "stock_trainer.py"
LENGTHS = (150, 5, 60, 22, 1, 12)  # the first spans both ranks
STEPS = 3
RATE = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer of 64 words, and texts of them as JSON lines."""
    place = tmp_path_factory.mktemp("run")
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
    return place


def launch(*command: str, processes: int = 2) -> str:
    """Run a command under `accelerate launch` as the README says; what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    start += [str(ROOT / "accelerate_configs" / "cpu_2.yaml")]
    ended = subprocess.run(
        [*start, "--num_processes", str(processes), "-m", "hf_longctx.run", *command],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


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


def training_flags(folder: Path, name: str) -> list[str]:
    """One batch holds all documents, so that every step is a full batch."""
    flags = f"--output_dir {folder / name} --max_steps {STEPS} --learning_rate {RATE} --optim sgd"
    flags += " --lr_scheduler_type constant --logging_steps 1 --report_to none --use_cpu"
    flags += " --save_strategy no --seed 3 --longctx_max_tokens_per_rank 128"
    return flags.split()


def test_an_unmodified_trainer_script(folder):
    printed = launch(
        str(SCRIPT), "--model", str(folder / "model"), "--attn_implementation", "distca",
        "--data", str(folder / "texts" / "train.jsonl"), *training_flags(folder, "stock"),
    )  # fmt: skip
    history = json.loads((folder / "stock" / "history.json").read_text())
    steps = [entry for entry in history if "loss" in entry]
    losses, norms, weights = full_batch(documents_of(folder, end=False))
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-5)
    assert [e["grad_norm"] for e in steps] == pytest.approx(norms, rel=1e-5)
    assert all(entry["longctx_bytes_moved"] > 0 for entry in steps)
    saved = AutoModelForCausalLM.from_pretrained(folder / "stock")
    assert saved.config._attn_implementation == "sdpa"
    for key, weight in weights_of(saved).items():
        torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-5)
    said = [line for line in printed.splitlines() if line.startswith("hf_longctx.run:")]
    assert len(said) == 2, printed
    assert "attn_implementation='distca' went to from_pretrained" in said[0]
    assert "longctx_max_tokens_per_rank=128" in said[0]
    assert "Trainer takes documents" in said[1]
    assert "per_device_train_batch_size, unset, is 1 instead of 8" in said[1]
    assert "attn_implementation='sdpa' of the script gives way to the flag" in printed
    assert "DataCollatorForLanguageModeling is left out" in printed


# The command line


def test_flags_are_taken_off_and_all_others_left_alone():
    given = "s.py --lr 3 --longctx-layout=zigzag a --attn_implementation ring -x -- --b"
    command = read([*given.split(), "--longctx_max_tokens_per_rank", "64"])
    assert command.script == "s.py" and not command.module
    assert command.rest == ["--lr", "3", "a", "-x", "--", "--b"]
    assert command.name == "ring"
    assert command.longctx.longctx_layout == "zigzag"
    assert command.longctx.longctx_max_tokens_per_rank == 64
    assert read(["-m", "a.b", "--attn_implementation", "ring"]).module


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("s.py", "the following arguments are required: --attn_implementation"),
        ("s.py --attn_implementation sdpa", "invalid choice: 'sdpa'"),
        ("--attn_implementation distca s.py", "the script comes first"),
        ("s.py --attn_implementation distca --longctx_layuot zigzag", "longctx_layuot"),
        ("s.py --attn_implementation distca --longctx_group_size x", "longctx_group_size"),
    ],
)
def test_a_wrong_flag_ends_before_the_script_starts(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        read(line.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        read(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("SCRIPT", "--longctx_max_tokens_per_rank", "hf-longctx check", "SFTTrainer"):
        assert word in printed


def patched(line: str) -> Launch:
    return Launch(read(line.split()))


def test_the_scripts_parser_gets_the_flags_it_knows():
    launch = patched("s.py --lr 3 --attn_implementation ring --longctx_layout zigzag")
    parser = argparse.ArgumentParser()
    for flag in ("--lr", "--attn-implementation", "--longctx_layout"):
        parser.add_argument(flag)
    with launch.patched():
        assert sys.argv == ["s.py", "--lr", "3"]
        found = parser.parse_args()
    assert (found.lr, found.attn_implementation, found.longctx_layout) == ("3", "ring", "zigzag")
    assert launch.handed and sys.argv[0] != "s.py"


def test_a_parser_that_knows_none_gets_none():
    launch = patched("s.py --lr 3 --attn_implementation ring")
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    with launch.patched():
        assert vars(parser.parse_args()) == {"lr": "3"}
    assert not launch.handed


def test_everything_is_put_back():
    before = [vars(argparse.ArgumentParser)["parse_known_args"], sys.argv, Trainer.__new__]
    with patched("s.py --attn_implementation ring").patched():
        assert Trainer.__new__ is not before[2]
    after = [vars(argparse.ArgumentParser)["parse_known_args"], sys.argv, Trainer.__new__]
    assert before == after


@pytest.mark.parametrize("name", ["distca", "ring"])
def test_every_way_to_a_causal_model_gets_the_name(folder, name, caplog):
    place, config = folder / "model", AutoConfig.from_pretrained(folder / "model")
    with patched(f"s.py --attn_implementation {name}").patched():
        made = [
            AutoModelForCausalLM.from_pretrained(place),
            AutoModelForCausalLM.from_config(config),
            LlamaForCausalLM.from_pretrained(place, attn_implementation="eager"),
        ]
        other = AutoModel.from_pretrained(place)
    assert [model.config._attn_implementation for model in made] == [name] * 3
    assert caplog.text.count("'eager' of the script gives way") == 1
    assert other.config._attn_implementation == "sdpa"


def test_subclasses_of_a_trainer_become_cooperative_and_ours_stay():
    class Theirs(Trainer):
        pass

    class Ours(LongCtxTrainerMixin, Trainer):
        pass

    launch = patched("s.py --attn_implementation ring")
    made = launch.cooperative(Theirs)
    assert issubclass(made, (LongCtxTrainerMixin, Theirs)) and made.__name__ == "Theirs"
    assert made is launch.cooperative(Theirs)
    assert launch.cooperative(Ours) is Ours


def test_a_batch_size_that_was_set_is_refused(folder, monkeypatch):
    flags = [
        str(SCRIPT), "--model", str(folder / "model"), "--attn_implementation", "distca",
        "--data", str(folder / "texts" / "train.jsonl"), *training_flags(folder, "refused"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="per_device_train_batch_size=8"):
        Launch(read([*flags, "--per_device_train_batch_size=8"])).run()


def test_a_script_without_a_trainer_is_told(tmp_path, caplog):
    (tmp_path / "script.py").write_text("import sys\nassert sys.argv[1:] == ['--a']\n")
    command = read([str(tmp_path / "script.py"), "--a", "--attn_implementation", "distca"])
    Launch(command).run()
    assert "made no transformers.Trainer" in caplog.text


def test_a_wrong_value_ends_with_the_rule(caplog, monkeypatch):
    monkeypatch.setattr("hf_longctx.run._log_to_stderr", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["s.py", "--attn_implementation", "distca", "--longctx_tolerance", "-1"])
    assert ended.value.code == 2
    assert "longctx_tolerance=-1.0 must be 0 or more" in caplog.text
