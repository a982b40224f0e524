"""Run one layer's attention as autograd nodes, one per phase of its program.

An exchange before and after the kernels, in both directions, makes three phases and three nodes:
the backward of the last node starts the exchange, that of the first collects its results. Between
forward and backward a row's home rank keeps q, k, v, out and lse, and sends them again; processes
that attended to remote rows keep nothing. Layer: runtime.

Letters: T rows, H query heads, K key/value heads, D head size, V value head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.channels import Channel
from ..kernels.softmax import Scoring, merge
from ..planning.program.counts import Widths
from ..planning.program.program import HomeArray, Program
from .executor import Account, Execution, drive
from .requests import Request


@dataclass(slots=True)
class Layer:
    """One attention call: its program, where it exchanges, and the direction under way.

    Args:
        program (`Program`): This rank's program.
        channel (`Channel`, *optional*): Needed where the program exchanges.
        scoring (`Scoring`): How scores are formed.
        account (`Account`): Where to add what was done.
        saved (`tuple[Tensor, ...]`, *optional*): `(out, lse)` of the forward, in its recompute.
        forget (`Callable`, *optional*): Called when backward starts, and saved results can go.
        half (`int`, *optional*, defaults to 0): Which half of a batch this is.
        turn (`Callable`, *optional*): Hands over to the other half, in a forward of both.
        call (`Callable`, *optional*): Called when a direction starts, to tell extra servers of it.
        index (`int`, *optional*): Number of the layer in its model, where that is known.
        run (`Execution`, *optional*): The direction under way.
    """

    program: Program
    channel: Channel | None
    scoring: Scoring
    account: Account
    saved: tuple[Tensor, ...] | None = None
    forget: Callable[[], None] | None = None
    half: int = 0
    turn: Callable[[], None] | None = None
    call: Callable[[Request], None] | None = None
    index: int | None = None
    run: Execution | None = None

    def start(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, backward: bool) -> Execution:
        """Begin one direction with the rank's own rows bound."""
        widths = Widths(
            heads=q_THD.shape[1],
            kv_heads=k_TKD.shape[1],
            head_dim=q_THD.shape[2],
            value_dim=v_TKD.shape[2],
        )
        if self.call is not None:  # before anything is sent, which the servers must expect
            self.call(Request(backward, widths, q_THD.dtype, self.scoring))
        self.run = Execution(
            self.program,
            widths=widths,
            dtype=q_THD.dtype,
            backward=backward,
            channel=self.channel,
            scoring=self.scoring,
            account=self.account,
            layer=self.index,
        )
        self.run.bind(HomeArray.Q, q=q_THD)
        self.run.bind(HomeArray.KV, k=k_TKD, v=v_TKD)
        return self.run

    def advance(self, phase: int) -> None:
        """Run one phase of the direction under way."""
        assert self.run is not None
        if self.half != self.account.half:  # counted to show that halves do alternate
            self.account.half, self.account.switches = self.half, self.account.switches + 1
        drive(self.run.phase(phase), self.account)

    def finish(self) -> Execution:
        """End the direction under way; its buffers go with it."""
        assert self.run is not None
        run, self.run = self.run, None
        return run


class _Phase(torch.autograd.Function):
    """Phase `index` of `phases`. The first takes q, k, v; the last gives out and lse.

    Empty tokens tie the nodes in their order. The last phase may take sinks, one score per head: a
    sink is a partial `(0, sink)` of every row.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, index: int, phases: int, sinks: Tensor | None, *given: Tensor
    ) -> Any:
        ctx.layer, ctx.index, ctx.phases, ctx.given = layer, index, phases, len(given)
        first, last = index == 0, index == phases - 1
        q, k, v = given[-3:] if first or last else (None, None, None)
        if layer.saved is None:
            if first:
                assert q is not None and k is not None and v is not None
                layer.start(q, k, v, backward=False)
            layer.advance(index)
        if not last:
            return given[0].new_empty(0)
        if layer.saved is None:
            fields = layer.finish().fields(HomeArray.OUT)
            out, lse = fields["out"], fields["lse"]
            if sinks is not None:
                out, lse = _with_sinks(out, lse, sinks)
        else:
            (out, lse), layer.saved = layer.saved, None
        # through autograd, so that hooks on saved tensors (checkpointing, offloading) see them
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.mark_non_differentiable(lse)  # it is kept for recomputes and never used by a model
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer, d_sinks = ctx.layer, None
        if ctx.index == ctx.phases - 1:
            q, k, v, out, lse, sinks = ctx.saved_tensors
            if sinks is not None:
                d_sinks = _sinks_grad(grads[0], out, lse, sinks)
            if layer.forget is not None:
                layer.forget()
            run = layer.start(q, k, v, backward=True)
            run.bind(HomeArray.GRAD, grad_out=grads[0].contiguous(), out=out, lse=lse)
        layer.advance(ctx.phases - 1 - ctx.index)
        if ctx.index:
            # the rows came detached: only the first phase returns their gradients
            rows = (None,) * (ctx.given - 1)
            return None, None, None, d_sinks, grads[0].new_zeros(0), *rows
        run = layer.finish()
        dtype = run.dtype
        dq, dkv = run.fields(HomeArray.DQ), run.fields(HomeArray.DKV)
        qkv = dq["dq"].to(dtype), dkv["dk"].to(dtype), dkv["dv"].to(dtype)
        return None, None, None, d_sinks, *qkv


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merge each head's partial `(0, sink)` into every row of `out [T, H, V]`, `lse [T, H, 1]`."""
    zero, score = torch.zeros_like(out, dtype=lse.dtype), sinks.to(lse.dtype).expand(lse.shape[:2])
    merged, norm = merge(out.to(lse.dtype), lse[..., 0], zero, score)
    return merged.to(out.dtype), norm[..., None]


def _sinks_grad(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of each head's sink, `[H]`.

    The value of a sink is 0, so its score's gradient in a row is minus its weight times delta.
    """
    wide = lse.dtype
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
    return -(torch.exp(sinks.to(wide) - lse[..., 0]) * delta).sum(0).to(sinks.dtype)


def attend(
    layer: Layer, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run one layer's attention.

    Args:
        layer (`Layer`): The call; with `saved` set, nothing is computed or sent in forward.
        q_THD, k_TKD, v_TKD (`Tensor`): The rank's own rows, of one dtype.
        sinks (`Tensor`, *optional*): `[H]`, a learned score of each head that takes weight and
            gives no value.

    Returns:
        `out [T, H, V]` in that dtype, differentiable, and `lse [T, H, 1]`, float32 or wider.
    """
    # kernels and messages read rows whose last axis is dense; heads may have any stride
    given = [t if t.stride(-1) == 1 else t.contiguous() for t in (q_THD, k_TKD, v_TKD)]
    phases, turn = len(layer.program.forward), layer.turn or (lambda: None)
    if phases == 1:
        # as often as on ranks that exchange something, so that all of them post in one order
        turn()
        result = _Phase.apply(layer, 0, phases, sinks, *given)
        turn()
        return result
    token = _Phase.apply(layer, 0, phases, None, *given)
    # the later phases need the rows for backward, but must not add to their gradients
    rows = [t.detach() for t in given]
    for index in range(1, phases - 1):
        turn()
        token = _Phase.apply(layer, index, phases, None, token)
    turn()
    return _Phase.apply(layer, phases - 1, phases, sinks, token, *rows)
