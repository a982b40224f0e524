"""Judge the repository's text by the house rules: import layers, lengths, names, docstrings.

Nothing of the package is imported: a file that cannot be imported is still judged.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hf_longctx"
SOURCE_FOLDERS = (PACKAGE, "benchmarks", "recipes", "examples", "tests")

# Bottom to top. A file imports only from its own layer and from the layers below it.
LAYERS = (
    {"version"},
    {"support"},
    {"config"},
    {"kernels"},
    {"planning"},
    {"data"},
    {"comm"},
    {"runtime"},
    {"attention"},
    {"recurrent"},
    {"servers"},
    {"training"},
    {"verify"},
    {"run"},
    {"cli", "sft"},
    {"__init__"},
)
# A plan and its simulation are data: they run where no process group and no model exists.
PURE = {"planning"}
BANNED_IN_PURE = ("torch.distributed", "transformers", "accelerate")
PRINTING = {"cli"}

LINE_CAP = 500
TEST_LINE_CAP = 600

# In two pieces, so that this file does not find itself.
LEFTOVER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME)\b")
LINK = re.compile(r"https?://\S+|#\d+")
# Parents that many machines share, and that a text may name.
COMMON_PARENTS = {Path("/"), Path("/home"), Path("/tmp")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def repository_files() -> list[Path]:
    """Files that git tracks or would add; in an export without git, those of the source folders."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def python_files(*folders: str) -> list[Path]:
    """The repository's Python files below `folders`."""
    return [
        path
        for path in repository_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders
    ]


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, *, line: int) -> str:
    """`path:line` as an editor opens it."""
    return f"{path.relative_to(ROOT)}:{line}"


def owner(path: Path) -> str:
    """The first name below the package: `planning` of `hf_longctx/planning/planners/ring.py`."""
    return path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0]


def layer_of(name: str) -> int | None:
    """The layer that holds `name`, counted from the bottom; None for a name without a layer."""
    return next((level for level, names in enumerate(LAYERS) if name in names), None)


def uses(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import at any depth, and of each dotted name like `torch.fft`.

    `from a import b` gives `a.b`; relative imports are made absolute.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def imported_owner(name: str) -> str | None:
    """Which part of the package a dotted name reaches; None when it is not the package's."""
    head, _, rest = name.partition(".")
    if head != PACKAGE:
        return None
    part = rest.partition(".")[0]
    return part if layer_of(part) is not None else "__init__"  # the rest are public names


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """(name, node) of the module's public classes and functions, and of those classes' methods.

    Methods of a class with bases are left out: the base says what an override does.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node.name, node
            members = node.body if isinstance(node, ast.ClassDef) and not node.bases else []
            for member in members:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def test_each_file_has_a_layer() -> None:
    owners = {owner(path) for path in python_files(PACKAGE)}
    assert owners, f"no file below {PACKAGE}: the other tests here would pass on nothing"
    without = sorted(name for name in owners if layer_of(name) is None)
    assert not without, f"give these a layer in {Path(__file__).name}: {without}"


def test_imports_come_from_layers_below() -> None:
    upward = []
    for path in python_files(PACKAGE):
        own = layer_of(owner(path))
        for line, name in uses(path):
            target = imported_owner(name)
            if target is None or own is None:
                continue
            level = layer_of(target)
            if level is not None and level > own:
                upward.append(f"{place(path, line=line)} reaches up to {name}")
    assert not upward, "\n".join(upward)


def test_plans_know_no_process_group_and_no_model() -> None:
    impure = [
        f"{place(path, line=line)} uses {name}"
        for path in python_files(PACKAGE)
        if owner(path) in PURE
        for line, name in uses(path)
        if any(name == banned or name.startswith(f"{banned}.") for banned in BANNED_IN_PURE)
    ]
    assert not impure, "\n".join(impure)


def test_files_stay_short() -> None:
    long = []
    for path in python_files(*SOURCE_FOLDERS):
        cap = TEST_LINE_CAP if path.relative_to(ROOT).parts[0] == "tests" else LINE_CAP
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > cap:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines, cap {cap}")
    assert not long, "\n".join(long)


def test_class_names_are_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in python_files(PACKAGE):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(place(path, line=node.lineno))
    twice = [f"{name}: {', '.join(at)}" for name, at in places.items() if len(at) > 1]
    assert not twice, "\n".join(twice)


def test_leftovers_carry_a_link() -> None:
    unlinked = [
        place(path, line=number)
        for path in python_files(*SOURCE_FOLDERS)
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if LEFTOVER.search(text) and not LINK.search(text)
    ]
    assert not unlinked, "\n".join(unlinked)


def test_no_assert_is_true_by_construction() -> None:
    vacuous = [
        place(path, line=node.lineno)
        for path in python_files(*SOURCE_FOLDERS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and node.test.value
    ]
    assert not vacuous, "\n".join(vacuous)


def test_only_the_command_line_prints() -> None:
    printing = [
        place(path, line=node.lineno)
        for path in python_files(PACKAGE)
        if owner(path) not in PRINTING
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "pprint.pprint")
    ]
    assert not printing, "\n".join(printing)


def test_public_names_are_documented() -> None:
    silent = []
    for path in python_files(PACKAGE):
        tree = parse(path)
        if not ast.get_docstring(tree):
            silent.append(f"{place(path, line=1)} module")
        silent += [
            f"{place(path, line=node.lineno)} {name}"
            for name, node in public_definitions(tree)
            if not ast.get_docstring(node)
        ]
    assert not silent, "\n".join(silent)


def test_no_file_names_this_machine() -> None:
    parent = ROOT.parent
    if parent in COMMON_PARENTS:
        pytest.skip(f"{parent} says nothing about one machine")
    here = re.compile(rb"(?<![\w.-])" + re.escape(f"{parent}/".encode()))
    naming = [
        path.relative_to(ROOT) for path in repository_files() if here.search(path.read_bytes())
    ]
    assert not naming, naming
