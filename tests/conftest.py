"""Settings that must hold before any test module imports torch or a Hugging Face library."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that asks the hub for a file fails at once
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores; sums keep one order
