"""Run `hf_longctx.check` and `hf-longctx check`: rows for every name, from a model or a config."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import CONFIGS, tiny
from transformers import AutoConfig

import hf_longctx
from hf_longctx.attention.spec import layer_specs
from hf_longctx.cli.main import main
from hf_longctx.support import NAMES, SOFTMAX_NAMES
from hf_longctx.verify.check import MAX_PARAMETERS, shrink, small_model


def works(subject: Any) -> dict[str, bool]:
    return {row.name: row.works for row in hf_longctx.check(subject)}


SOFTMAX = {name: name in SOFTMAX_NAMES for name in NAMES}  # what works with softmax layers alone
RECURRENT = {name: name not in SOFTMAX_NAMES for name in NAMES}


def on_meta() -> Any:
    with torch.device("meta"):
        return tiny("sdpa")


def with_lora() -> Any:
    targets = ["q_proj", "v_proj"]
    return get_peft_model(tiny("sdpa"), LoraConfig(r=2, target_modules=targets))


@pytest.mark.parametrize(
    "subject",
    [
        lambda: tiny("sdpa"),
        lambda: tiny("distca"),
        lambda: tiny("eager").config,
        on_meta,
        with_lora,
    ],
    ids=["sdpa", "distca", "config", "meta", "lora"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # PEFT asks by an old name
def test_a_llama_works_in_every_form(subject):
    assert works(subject()) == SOFTMAX


@pytest.mark.parametrize("name", ["sdpa", "eager", "ring"])
@pytest.mark.parametrize("training", [False, True])
def test_a_checked_model_is_left_as_it_was(name, training):
    model = tiny(name).train(training)
    before = {key: p.clone() for key, p in model.named_parameters()}
    assert works(model) == SOFTMAX
    assert model.training is training
    assert {part.config._attn_implementation for part in (model, model.model)} == {name}
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())


@pytest.mark.parametrize("family", ["qwen3_next", "minimax", "lfm2"])
@pytest.mark.parametrize("from_config", [True, False])
def test_a_checked_model_with_recurrent_layers_is_left_as_it_was(family, from_config):
    model = tiny("sdpa", family=family)
    assert works(model.config if from_config else model) == RECURRENT
    assert model.config._attn_implementation == "sdpa"
    assert all("forward" not in vars(part) for part in model.modules())


def test_a_wrong_model_is_left_as_it_was_too():
    model = tiny("sdpa").train()
    model.model.rotary_emb.inv_freq.zero_()
    (row, *_) = hf_longctx.check(model)
    assert not row.works and row.rule.startswith("positions that are not read: LlamaForCausalLM")
    assert row.remedy == "use a model that takes position_ids"
    assert model.training and model.config._attn_implementation == "sdpa"


def test_every_rule_that_applies_is_listed():
    config = AutoConfig.for_model("mixtral", attention_dropout=0.1, router_jitter_noise=0.2)
    row = hf_longctx.check(config)[0]
    assert [part.split(":")[0] for part in row.rule.split(" | ")] == [
        "attention dropout",
        "router noise",
    ]
    assert row.remedy == "set it to 0.0 | set it to 0.0"


@pytest.mark.parametrize(
    "subject",
    [None, 3, "a path", torch.nn.Linear(2, 2), torch.nn.Module(), {"model_type": "llama"}],
)
def test_nothing_is_raised(subject):
    rows = hf_longctx.check(subject)
    assert [row.name for row in rows] == [*NAMES]
    assert all(not row.works and row.rule and row.remedy for row in rows)


def test_a_model_without_its_own_class_in_the_auto_classes_gives_rows():
    rows = hf_longctx.check(AutoConfig.for_model("clip"))
    assert not rows[0].works and "no small instance of this family can be built" in rows[0].rule


# A config of a large checkpoint -> a small instance

LARGE = {
    "llama": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008],
        "pad_token_id": 128004,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
    },
    "deepseek_v3": {},  # 671 billion parameters
    "gpt_oss": {},
    "gemma4_text": {},
}


@pytest.mark.parametrize("family", LARGE)
def test_a_small_instance_keeps_what_decides_support(family):
    config = AutoConfig.for_model(family, **LARGE[family])
    before = config.to_dict()
    model = small_model(config)
    small = model.config
    assert config.to_dict() == before
    assert sum(p.numel() for p in model.parameters()) < MAX_PARAMETERS
    assert {spec.kind for spec in layer_specs(small)} == {spec.kind for spec in layer_specs(config)}
    for name in ("num_attention_heads", "sliding_window", "rope_parameters", "model_type"):
        assert getattr(small, name, None) == getattr(config, name, None)
    for name in ("layer_types", "mlp_layer_types"):
        assert set(getattr(small, name, None) or ()) == set(getattr(config, name, None) or ())
    ids = [small.bos_token_id, small.eos_token_id, small.pad_token_id]
    flat = [i for given in ids for i in (given if isinstance(given, list) else [given]) if i]
    assert all(0 <= i < small.vocab_size == 256 for i in flat)


def test_numbered_layers_are_numbered_anew():
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=8, interleave_moe_layer_step=2)
    assert config.moe_layers == [1, 3, 5, 7] and config.no_rope_layers == [1, 1, 1, 0] * 2
    small = shrink(config)
    kinds = [(n in small.moe_layers, r) for n, r in enumerate(small.no_rope_layers)]
    assert kinds == [(False, 1), (True, 1), (True, 0)]
    assert small.layer_types == ["chunked_attention"] * 2 + ["full_attention"]


def test_a_large_config_that_cannot_be_shrunk_is_not_run(monkeypatch):
    def refuse(config: Any, **given: Any) -> Any:
        raise RuntimeError("sizes do not fit")

    monkeypatch.setattr("hf_longctx.verify.check.shrink", refuse)
    assert works(tiny("sdpa").config) == SOFTMAX  # small enough as it is
    row = hf_longctx.check(AutoConfig.for_model("llama"))[0]
    assert not row.works and row.rule.startswith("nothing was run: no small instance")
    assert "parameters are above 300,000,000" in row.rule
    assert row.remedy == "load the model and pass it to hf_longctx.check"


# The command


@pytest.mark.parametrize(
    ("model", "rule", "remedy"),
    [
        ("llama4", "temperature from positions: attn_temperature_tuning=True", "'sdpa' for now"),
        ("bloom", "no attention interface: model_type=bloom", "with its own attention"),
        ("phi3_longrope", "RoPE longrope or dynamic: rope_type=longrope", "linear, yarn or llama3"),
    ],
)
def test_the_command_prints_rule_and_remedy(model, rule, remedy, capsys):
    assert main(["check", "--model", str(CONFIGS / f"tiny_{model}.json")]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert rule in printed and remedy in printed
    assert all(f"{name} refused" in printed for name in NAMES)


def test_the_command_prints_what_works_and_writes_it(tmp_path, capsys):
    model, out = str(CONFIGS / "tiny_llama.json"), tmp_path / "rows.json"
    assert main(["check", "--model", model, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("distca       works\ncharm ") and "\nring         works\n" in printed
    found = json.loads(out.read_text())
    assert found["model"] == model
    assert [row["name"] for row in found["rows"]] == [*NAMES]
    assert found["rows"][0] == {"name": "distca", "works": True, "rule": "", "remedy": ""}
    assert main(["check", "--model", model, "--attn_implementation", "ring"]) == 0
    assert main(["check", "--model", model, "--attn_implementation", "zeco_linear"]) == 2


@pytest.mark.parametrize("layers", [0, -3, 10**8])
def test_a_number_of_layers_that_no_model_has_is_refused(layers, tmp_path, capsys):
    message = f"num_hidden_layers={layers:,}: a model has 1 to 10,000 layers"
    row = hf_longctx.check(AutoConfig.for_model("llama", num_hidden_layers=layers))[0]
    assert (row.works, row.rule) == (False, message)
    assert row.remedy == "give the number that the checkpoint has"
    path = tmp_path / "config.json"  # Qwen3's config class lists the kind of every layer
    path.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": layers}))
    for place in (path, tmp_path):
        assert main(["check", "--model", str(place)]) == 1
        said = " ".join("".join(capsys.readouterr()).split())
        assert message in said and row.remedy in said


@pytest.mark.parametrize(
    ("given", "kind"), [("null", "NoneType"), ("3", "int"), ('[{"model_type": "llama"}]', "list")]
)
def test_a_config_that_is_no_object_is_refused(given, kind, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(given)
    for place in (path, tmp_path):
        assert main(["check", "--model", str(place)]) == 1
        said = capsys.readouterr().err
        assert f"holds a JSON {kind}; a config is an object with a model_type" in said


def test_a_folder_needs_no_weights(tmp_path):
    tiny("sdpa").config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert main(["check", "--model", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "no_such_file.json"], "--model no_such_file.json: no such file or folder"),
        (["--model", __file__], "test_model_check.py: no JSON ("),
        (["--model", str(CONFIGS / "tiny_llama.json"), "--json", "no/such/folder"], "No such file"),
        (
            ["--model", str(CONFIGS / "tiny_llama.json"), "--attn_implementation", "chram"],
            "did you mean 'charm'?",
        ),
        (["--model", str(CONFIGS / "tiny_llama.json"), "--rank", "2"], "unrecognized arguments"),
        ([], "the following arguments are required: --model"),
    ],
)
def test_missing_files_and_wrong_flags_exit_with_1(flags, message, capsys):
    try:
        code: Any = main(["check", *flags])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 1
    assert message in capsys.readouterr().err
