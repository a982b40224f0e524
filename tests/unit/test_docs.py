"""README.md and docs/ say what the code does: snippets run, links resolve, pages are fresh.

A `python` block runs, in a folder that holds `my_checkpoint`, `my_hybrid_checkpoint` and
`my_documents.jsonl`. If a `text` block follows it, that is what it must print. A block behind
`<!-- fragment -->` cannot run alone and is only compiled. `<!-- output: COMMAND -->` before a
`text` block names the command of ours that prints it.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from hf_longctx import LongCtxArguments, LongCtxTrainingArguments
from hf_longctx.cli.main import main as command_line

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = DOCS / "reference"
USER_PAGES = sorted(path for path in DOCS.rglob("*.md") if GENERATED not in path.parents)
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
CONFIGS = ROOT / "tests" / "configs"
README_BYTES = 8192

BLOCK = re.compile(
    r"(?P<before>(?:<!--[^\n]*-->\n)?)```(?P<kind>\w+)\n(?P<text>.*?)^```\n", re.M | re.S
)
FOLLOWED = re.compile(r"\s*```text\n(.*?)^```\n", re.M | re.S)
OUTPUT = re.compile(r"<!-- output: (.*?) -->\n```text\n(.*?)^```\n", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Snippet(NamedTuple):
    """A `python` block of a page."""

    place: str
    text: str
    fragment: bool
    prints: str | None


def snippets() -> Iterator[Snippet]:
    """The `python` blocks of all pages."""
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            if block["kind"] == "python":
                line = text.count("\n", 0, block.start("text")) + 1
                after = FOLLOWED.match(text, block.end())
                yield Snippet(
                    f"{page.relative_to(ROOT)}:{line}",
                    block["text"],
                    "<!-- fragment -->" in block["before"],
                    after[1] if after else None,
                )


SNIPPETS = list(snippets())


def prose(page: Path) -> str:
    """A page without its code blocks: text in them is no link and no heading."""
    return BLOCK.sub("", page.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the snippets load: two tiny checkpoints and some texts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("docs")
    words = {f"w{i}": i for i in range(60)} | {"<eos>": 60, "<pad>": 61, "<unk>": 62}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    for name, family in (("my_checkpoint", "llama"), ("my_hybrid_checkpoint", "qwen3_next")):
        config = json.loads((CONFIGS / f"tiny_{family}.json").read_text())
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        model.save_pretrained(place / name)
        fast.save_pretrained(place / name)
    lines = [json.dumps({"text": " ".join(f"w{i % 60}" for i in range(n))}) for n in (90, 7, 40)]
    (place / "my_documents.jsonl").write_text("\n".join(lines) + "\n")
    return place


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 7, [snippet.place for snippet in SNIPPETS]
    assert any(snippet.prints for snippet in SNIPPETS)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.place)
def test_snippet_runs(
    snippet: Snippet, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = compile(snippet.text, snippet.place, "exec")
    if snippet.fragment:
        return
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    if snippet.prints is not None:
        assert printed.getvalue().splitlines() == snippet.prints.splitlines()


OUTPUTS = [
    pytest.param(command, text, id=f"{page.relative_to(ROOT)}: {command}")
    for page in PAGES
    for command, text in OUTPUT.findall(page.read_text())
]


@pytest.mark.parametrize(("command", "text"), OUTPUTS)
def test_command_prints_what_the_page_shows(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *arguments = shlex.split(command)
    assert program == "hf-longctx"
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command_line(arguments)
    assert printed.getvalue().splitlines() == text.splitlines()


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


def generator() -> ModuleType:
    """`docs/generate.py` as a module."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh() -> None:
    pages: dict[Path, str] = generator().pages()
    assert {path.name for path in pages} == {path.name for path in GENERATED.iterdir()}
    stale = [path.name for path, text in pages.items() if path.read_text() != text]
    assert not stale, f"run python docs/generate.py: {stale}"


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {re.sub(r" +", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        # mkdocs sees docs alone
        inside = not page.is_relative_to(DOCS) or path.is_relative_to(DOCS)
        if not (path.exists() and inside):
            broken.append(link)
        elif anchor and anchor not in anchors(path):
            broken.append(f"{link} (no such heading)")
    assert not broken, broken


def test_site_lists_every_page() -> None:
    def paths(entries: Any) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from paths(value) if isinstance(value, list) else (value,)

    listed = list(paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(listed) == pages


def test_every_flag_is_explained_by_a_page_that_people_write() -> None:
    built = generator().built
    text = "\n".join(page.read_text() for page in USER_PAGES)
    missing = []
    for field in dataclasses.fields(LongCtxArguments):
        choices = getattr(field.type, "__args__", ())
        words = [choice for choice in choices if isinstance(choice, str)]
        usable = not words or sum(built(field.name, word) for word in words) > 1
        if usable and not re.search(rf"--{field.name}\b", text):
            missing.append(field.name)
    assert not missing, missing


def test_pages_name_no_flag_that_does_not_exist() -> None:
    known = {field.name for field in dataclasses.fields(LongCtxTrainingArguments)}
    for page in PAGES:
        unknown = set(re.findall(r"--(longctx_\w+)", page.read_text())) - known
        assert not unknown, (page, unknown)


def test_figures_name_their_command() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = readme.split("| figure | command |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 4
    assert all("`python -m benchmarks " in row for row in rows), rows
    for page, name, command in (
        (DOCS / "verify.md", "verify", "python examples/verify_families.py"),
        (DOCS / "recurrent.md", "packing", "python examples/packing_leaks.py"),
        (ROOT / "benchmarks" / "README.md", "bench", "python -m benchmarks"),
    ):
        start, end = f"<!-- figures:{name} -->", f"<!-- /figures:{name} -->"
        figures = page.read_text().split(start, 1)[1].split(end, 1)[0]
        assert command in page.read_text(), (page, command)
        assert re.search(r"\|[^|]*\d[^|]*\|", figures), page


def test_architecture_names_every_package() -> None:
    package = ROOT / "hf_longctx"
    text = (DOCS / "internals" / "architecture.md").read_text()
    folders = {path.parent.relative_to(package) for path in package.rglob("__init__.py")}
    missing = [str(folder) for folder in sorted(folders) if f"`{folder}/`" not in text]
    assert not [name for name in missing if name not in (".", "planning", "cli")], missing


def test_glossary_names_classes_that_exist_in_the_files_it_says() -> None:
    package = ROOT / "hf_longctx"
    glossary = (DOCS / "internals" / "glossary.md").read_text()
    types, files = glossary.split("## Types", 1)[1].split("## Files", 1)
    rows = re.findall(r"^\| (`[A-Z].*?) \| (`.*?) \|", types, re.M)
    assert len(rows) > 50, rows
    missing = []
    for names, places in rows:
        sources = "".join((package / place).read_text() for place in re.findall("`(.*?)`", places))
        missing += [
            f"{name} in {places}"
            for name in re.findall("`(.*?)`", names)
            if not re.search(rf"^class {name}\b", sources, re.M)
        ]
    assert not missing, missing
    classes = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.M)
    }
    mentioned = set(re.findall(r"`((?:[A-Z][a-z0-9]+){2,})`", glossary))
    assert mentioned <= classes, mentioned - classes
    gone = [
        place
        for place in re.findall(r"`(\w+/[\w/]+\.py)`", files)
        if not (package / place).exists()
    ]
    assert not gone, gone


def test_diagrams_are_there_and_say_what_they_show() -> None:
    for name in ("distca", "charm", "ring", "ulysses", "zeco_linear"):
        text = (DOCS / "images" / f"{name}.svg").read_text()
        assert f'<title id="t">{name}</title>' in text
        assert '<desc id="d">' in text
        assert f"images/{name}.svg" in (DOCS / "choosing.md").read_text()
