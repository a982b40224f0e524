"""Measures ours against a peer and a bound in one run: one file per bench, `run() -> figures`.

Each bench prints shape, seed, machine and repetitions with its figures, runs the sides in turn so
that drift meets them alike, and checks that they computed the same loss and gradients.
"""
