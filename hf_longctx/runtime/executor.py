"""Run a program on the tensors of one layer, phase by phase.

A phase is a generator that yields at waits only, so that one program runs blocking in a process, in
lock step over ranks in one thread, or alternately with the other half of a batch. The file also
keeps the account of what ran, and the runtime that ties batches to this process's channel.
Layer: runtime.

Letters: T rows, H query heads, K key/value heads, D head size, V value head size, N rows of a
state.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

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
from ..planning.program.program import KINDS, TRANSIENT, Field, Program, kept_with_program
from . import exchanges
from .exchanges import Exchanges
from .requests import RequestSender

_Views = Sequence[Tensor]  # of one block, in the order of its kind's fields


def fold(how: str, target: _Views, parts: Sequence[_Views]) -> None:
    """Combine the parts of a block into the target, in their order; see `operations.Fold`.

    The order is the plan's, not that of arrival, so that results are equal to the bit.
    """
    if how == "cat":
        for i, view in enumerate(target):
            view.copy_(torch.cat([part[i] for part in parts]) if len(parts) > 1 else parts[0][i])
    elif how == "sum":
        for part in parts:
            for view, value in zip(target, part, strict=True):
                view.add_(value)
    elif how == "affine":  # of states: E + M S
        (offset,), (decay,), (entering,) = parts
        target[0].copy_(offset + _decayed(decay, entering))
    elif how == "product":  # of two segments' decays
        (later,), (earlier,) = parts
        target[0].copy_(_decayed(later, earlier))
    elif how == "delta":  # the sum of grad_out * out travels in place of out: it is smaller
        grad_out, out, lse = parts[0]
        wide = lse.dtype
        target[0].copy_(grad_out)
        target[1].copy_(linalg.vecdot(grad_out.to(wide), out.to(wide))[..., None])
        target[2].copy_(lse)
    else:  # of partials, by their lse
        (out, lse), same = parts[0], target[0].dtype == parts[0][0].dtype
        lse = lse[..., 0]
        for other_out, other_lse in parts[1:]:
            # the target may be one of the parts: it is written once all of them were read
            last = other_out is parts[-1][0]
            into = target[0] if same and last else None
            out, lse = merge(out, lse, other_out, other_lse[..., 0], into=into)
        if out is not target[0]:
            target[0].copy_(out)
        target[1].copy_(lse[..., None])


def _decayed(decay: Tensor, state_NHV: Tensor) -> Tensor:
    """Apply a decay to a state, both by rows: M is `[1, H, 1]`, `[N, H, 1]` or `[N, H, N]`."""
    return decayed(decay.transpose(0, 1), state_NHV.transpose(0, 1)).transpose(0, 1)


Fields = dict[str, Tensor]
_ROLES = {Attend: ("q", "kv", "into"), AttendGrad: ("q", "kv", "grad", "dq", "dkv")}


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Adjacent tasks on the same arrays, as kernel calls."""

    arrays: dict[str, Block]  # with all rows
    calls: tuple[KernelCall, ...]
    tasks: int
    backward: bool


Step = _Kernels | Op


@kept_with_program
def _steps(
    program: Program, window: int, causal: bool, backward: bool
) -> tuple[tuple[Step, ...], ...]:
    """Fuse adjacent tasks on the same arrays into kernel calls, in the phases of one direction."""
    return tuple(
        tuple(_fused(program, phase, window, causal))
        for phase in (program.backward if backward else program.forward)
    )


def _fused(program: Program, phase: Iterable[Op], window: int, causal: bool) -> Iterable[Step]:
    for arrays, ops in groupby(phase, key=partial(_arrays, program)):
        if arrays is None:
            yield from ops
        else:
            tasks = [_task(program, op) for op in ops]
            fused = calls(tasks, window=window, causal=causal)
            yield _Kernels(arrays, fused, len(tasks), "dq" in arrays)


def _arrays(program: Program, op: Op) -> dict[str, Block] | None:
    """All rows of the arrays that a task works on, by role; `None` for other operations.

    Kernels take whole arrays, and the rows of each task, so that one call serves many tasks.
    """
    if not isinstance(op, Attend | AttendGrad):
        return None
    blocks = zip(_ROLES[type(op)], op, strict=True)
    return {role: block._replace(start=0, stop=program.rows[block.array]) for role, block in blocks}


def _task(program: Program, op: Any) -> KernelTask:
    rows = {role: block.start for role, block in zip(_ROLES[type(op)], op, strict=True)}
    (_, q_start, _), (_, k_start, _) = program.task(op.q), program.task(op.kv)
    return KernelTask(rows, q_start, op.q.stop - op.q.start, k_start, op.kv.stop - op.kv.start)


