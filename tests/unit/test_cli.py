"""The command line: its version, the files that `init` writes, and where moved commands went."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_longctx
from hf_longctx.cli.init import recipes
from hf_longctx.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"hf-longctx {hf_longctx.__version__}\n"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    for name in ("check", "verify", "init", "sft", "profile", "serve"):
        assert re.search(rf"^ +{name} ", told, re.MULTILINE), name
    assert "bench" not in told and "cluster" not in told


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (["bench", "packed", "--json", "my file"], "run python -m benchmarks packed --json 'my fi"),
        (["cluster", "nodes=2", "--", "true"], "run python -m benchmarks.cluster nodes=2 -- true"),
        (["bench"], "run python -m benchmarks"),
    ],
)
def test_commands_that_left_the_package_name_the_new_one(given, instead, capsys):
    assert main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert instead in line


@pytest.mark.parametrize("name", [*recipes()])
def test_init_writes_a_recipe_that_names_its_own_files(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "new/run", "--recipe", name]) == 0
    files = {path.name: path for path in Path("new/run").iterdir()}
    recipe = files.pop(f"{name.partition('/')[2]}.yaml")
    command = f"-m hf_longctx.sft --config {recipe}"
    told = capsys.readouterr().out
    assert command in told
    (config,) = [path for path in files.values() if path.suffix == ".yaml"]
    assert f"--config_file {config} " in told
    assert config.read_text() == (ROOT / "accelerate_configs" / config.name).read_text()
    text = recipe.read_text()
    assert not re.search(r"(?<!new/run/)(accelerate_configs|recipes)/", text), text
    values = yaml.safe_load(text)
    original = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    for key in ("model_config",):
        if key in original:
            assert Path(values.pop(key)).read_text() == (ROOT / original.pop(key)).read_text()
    assert values == original


def test_init_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "cpu_2.yaml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path / 'cpu_2.yaml'} exists already; move it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["cpu_2.yaml"]
    assert (tmp_path / "cpu_2.yaml").read_text() == "mine"


def test_the_wheel_holds_every_package_and_recipe():
    listed = PROJECT["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "hf_longctx").rglob("__init__.py")}
    ours = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    mapped = {
        f"hf_longctx.{'.'.join(folder.relative_to(ROOT).parts)}": str(folder.relative_to(ROOT))
        for folder in (ROOT / "accelerate_configs", *(ROOT / "recipes").iterdir())
        if folder.is_dir() and folder.name != "__pycache__"
    }
    assert {*listed["packages"]} == ours | mapped.keys()
    assert listed["package-dir"] == mapped
