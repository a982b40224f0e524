"""`hf-longctx serve` without the package's `__init__`: what a trainer starts as its server.

Layer: servers. Run by its path, which `ps` shows: `-m` would import Transformers, which takes
longer than all the rest of a server's start.
"""

import runpy
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    package = types.ModuleType("hf_longctx")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["hf_longctx"] = package
    sys.argv[0] = "hf-longctx"
    runpy.run_module("hf_longctx.cli.main", run_name="__main__", alter_sys=True)