@dataclass(slots=True)
class Account:
    """What one rank's attention did, summed over layers and batches.

    Args:
        calls (`int`): Attention calls of forwards.
        recomputed (`int`): Attention calls answered from saved results, under checkpointing.
        recompute_bytes (`int`): Bytes sent during those; 0 by design.
        planned_bytes (`int`): Bytes that the programs of scans and halos send.
        waited (`float`): Seconds blocked in waits.
        attending (`float`): Seconds in attention kernels, by `clock`.
        peak_bytes (`int`): Largest sum of live transient arrays in one layer.
        message_peak_bytes (`int`): Largest sum of messages posted and not waited for.
        layers (`set[object]`): Layers that called.
        half (`int`): The half of a batch that ran last.
        switches (`int`): How often a phase of one half followed one of the other.
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
        spans = lifetimes(program, backward=backward)
        self._last_use = {array: last for array, (_, last) in spans.items()}
        self._number = 0  # of the operation that runs, as `lifetimes` counts them

    def bind(self, array: int, **fields: Tensor) -> None:
        """Give one of the rank's own arrays its tensors, each `[rows, heads, width]`."""
        self.arrays[array] = fields

    def fields(self, array: int) -> Fields:
        """The tensors of an array, allocated at its first use.

        Gradients and states start at 0, partials at (0, -inf).
        """
        if array not in self.arrays:
            self.arrays[array] = self._allocate(array)
            if array >= TRANSIENT:  # the rank's own rows live longer than the layer's call
                self._live += exchanges.size(self.arrays[array].values())
                self.account.peak_bytes = max(self.account.peak_bytes, self._live)
        return self.arrays[array]

    def _allocate(self, array: int) -> Fields:
        w, kind = self.widths, self.program.kinds[array]
        sizes = {"D": w.head_dim, "V": w.value_dim, "N": w.state, "1": 1}
        kept, made = kept_heads(self.program)[array], {}
        for f in KINDS[kind]:
            first, stop = self._heads(kept, f)
            shape = self.program.rows[array], stop - first, sizes[f.width]
            made[f.name] = torch.empty(shape, dtype=self.wide if f.wide else self.dtype)
            # what is added to or merged into starts neutral; all else is written whole
            if kind in ("part", "dq", "dkv", "state", "dx"):
                made[f.name].fill_(float("-inf") if f.name == "lse" else 0.0)
        return made

    def _heads(self, heads: HeadRange, of: Field) -> tuple[int, int]:
        """The heads `[first, stop)` of a field that belong to head groups."""
        groups = int(self.program.head_groups[0]) or self.widths.kv_heads
        sizes = {"H": self.widths.heads, "K": self.widths.kv_heads, "1": 1}
        return heads_in(heads, groups=groups, of=sizes[of.heads])

    def _of(self, block: Block) -> Fields:
        """The rows and heads of a block, by field, in the order of its kind's fields."""
        kept, found = kept_heads(self.program)[block.array], {}
        for f in KINDS[self.program.kinds[block.array]]:
            rows = self.fields(block.array)[f.name][block.start : block.stop]
            if block.heads:  # an array keeps the head groups that its blocks name, from `begin`
                (begin, _), (first, stop) = (self._heads(h, f) for h in (kept, block[3:]))
                rows = rows[:, first - begin : stop - begin]
            found[f.name] = rows
        return found

    def _views(self, block: Block) -> list[Tensor]:
        return [*self._of(block).values()]

    def phase(self, number: int) -> Generator[Exchange]:
        """Run one phase. Yields an exchange at each wait, to be resumed once it is done."""
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
            # lifetimes are counted in operations of the program, of which kernels fuse several
            self._number += step.tasks if isinstance(step, _Kernels) else 1
            self._free()

    def _free(self) -> None:
        """Drop the transient arrays that no later operation of this direction touches."""
        for array in [a for a in self.arrays if a >= TRANSIENT]:
            if self._last_use[array] < self._number:
                self._live -= exchanges.size(self.arrays.pop(array).values())

    def _attend(self, step: _Kernels) -> None:
        started = self.account.clock()  # may be CPU time: benchmarks share cores
        arrays = {role: self._of(block) for role, block in step.arrays.items()}
        kernel = softmax.attend_grad if step.backward else softmax.attend
        for call in step.calls:
            kernel(call, **arrays, scoring=self.scoring)
        self.account.attending += self.account.clock() - started


def drive(steps: Generator[Exchange], account: Account) -> None:
    """Run a phase to its end: block at each wait, and count the seconds."""
    for exchange in steps:
        started = time.perf_counter()
        exchange.wait()
        account.waited += time.perf_counter() - started


@dataclass(slots=True, kw_only=True)
class Runtime:
    """What ties batches to this process: its group's channel, and the account of its attention.

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
