"""Parts of a block -> the block: copied, summed, merged or formed anew.

Layer: runtime. A block is the list of its fields' tensors, in the order of its kind.

A program and one layer's tensors -> its attention, phase by phase. The executor is a generator that yields at waits only, so one program runs blocking
in a process, in lock step over ranks in one thread, or between two halves of a batch. Letters: T
rows, H query heads, K key/value heads, D head size, V value head size.

What ties batches to this process: the channel of its group and the account of its attention.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, linalg

from ..comm.arrivals import Exchange
from ..comm.channels import Channel, sent_over_all, sent_to_each
from ..kernels import softmax
from ..kernels.chunk_states import decayed
from ..kernels.kernel_calls import KernelCall, KernelTask, calls
from ..kernels.softmax import Scoring, merge
from ..planning.program.counts import Widths, heads_in, kept_heads, lifetimes
from ..planning.program.operations import Attend, AttendGrad, Block, Fold, HeadRange, Op, Post, Wait
from ..planning.program.program import HOME, KINDS, Field, Program
from . import exchanges
from .exchanges import Exchanges
from .requests import RequestSender

_Views = Sequence[Tensor]


def fold(how: str, target: _Views, parts: Sequence[_Views]) -> None:
    """Combine parts into the target, in their order; see `plan.program.Fold`."""
    if how == "cat":
        for i, view in enumerate(target):
            view.copy_(torch.cat([part[i] for part in parts]) if len(parts) > 1 else parts[0][i])
    elif how == "sum":
        for part in parts:
            for view, value in zip(target, part, strict=True):
                view.add_(value)
    elif how == "affine":
        (offset,), (decay,), (entering,) = parts
        target[0].copy_(offset + _decayed(decay, entering))
    elif how == "product":
        (later,), (earlier,) = parts
        target[0].copy_(_decayed(later, earlier))
    elif how == "delta":
        grad_out, out, lse = parts[0]
        wide = lse.dtype
        target[0].copy_(grad_out)
        target[1].copy_(linalg.vecdot(grad_out.to(wide), out.to(wide))[..., None])
        target[2].copy_(lse)
    else:
        (out, lse), same = parts[0], target[0].dtype == parts[0][0].dtype
        lse = lse[..., 0]
        for other_out, other_lse in parts[1:]:
            last = other_out is parts[-1][0]  # then all parts are read, whatever the target is
            into = target[0] if same and last else None
            out, lse = merge(out, lse, other_out, other_lse[..., 0], into=into)
        if out is not target[0]:
            target[0].copy_(out)
        target[1].copy_(lse[..., None])


def _decayed(decay: Tensor, state_NHV: Tensor) -> Tensor:
    """M S of arrays by rows: M is `[1, H, 1]`, `[N, H, 1]` or `[N, H, N]`."""
    return decayed(decay.transpose(0, 1), state_NHV.transpose(0, 1)).transpose(0, 1)


Fields = dict[str, Tensor]
_ROLES = {Attend: ("q", "kv", "into"), AttendGrad: ("q", "kv", "grad", "dq", "dkv")}


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Neighbouring tasks on the same arrays, as kernel calls."""

    arrays: dict[str, Block]  # with all rows
    calls: tuple[KernelCall, ...]
    tasks: int
    backward: bool


Step = _Kernels | Post | Wait | Fold


@lru_cache(maxsize=256)
def _steps(
    program: Program, window: int, causal: bool, backward: bool
) -> tuple[tuple[Step, ...], ...]:
    """Phases with neighbouring tasks fused (memo of a pure function, keyed by identity)."""
    return tuple(
        tuple(_fused(program, phase, window, causal))
        for phase in (program.backward if backward else program.forward)
    )


