"""Write the pages of docs/reference from the code.

    python docs/generate.py            # write them
    python docs/generate.py --check    # exit with 1 if a committed page differs

A page that the code can write is never edited by hand: flags come from the dataclass fields, the
support table from its rules, JSON keys from tables of the code and from docstrings.
`tests/unit/test_docs.py` compares the committed pages with what this script writes.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Every place where this script reaches into the code.
import hf_longctx  # noqa: E402
from hf_longctx import LongCtxArguments, LongCtxTrainingArguments, support  # noqa: E402
from hf_longctx.cli import profile, sft, verify  # noqa: E402
from hf_longctx.training import report  # noqa: E402
from hf_longctx.verify.check import Row  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"  # docstrings of its modules name the keys

REFERENCE = ROOT / "docs" / "reference"
HEADER = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"
LONGCTX = "longctx_"


# flags.md


def flags() -> str:
    """The flags of a training run, and those of the recipe."""
    return "\n".join(
        [
            "# Flags",
            "",
            "The `--longctx_*` flags are fields of `LongCtxArguments`. `LongCtxTrainingArguments`",
            "joins them with `TrainingArguments` of Transformers. A misspelt choice raises an",
            "error that names the nearest one.",
            "",
            "## Batches, attention and servers",
            "",
            *_flag_rows(LongCtxArguments, named=lambda name: name.startswith(LONGCTX)),
            "",
            "## What `LongCtxTrainingArguments` changes",
            "",
            *_flag_rows(
                LongCtxTrainingArguments,
                named=lambda name: name in LongCtxTrainingArguments.__annotations__,
            ),
            "",
            "## The recipe's own flags: model",
            "",
            *_flag_rows(sft.ModelArguments),
            "",
            "## The recipe's own flags: data",
            "",
            *_flag_rows(sft.DataArguments),
            "",
        ]
    )


def _flag_rows(owner: Any, *, named: Callable[[str], bool] = lambda name: True) -> list[str]:
    """A Markdown table: flag, values, default, help."""
    hints = get_type_hints(owner)
    rows = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(owner):
        if named(field.name) and field.init:
            values = _values(hints[field.name], name=field.name, owner=owner)
            cells = f"`--{field.name}`", values, _code(field.default), field.metadata["help"]
            rows.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return rows


def _values(hint: Any, *, name: str, owner: Any) -> str:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        ours = owner is LongCtxArguments
        return ", ".join(
            f"`{value}`" + (" (not built yet)" if ours and not built(name, value) else "")
            for value in choices
        )
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return " or ".join(kind.__name__ for kind in kinds)


def built(name: str, value: str) -> bool:
    """Whether a choice of a `longctx_*` flag works: one that is not built yet raises."""
    try:
        LongCtxArguments(**{name: value})
    except ValueError as error:
        return "not built yet" not in str(error)
    return True


def _code(value: object) -> str:
    return "none" if value is None or value == "" else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# support.md


def support_table() -> str:
    """What works under which attention name, and why not."""
    return "\n".join(
        [
            "# What is supported, and what is refused",
            "",
            "Each row is a feature of a model or of a run. Rows with `refused` are rules: the",
            "package raises a `ValueError` before the first step and names the value, the rule and",
            "the remedy. `hf-longctx check --model M` applies the rules of models to yours.",
            "",
            support.table(),
            "",
        ]
    )


# logged_keys.md


def logged_keys() -> str:
    """The keys that each logged step adds."""
    return "\n".join(
        [
            "# Logged keys",
            "",
            "Each logged training step adds these keys to `trainer.state.log_history`. They cover",
            "all trainers and all micro-batches since the last log.",
            "",
            "| key | meaning |",
            "|---|---|",
            *(f"| `{key}` | {text} |" for key, text in report.LOGGED_KEYS.items()),
            "",
            "`make demo` and the callback print them as a table at the end of a run.",
            "",
        ]
    )


# json_keys.md

BENCHMARK_PAGES = {  # heading -> modules whose docstrings list its keys
    "packed": ("packed",),
    "packed --model qwen3_next": ("packed_linear",),
    "distca": ("distca", "tables", "exposed", "served"),
    "charm": ("charm", "sweep"),
    "zeco": ("zeco",),
    "trainer": ("trainer",),
    "plan": ("plan",),
}


def json_keys() -> str:
    """The keys of every JSON file that a command writes."""
    lines = [
        "# JSON keys",
        "",
        "Each command below writes one JSON object with `--json FILE`. Nested objects are printed",
        "as `outer.inner`.",
        "",
        "## `hf-longctx verify`",
        "",
        *_table(verify.FIGURES),
        "",
        "With `--kill`:",
        "",
        *_table(verify.KILL_FIGURES),
        "",
        "## `hf-longctx check`",
        "",
        "`model`, and `rows` with one object per attention name:",
        "",
        *_table(_arguments(inspect.getdoc(Row) or "")),
        "",
        "## `--summary_json` of the recipe, `trainer.longctx_summary()`",
        "",
        *_table(report.SUMMARY_KEYS),
        "",
        "## `hf-longctx profile`",
        "",
        *_table(profile.FIGURES),
        "",
        "With `--compare`, for each layout:",
        "",
        *_table(profile.COMPARED_FIGURES),
        "",
    ]
    for heading, modules in BENCHMARK_PAGES.items():
        lines += [f"## `python -m benchmarks {heading}`", ""]
        for module in modules:
            lines += [*_bullets(_docstring(BENCHMARKS / f"{module}.py"))]
        lines += [""]
    return "\n".join(lines)


def _table(found: Mapping[str, str]) -> list[str]:
    keys = (", ".join(f"`{key}`" for key in keys.split(", ")) for keys in found)
    rows = (f"| {key} | {_cell(text)} |" for key, text in zip(keys, found.values(), strict=True))
    return ["| key | meaning |", "|---|---|", *rows]


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _bullets(docstring: str) -> list[str]:
    """The lines of a docstring's lists."""
    found, inside = [], False
    for line in docstring.splitlines():
        inside = line.startswith("- ") or (inside and line.startswith("  "))
        if inside:
            found.append(line)
    return found


