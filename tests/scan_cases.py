"""Recurrences and convolutions of packed documents over ranks, beside the naive twins.

Letters: T tokens, H heads, N rows of a state, V its columns, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from helpers import threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_longctx.comm.channels import Channel, Hub, sent_over_all
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.kernels import reference as linear_reference
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.planners.state_scan import State, scan_program
from hf_longctx.planning.predict.scan_schedule import Sizes
from hf_longctx.recurrent.packed_layer import run_convolution, run_recurrence
from hf_longctx.runtime.executor import Account, Runtime
from hf_longctx.verify.rank_pool import RankContext

HEADS, ROWS, COLUMNS, CHANNELS, TAPS = 2, 3, 4, 5, 4
FAMILIES = ("head", "row", "delta", "delta rows")  # how a state decays, and the delta rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A layer's rows, documents end to end, and the weights and gradients around it.

    Args:
        q, k (`Tensor`): `[T, H, N]`.
        v, grad_out (`Tensor`): `[T, H, V]`.
        log_decay (`Tensor`): `[T, H]` or `[T, H, N]`; slow, so that a leak shows.
        beta (`Tensor`): `[T, H]`, or `[T, 0]` without the delta rule.
        x, grad_x (`Tensor`): `[T, C]`.
        weight, bias (`Tensor`): `[C, W]` and `[C]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor
    grad_out: Tensor
    grad_x: Tensor

    @classmethod
    def random(cls, tokens: int, *, family: str, columns: int = COLUMNS) -> Inputs:
        """Noise in float64."""
        noise = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=noise, dtype=torch.float64)

        by_row = (tokens, HEADS, *([ROWS] if "row" in family else []))
        return cls(
            q=normal(tokens, HEADS, ROWS),
            k=normal(tokens, HEADS, ROWS) / 2,
            v=normal(tokens, HEADS, columns),
            log_decay=-0.05 * normal(*by_row).abs(),
            beta=normal(tokens, HEADS if "delta" in family else 0).sigmoid(),
            x=normal(tokens, CHANNELS),
            weight=normal(CHANNELS, TAPS),
            bias=normal(CHANNELS),
            grad_out=normal(tokens, HEADS, columns),
            grad_x=normal(tokens, CHANNELS),
        )

    def shard(self, rows: Tensor) -> Inputs:
        """Some tokens of them, and the weights."""
        own = [name for name in self.__slots__ if name not in ("weight", "bias")]
        return replace(self, **{name: getattr(self, name)[rows] for name in own})


Results = dict[str, Tensor]
Layer = Callable[..., tuple[Tensor, Tensor]]


def forward(layer: Layer, given: Inputs) -> Callable[[], Results]:
    """Run `layer(q, k, v, log_decay, beta, x, weight, bias)` forward; what is returned runs it
    backward, and gives its two outputs and all gradients."""
    names = ("q", "k", "v", "log_decay", "beta", "x", "weight", "bias")
    leaves = {name: getattr(given, name).clone().requires_grad_() for name in names}
    out, mixed = layer(**leaves)

    def backward() -> Results:
        ((out * given.grad_out).sum() + (mixed * given.grad_x).sum()).backward()
        grads = {f"d_{n}": x.grad for n, x in leaves.items() if x.grad is not None}
        return {"out": out.detach(), "mixed": mixed.detach()} | grads

    return backward


def reference(given: Inputs, lengths: Sequence[int]) -> Results:
    """Token by token, each document alone."""

    def layer(q, k, v, log_decay, beta, x, weight, bias):  # type: ignore[no-untyped-def]
        rate = beta if beta.shape[1] else None
        out = linear_reference.linear_attention(
            q, k, v, log_decay=log_decay, beta=rate, lengths=lengths
        )
        return out, linear_reference.causal_conv(x, weight, bias, lengths=lengths)

    return forward(layer, given)()


@dataclass(slots=True, kw_only=True)
class Ran:
    """What one rank computed and counted."""

    results: Results
    account: Account
    sent: int
    kept: int = 0  # results that are still saved at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run.

    Args:
        layout (`Layout`): Of the documents.
        given (`Inputs`): All tokens of it.
        scan (`str`): Schedule.
        checkpointing (`str`): `none`, `reentrant` or `non_reentrant`.
        pieces (`int`): Of the chain; 0 leaves it to the batch.
    """

    layout: Layout
    given: Inputs
    scan: str = "auto"
    checkpointing: str = "none"
    pieces: int = 0
    module: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))

    def run(self, rank: int, channel: Channel) -> Ran:
        """One rank's share."""
        return self.start(rank, channel)()

    def start(self, rank: int, channel: Channel) -> Callable[[], Ran]:
        """One rank's share, forward; what is returned does the rest."""
        account = Account()
        runtime = Runtime(channel=channel, account=account)
        batch = LongCtxBatch(self.layout, rank, runtime=runtime, scan=self.scan)
        if self.pieces:
            decay = "matrix" if self.given.beta.shape[1] else "row"
            sizes = Sizes(State(ROWS, decay), HEADS, self.given.v.shape[2], 8)
            batch._programs[sizes] = scan_program(
                self.layout, rank=rank, state=sizes.state, schedule="chain", pieces=self.pieces
            )

        def layer(q, k, v, log_decay, beta, x, weight, bias):  # type: ignore[no-untyped-def]
            rate = beta if beta.shape[1] else None
            mixed = run_convolution(batch, self.module, x, weight, bias)
            return run_recurrence("s", batch, self.module, q, k, v, log_decay, rate), mixed

        def recomputed(**leaves: Tensor) -> tuple[Tensor, Tensor]:
            reentrant = self.checkpointing == "reentrant"
            found: tuple[Tensor, Tensor] = checkpoint(
                lambda *given: layer(*given), *leaves.values(), use_reentrant=reentrant
            )
            return found

        own = self.given.shard(torch.from_numpy(self.layout.flat_rows(rank)))
        before = sent_over_all(channel)
        backward = forward(layer if self.checkpointing == "none" else recomputed, own)

        def finish() -> Ran:
            results = backward()
            sent = sent_over_all(channel) - before
            kept = len(batch.saved.results)
            return Ran(results=results, account=account, sent=sent, kept=kept)

        return finish


