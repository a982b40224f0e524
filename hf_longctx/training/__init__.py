"""Trainer, callback and data loaders: the names in a stock Trainer script."""
