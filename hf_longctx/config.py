"""Define the `--longctx_*` flags: how documents are packed and cut, and how attention runs.

`LongCtxArguments` works with `HfArgumentParser` and `TrlParser`; `LongCtxTrainingArguments` is a
`TrainingArguments` with the same fields. The help texts here are the only description of a flag:
`--help` shows them and the reference page of flags is written from them. Layer: config.
"""

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from .support import validate_arguments, validate_extension_lock, validate_name

logger = logging.getLogger(__name__)
_Flags = TypeVar("_Flags")

# The flag of activation checkpointing, by its name before Transformers 5.24 or since.
RECOMPUTE = (
    "activation_checkpointing"
    if hasattr(TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)
_BUILT: dict[str, tuple[object, ...]] = {  # flags with values that are only planned, and the others
    "longctx_balance": ("none", "tokens"),
    "longctx_server_devices": (None, "cpu"),
}
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {  # NaN fails each of these comparisons
    "longctx_max_tokens_per_rank": (lambda n: n >= 1, "at least 1; 2048 to 32768 are usual"),
    "longctx_group_size": (
        lambda n: n >= 1,
        "at least 1 and divide the trainers; leave it out to share each batch among all of them",
    ),
    "longctx_lookahead": (lambda n: n >= 1, "at least 1; 1000 is usual"),
    "longctx_tolerance": (lambda x: 0 <= x < float("inf"), "0 or more, for example 0.05"),
    "longctx_servers": (
        lambda n: n >= 0,
        "0 or more; 0 means the trainers compute all attention themselves",
    ),
    "longctx_server_timeout": (lambda x: x > 0, "above 0; 30 is usual"),
    "longctx_server_memory": (lambda n: n >= 1, "at least 1; leave it out for no limit"),
    "longctx_ulysses_size": (
        lambda n: n >= 1,
        "at least 1, and divide the ranks that share a batch",
    ),
    "data_seed": (lambda n: n >= 0, "0 or more; leave it out to use --seed"),
}
_REMOVED = {
    "longctx_verify": "it had the one value off; run `hf-longctx verify` before you train",
}


def documented_flags(cls: type[_Flags]) -> type[_Flags]:
    """Give the fields of a data class their help texts, which are those of its docstring's `Args`.

    To be applied below `@dataclass`. A field without an entry keeps what it has.
    """
    entry = r"^ {4}(\w+) \(.*?\): (.*?)(?=^ {4}\w|^\S|\Z)"
    for name, text in re.findall(entry, inspect.getdoc(cls) or "", re.M | re.S):
        help_text = " ".join(text.split())
        setattr(cls, name, field(default=cls.__dict__[name], metadata={"help": help_text}))
    return cls


@dataclass(kw_only=True)
@documented_flags
class LongCtxArguments:
    """Flags that say how batches are built and how attention runs across ranks.

    Args:
        longctx_max_tokens_per_rank (`int`, *optional*, defaults to `4096`): Largest number of
            tokens a rank holds of one batch. A batch holds up to this many tokens times the group
            size.
        longctx_group_size (`int`, *optional*): Number of ranks that share one batch. It must divide
            the number of trainers. By default all trainers share each batch.
        longctx_layout (`str`, *optional*, defaults to `"auto"`): How documents are cut over the
            ranks. contiguous: consecutive tokens to each rank. zigzag: each rank gets one piece
            from the head and one from the tail. spread: only long documents are split that way,
            short ones stay whole. auto: spread for distca, zigzag for charm and ring, contiguous
            for ulysses and zeco_linear.
        longctx_balance (`str`, *optional*, defaults to `"tokens"`): How documents are chosen for a
            batch. none: in the given order. tokens: so that batches are as full as possible.
        longctx_tolerance (`float`, *optional*, defaults to `0.05`): Attention work that a rank may
            have above the mean, as a fraction (distca). A smaller value balances better and moves
            more data.
        longctx_cost (`str`, *optional*, defaults to `"entries"`): What is balanced (distca).
            entries: the number of score entries. measured: seconds, from the table that hf-longctx
            profile wrote on the first trainer's machine.
        longctx_overflow (`str`, *optional*, defaults to `"error"`): What happens to a document that
            is longer than a batch. error: the run stops before the first step. split: it becomes
            several documents, each starting at position 0. truncate: only its beginning is kept.
        longctx_lookahead (`int`, *optional*, defaults to `1000`): Number of documents that are read
            ahead from a stream to choose from for a batch. A larger number fills batches better and
            takes more memory. A data set with a length is packed as a whole.
        longctx_overlap (`str`, *optional*, defaults to `"none"`): How communication overlaps with
            computation (distca). heads: each exchange is cut into groups of key/value heads; one
            group is sent while attention to another is computed. pingpong: each batch runs as two
            halves of whole documents; one half computes while the other half's exchanges are under
            way.
        longctx_servers (`int`, *optional*, defaults to `0`): Number of attention-server processes
            that the trainers start (distca): the total, which is divided evenly among groups and
            nodes. More can join with hf-longctx serve.
        longctx_server_devices (`str`, *optional*): Device of the attention servers. Only cpu, the
            default, is built yet.
        longctx_server_timeout (`float`, *optional*, defaults to `30.0`): Seconds that a trainer
            waits for an attention server in one exchange before it counts the server as lost.
        longctx_server_memory (`int`, *optional*): Largest number of bytes of queries, keys, values
            and results that an attention server may hold of one layer. A server gets less work
            where more would not fit. Messages take the same amount once more for a short time.
        longctx_topology (`str`, *optional*, defaults to `"auto"`): Nested domains of the ranks of a
            group (charm, ring, ulysses), outermost first: 2x4 means 2 nodes of 4 ranks. The product
            must be the group size. auto: taken from the launcher and the machine, and confirmed by
            measured links; charm then runs as a flat ring for batches where the predicted gain is
            below 5 percent, and where all ranks are in one place. The choice is logged.
        longctx_ulysses_size (`int`, *optional*, defaults to `1`): Number of ranks in a domain that
            exchanges heads (all-to-all), while keys and values travel between domains as in ring or
            charm. With the default 1, ulysses exchanges heads over all ranks, and ring and charm
            exchange none.
        longctx_scan (`str`, *optional*, defaults to `"auto"`): How the states of recurrent layers
            are passed on (zeco_linear). chain: from rank to rank, cut into pieces. tree: in
            log2(ranks) steps. allgather: to all ranks at once. auto: the one predicted to be
            fastest over the measured link. The choice is logged.
        longctx_softmax (`str`, *optional*, defaults to `"distca"`): How the softmax layers of a
            hybrid model run across ranks under zeco_linear.

    Raises:
        ValueError: At construction, for a value of the wrong type or out of range.
    """

    longctx_max_tokens_per_rank: int = 4096
    longctx_group_size: int | None = None
    longctx_layout: Literal["auto", "contiguous", "zigzag", "spread"] = "auto"
    longctx_balance: Literal["none", "tokens", "attention"] = "tokens"
    longctx_tolerance: float = 0.05
    longctx_cost: Literal["entries", "measured"] = "entries"
    longctx_overflow: Literal["error", "split", "truncate"] = "error"
    longctx_lookahead: int = 1000
    longctx_overlap: Literal["none", "heads", "pingpong"] = "none"
    longctx_servers: int = 0
    longctx_server_devices: str | None = None
    longctx_server_timeout: float = 30.0
    longctx_server_memory: int | None = None
    longctx_topology: str = "auto"
    longctx_ulysses_size: int = 1
    longctx_scan: Literal["auto", "chain", "tree", "allgather"] = "auto"
    longctx_softmax: Literal["distca", "charm", "ring", "ulysses"] = "distca"

    def __post_init__(self) -> None:
        self.check_longctx()
        following = getattr(super(), "__post_init__", None)  # of a TrainingArguments mixed in
        if following is not None:
            validate_extension_lock(self)  # TrainingArguments starts DeepSpeed's process group
            following()
            for name, value in unset_batch_sizes(self).items():
                setattr(self, name, 1)
                logger.info("%s was not set; it is 1 instead of %d", name, value)

    def check_longctx(self) -> None:
        """Check each field by itself, and those that exclude each other.

        Raises:
            ValueError: Names the flag, its value, the rule and the remedy.
        """
        for name, hint in get_type_hints(LongCtxArguments).items():
            default = getattr(LongCtxArguments, name)
            _validate_type(name, getattr(self, name), hint=hint, default=default)
        data_seed = getattr(self, "data_seed", None)  # a field of TrainingArguments
        _validate_type("data_seed", data_seed, hint=int | None, default=None)
        for name, (valid, rule) in _RANGES.items():
            value = getattr(self, name, None)
            if value is not None and not valid(value):
                raise ValueError(f"{name}={value} must be {rule}")
        if not re.fullmatch(r"auto|[1-9]\d*(x[1-9]\d*)*", self.longctx_topology):
            raise ValueError(
                f"longctx_topology={self.longctx_topology!r}: write nodes x ranks, outermost "
                "first, as 2x4, or auto"
            )
        if self.longctx_overlap == "heads" and self.longctx_softmax != "distca":
            raise ValueError(
                f"longctx_overlap=heads with longctx_softmax={self.longctx_softmax}: only distca "
                "cuts its exchanges by heads; use longctx_softmax=distca, or longctx_overlap=none"
            )
        for name, built in _BUILT.items():
            value = getattr(self, name)
            if value not in built:
                raise ValueError(
                    f"{name}={value!r} is not built yet; use one of {', '.join(map(repr, built))}"
                )

    def layout_for(self, name: str) -> str:
        """Return the layout to use under an attention name.

        Raises:
            ValueError: Under `zeco_linear`, a layout in which a rank's tokens do not follow those
                of the rank before it, whose states they need.
        """
        if name == "zeco_linear" and self.longctx_layout not in ("auto", "contiguous"):
            raise ValueError(
                f"longctx_layout={self.longctx_layout} under attn_implementation='zeco_linear': "
                "recurrent layers pass states from each rank to the next; use contiguous or auto"
            )
        if self.longctx_layout != "auto":
            return self.longctx_layout
        suited = {"distca": "spread", "charm": "zigzag", "ring": "zigzag"}
        return suited.get(name, "contiguous")

    def algorithm(self, name: str) -> str:
        """Return the algorithm that plans softmax layers under an attention name."""
        return self.longctx_softmax if name == "zeco_linear" else name

    def plan_overlap(self, name: str) -> str:
        """Return the overlap that plans are made with under an attention name: none or heads.

        Raises:
            ValueError: The name's plans cannot overlap as `longctx_overlap` says.
        """
        if self.longctx_overlap != "heads":
            return "none"  # pingpong runs two halves of a batch, each under a plan without overlap
        # `self` may be other training arguments that the fields were attached to
        if LongCtxArguments.algorithm(self, name) != "distca":
            raise ValueError(
                f"longctx_overlap=heads: the exchanges of {name!r} are not cut by heads; use none, "
                "or attn_implementation='distca'"
            )
        return "heads"


@dataclass(kw_only=True)
@documented_flags
class LongCtxTrainingArguments(LongCtxArguments, TrainingArguments):
    """`TrainingArguments` with the `longctx_*` fields.

    Both per-device batch sizes are 1: a batch is one pack per group. The trainer fills in
    `longctx_attention` (the attention name), `longctx_trainers` (the number of trainers) and
    `longctx_train_data` (a fingerprint of the training data). They are saved with each checkpoint,
    and a resumed run is compared with them.

    Args:
        per_device_train_batch_size (`int`, *optional*, defaults to `1`): Always 1: a batch is one
            pack per group.
        per_device_eval_batch_size (`int`, *optional*, defaults to `1`): Always 1: a batch is one
            pack per group.
        ddp_timeout (`int`, *optional*, defaults to `600`): Seconds that a trainer waits for another
            one outside of attention exchanges, also on CPU.
        longctx_attention (`str`, *optional*): Attention name of the run. The trainer fills it in,
            and reads it again when it resumes.
    """

    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1
    ddp_timeout: int = 600
    longctx_attention: str | None = None
    longctx_trainers: int | None = field(default=None, init=False)
    longctx_train_data: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.longctx_attention is not None:
            validate_name(self.longctx_attention)
        validate_arguments(self)
        super().__post_init__()
        validate_arguments(self)  # again: TrainingArguments computes some fields, such as n_gpu


def validate_removed_flags(given: Iterable[str]) -> None:
    """Raise if a flag is given that existed in an earlier version.

    Args:
        given (`Iterable[str]`): Parts of a command line, or keys of a configuration file.

    Raises:
        ValueError: Names the flag and what to do instead.
    """
    for part in given:
        flag = part.partition("=")[0].lstrip("-").replace("-", "_")
        if flag in _REMOVED:
            raise ValueError(f"{flag} was removed: {_REMOVED[flag]}, and leave the flag out")


def unset_batch_sizes(arguments: Any) -> dict[str, int]:
    """Find per-device batch sizes that are still their class's default, though a batch is one pack.

    Args:
        arguments: Training arguments of any class.

    Returns:
        Field and default of each one that is not 1.
    """
    defaults = {field.name: field.default for field in fields(arguments)}
    names = {"per_device_train_batch_size", "per_device_eval_batch_size"} & defaults.keys()
    found = {name: getattr(arguments, name) for name in sorted(names)}
    return {name: size for name, size in found.items() if size == defaults[name] and size != 1}


def _validate_type(name: str, value: object, *, hint: Any, default: object) -> None:
    """Raise for a value outside a flag's type hint, which a parser checks but code does not."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if isinstance(value, str) and value in choices:
            return
        rule = f"must be one of {', '.join(map(repr, choices))}"
        near = get_close_matches(str(value), choices, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the default is {default!r}"
    else:
        kinds = get_args(hint) or (hint,)  # several if it may be None
        numbers = {int: Integral, float: Real}  # also NumPy's
        allowed = tuple(numbers.get(kind, kind) for kind in kinds)
        if isinstance(value, allowed) and not isinstance(value, bool):
            return
        names = (kind.__name__ for kind in kinds if kind is not type(None))
        rule = f"is a {type(value).__name__}, but must be of type {' or '.join(names)}"
        remedy = f"the default is {default!r}"
    raise ValueError(f"{name}={value!r} {rule}; {remedy}")
