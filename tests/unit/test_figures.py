"""The figures of `.ci/figures.py` on a small package, counted by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "figures.py"
FILES = {
    "hf_longctx/__init__.py": "from .top import go\n",
    "hf_longctx/top.py": "from . import low\nfrom .deep import Shown\n\ndef go(): ...\n",
    "hf_longctx/low.py": '"""Two\n\nlines."""\nimport hf_longctx.deep.other as o  # why\n# noqa\n',
    "hf_longctx/deep/__init__.py": '"""Passes on."""\n\nfrom .inner import Shown\n',
    "hf_longctx/deep/inner.py": "class Shown:\n    # a thing\n    text = '''a\n\n# no\n'''\n",
    "hf_longctx/deep/other.py": "def f():\n    from ..top import go  # noqa\nclass _Shown: ...\n",
    "hf_longctx/planning/planners/ring.py": "from ...low import o\n",
    "hf_longctx/late.py": "from .planning.planners import ring\nfrom .top import go\n",
    "tests/test_one.py": "from hf_longctx import late\n",
    "README.md": "words",
}


@pytest.fixture
def figures() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_figures_of_a_small_package(figures, tmp_path, capsys):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    values, lists = figures["measure"](tmp_path)
    assert values["files in the package"] == 8
    assert values["lines of code"] == 1 + 3 + 1 + 1 + 5 - 1 + 3 + 1 + 2
    assert values["% comments, of code and comments"] == pytest.approx(100 * 2 / (16 + 1))
    assert values["bytes of the README"] == 5
    assert lists["classes defined twice"] == [
        "Shown: hf_longctx/deep/inner.py:1, hf_longctx/deep/other.py:3"
    ]
    # low by top and ring; inner by top, through the name that its package passes on; other by low;
    # top by other and late; ring is registered; nobody but a test imports late
    assert lists["modules with one importer (2 of 6)"] == [
        "hf_longctx/deep/inner.py by hf_longctx.top",
        "hf_longctx/deep/other.py by hf_longctx.low",
    ]
    assert figures["main"](["--root", str(tmp_path)]) == 1
    assert "BROKEN        1 class names defined twice (<= 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("comment", "pure"),
    [
        ("# noqa", True),
        ("# noqa: E402", True),
        ("# type: ignore[misc]", True),
        ("# fmt: skip", True),
        ("# noqa: F401  (registers the names)", False),
        ("# no quality", False),
    ],
)
def test_pragmas_are_no_comments(figures, comment, pure):
    assert bool(figures["PRAGMA"].fullmatch(comment)) == pure
