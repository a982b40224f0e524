"""Exact attention across ranks for long, uneven documents, behind one Transformers flag.

Importing this package registers the attention names `distca`, `charm`, `ring`, `ulysses`,
`zeco_linear`, and has models with recurrent layers, as they are given one of these, refuse packed
documents until they are prepared; nothing else happens.
"""

from .attention.registration import register
from .config import LongCtxArguments, LongCtxTrainingArguments
from .recurrent.prepare import prepare
from .recurrent.unprepared_guard import guard_by_name
from .training.trainer import LongCtxTrainer, LongCtxTrainerMixin
from .verify.check import check

register()
guard_by_name()

__all__ = [
    "LongCtxArguments",
    "LongCtxTrainer",
    "LongCtxTrainerMixin",
    "LongCtxTrainingArguments",
    "check",
    "prepare",
    "register",
]
