"""The chain scan on the attention executor: scalar-decay states over ranks, exact both ways.

The layer is `S_t = a_t S_{t-1} + k_t^T v_t`, `o_t = q_t S_t`; a document starts from state zero.
Letters: T tokens, H heads, D head size, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from helpers import examples, lock_step, whole
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.comm.channels import Hub
from hf_longctx.plan import scan
from hf_longctx.plan.check import lock_step as checked
from hf_longctx.plan.count import Widths, sent
from hf_longctx.plan.program import Fold, Post, Wait
from hf_longctx.runtime.executor import Execution, Fields

HEADS, DIM = 2, 3
WIDTHS = Widths(
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=DIM,
    value_dim=DIM,
    state=DIM * DIM,
    itemsize=8,
    wide_itemsize=8,
)
every_cut = pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)
every_piece = pytest.mark.parametrize("pieces", [1, 2], ids="pieces{}".format)


def recur(
    inputs: Sequence[Tensor], *, starts: Sequence[bool], state_HDD: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: outputs `[T, H, D]` and the state that leaves. Inputs as in `Shard`."""
    q_THD, k_THD, v_THD, a_TH = inputs
    outs = []
    for t, start in enumerate(starts):
        if start:
            state_HDD = torch.zeros_like(state_HDD)
        state_HDD = a_TH[t, :, None, None] * state_HDD + k_THD[t, :, :, None] * v_THD[t, :, None]
        outs.append(torch.einsum("hd,hde->he", q_THD[t], state_HDD))
    return torch.stack(outs) if outs else v_THD.new_zeros(v_THD.shape), state_HDD


@dataclass(slots=True)
class Shard:
    """One rank's tokens, and the layer's own steps of the scan on them.

    Args:
        inputs (`list[Tensor]`): q, k, v `[T, H, D]` and a `[T, H]`, leaves.
        grad_out (`Tensor`): `[T, H, D]`.
        starts (`list[bool]`): For each token, whether a document starts with it.
    """

    inputs: list[Tensor]
    grad_out: Tensor
    starts: list[bool]
    run: Execution | None = None
    outs: tuple[Tensor, Tensor] | None = None  # outputs and leaving state, of a known entering one
    entering: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    @property
    def continues(self) -> bool:
        """Whether the entering state reaches the leaving one."""
        return not any(self.starts)

    def step(self, step: int, into: Fields) -> None:
        """What the executor calls at each `Local`."""
        actions: dict[int, Callable[[Fields], None]] = {
            scan.SUMMARY: self._summary,
            scan.EMIT: self._emit,
            scan.GRAD_SUMMARY: self._grad_summary,
            scan.GRAD_EMIT: self._grad_emit,
        }
        actions[step](into)

    def _decay(self) -> Tensor:
        """M: `[1, H, 1]`, zero where a document starts in the shard."""
        decay = self.inputs[3].detach().prod(0)[None, :, None]
        return decay if self.continues else torch.zeros_like(decay)

    def _fill_decay(self) -> None:
        assert self.run is not None
        self.run.fields(scan.M_)["decay"].copy_(self._decay())

    def _summary(self, into: Fields) -> None:
        zero = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
        with torch.no_grad():
            _, end = recur(self.inputs, starts=self.starts, state_HDD=zero)
        into["state"].copy_(end.reshape(1, HEADS, -1))
        self._fill_decay()

    def _emit(self, into: Fields) -> None:
        self.entering = into["state"].reshape(HEADS, DIM, DIM).clone().requires_grad_()
        self.outs = recur(self.inputs, starts=self.starts, state_HDD=self.entering)

    def _pull(self, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert self.entering is not None
        leaves = [*self.inputs, self.entering]
        found = torch.autograd.grad(
            [x for x in outputs if x.requires_grad],
            leaves,
            [g for x, g in zip(outputs, grads, strict=True) if x.requires_grad],
            retain_graph=True,
            allow_unused=True,
        )
        return tuple(
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, found, strict=True)
        )

    def _grad_summary(self, into: Fields) -> None:
        assert self.outs is not None
        into["state"].copy_(self._pull(self.outs[:1], [self.grad_out])[-1].reshape(1, HEADS, -1))
        self._fill_decay()

    def _grad_emit(self, into: Fields) -> None:
        assert self.outs is not None
        leaving = into["state"].reshape(HEADS, DIM, DIM)
        self.grads = self._pull(self.outs, [self.grad_out, leaving])[:-1]


