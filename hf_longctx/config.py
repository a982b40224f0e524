"""The `--longctx_*` flags: how documents are packed, cut and balanced, and what is not built yet.

Layer: config. `LongCtxArguments` works with `HfArgumentParser` and `TrlParser`;
`LongCtxTrainingArguments` is a `TrainingArguments` with the same fields.
"""

import logging
import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from .support import validate_arguments, validate_name

logger = logging.getLogger(__name__)

_UNBUILT: dict[str, tuple[object, ...]] = {  # field -> values that are built
    "longctx_layout": ("auto", "contiguous", "zigzag", "spread"),
    "longctx_balance": ("none", "tokens"),
    "longctx_overflow": ("error", "split", "truncate"),
    "longctx_server_devices": (None, "cpu"),
    "longctx_verify": ("off",),
}


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class LongCtxArguments:
    """How batches are built and attention runs across ranks."""

    longctx_max_tokens_per_rank: int = _flag(
        4096, "Tokens each rank holds of a batch, at most. A group's batch holds this x group size."
    )
    longctx_group_size: int | None = _flag(
        None, "Ranks that share one batch; must divide the trainers. Default: all trainers."
    )
    longctx_layout: Literal["auto", "contiguous", "zigzag", "spread"] = _flag(
        "auto",
        "How documents are cut over ranks. auto: spread for distca, zigzag for charm and ring, "
        "contiguous for ulysses and zeco_linear.",
    )
    longctx_balance: Literal["none", "tokens", "attention"] = _flag(
        "tokens", "How packs are filled: none keeps the order, tokens fits documents best."
    )
    longctx_tolerance: float = _flag(
        0.05, "Attention work a rank may do above the mean, as a fraction (distca)."
    )
    longctx_cost: Literal["entries", "measured"] = _flag(
        "entries",
        "What is balanced (distca): score entries, or seconds by the table that hf-longctx profile "
        "has measured on the first trainer's machine.",
    )
    longctx_overflow: Literal["error", "split", "truncate"] = _flag(
        "error",
        "A document longer than a batch: error stops, split makes several documents of it (each "
        "restarts at position 0), truncate keeps its beginning.",
    )
    longctx_lookahead: int = _flag(
        1000,
        "Documents of a stream that are read ahead, to choose from for a batch. More fill batches "
        "better and take memory; a data set with a length is packed as a whole.",
    )
    longctx_overlap: Literal["none", "heads", "pingpong"] = _flag(
        "none",
        "How communication hides behind work. heads (distca): each exchange is cut into groups of "
        "key/value heads, which travel while others are attended to. pingpong (distca): each batch "
        "runs as two halves of whole documents, and one computes while the other's exchanges "
        "travel.",
    )
    longctx_servers: int = _flag(
        0,
        "Extra attention-server processes that the trainers start (distca), over all groups and "
        "nodes, which share them evenly. More can join with hf-longctx serve.",
    )
    longctx_server_devices: str | None = _flag(
        None, "Devices of the servers. Only cpu, the default, is built yet."
    )
    longctx_server_timeout: float = _flag(
        30.0, "Seconds that a trainer waits for a server in one exchange before it gives it up."
    )
    longctx_server_memory: int | None = _flag(
        None,
        "Bytes of queries, keys, values and results that a server may hold of a layer; it gets "
        "less work where that would not fit. Messages take as much again for a moment.",
    )
    longctx_topology: str = _flag(
        "auto",
        "Nested domains of a group's ranks (charm, ring, ulysses), outermost first: 2x4 is 2 nodes "
        "of 4 ranks, and 8 is the group size. auto: as the launcher and the machine tell, where "
        "measured links bear it out; charm then runs the flat ring for batches that it is not "
        "predicted to speed up by 5 percent, and where all ranks share one place. The log says "
        "what.",
    )
    longctx_ulysses_size: int = _flag(
        1,
        "Ranks of a domain that exchange heads, while keys and values travel between domains: "
        "round a ring, or as charm takes them. Left at 1, ulysses exchanges heads over all ranks, "
        "and ring and charm none.",
    )
    longctx_scan: Literal["auto", "chain", "tree", "allgather"] = _flag(
        "auto",
        "How states of recurrent layers pass on (zeco_linear): chain from rank to rank, in pieces; "
        "tree in log2 steps; allgather to all at once. auto: what is predicted to be fastest by a "
        "measured link; the log says what.",
    )
    longctx_softmax: Literal["distca", "charm", "ring", "ulysses"] = _flag(
        "distca", "How softmax layers run across ranks under zeco_linear."
    )
    longctx_verify: Literal["off", "first_step", "always"] = _flag(
        "off", "Check steps against one process while training. Only off is built yet."
    )

    def __post_init__(self) -> None:
        self.check_longctx()
        following = getattr(super(), "__post_init__", None)  # of a TrainingArguments mixed in
        if following is not None:
            following()
            for name, value in unset_batch_sizes(self).items():
                setattr(self, name, 1)
                logger.info("%s, unset, is 1 instead of %d", name, value)

    def check_longctx(self) -> None:
        """Check the fields that need nothing else.

        Raises:
            ValueError: naming the flag, its value, the rule and the remedy.
        """
        for name, hint in get_type_hints(LongCtxArguments).items():
            default = getattr(LongCtxArguments, name)
            _validate_type(name, getattr(self, name), hint=hint, default=default)
        if self.longctx_max_tokens_per_rank < 1:
            raise ValueError(
                f"longctx_max_tokens_per_rank={self.longctx_max_tokens_per_rank} must be at least 1"
                "; 2048 to 32768 are usual"
            )
        if self.longctx_group_size is not None and self.longctx_group_size < 1:
            raise ValueError(
                f"longctx_group_size={self.longctx_group_size} must be at least 1 and divide the "
                "trainers; leave it out to share each batch among all of them"
            )
        if self.longctx_lookahead < 1:
            raise ValueError(
                f"longctx_lookahead={self.longctx_lookahead} must be at least 1; 1000 is usual"
            )
        if not 0 <= self.longctx_tolerance < float("inf"):
            raise ValueError(
                f"longctx_tolerance={self.longctx_tolerance} must be 0 or more, for example 0.05"
            )
        if self.longctx_servers < 0:
            raise ValueError(
                f"longctx_servers={self.longctx_servers} must be 0 or more; 0 has the trainers "
                "attend by themselves"
            )
        if not self.longctx_server_timeout > 0:
            raise ValueError(
                f"longctx_server_timeout={self.longctx_server_timeout} must be above 0; 30 is usual"
            )
        if self.longctx_server_memory is not None and self.longctx_server_memory < 1:
            raise ValueError(
                f"longctx_server_memory={self.longctx_server_memory} must be at least 1; leave it "
                "out for no limit"
            )
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
        if self.longctx_ulysses_size < 1:
            raise ValueError(
                f"longctx_ulysses_size={self.longctx_ulysses_size} must be at least 1, and divide "
                "the ranks that share a batch"
            )
        data_seed = getattr(self, "data_seed", None)  # a field of TrainingArguments
        _validate_type("data_seed", data_seed, hint=int | None, default=None)
        if data_seed is not None and data_seed < 0:
            raise ValueError(f"data_seed={data_seed} must be 0 or more; leave it out to use --seed")
        for name, built in _UNBUILT.items():
            value = getattr(self, name)
            if value not in built:
                raise ValueError(
                    f"{name}={value!r} is not built yet; use one of {', '.join(map(repr, built))}"
                )

    def layout_for(self, name: str) -> str:
        """The layout under an attention name; `auto` suits its plans.

        Raises:
            ValueError: under `zeco_linear`, where a rank's states enter the next rank's tokens, for
                a layout in which those do not follow.
        """
        if name == "zeco_linear" and self.longctx_layout not in ("auto", "contiguous"):
            raise ValueError(
                f"longctx_layout={self.longctx_layout} under attn_implementation='zeco_linear': "
                "a recurrent layer goes on from rank to rank; use contiguous, or leave it at auto"
            )
        if self.longctx_layout != "auto":
            return self.longctx_layout
        suited = {"distca": "spread", "charm": "zigzag", "ring": "zigzag"}
        return suited.get(name, "contiguous")

    def algorithm(self, name: str) -> str:
        """Who plans softmax layers under an attention name."""
        return self.longctx_softmax if name == "zeco_linear" else name

    def plan_overlap(self, name: str) -> str:
        """What plans overlap under an attention name.

        Raises:
            ValueError: where its plans cannot overlap so.
        """
        if self.longctx_overlap != "heads":
            return "none"
        if LongCtxArguments.algorithm(self, name) != "distca":
            raise ValueError(
                f"longctx_overlap=heads: the exchanges of {name!r} are not cut by heads; use none, "
                "or attn_implementation='distca'"
            )
        return "heads"


