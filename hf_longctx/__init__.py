"""Exact attention across ranks for long, uneven documents, behind one Transformers flag.

Importing this package registers the attention names `distca`, `charm`, `ring`, `ulysses`,
`zeco_linear`, and has models with recurrent layers, as they are given one of these, refuse packed
documents until they are prepared; nothing else happens.
"""

from .arguments import LongCtxArguments, LongCtxTrainingArguments
from .attention.register import register
from .models.prepare import prepare
from .models.watch import watch_names
from .training.trainer import LongCtxTrainer, LongCtxTrainerMixin
from .verify.check import check

register()
watch_names()

__all__ = [
    "LongCtxArguments",
    "LongCtxTrainer",
    "LongCtxTrainerMixin",
    "LongCtxTrainingArguments",
    "check",
    "prepare",
    "register",
]
