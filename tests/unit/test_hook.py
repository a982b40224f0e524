"""Compare the attention hook in whole models over ranks with the naive twin, and without ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from helpers import nan_memory
from tiny import (
    alone,
    collate,
    decode_two,
    documents,
    enable_checkpointing,
    gradients,
    positions,
    run_ranks,
    targets,
    tiny,
    twin,
)

from hf_longctx.attention.boundaries import local_documents
from hf_longctx.attention.spec import layer_specs
from hf_longctx.data.batch import KEY, LongCtxBatch
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.runtime.executor import Runtime

NAMES = pytest.mark.parametrize("name", ["distca", "ring"])
KINDS = pytest.mark.parametrize(
    "checkpointing",
    [None, {"use_reentrant": True}, {"use_reentrant": False}],
    ids=["plain", "reentrant", "nonreentrant"],
)
EXACT = 1e-10
IDS = torch.tensor([documents([17])[0]["input_ids"]])


def logits(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """`[B, T, V]` of one forward."""
    with torch.no_grad():
        return model(input_ids=ids, **given).logits


def ids(tokens: int, *, rows: int = 1) -> torch.Tensor:
    return torch.tensor([row["input_ids"] for row in documents([tokens] * rows)])


# Whole models over ranks


@NAMES
@pytest.mark.parametrize("layout", ["contiguous", "spread"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], ids="ranks{}".format)
def test_whole_models_of_all_ranks_equal_the_twin(name, layout, ranks):
    batches = [documents([131, 1, 60, 37]), documents([2, 300], seed=1)]
    ours = run_ranks(tiny(name), batches, ranks=ranks, layout=layout)
    assert ours.error(twin(batches)) < EXACT
    assert {r.account.calls for r in ours.runtimes} == {4}
    assert ours.sent_bytes > 0 or ranks == 1


@NAMES
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families_equal_the_twin(name, family):
    batches = [documents([211, 1, 64])]
    ours = run_ranks(tiny(name, family=family), batches, ranks=3)
    assert ours.error(twin(batches, family=family)) < EXACT


@NAMES
def test_ranks_without_tokens_of_a_document_equal_the_twin(name):
    batches = [documents([1, 1, 2])]  # 4 tokens on 4 ranks
    assert run_ranks(tiny(name), batches, ranks=4).error(twin(batches)) < EXACT


@NAMES
@pytest.mark.parametrize("layout", ["contiguous", "spread"])
def test_b20_five_documents_have_the_loss_of_one_process(name, layout):
    batches = [documents([200, 200, 200, 200, 224])]
    right = alone(tiny("sdpa", dtype=torch.float32), batches)
    model = tiny(name, dtype=torch.float32)
    one, two = (run_ranks(model, batches, ranks=ranks, layout=layout) for ranks in (1, 2))
    assert abs(one.loss - right.loss) / right.loss < 1e-5
    assert abs(two.loss - one.loss) / one.loss < 1e-5
    assert two.error(right) < 1e-5
    packed = documents([1024])  # a path that is blind to boundaries must not pass
    packed[0]["input_ids"] = [i for row in batches[0] for i in row["input_ids"]]
    assert abs(alone(tiny("sdpa", dtype=torch.float32), [packed]).loss - right.loss) > 1e-3


@NAMES
def test_b37_window_of_four_over_two_ranks(name):
    model = tiny(name, family="mistral", num_hidden_layers=1, sliding_window=4)
    rows = documents([16])
    base = run_ranks(model, [rows], ranks=2).logits[0]
    for token, moves in ((4, False), (5, True), (8, True), (9, False)):
        changed = [{"input_ids": list(rows[0]["input_ids"])}]
        changed[0]["input_ids"][token] ^= 1
        moved = run_ranks(model, [changed], ranks=2).logits[0]
        assert torch.equal(moved[8], base[8]) is not moves, token


@NAMES
@pytest.mark.parametrize("ranks", [0, 1, 2], ids=["local", "ranks1", "ranks2"])
def test_b39_a_later_token_moves_no_earlier_logits(name, ranks):
    model = tiny(name)

    def run(row: dict[str, list[int]]) -> torch.Tensor:
        if ranks:
            return run_ranks(model, [[row]], ranks=ranks).logits[0]
        return logits(model, torch.tensor([row["input_ids"]]))[0]

    row = documents([6])[0]
    changed = {"input_ids": [*row["input_ids"][:5], row["input_ids"][5] ^ 1]}
    before, after = run(row), run(changed)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5], after[5])


@NAMES
def test_no_token_moves_another_document(name):
    rows = documents([40, 33, 23])
    changed = [*rows[:1], {"input_ids": [i ^ 1 for i in rows[1]["input_ids"]]}, *rows[2:]]
    before, after = (run_ranks(tiny(name), [x], ranks=2).logits[0] for x in (rows, changed))
    assert torch.equal(before[:40], after[:40]) and torch.equal(before[73:], after[73:])
    assert not torch.equal(before[40:73], after[40:73])


# Recompute, and several batches in flight


@NAMES
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
def test_b47_checkpointing_recomputes_no_attention_and_sends_nothing(name, reentrant):
    batches = [documents([70, 26, 1])]
    plain = run_ranks(tiny(name), batches, ranks=2)
    ours = run_ranks(tiny(name), batches, ranks=2, checkpointing={"use_reentrant": reentrant})
    assert ours.error(twin(batches)) < EXACT
    assert ours.sent_bytes == plain.sent_bytes > 0
    for runtime in ours.runtimes:
        assert runtime.account.recomputed == runtime.account.calls == 2
        assert runtime.account.recompute_bytes == 0
    for batch in (*ours.batches, *plain.batches):
        assert not batch.binding.saved.results


@NAMES
@KINDS
@pytest.mark.parametrize("ranks", [1, 2], ids="ranks{}".format)
def test_b48_two_batches_in_flight(name, checkpointing, ranks):
    batches = [documents([6, 2]), documents([3, 5], seed=1)]
    together = run_ranks(tiny(name), batches, ranks=ranks, checkpointing=checkpointing)
    assert together.error(twin(batches)) < EXACT
    assert all(not batch.binding.saved.results for batch in together.batches)


def test_b48_a_batch_in_two_forwards_is_refused_under_checkpointing():
    model = tiny("distca").train()
    enable_checkpointing(model, use_reentrant=False)
    given = collate(documents([6, 2]))
    losses = [model(**given).loss for _ in range(2)]
    with pytest.raises(ValueError, match="2 times before its backward; collate a batch once"):
        sum(losses).backward()


# Without a runtime: padding, packs and caches, in one process


@NAMES
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_sdpa(name, family, side):
    changes = {"sliding_window": 6} if family == "mistral" else {}
    mask = torch.ones(3, 17, dtype=torch.long)
    for row, pads in enumerate((0, 5, 16)):
        mask[row, slice(0, pads) if side == "left" else slice(17 - pads, 17)] = 0
    right, ours = (
        logits(
            tiny(n, family=family, dtype=torch.float32, **changes),
            ids(17, rows=3),
            attention_mask=mask,
        )
        for n in ("sdpa", name)
    )
    torch.testing.assert_close(ours[mask.bool()], right[mask.bool()], rtol=0, atol=1e-5)


@NAMES
def test_padded_gradients_equal_sdpa(name):
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, :5] = 0
    labels = ids(17, rows=2).masked_fill(mask == 0, -100)
    found = []
    for n in ("sdpa", name):
        model = tiny(n, dtype=torch.float32)
        model(input_ids=ids(17, rows=2), attention_mask=mask, labels=labels).loss.backward()
        found.append(gradients(model))
    for key, right in found[0].items():
        torch.testing.assert_close(found[1][key], right, rtol=0, atol=1e-5)


@NAMES
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": True}, {"attention_mask": torch.ones(1, 17, dtype=torch.long)}],
    ids=["plain", "use_cache", "all-ones mask"],
)
def test_packed_positions_keep_documents_apart(name, options):
    model = tiny(name)
    packed = logits(model, IDS, position_ids=positions(9, 1, 7), **options)[0]
    parts = [logits(model, part)[0] for part in IDS.split([9, 1, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=0, atol=EXACT)


@NAMES
def test_cu_seq_lens_keep_documents_apart(name):
    model, bounds = tiny(name), torch.tensor([0, 9, 10, 17], dtype=torch.int32)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    packed = logits(model, IDS, position_ids=positions(9, 1, 7), **given)[0]
    parts = [logits(model, part)[0] for part in IDS.split([9, 1, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=0, atol=EXACT)


@NAMES
def test_a_users_4d_mask_is_kept(name):
    mask = torch.ones(17, 17, dtype=torch.bool).tril().logical_and(torch.arange(17) != 3)
    mask |= torch.eye(17, dtype=torch.bool)
    given = {"attention_mask": mask[None, None], "position_ids": positions(17)}
    right, ours = (logits(tiny(n, dtype=torch.float32), IDS, **given) for n in ("sdpa", name))
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)
    assert not torch.allclose(ours, logits(tiny(name, dtype=torch.float32), IDS), atol=1e-3)


@NAMES
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 3], ids=["whole", "padded"])
def test_b52_generate_and_decode_on_a_cache(name, family, cache, padding):
    changes = {"sliding_window": 6} if family == "mistral" else {}
    found = []
    for n in ("sdpa", name):
        model = tiny(n, family=family, dtype=torch.float32, **changes)
        model.train()
        if n == name:  # generate comes between steps of training
            model(**collate(documents([9, 3]))).loss.backward()
        model.eval()
        prompt = ids(7, rows=2)
        mask = torch.ones_like(prompt)
        mask[1, :padding] = 0
        tokens = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            use_cache=True,
            cache_implementation=cache,
            pad_token_id=0,
        )
        found.append((tokens, decode_two(model, prompt)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    assert found[0][0].shape == (2, 11)


# Documents without a batch object


def test_b13_boundaries_are_drops_not_zeros():
    def found(*given: int) -> tuple[int, ...]:
        position_ids = torch.tensor([given])
        return local_documents(batch=1, rows=len(given), position_ids=position_ids)

    assert found(3, 4, 5, 6) == (4,)
    assert found(3, 4, 0, 1, 2) == (2, 3)
    assert found(0, 0, 0) == (1, 1, 1)
    model = tiny("distca")
    shifted = logits(model, IDS[:, :5], position_ids=torch.tensor([[3, 4, 0, 1, 2]]))
    for part, start in ((slice(0, 2), 3), (slice(2, 5), 0)):
        at = torch.arange(start, start + part.stop - part.start)[None]
        right = logits(model, IDS[:, part], position_ids=at)
        torch.testing.assert_close(shifted[:, part], right, rtol=0, atol=EXACT)


def test_b15_padding_is_one_document():
    padded = {"batch": 1, "rows": 12, "position_ids": positions(5, 3, 4)}
    assert local_documents(**padded) == (5, 3, 4)
    rows = documents([5, 3])
    twelve = [collate(rows, rank=rank, ranks=12, layout="contiguous") for rank in range(12)]
    assert twelve[0][KEY].layout.lengths.tolist() == [5, 3, 4]
    assert sum(int(inputs["shift_labels"].ne(-100).sum()) for inputs in twelve) == 4 + 2
    unpadded = run_ranks(tiny("distca"), [rows], ranks=1)
    assert abs(run_ranks(tiny("distca"), [rows], ranks=12).loss - unpadded.loss) < EXACT
    batches = [documents([1])]
    given = [collate(batches[0], rank=rank, ranks=4) for rank in range(4)]
    assert given[0][KEY].layout.lengths.tolist() == [1, 3] and given[0][KEY].filler == 3
    assert all(inputs["shift_labels"].eq(-100).all() for inputs in given)
    batches.append(documents([3], seed=2))
    assert targets(batches[1]) == 2  # and one filler token on the fourth rank
    ours, right = run_ranks(tiny("distca"), batches, ranks=4), twin(batches)
    assert abs(ours.loss - right.loss) < EXACT
    for key, grad in right.grads.items():
        torch.testing.assert_close(ours.grads[key], grad, rtol=0, atol=EXACT)


@NAMES
def test_b17_rows_behind_the_last_boundary_are_refused(name):
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows 0 to 8, but the input has 10 rows"), nan_memory():
        tiny(name)(input_ids=IDS[:, :10], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


@NAMES
def test_b17_uninitialised_memory_reaches_no_gradient(name):
    batches = [documents([3, 5, 2])]
    with nan_memory():
        ours = run_ranks(tiny(name), batches, ranks=2)
    assert ours.error(twin(batches)) < EXACT


def test_boundaries_that_differ_or_decrease_are_refused():
    def found(queries: list[int], keys: list[int] | None = None) -> tuple[int, ...]:
        given = {"cu_seq_lens_q": torch.tensor(queries)}
        if keys is not None:
            given["cu_seq_lens_k"] = torch.tensor(keys)
        return local_documents(batch=1, rows=8, position_ids=None, **given)

    assert found([0, 3, 3, 8]) == (3, 5)
    with pytest.raises(ValueError, match="differ"):
        found([0, 3, 8], [0, 4, 8])
    with pytest.raises(ValueError, match="must not decrease"):
        found([0, 5, 3, 8])
    with pytest.raises(ValueError, match="several axes"):
        local_documents(batch=1, rows=8, position_ids=torch.zeros(3, 1, 8))


def test_a_batch_pickles_small_and_plans_alike():
    layout = cut([7, 4000, 93], ranks=4, layout="spread")
    options = PlanOptions(tolerance=0.5)
    given = {"options": options, "budget": 4100, "filler": 3, "contents": 9}
    batch = LongCtxBatch(layout, 2, **given)
    batch.bind(Runtime())
    kinds = [spec.kind for spec in layer_specs(tiny("distca").config)]
    digest = batch.digest("distca", kinds)
    batch.binding.saved.keep(0, (torch.zeros(9), torch.zeros(9)))
    pickled = pickle.dumps(batch)
    again = pickle.loads(pickled)
    assert len(pickled) < 4096
    assert again.digest("distca", kinds) == digest
    assert again.rank == 2
    assert {name: getattr(again, name) for name in given} == given
    assert again.binding.runtime is None and not again.binding.saved.results
