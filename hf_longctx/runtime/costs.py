"""Cost tables of this machine: which file of the user's cache holds one.

Floor: runtime. `hf-longctx profile` writes them; a training run reads the one of its layers.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..plan.measured import CostTable


def cost_file(*, device: str, dtype: str, heads: int, kv_heads: int, head_dim: int) -> Path:
    """Where the table of a device, a dtype, a layer's shape and this version of the package is.

    In `$XDG_CACHE_HOME/hf_longctx`, or `~/.cache/hf_longctx`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{device}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()
    try:
        ours = version("hf-longctx")
    except PackageNotFoundError:  # a source tree that is not installed
        ours = "0"
    shape = f"{heads}-{kv_heads}-{head_dim}"
    return cache / "hf_longctx" / f"costs-{name}-{dtype}-{shape}-{ours}.json".replace(" ", "_")


def save(table: CostTable, path: Path) -> None:
    """Write a table; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.to_json() + "\n")


def load(path: Path) -> CostTable:
    """Read a table.

    Raises:
        ValueError: where there is none, naming the file and the command that writes it.
    """
    if not path.is_file():
        raise ValueError(f"no cost table at {path}")
    return CostTable.from_json(path.read_text())