def _fused(program: Program, phase: Iterable[Op], window: int, causal: bool) -> Iterable[Step]:
    tasks: list[KernelTask] = []
    arrays: dict[str, Block] = {}

    def flush() -> Iterable[Step]:
        if tasks:
            fused = calls(tasks, window=window, causal=causal)
            yield _Kernels(dict(arrays), fused, len(tasks), "dq" in arrays)
            tasks.clear()

    for op in phase:
        if not isinstance(op, Attend | AttendGrad):
            yield from flush()
            yield op
            continue
        blocks = dict(zip(_ROLES[type(op)], op, strict=True))
        whole = {r: b._replace(start=0, stop=program.rows[b.array]) for r, b in blocks.items()}
        if whole != arrays:
            yield from flush()
            arrays = whole
        (_, q_pos, _), (_, k_pos, _) = program.task(op.q), program.task(op.kv)
        rows = {role: block.start for role, block in blocks.items()}
        tasks.append(
            KernelTask(rows, q_pos, op.q.stop - op.q.start, k_pos, op.kv.stop - op.kv.start)
        )
    yield from flush()


@dataclass(slots=True)
class Account:
    """What one rank's attention did, summed over layers and batches.

    Args:
        calls (`int`): Attention calls of a forward.
        recomputed (`int`): Attention calls answered from saved results, under checkpointing.
        recompute_bytes (`int`): Bytes sent during those (0 by design).
        planned_bytes (`int`): Bytes that programs of scans and halos were to send.
        waited (`float`): Seconds blocked in waits.
        attending (`float`): Seconds in attention kernels, by `clock`.
        peak_bytes (`int`): Largest sum of live transient arrays in one layer.
        message_peak_bytes (`int`): Largest sum of messages that are posted and not waited for.
        layers (`set[object]`): Layers that called.
        half (`int`): Half of a batch that ran last.
        switches (`int`): How often one half's phase came after the other's.
        clock (`Callable`): Reads seconds; a benchmark may count those of its own process only.
    """

    calls: int = 0
    recomputed: int = 0
    recompute_bytes: int = 0
    planned_bytes: int = 0
    waited: float = 0.0
    attending: float = 0.0
    peak_bytes: int = 0
    message_peak_bytes: int = 0
    layers: set[object] = field(default_factory=set)
    half: int = 0
    switches: int = 0
    clock: Callable[[], float] = time.perf_counter


