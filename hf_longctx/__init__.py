"""Exact attention across ranks for long, uneven documents, behind one Transformers flag.

Importing this package registers the attention names `distca`, `charm`, `ring`, `ulysses`,
`zeco_linear`; nothing else happens.
"""

from .arguments import LongCtxArguments, LongCtxTrainingArguments
from .attention.register import register
from .models.prepare import prepare
from .training.trainer import LongCtxTrainer, LongCtxTrainerMixin
from .verify.check import check

register()

__all__ = [
    "LongCtxArguments",
    "LongCtxTrainer",
    "LongCtxTrainerMixin",
    "LongCtxTrainingArguments",
    "check",
    "prepare",
    "register",
]
