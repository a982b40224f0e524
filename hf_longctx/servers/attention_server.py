"""Run `hf-longctx serve` without importing the package's `__init__`, as a trainer's server.

A trainer runs this file by its path, which `ps` then shows. With `-m` Python would import the
package first, and with it Transformers, which takes longer than the rest of a server's start.
Layer: servers.
"""

import runpy
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    # An empty package that knows its folder: its modules can be imported, its __init__ never runs.
    package = types.ModuleType("hf_longctx")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["hf_longctx"] = package
    sys.argv[0] = "hf-longctx"
    runpy.run_module("hf_longctx.cli.main", run_name="__main__", alter_sys=True)
