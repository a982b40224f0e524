"""The README says what the code does: its table is generated and its tree is complete."""

from pathlib import Path

from hf_longctx import support

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def between(start: str, end: str) -> str:
    return README.split(start, 1)[1].split(end, 1)[0].strip()


def test_support_table_is_the_one_that_support_writes() -> None:
    start = "<!-- support table: written by hf_longctx.support.table() -->"
    assert between(start, "<!-- /support table -->") == support.table()


def test_tree_names_every_module() -> None:
    tree = between("## Reading order", "`make quality`")
    modules = {
        path.name for path in (ROOT / "hf_longctx").rglob("*.py") if path.name != "__init__.py"
    }
    missing = sorted(name for name in modules if name not in tree)
    assert not missing, missing


def test_figures_are_filled_and_name_their_command() -> None:
    for name, command in (("verify", "hf-longctx verify"), ("bench", "hf-longctx bench")):
        figures = between(f"<!-- figures:{name} -->", f"<!-- /figures:{name} -->")
        assert command in figures, name