@dataclass(kw_only=True)
class LongCtxTrainingArguments(LongCtxArguments, TrainingArguments):
    """`TrainingArguments` with the `longctx_*` fields.

    Both per-device batch sizes are 1: a batch is one pack per group. Saved and reloaded with a
    checkpoint, the attention name stands in `longctx_attention`, the number of trainers in
    `longctx_trainers` and a fingerprint of the training data in `longctx_train_data`; the trainer
    fills them in.
    """

    per_device_train_batch_size: int = _flag(1, "Always 1: a batch is one pack per group.")
    per_device_eval_batch_size: int = _flag(1, "Always 1: a batch is one pack per group.")
    ddp_timeout: int = _flag(
        600, "Seconds that a trainer waits for another outside of exchanges, also on the CPU."
    )
    longctx_attention: str | None = _flag(
        None, "Attention name of the run; filled in by the trainer, read again at resume."
    )
    longctx_trainers: int | None = field(default=None, init=False)
    longctx_train_data: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.longctx_attention is not None:
            validate_name(self.longctx_attention)
        validate_arguments(self)
        super().__post_init__()
        validate_arguments(self)


def unset_batch_sizes(arguments: Any) -> dict[str, int]:
    """Per-device batch sizes that stand at their class's default, though a batch is one pack.

    Args:
        arguments: Training arguments of any class.

    Returns:
        Field -> its default, where that is not 1.
    """
    defaults = {field.name: field.default for field in fields(arguments)}
    names = {"per_device_train_batch_size", "per_device_eval_batch_size"} & defaults.keys()
    found = {name: getattr(arguments, name) for name in sorted(names)}
    return {name: size for name, size in found.items() if size == defaults[name] and size != 1}


def _validate_type(name: str, value: object, *, hint: Any, default: object) -> None:
    """Refuse a value outside a flag's type hint: a parser would, but code may pass anything."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if isinstance(value, str) and value in choices:
            return
        rule = f"must be one of {', '.join(map(repr, choices))}"
        near = get_close_matches(str(value), choices, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the default is {default!r}"
    else:
        kinds = get_args(hint) or (hint,)  # several where it may be None
        numbers = {int: Integral, float: Real}  # NumPy's among them
        allowed = tuple(numbers.get(kind, kind) for kind in kinds)
        if isinstance(value, allowed) and not isinstance(value, bool):
            return
        names = (kind.__name__ for kind in kinds if kind is not type(None))
        rule = f"is a {type(value).__name__}, but must be of type {' or '.join(names)}"
        remedy = f"the default is {default!r}"
    raise ValueError(f"{name}={value!r} {rule}; {remedy}")
