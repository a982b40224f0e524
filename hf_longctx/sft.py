"""Run the recipe on every rank: `accelerate launch -m hf_longctx.sft FLAGS`.

Layer: cli. A short name for launchers; the recipe itself is `hf_longctx.cli.sft`.
"""

import sys

from .cli.sft import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
