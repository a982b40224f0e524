"""Print the lower bounds of pyproject.toml as pins, for `make test-lowest`.

torch is pinned to the version of constraints.txt instead, and standard error says so: its lower
bound is what GPU machines have, and a CPU build of that version is not at hand everywhere.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("trl", "peft", "test")


def main() -> None:
    """Print one `name==version` a line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    for requirement in wanted:
        found = re.fullmatch(r"([\w-]+)>=([\w.]+)(?:,<[\w.]+)?", requirement)
        if not found:
            sys.exit(f"{requirement!r} has no lower bound to test; write it as name>=version")
        name, version = found.groups()
        if name == "torch":
            pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
            at_hand = re.search(r"^torch==(\S+)$", pins, re.MULTILINE)
            assert at_hand, "constraints.txt pins no torch"
            print(f"torch {at_hand[1]} stands in for the bound {requirement}", file=sys.stderr)
            version = at_hand[1]
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
