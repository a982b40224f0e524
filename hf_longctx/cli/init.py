"""`hf-longctx init`: copy a recipe and its accelerate config into a folder, to edit and launch.

The wheel carries the files of `recipes/` and `accelerate_configs/` as package data; in a clone they
are read from the top of the repository. Exit codes: 0 written, 2 refused. Layer: cli.
"""

import argparse
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

_DEFAULT = "smollm2/distca_cpu"
# What a recipe's text names: its accelerate config, and files of its own beside it.
_CONFIG = re.compile(r"accelerate_configs/([\w.]+\.yaml)")
_BESIDE = re.compile(r"^\w+: recipes/([\w/]+\.json)$", re.MULTILINE)


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    init = commands.add_parser(
        "init",
        help="copy a recipe and an accelerate config into a folder, to start from",
        description=(
            "Writes a recipe (YAML) and the accelerate config that goes with it into DIR, and "
            "prints the command that launches them. Files that exist are never overwritten."
        ),
        epilog="example: hf-longctx init my_run --recipe smollm2/charm_cpu",
    )
    init.add_argument("folder", metavar="DIR", help="where to write; made if it is missing")
    init.add_argument(
        "--recipe", default=_DEFAULT, metavar="NAME", choices=[*recipes()],
        help=f"one of {', '.join(recipes())} (default: {_DEFAULT})",
    )  # fmt: skip
    init.set_defaults(run=run)


def _data(folder: str) -> Any:
    """Find a folder of data files: inside the installed package, else beside it in a clone."""
    inside = resources.files("hf_longctx").joinpath(folder)
    return inside if inside.is_dir() else Path(__file__).parents[2] / folder


def recipes() -> dict[str, str]:
    """Read the recipes: name, as `smollm2/distca_cpu`, and text."""
    return {
        f"{folder.name}/{file.name.removesuffix('.yaml')}": file.read_text(encoding="utf-8")
        for folder in sorted(_data("recipes").iterdir(), key=lambda entry: entry.name)
        if folder.is_dir()
        for file in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if file.name.endswith(".yaml")
    }


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print what to do next; returns the exit code."""
    folder, name = Path(arguments.folder), arguments.recipe
    text = recipes()[name]
    recipe, config = folder / f"{name.partition('/')[2]}.yaml", _CONFIG.findall(text)[0]
    sources = {folder / config: _data("accelerate_configs").joinpath(config)}
    for beside in _BESIDE.findall(text):
        place = folder / beside.rpartition("/")[2]
        sources[place] = _data("recipes").joinpath(beside)
        text = text.replace(f"recipes/{beside}", str(place))
    # The comments of a recipe show commands as they are run in a clone.
    text = text.replace(f"accelerate_configs/{config}", str(folder / config))
    text = text.replace("python recipes/sft.py", "hf-longctx sft")
    text = text.replace(f"recipes/{name}.yaml", str(recipe))
    text = text.replace("recipes/sft.py", "-m hf_longctx.sft")
    written = {place: source.read_text(encoding="utf-8") for place, source in sources.items()}
    written[recipe] = text
    if existing := [str(place) for place in written if place.exists() or place.is_symlink()]:
        raise ValueError(f"{', '.join(existing)} exists already; move it or name another DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{folder}: a file has that name; give another DIR") from error
    for place, content in written.items():
        place.write_text(content, encoding="utf-8")
        print(f"wrote {place}", file=sys.stderr)
    print(
        f"Edit model_name_or_path, gguf_file and data in {recipe}, then run:\n\n"
        f"    accelerate launch --config_file {folder / config} -m hf_longctx.sft "
        f"--config {recipe}"
    )
    return 0