def gather(case: Case, ran: Sequence[Ran]) -> Results:
    """Rows back in document order, and the sums of the weights' gradients."""
    order = torch.from_numpy(case.layout.inverse())
    found = {}
    for name in ran[0].results:
        parts = [each.results[name] for each in ran]
        whole = name in ("d_weight", "d_bias")
        found[name] = torch.stack(parts).sum(0) if whole else torch.cat(parts)[order]
    return found


def error(ours: Results, right: Results) -> float:
    """Largest difference of an output or gradient, beside its largest entry."""
    assert ours.keys() == right.keys()
    return max(
        float((ours[n] - right[n]).abs().max() / right[n].abs().max().clamp(min=1e-9))
        for n in right
    )


def run_threads(case: Case, *, channels: Sequence[Channel] | None = None) -> list[Ran]:
    """All ranks as threads of this process."""
    return run_threads_together([case], channels=channels)[0]


def run_threads_together(
    cases: Sequence[Case], *, channels: Sequence[Channel] | None = None
) -> list[list[Ran]]:
    """Cases of as many ranks, all forward before any goes backward."""
    ranks = cases[0].layout.ranks
    to = channels or Hub(ranks, timeout=20.0).channels()
    ran: dict[int, list[Ran]] = {}

    def work(rank: int) -> None:
        ran[rank] = [finish() for finish in [case.start(rank, to[rank]) for case in cases]]

    threads(work, ranks=ranks)
    return [[ran[rank][number] for rank in range(ranks)] for number in range(len(cases))]


def run_gloo(context: RankContext, *, cases: Sequence[Case]) -> list[Ran]:
    """A rank's job: its share of each case."""
    return [case.run(context.rank, context.channel) for case in cases]


def contiguous(lengths: Sequence[int], *, ranks: int) -> Layout:
    """The layout that scans need."""
    return cut(lengths, ranks=ranks, layout="contiguous")
