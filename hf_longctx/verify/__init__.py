"""Compare a model under one of our names, over ranks, with one process that runs each document."""
