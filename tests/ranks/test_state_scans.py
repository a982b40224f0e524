"""Compare recurrent layers over ranks with one process: outputs, gradients, bytes and memory.

The references are the naive token-by-token twins. Letters: T tokens, H heads, N rows of a state,
V its columns, C channels, W taps, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import examples, nan_memory, threads, uneven
from hypothesis import given
from hypothesis import strategies as st
from late_channels import LateHub
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_longctx.comm.channels import Channel, Hub, sent_over_all
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.kernels import reference as linear_reference
from hf_longctx.planning.layouts.layout import Layout, cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.state_scan import State, scan_program
from hf_longctx.planning.predict.scan_schedule import StateSizes
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
        batch = LongCtxBatch(self.layout, rank, PlanOptions(scan=self.scan))
        batch.bind(runtime)
        if self.pieces:
            decay = "matrix" if self.given.beta.shape[1] else "row"
            sizes = StateSizes(State(ROWS, decay), HEADS, self.given.v.shape[2], 8)
            batch.binding.programs[sizes] = scan_program(
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
            kept = len(batch.binding.saved.results)
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


SCHEDULES = ("chain", "tree", "allgather")
# One document over all ranks; cuts inside shards, on edges and a token beside them; short ones.
DOCUMENTS = ([48], [7, 37, 4], [24, 24], [23, 1, 24], [25, 23], [1, 1, 44, 2], [6] * 8, [3, 2])
every_family = pytest.mark.parametrize("family", FAMILIES)
every_schedule = pytest.mark.parametrize("scan", SCHEDULES)


def case(lengths: list[int], *, ranks: int, family: str, **options: Any) -> Case:
    columns = options.pop("columns", 4)
    given = Inputs.random(sum(lengths), family=family, columns=columns)
    return Case(layout=contiguous(lengths, ranks=ranks), given=given, **options)


@every_family
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8], ids="ranks{}".format)
def test_ranks_compute_what_one_process_does(family: str, ranks: int) -> None:
    for number, lengths in enumerate(DOCUMENTS):
        what = case(lengths, ranks=ranks, family=family, scan=SCHEDULES[(number + ranks) % 3])
        with nan_memory():
            ran = run_threads(what)
        assert error(gather(what, ran), reference(what.given, lengths)) < 1e-11, lengths
        assert [each.sent for each in ran] == [each.account.planned_bytes for each in ran]
        assert not any(each.kept for each in ran)


@every_family
@every_schedule
@pytest.mark.parametrize(
    ("lengths", "edges"),
    [
        ([48], [0, 40, 41, 48]),  # a halo of three rows reaches over the shard of one
        ([48], [0, 2, 5, 7, 48]),
        ([3, 43, 2], [0, 1, 4, 6, 48]),
        ([20, 28], [0, 30, 30, 32, 48]),  # a rank without a row
        ([48], [0, 20, 20, 48]),
    ],
    ids=str,
)
def test_shards_of_very_different_lengths(
    family: str, scan: str, lengths: list[int], edges: list[int]
) -> None:
    given = Inputs.random(48, family=family)
    what = Case(layout=uneven(lengths, edges), given=given, scan=scan)
    with nan_memory():
        ran = run_threads(what)
    assert error(gather(what, ran), reference(given, lengths)) < 1e-11
    assert [each.sent for each in ran] == [each.account.planned_bytes for each in ran]


@pytest.mark.parametrize("family", ["row", "delta"])
def test_bf16_over_ranks_is_bf16_of_one_process(family: str) -> None:
    """States travel in float32 and a halo as it is; its gradient is rounded once more."""
    lengths = [7, 37, 4]
    given = Inputs.random(48, family=family)
    right = reference(given, lengths)
    low = replace(given, **{name: getattr(given, name).bfloat16() for name in given.__slots__})
    one, three = (
        gather(what, run_threads(what))
        for what in (Case(layout=contiguous(lengths, ranks=n), given=low) for n in (1, 3))
    )
    assert torch.equal(three["mixed"], one["mixed"]) and three["mixed"].dtype == torch.bfloat16
    assert not torch.equal(three["d_x"], one["d_x"])  # it is added up in another order
    for name, value in right.items():
        plain, found = (error({name: each[name]}, {name: value}) for each in (one, three))
        assert found <= 2 * max(plain, 2**-9), (name, found, plain)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    ranks=st.integers(2, 5),
    family=st.sampled_from(FAMILIES),
    scan=st.sampled_from(("auto", *SCHEDULES)),
    seed=st.integers(0, 1000),
)
@examples(12)
def test_late_messages_change_no_bit(
    lengths: list[int], ranks: int, family: str, scan: str, seed: int
) -> None:
    what = case(lengths, ranks=ranks, family=family, scan=scan)
    plain = gather(what, run_threads(what))
    late = gather(what, run_threads(what, channels=LateHub(ranks, seed=seed).channels()))
    assert error(plain, reference(what.given, lengths)) < 1e-11
    assert all(torch.equal(late[name], plain[name]) for name in plain)


@pytest.mark.parametrize("ranks", [2, 3, 4], ids="ranks{}".format)
def test_processes_compute_what_one_does(ranks: int, rank_pool: Any) -> None:
    cases = [
        case(lengths, ranks=ranks, family=family, scan=scan)
        for family in FAMILIES
        for lengths, scan in zip(DOCUMENTS[:3], SCHEDULES, strict=True)
    ]
    ran = rank_pool.run(run_gloo, ranks=ranks, cases=cases)
    for what, parts in zip(cases, zip(*ran, strict=True), strict=True):
        lengths = what.layout.lengths.tolist()
        assert error(gather(what, parts), reference(what.given, lengths)) < 1e-11
        assert [each.sent for each in parts] == [each.account.planned_bytes for each in parts]


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@every_schedule
def test_recompute_sends_nothing(scan: str, checkpointing: str) -> None:
    lengths = [30, 18]
    for family in ("row", "delta"):
        plain = case(lengths, ranks=3, family=family, scan=scan)
        again = case(lengths, ranks=3, family=family, scan=scan, checkpointing=checkpointing)
        once, twice = run_threads(plain), run_threads(again)
        assert error(gather(again, twice), gather(plain, once)) == 0
        assert [each.sent for each in twice] == [each.sent for each in once]
        assert not any(each.kept or each.account.recompute_bytes for each in twice)


def test_short_documents_send_nothing() -> None:
    for lengths in ([6] * 8, [6, 3, 3, 6, 6], [5, 1, 6, 6, 6]):
        what = case(lengths, ranks=sum(lengths) // 6, family="delta rows")
        ran = run_threads(what)
        assert error(gather(what, ran), reference(what.given, lengths)) < 1e-11
        assert not any(each.sent or each.account.message_peak_bytes for each in ran)


@pytest.mark.parametrize("family", ["row", "delta"])
def test_a_chain_sends_and_holds_one_state_whatever_the_ranks(family: str) -> None:
    sent, peaks = set(), set()
    for ranks in (3, 8):
        ran = run_threads(case([4 * ranks], ranks=ranks, family=family, scan="chain"))
        for each in ran[1:-1]:
            sent.add(each.sent)
            peaks.add((each.account.peak_bytes, each.account.message_peak_bytes))
    state, halo = 2 * 3 * 4 * 8, 3 * 5 * 8
    assert sent == {2 * (state + halo)}
    assert peaks == {(state, 2 * halo)}  # what has come is taken before anything leaves


@pytest.mark.parametrize("family", ["row", "delta"])
@pytest.mark.parametrize("pieces", [2, 4, 16])
def test_pieces_of_a_chain_are_heads_or_columns(family: str, pieces: int) -> None:
    whole, cut = (
        case([24], ranks=4, family=family, columns=8, pieces=count) for count in (1, pieces)
    )
    once, ran = run_threads(whole), run_threads(cut)
    assert error(gather(cut, ran), reference(cut.given, [24])) < 1e-11
    assert [each.sent for each in ran] == [each.sent for each in once]
    assert [each.account.peak_bytes for each in ran] == [each.account.peak_bytes for each in once]


@every_family
def test_b42_documents_neither_leak_nor_restart_at_a_rank_edge(family: str) -> None:
    lengths = [37, 51, 40]
    what = case(lengths, ranks=2, family=family)
    right = reference(what.given, lengths)
    assert error(gather(what, run_threads(what)), right) < 1e-11
    for wrong in ([128], [37, 27, 24, 40]):  # runs on into the next, or restarts at token 64
        other = case(wrong, ranks=2, family=family)
        assert error(gather(other, run_threads(other)), right) > 0.1


@every_family
def test_b44_the_gradient_of_a_state_returns_to_the_first_shard(family: str) -> None:
    what = case([8], ranks=2, family=family)
    what.given.grad_out[:4] = 0.0
    ours = gather(what, run_threads(what))
    assert error(ours, reference(what.given, [8])) < 1e-11
    assert ours["d_q"][:4].abs().max() == 0
    assert min(ours[name][:4].abs().max() for name in ("d_k", "d_v")) > 0.1


def test_b46_a_halo_reaches_over_shards_that_are_shorter() -> None:
    what = case([1, 7], ranks=4, family="head")
    assert error(gather(what, run_threads(what)), reference(what.given, [1, 7])) < 1e-11


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_b48_two_batches_in_flight_keep_their_own_states(checkpointing: str) -> None:
    pair = [
        case(lengths, ranks=2, family="delta", checkpointing=checkpointing)
        for lengths in ([6, 2], [3, 5])
    ]
    ran = run_threads_together(pair)
    for what, parts in zip(pair, ran, strict=True):
        lengths = what.layout.lengths.tolist()
        assert error(gather(what, parts), reference(what.given, lengths)) < 1e-11
