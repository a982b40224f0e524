"""Run two halves by turns: each keeps its state, and a model computes what it did without."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import threads
from peft import LoraConfig, get_peft_model
from tiny import CONFIGS, collate, documents, gradients, tiny, twin
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutput

from hf_longctx import LongCtxArguments
from hf_longctx.comm.arrivals import Exchange
from hf_longctx.comm.channels import Hub, Payload, ThreadChannel
from hf_longctx.data.batch import KEY
from hf_longctx.data.collator import LongCtxCollator
from hf_longctx.data.packing import Piece
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.runtime.executor import Runtime
from hf_longctx.runtime.pingpong import PingPong, _join, enable_pingpong
from hf_longctx.support import validate_pingpong
from hf_longctx.verify import compare
from hf_longctx.verify.rank_pool import RankContext
from hf_longctx.verify.twins import backward, precision

pytestmark = pytest.mark.usefixtures("references_once")
SEEN: ContextVar[str] = ContextVar("seen", default="nothing")


# Coroutines


def both(first: Callable[[Callable[[], None]], Any], second: Any = None) -> list[Any]:
    """Return what two functions of `switch` return."""
    halves = PingPong(lambda: first(halves.switch), lambda: (second or first)(halves.switch))
    return halves.run()


def test_halves_alternate_and_one_may_end_first():
    order: list[str] = []

    def named(name: str, count: int) -> Callable[[Callable[[], None]], str]:
        def run(turn: Callable[[], None]) -> str:
            for i in range(count):
                order.append(f"{name}{i}")
                turn()
            return name

        return run

    assert both(named("a", 2), named("b", 4)) == ["a", "b"]
    assert order == ["a0", "b0", "a1", "b1", "b2", "b3"]


def test_each_half_draws_as_if_it_ran_alone():
    def draws(turn: Callable[[], None]) -> list[float]:
        found = []
        for _ in range(3):
            found.append(torch.rand(()).item())
            turn()
        return found

    torch.manual_seed(3)
    ours, after = both(draws), torch.rand(()).item()
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()))
    first = draws(lambda: None)
    assert after == torch.rand(()).item()  # goes on behind the first half
    torch.manual_seed(seed)
    assert ours == [first, draws(lambda: None)]


def test_state_of_the_thread_stays_with_each_half():
    def state(turn: Callable[[], None]) -> list[Any]:
        turn()
        return [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), SEEN.get(), seen_by()]

    def changed(turn: Callable[[], None]) -> list[Any]:
        hooks = saved_tensors_hooks(lambda x: x + 1, lambda x: x)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), hooks:
            SEEN.set("inner")
            with torch.enable_grad():
                return state(turn)

    def seen_by() -> float:
        x = torch.ones((), requires_grad=True)
        return float((x * x).grad_fn._saved_self.detach())

    SEEN.set("outer")
    plain = [True, False, "outer", 1.0]
    inner = [True, True, "inner", 2.0]
    assert both(changed, state) == [inner, plain]
    assert both(state, changed) == [plain, inner]
    with torch.no_grad():
        assert both(lambda turn: (turn(), torch.is_grad_enabled())[1]) == [False, False]
    assert state(lambda: None) == plain


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_half_ends_the_other_and_leaves_no_state(failing):
    ended: list[str] = []

    def fails(turn: Callable[[], None]) -> None:
        with torch.no_grad():
            turn()
            turn()
            raise KeyError("half")

    def waits(turn: Callable[[], None]) -> None:
        hooks = saved_tensors_hooks(lambda x: x + 1, lambda x: x)
        try:
            with hooks:
                while True:
                    turn()
        finally:
            ended.append("other")

    halves = [waits, waits]
    halves[failing] = fails
    with pytest.raises(KeyError, match="half"):
        both(*halves)
    assert ended == ["other"] and torch.is_grad_enabled()
    x = torch.ones((), requires_grad=True)
    assert float((x * x).grad_fn._saved_self.detach()) == 1.0


def test_a_mode_that_a_layer_enters_is_refused():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def inside(turn: Callable[[], None]) -> None:
        with Mode():
            turn()

    with pytest.raises(ValueError, match="inside a torch function or dispatch mode that its layer"):
        both(inside)
    with Mode():  # around both halves
        both(lambda turn: turn())


# One forward


def test_outputs_are_put_together_as_those_of_one_forward():
    first, second = (
        CausalLMOutput(loss=torch.tensor(n), logits=torch.full((1, int(n), 2), n), hidden_states=(
            torch.full((1, int(n), 3), n),)) for n in (2.0, 3.0)
    )  # fmt: skip
    joined = _join([first, second], [2, 3])
    assert joined.loss == 5 and joined.logits[0, :, 0].tolist() == [2, 2, 3, 3, 3]
    assert joined.hidden_states[0].shape == (1, 5, 3) and joined.attentions is None
    with pytest.raises(ValueError, match=re.escape("output logits=Tensor (1, 2, 2) cannot be put")):
        _join([first, second], [3, 2])
    with pytest.raises(ValueError, match="output logits=str cannot"):
        _join([{"logits": "a"}, {"logits": "b"}], [1, 1])


def test_a_forward_that_is_no_method_is_refused():
    model = tiny("distca")
    model.forward = lambda **kwargs: None
    with pytest.raises(ValueError, match="forward of LlamaForCausalLM was replaced by a function"):
        enable_pingpong(model)


# The order of exchanges, over two ranks


class RecordedChannel(ThreadChannel):
    """Notes which half posts what."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.runtime = Runtime(channel=self)
        self.posts: list[tuple[str, int, int]] = []

    def post(self, sends: Sequence[Payload], recvs: Sequence[Payload], *, what: str) -> Exchange:
        (tag, direction) = re.findall(r"exchange (\d+) of (\w+)", what)[0]
        self.posts.append((direction, self.runtime.account.half, int(tag)))
        return super().post(sends, recvs, what=what)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_forward_and_backward_alternate_layer_by_layer(checkpointing):
    rows = documents([700, 20, 690, 30])  # both halves move tasks, so that all exchanges are there
    hub = Hub(2, timeout=20.0)
    channels = [RecordedChannel(hub, rank) for rank in range(2)]
    losses: dict[int, float] = {}
    models = [tiny("distca").train() for _ in range(2)]

    def work(rank: int) -> None:
        model = models[rank]
        if checkpointing:
            model.activation_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
            model.enable_input_require_grads()
        enable_pingpong(model)
        inputs = halved_inputs(rows, rank=rank, runtime=channels[rank].runtime, layout="contiguous")
        with precision(model.dtype):
            loss = model(**inputs, num_items_in_batch=1436).loss
            losses[rank] = loss.item()
            backward(loss)

    threads(work, ranks=2)
    there = [("forward", half, tag) for tag in range(2) for half in (0, 1)] * 2  # layers
    back = [("backward", half, tag) for tag in range(2) for half in (1, 0)] * 2
    assert [channel.posts for channel in channels] == [there + back] * 2
    right = twin([rows])
    assert sum(losses.values()) == pytest.approx(right.loss, rel=1e-12)