def batch(tokens: int, *, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """q, k, v, a with slow decay, which would show a leak, and the gradient of the output."""
    noise = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(tokens, HEADS, DIM, dtype=torch.float64, generator=noise) for _ in range(4)
    )
    a = 1 - 0.05 * torch.rand(tokens, HEADS, dtype=torch.float64, generator=noise)
    return [q, k, v, a], grad


def reference(
    inputs: Sequence[Tensor], grad_out: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v, a: each document alone, from a zero state."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    zero = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
    outs = [
        recur([x[start:stop] for x in leaves], starts=[False] * (stop - start), state_HDD=zero)[0]
        for start, stop in pairwise([0, *accumulate(lengths)])
    ]
    out = torch.cat(outs)
    out.backward(grad_out)
    return out.detach(), *(x.grad for x in leaves if x.grad is not None)


def scanned(
    inputs: Sequence[Tensor],
    grad_out: Tensor,
    starts: Sequence[bool],
    edges: Sequence[int],
    *,
    pieces: int = 1,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """The same over ranks that hold tokens `[edges[r], edges[r + 1])`."""
    spans = list(pairwise(edges))
    shards = [
        Shard(
            [x[start:stop].clone().requires_grad_() for x in inputs],
            grad_out[start:stop],
            list(starts[start:stop]),
        )
        for start, stop in spans
    ]
    cut = [not shard.continues for shard in shards]
    programs = [
        scan.program(rank=r, cut=cut, heads=HEADS, pieces=pieces) for r in range(len(spans))
    ]
    channels = Hub(len(spans)).channels()
    for backward in (False, True):
        for shard, program, channel in zip(shards, programs, channels, strict=True):
            shard.run = Execution(
                program,
                widths=WIDTHS,
                dtype=torch.float64,
                backward=backward,
                channel=channel,
                local=shard.step,
            )
        lock_step([whole(shard.run) for shard in shards if shard.run], seed=seed)
    for program, channel in zip(programs, channels, strict=True):
        planned = sent(program, WIDTHS, backward=False) + sent(program, WIDTHS, backward=True)
        assert channel.sent == planned
    outs = torch.cat([shard.outs[0].detach() for shard in shards if shard.outs])
    return outs, *(torch.cat(parts) for parts in zip(*(s.grads for s in shards), strict=True))


def even(tokens: int, ranks: int) -> list[int]:
    return [tokens * rank // ranks for rank in range(ranks + 1)]


def first_tokens(lengths: Sequence[int]) -> list[bool]:
    return [at == 0 for n in lengths for at in range(n)]


def error(ours: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    assert len(ours) == len(right) == 5
    return max(float((a - b).abs().max()) for a, b in zip(ours, right, strict=True))


@every_cut
@every_piece
@pytest.mark.parametrize(
    "lengths",
    [[24], [5, 19], [12, 12], [6, 6, 6, 6], [11, 1, 12], [13, 11], [1, 1, 20, 2]],
    ids=str,
)
def test_outputs_and_gradients_of_documents(ranks: int, pieces: int, lengths: list[int]) -> None:
    inputs, grad_out = batch(24)
    ours = scanned(inputs, grad_out, first_tokens(lengths), even(24, ranks), pieces=pieces)
    assert error(ours, reference(inputs, grad_out, lengths)) < 1e-12


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    pieces=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@examples(30)
def test_uneven_shards_in_any_order_of_arrival(
    lengths: list[int], ranks: int, pieces: int, seed: int, data: st.DataObject
) -> None:
    tokens = sum(lengths)
    inner = data.draw(st.lists(st.integers(1, tokens), min_size=ranks - 1, max_size=ranks - 1))
    edges = [0, *sorted(inner), tokens]
    inputs, grad_out = batch(tokens, seed=seed)
    ours = scanned(inputs, grad_out, first_tokens(lengths), edges, pieces=pieces, seed=seed)
    assert error(ours, reference(inputs, grad_out, lengths)) < 1e-12


def test_b42_documents_neither_leak_nor_restart_at_a_rank_edge() -> None:
    lengths = [37, 51, 40]
    inputs, grad_out = batch(128)
    right = reference(inputs, grad_out, lengths)
    starts = first_tokens(lengths)
    assert error(scanned(inputs, grad_out, starts, even(128, 2)), right) < 1e-12
    runs_on = [True, *[False] * 127]
    assert error(scanned(inputs, grad_out, runs_on, even(128, 2)), right) > 0.1
    restarts = [start or at == 64 for at, start in enumerate(starts)]
    assert error(scanned(inputs, grad_out, restarts, even(128, 2)), right) > 0.1


@every_piece
def test_b44_the_state_gradient_returns_to_the_first_shard(pieces: int) -> None:
    inputs, grad_out = batch(8)
    grad_out[:4] = 0.0
    ours = scanned(inputs, grad_out, first_tokens([8]), even(8, 2), pieces=pieces)
    right = reference(inputs, grad_out, [8])
    assert error(ours, right) < 1e-12
    _, dq, dk, dv, da = ours
    assert dq[:4].abs().max() == 0
    assert min(x[:4].abs().max() for x in (dk, dv, da)) > 0.1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@every_piece
def test_a_rank_where_a_document_starts_sends_before_it_waits(pieces: int, backward: bool) -> None:
    program = scan.program(rank=1, cut=[True, True, False], heads=HEADS, pieces=pieces)
    (ops,) = program.backward if backward else program.forward
    sends = [at for at, op in enumerate(ops) if isinstance(op, Post) and op.sends]
    waits = [at for at, op in enumerate(ops) if isinstance(op, Wait)]
    assert len(sends) == pieces and max(sends) < min(waits)
    assert {op.how for op in ops if isinstance(op, Fold)} == {"cat"}


@every_piece
def test_a_rank_inside_a_document_forwards_piece_by_piece(pieces: int) -> None:
    program = scan.program(rank=1, cut=[True, False, False], heads=HEADS, pieces=pieces)
    (ops,) = program.forward
    kinds = [
        "send" if isinstance(op, Post) and op.sends else "wait" if isinstance(op, Wait) else None
        for op in ops
    ]
    assert [kind for kind in kinds if kind][: 2 * pieces] == ["wait", "send"] * pieces
    state = DIM * DIM * HEADS * 8
    assert sent(program, WIDTHS, backward=False) == {2: state}
    assert sent(program, WIDTHS, backward=True) == {0: state}


@every_piece
def test_messages_match_at_any_number_of_ranks(pieces: int) -> None:
    for ranks in (1, 2, 5, 32):
        cut = [rank % 3 == 0 for rank in range(ranks)]
        programs = {
            rank: scan.program(rank=rank, cut=cut, heads=4, pieces=2 * pieces)
            for rank in range(ranks)
        }
        for backward in (False, True):
            checked(programs, backward=backward)


@pytest.mark.parametrize("pieces", [0, 3])
def test_pieces_must_divide_the_heads(pieces: int) -> None:
    with pytest.raises(ValueError, match=f"pieces={pieces} must divide heads=4; use a divisor"):
        scan.program(rank=0, cut=[True], heads=4, pieces=pieces)
