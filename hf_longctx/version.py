"""Name the version of the installed package.

Layer: version. It stands apart so that a server process reads it without importing Transformers.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("hf-longctx")
except PackageNotFoundError:  # imported from a source tree that was never installed
    VERSION = "unknown"