def halved_inputs(
    rows: Any, *, rank: int, runtime: Runtime, layout: str = "spread"
) -> dict[str, Any]:
    """One rank of two, with all rows in one batch that has halves."""
    pack = tuple(Piece(document=d, start=0, stop=len(r["input_ids"])) for d, r in enumerate(rows))
    collator = LongCtxCollator(
        rank=rank,
        ranks=2,
        options=PlanOptions(layout=layout, tolerance=0.0),
        budget=0,
        halves=True,
    )
    inputs = collator([(pack, rows)])
    assert len(inputs[KEY].halves) == 2
    inputs[KEY].bind(runtime)
    return inputs


# Dropout


@dataclass
class Trained:
    """Of one rank."""

    loss: float
    grads: dict[str, Tensor]
    switches: int


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Random state of its own, or the thread's."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def with_dropout(context: RankContext, *, kind: str) -> Trained:
    """A step of LoRA with dropout: in turns, or the two halves' forwards and backwards apart."""
    model = tiny("distca", dtype=torch.float64)
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
    torch.manual_seed(5)
    adapter.init_lora_weights = False
    model = get_peft_model(model, adapter).double().train()
    if kind != "apart":
        options = {"use_reentrant": kind == "reentrant"}
        model.activation_checkpointing_enable(options)
        model.enable_input_require_grads()
        enable_pingpong(model)
    runtime = Runtime(channel=context.channel)
    rows = documents([300, 40, 180, 120])
    inputs = halved_inputs(rows, rank=context.rank, runtime=runtime)
    torch.manual_seed(100 + context.rank)
    with precision(torch.float64):
        if kind != "apart":
            loss = model(**inputs, num_items_in_batch=636).loss
            backward(loss)
            return Trained(loss.item(), gradients(model), runtime.account.switches)
        total, start = 0.0, 0
        seeds = [None, int(torch.randint(2**62, ()))]
        for part, seed in zip(inputs[KEY].parts, seeds, strict=True):
            stop = start + part.layout.rows(context.rank)
            given = {key: x[:, start:stop] for key, x in inputs.items() if isinstance(x, Tensor)}
            with seeded(seed):
                loss = model(**given, **{KEY: part}, num_items_in_batch=636).loss
            backward(loss)
            total, start = total + loss.item(), stop
    return Trained(total, gradients(model), runtime.account.switches)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_b47_dropout_and_checkpointing_give_the_gradients_of_two_forwards_apart(rank_pool, kind):
    ours = rank_pool.run(with_dropout, ranks=2, kind=kind)
    apart = rank_pool.run(with_dropout, ranks=2, kind="apart")
    for mine, right in zip(ours, apart, strict=True):
        assert mine.switches > 8 > right.switches
        assert mine.loss == pytest.approx(right.loss, rel=1e-12)
        largest = max(float(grad.abs().max()) for grad in right.grads.values())
        assert largest > 0
        for name, grad in right.grads.items():
            torch.testing.assert_close(mine.grads[name], grad, rtol=0, atol=1e-10 * largest)


