"""Compute on one process: naive references, fast kernels, and the merge of partials."""
