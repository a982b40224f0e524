"""Exact attention across ranks for long, uneven documents, behind one Transformers flag.

Importing this package registers the attention names `distca`, `charm`, `ring`, `ulysses` and
`zeco_linear` with Transformers. Models with recurrent layers that get one of these names refuse
packed documents until they are prepared. Nothing else happens on import.
"""

from .attention.registration import register
from .config import LongCtxArguments, LongCtxTrainingArguments
from .recurrent.prepare import prepare
from .recurrent.unprepared_guard import guard_by_name
from .training.trainer import LongCtxTrainer, LongCtxTrainerMixin
from .verify.check import check
from .version import VERSION as __version__

register()
guard_by_name()

__all__ = [
    "__version__",
    "LongCtxArguments",
    "LongCtxTrainer",
    "LongCtxTrainerMixin",
    "LongCtxTrainingArguments",
    "check",
    "prepare",
    "register",
]