# hf-longctx verify --overlap pingpong


def verify(pool: Any, family: str = "llama", **given: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"name": "distca", "ranks": 2} | given
    options["arguments"] = LongCtxArguments(longctx_overlap="pingpong", longctx_tolerance=0.0)
    return compare.verify(model=str(CONFIGS / f"tiny_{family}.json"), pool=pool, **options)


@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", 1), ("llama", 4), ("gemma2", 3), ("gpt_oss", 2)]
)
def test_verify(rank_pool, family, ranks):
    report = verify(rank_pool, family, ranks=ranks)
    assert report["failed"] == []
    assert report["switches"] > 0


def test_b47_verify_with_checkpointing_of_both_kinds(rank_pool):
    report = verify(rank_pool, checkpointing=True)
    assert report["failed"] == [] and report["recompute_bytes"] == 0
    # Two batches of three have halves: 4 layers' phases in turn forward, as many backward.
    assert report["switches"] >= 2 * 2 * (8 * 2 + 2)


@pytest.mark.parametrize("lengths", [(1,) * 9 + (2,), (64,), (1, 1, 1, 300, 290)], ids=str)
def test_documents_that_do_not_split_evenly(rank_pool, lengths):
    report = verify(rank_pool, document_lengths=lengths)
    for key in ("logit_error", "loss_error", "grad_error"):
        assert report[key] < 1e-10, key
    assert report["leak"] == 0 and report["bytes_sent"] == report["bytes_planned"]


def test_verify_with_a_server(rank_pool):
    report = verify(rank_pool, servers=1)
    assert max(report[key] for key in ("logit_error", "loss_error", "grad_error")) < 1e-10
    assert report["tasks_on_servers"] > 0 and report["switches"] > 0


def test_a_name_without_phases_is_refused(rank_pool):
    with pytest.raises(ValueError, match="without phases: attn_implementation=ring: all its exch"):
        verify(rank_pool, name="ring")
    validate_pingpong("distca")


def test_evaluation_and_generation_see_the_model_as_it_was():
    model, plain = tiny("distca").eval(), tiny("distca").eval()
    enable_pingpong(model)
    inputs = collate(documents([9, 4]))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    prompt = inputs["input_ids"][:, :7]
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    assert torch.equal(
        model.generate(prompt, attention_mask=mask, **given),
        plain.generate(prompt, attention_mask=mask, **given),
    )
