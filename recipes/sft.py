"""Run the recipe from a clone: `accelerate launch recipes/sft.py FLAGS`, as `-m hf_longctx.sft`."""

import sys

from hf_longctx.cli.sft import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