def _section(docstring: str, name: str) -> str:
    """A docstring's section, without its indent."""
    after = docstring.split(f"{name}:\n", 1)[1]
    kept = [line for line in re.split(r"\n(?=\S)", after, maxsplit=1)[0].splitlines()]
    return textwrap.dedent("\n".join(kept)).strip()


def _arguments(docstring: str) -> dict[str, str]:
    """Arguments of a docstring -> what they are."""
    listed = re.split(r"\n(?=\S)", _section(docstring, "Args"))
    parts = (" ".join(entry.split()).split(": ", 1) for entry in listed)
    return {head.split(" (")[0]: text for head, text in parts}


# api.md


def api() -> str:
    """mkdocstrings directives for every public name."""
    lines = [
        "# Python API",
        "",
        "`import hf_longctx` registers the attention names `distca`, `charm`, `ring`, `ulysses`",
        "and `zeco_linear` with Transformers. Models with recurrent layers then refuse packed",
        "documents under these names until they are prepared. It does nothing else.",
        "",
    ]
    for name in sorted(name for name in hf_longctx.__all__ if not name.startswith("_")):
        lines += [f"## `{name}`", "", f"::: hf_longctx.{name}", ""]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags,
    "support.md": support_table,
    "logged_keys.md": logged_keys,
    "json_keys.md": json_keys,
    "api.md": api,
}


def pages() -> dict[Path, str]:
    """Path of each generated page -> its text."""
    return {REFERENCE / name: HEADER + write() for name, write in PAGES.items()}


def main(argv: list[str]) -> int:
    """Write the pages, or compare them with those that are there."""
    stale = []
    for path, text in pages().items():
        if argv == ["--check"]:
            stale += [path.name] if not path.exists() or path.read_text() != text else []
        else:
            path.write_text(text)
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run python docs/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