class Execution:
    """One direction of one program on one layer's tensors.

    Args:
        program (`Program`): This rank's program.
        widths (`Widths`): Sizes of the layer's rows.
        dtype (`torch.dtype`): The model's dtype; wide fields are float32, or float64 with it.
        backward (`bool`): Which direction.
        channel (`Channel`, *optional*): Needed where the program exchanges.
        scoring (`Scoring`, *optional*): How scores are formed.
        account (`Account`, *optional*): Where to add what was done.
        layer (`int`, *optional*): Number of the layer that runs it, for errors to name.
    """

    def __init__(
        self,
        program: Program,
        *,
        widths: Widths,
        dtype: torch.dtype,
        backward: bool,
        channel: Channel | None = None,
        scoring: Scoring | None = None,
        account: Account | None = None,
        layer: int | None = None,
    ) -> None:
        self.program, self.widths, self.dtype = program, widths, dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.backward = backward
        self.scoring = scoring or Scoring()
        self.account = account or Account()
        self.arrays: dict[int, Fields] = {}
        self._exchanges = Exchanges(
            program, backward=backward, channel=channel, views=self._views, layer=layer
        )
        self._live = 0
        self._last_use = {a: last for a, (_, last) in self._lifetimes().items()}
        self._number = 0

    def _lifetimes(self) -> Mapping[int, tuple[int, int]]:
        return _lifetimes(self.program, self.backward)

    def bind(self, array: int, **fields: Tensor) -> None:
        """Give the tensors of one of the rank's own arrays, `[rows, heads, width]`."""
        self.arrays[array] = fields

    def fields(self, array: int) -> Fields:
        """An array's tensors; made at first use: gradients and states zero, partials keyless."""
        if array not in self.arrays:
            self.arrays[array] = self._allocate(array)
            if array >= len(HOME):
                self._live += _bytes(self.arrays[array])
                self.account.peak_bytes = max(self.account.peak_bytes, self._live)
        return self.arrays[array]

    def _allocate(self, array: int) -> Fields:
        kind = self.program.kinds[array]
        sizes = {"D": self.widths.head_dim, "V": self.widths.value_dim, "N": self.widths.state}
        sizes |= {"1": 1}
        kept, made = kept_heads(self.program)[array], {}
        for f in KINDS[kind]:
            first, stop = self._heads(kept, f)
            shape = (self.program.rows[array], stop - first, sizes[f.width])
            fill = float("-inf") if f.name == "lse" else 0.0
            if kind in ("part", "dq", "dkv", "state", "dx"):
                made[f.name] = torch.full(shape, fill, dtype=self._dtype(f.wide))
            else:
                made[f.name] = torch.empty(shape, dtype=self._dtype(f.wide))
        return made

    def _heads(self, heads: HeadRange, of: Field) -> tuple[int, int]:
        """The heads of a field that belong to these groups."""
        groups = int(self.program.head_groups[0]) or self.widths.kv_heads
        sizes = {"H": self.widths.heads, "K": self.widths.kv_heads, "1": 1}
        return heads_in(heads, groups=groups, of=sizes[of.heads])

    def _dtype(self, wide: bool) -> torch.dtype:
        return self.wide if wide else self.dtype

    def _of(self, block: Block) -> Fields:
        """The block's rows and heads of each field."""
        kept, found = kept_heads(self.program)[block.array], {}
        for f in KINDS[self.program.kinds[block.array]]:
            rows = self.fields(block.array)[f.name][block.start : block.stop]
            if block.heads:
                (begin, _), (first, stop) = (self._heads(h, f) for h in (kept, block[3:]))
                rows = rows[:, first - begin : stop - begin]
            found[f.name] = rows
        return found

    def _views(self, block: Block) -> list[Tensor]:
        """The block's rows and heads, in the order of its kind's fields."""
        fields = self._of(block)
        return [fields[f.name] for f in KINDS[self.program.kinds[block.array]]]

    def phase(self, number: int) -> Generator[Exchange]:
        """Run one phase; yields an exchange at each wait, to be resumed once it is done."""
        sees = self.scoring.window, self.scoring.causal
        for step in _steps(self.program, *sees, self.backward)[number]:
            match step:
                case Post():
                    self._exchanges.post(step, phase=number)
                    peak = max(self.account.message_peak_bytes, self._exchanges.peak_bytes)
                    self.account.message_peak_bytes = peak
                case Wait(tag):
                    yield from self._exchanges.wait(tag)
                case Fold(into, parts, how):
                    fold(how, self._views(into), [self._views(part) for part in parts])
                case _Kernels():
                    self._attend(step)
            self._number += step.tasks if isinstance(step, _Kernels) else 1
            self._free()

    def _free(self) -> None:
        for array in [a for a in self.arrays if a >= len(HOME)]:
            if self._last_use[array] < self._number:
                self._live -= _bytes(self.arrays.pop(array))

    def _attend(self, step: _Kernels) -> None:
        started = self.account.clock()
        arrays = {role: self._of(block) for role, block in step.arrays.items()}
        kernel = softmax.attend_grad if step.backward else softmax.attend
        for call in step.calls:
            kernel(call, **arrays, scoring=self.scoring)
        self.account.attending += self.account.clock() - started


def _bytes(fields: Fields) -> int:
    return exchanges.size(list(fields.values()))


@lru_cache(maxsize=256)
def _lifetimes(program: Program, backward: bool) -> Mapping[int, tuple[int, int]]:
    return lifetimes(program, backward=backward)


def drive(steps: Generator[Exchange], account: Account) -> None:
    """Run a phase in this process: block at each wait, and count the seconds."""
    for exchange in steps:
        started = time.perf_counter()
        exchange.wait()
        account.waited += time.perf_counter() - started


@dataclass(slots=True, kw_only=True)
class Runtime:
    """The channel of this rank's group, and what its attention layers did so far.

    Args:
        channel (`Channel`, *optional*): How the group exchanges; `None` where one process is alone.
        account (`Account`): Counts of calls, bytes and seconds.
        senders (`tuple[RequestSender, ...]`): One per extra server; only the first rank of a
            group has them.
    """

    channel: Channel | None = None
    account: Account = field(default_factory=Account)
    senders: tuple[RequestSender, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent to its peers."""
        return sent_over_all(self.channel) if self.channel else 0

    @property
    def sent_to(self) -> Counter[int]:
        """Bytes this rank has sent to each of its peers."""
        return sent_to_each(self.channel) if self.channel else Counter()
