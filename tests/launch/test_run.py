"""Run scripts that do not know the package through `hf_longctx.run`; compare with a plain loop."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch
from launching import ROOT
from plain_loop import weights_of
from run_scripts import documents_of, full_batch, launch, training_flags
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_longctx import LongCtxTrainingArguments
from hf_longctx.run import Launch, main, read
from hf_longctx.training.trainer import LongCtxTrainerMixin

SCRIPT = ROOT / "tests" / "scripts" / "stock_trainer.py"


def test_an_unmodified_trainer_script(checkpoint):
    printed = launch(
        str(SCRIPT), "--model", str(checkpoint / "model"), "--attn_implementation", "distca",
        "--data", str(checkpoint / "texts" / "train.jsonl"), *training_flags(checkpoint, "stock"),
        forked=False,
    )  # fmt: skip
    history = json.loads((checkpoint / "stock" / "history.json").read_text())
    steps = [entry for entry in history if "loss" in entry]
    losses, norms, weights = full_batch(documents_of(checkpoint, end=False))
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-5)
    assert [e["grad_norm"] for e in steps] == pytest.approx(norms, rel=1e-5)
    assert all(entry["longctx_bytes_moved"] > 0 for entry in steps)
    saved = AutoModelForCausalLM.from_pretrained(checkpoint / "stock")
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
    assert "find_unused_parameters" not in printed  # of DDP, where a step used all it had


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


def test_a_removed_flag_is_named_with_its_remedy():
    with pytest.raises(ValueError, match="longctx_verify was removed: .* `hf-longctx verify`"):
        read(["s.py", "--attn_implementation", "distca", "--longctx_verify", "off"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("s.py", "the following arguments are required: --attn_implementation"),
        ("--attn_implementation distca s.py", "the script comes first"),
        (
            "s.py --attn_implementation distca --longctx_layuot zigzag",
            "no such flag: --longctx_layuot; did you mean --longctx_layout?",
        ),
        ("s.py --attn_implementation distca --longctx_group_size x", "longctx_group_size"),
    ],
)
def test_a_wrong_flag_ends_before_the_script_starts(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        read(line.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_help_teaches(capsys):
    for argv, code in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            read(argv)
        assert ended.value.code == code
    printed = capsys.readouterr().out
    assert "(default: 4096)" in printed
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


def test_flags_go_first_and_only_where_they_are_allowed():
    launch = patched("s.py --attn_implementation ring a b")
    files, chooser, sub = (argparse.ArgumentParser() for _ in range(3))
    files.add_argument("--attn_implementation")
    files.add_argument("files", nargs=argparse.REMAINDER)
    chooser.add_argument("--attn_implementation", choices=["sdpa", "eager"], default="sdpa")
    sub.add_argument("--attn_implementation")
    sub.add_subparsers(dest="command").add_parser("a").add_argument("more")
    with launch.patched():
        found = files.parse_args()
        assert (found.attn_implementation, found.files) == ("ring", ["a", "b"])
        assert sub.parse_args().attn_implementation == "ring"
        assert sub.parse_args([]).attn_implementation is None
        assert chooser.parse_known_args()[0].attn_implementation == "sdpa"  # from_pretrained will


def test_a_parser_that_knows_none_gets_none():
    launch = patched("s.py --lr 3 --attn_implementation ring")
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    with launch.patched():
        assert vars(parser.parse_args()) == {"lr": "3"}
    assert not launch.handed


def test_everything_is_put_back(tmp_path):
    parsing, argv, path = argparse.ArgumentParser.parse_known_args, sys.argv, [*sys.path]
    with patched("/folder/s.py --attn_implementation ring").patched():
        assert argparse.ArgumentParser.parse_known_args is not parsing
        assert sys.path == ["/folder", *path[1:]]
    assert argparse.ArgumentParser.parse_known_args is parsing
    assert sys.argv is argv and sys.path == path
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert type(Trainer(model=torch.nn.Linear(1, 1), args=arguments)) is Trainer


@pytest.mark.parametrize("name", ["distca", "ring"])
def test_every_way_to_a_causal_model_gets_the_name(checkpoint, name, caplog):
    place, config = checkpoint / "model", AutoConfig.from_pretrained(checkpoint / "model")
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


def test_subclasses_of_a_trainer_become_cooperative():
    class Theirs(Trainer):
        pass

    class Ours(LongCtxTrainerMixin, Trainer):
        pass

    launch = patched("s.py --attn_implementation ring --longctx_max_tokens_per_rank 9")
    for of in (Theirs, Ours):
        made = launch.cooperative(of)
        assert issubclass(made, LongCtxTrainerMixin) and issubclass(made, of)
        assert made.__name__ == of.__name__ and made is launch.cooperative(of)


def test_a_batch_size_that_was_set_is_refused(checkpoint, caplog):
    flags = [
        str(SCRIPT), "--model", str(checkpoint / "model"), "--attn_implementation", "distca",
        "--data", str(checkpoint / "texts" / "train.jsonl"), *training_flags(checkpoint, "refused"),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        Launch(read([*flags, "--per_device_train_batch_size=8"])).run()
    assert ended.value.code == 2
    assert "error: per-device batch sizes: per_device_train_batch_size=8" in caplog.text


def test_a_lost_trainer_is_waited_for_no_longer_than_with_our_own_arguments(checkpoint, tmp_path):
    flags = training_flags(checkpoint, "waits")
    code = "from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer\n"
    code += "from transformers import TrainingArguments\n"
    code += "a = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]\n"
    code += f"m = AutoModelForCausalLM.from_pretrained({str(checkpoint / 'model')!r})\n"
    code += "t = Trainer(m, a, train_dataset=[{'input_ids': [1, 2, 3]}])\n"
    code += f"assert t.args.ddp_timeout == {LongCtxTrainingArguments.ddp_timeout}\n"
    code += "assert t.args.longctx_max_tokens_per_rank == 128\n"
    (tmp_path / "script.py").write_text(code)
    launch = Launch(read([str(tmp_path / "script.py"), *flags, "--attn_implementation", "ring"]))
    launch.run()
    assert launch.trainers == 1


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
    with pytest.raises(SystemExit):
        main(["s.py", "--attn_implementation", "chram"])
    assert "did you mean 'charm'?" in caplog.text
