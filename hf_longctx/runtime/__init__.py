"""Runs programs: executor, autograd nodes and what a batch keeps between forward and backward."""
