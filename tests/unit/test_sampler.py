"""Draw group batches alone, under Accelerate's data loaders, and under a resumed Trainer."""

from __future__ import annotations

import accelerate
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import get_dataloader_sampler

from hf_longctx.data.packing import FILLER, GroupBatchSampler

LENGTHS = [7, 5, 5, 5, 9, 1, 2, 8, 8, 3, 10, 4, 6, 6]


def make(lengths=LENGTHS, **changes):
    options = {
        "capacity": 10,
        "overflow": "split",
        "balance": "tokens",
        "groups": 1,
        "group": 0,
        "seed": 0,
        "shuffle": True,
    }
    return GroupBatchSampler(lengths, **options | changes)


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    groups=st.integers(1, 5),
    balance=st.sampled_from(["none", "tokens"]),
    epoch=st.integers(0, 3),
)
def test_b59_groups_take_equally_many_batches_and_every_pack_once(lengths, groups, balance, epoch):
    samplers = [
        make(lengths, groups=groups, group=group, balance=balance) for group in range(groups)
    ]
    lengths_before = [len(sampler) for sampler in samplers]
    batches = [epoch_of(sampler, epoch) for sampler in samplers]
    assert {len(run) for run in batches} == set(lengths_before) == {len(samplers[0])}
    assert all(len(batch) == 1 for run in batches for batch in run)
    dealt = [pack for step in zip(*batches, strict=True) for (pack,) in step]
    packs = samplers[0].packs
    assert tuple(dealt[: len(packs)]) == packs
    assert all(pack == FILLER for pack in dealt[len(packs) :])
    assert len(dealt) - len(packs) < groups


def test_b59_five_packs_and_four():
    first, second = (make([10] * 9, groups=2, group=group) for group in range(2))
    assert len(first) == len(second) == 5
    first_batches, second_batches = list(first), list(second)
    assert [FILLER] not in first_batches
    assert [batch == [FILLER] for batch in second_batches] == [False] * 4 + [True]


def test_ranks_of_one_group_agree_and_groups_share_nothing():
    one, same, other = (make(groups=2, group=group) for group in (0, 0, 1))
    for epoch in range(3):
        assert epoch_of(one, epoch) == epoch_of(same, epoch)
        packs = {pack for batch in epoch_of(other, epoch) for pack in batch}
        assert packs.isdisjoint(pack for batch in one for pack in batch)


def test_shuffle_off_repeats_the_first_epoch():
    shuffled, fixed = make(), make(shuffle=False)
    assert len({str(epoch_of(shuffled, epoch)) for epoch in range(4)}) > 1
    assert len({str(epoch_of(fixed, epoch)) for epoch in range(4)}) == 1
    assert fixed.epoch == 3


def test_an_iterator_keeps_its_epoch():
    sampler = make()
    expected = list(sampler)
    iterator = iter(sampler)
    head = next(iterator)
    sampler.set_epoch(1)
    assert [head, *iterator] == expected


def test_report_and_refusals_are_those_of_packing():
    assert make([25]).report.fragments == 3
    with pytest.raises(ValueError, match="row 0 has 25 tokens"):
        make([25], overflow="error")
    with pytest.raises(ValueError, match="not built yet"):
        make(balance="attention")


class Packs(Dataset):
    """A data set that is asked for packs and hands out the documents in them."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, pack):
        return [piece.document for piece in pack]


def collate(batch):
    (documents,) = batch
    return {"documents": torch.tensor(documents)}


def loader_of(sampler):
    """The data loader as a trainer makes it: this rank's own batches, not sharded again."""
    return prepare_data_loader(
        DataLoader(Packs(), batch_sampler=sampler, collate_fn=collate),
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )


def seen(loader):
    return [batch["documents"].tolist() for batch in loader]


def orders(epochs):
    """What each epoch holds, from a sampler that no data loader has touched."""
    sampler = make()
    found = [
        [[piece.document for piece in pack] for (pack,) in epoch_of(sampler, epoch)]
        for epoch in range(epochs)
    ]
    assert len(set(map(str, found))) == epochs  # else no comparison could tell epochs apart
    return found


def start_epoch(loader, epoch):
    """The first lines of `Trainer._run_epoch`."""
    loader.set_epoch(epoch)
    underlying = getattr(loader.batch_sampler, "batch_sampler", None)
    if hasattr(underlying, "set_epoch"):
        underlying.set_epoch(epoch)


def test_accelerate_counts_and_iterates_epoch_by_epoch():
    sampler = make()
    loader = loader_of(sampler)
    assert loader.batch_sampler is sampler and get_dataloader_sampler(loader) is sampler
    assert len(loader) == len(sampler)
    assert loader.total_batch_size == 1
    assert [seen(loader) for _ in range(3)] == orders(3)  # the loader itself counts epochs


@pytest.mark.parametrize("epoch", [0, 1, 2], ids="epoch{}".format)
@pytest.mark.parametrize("how", ["set, then skip", "skip, then set", "as Trainer does"])
def test_skipping_batches_resumes_within_any_epoch(epoch, how):
    fresh = loader_of(make())
    if how == "set, then skip":
        if Version(accelerate.__version__) < Version("1.14"):
            pytest.skip("skip_first_batches forgets the epoch; Trainer skips first, then sets it")
        fresh.set_epoch(epoch)
    resumed = skip_first_batches(fresh, 2)
    if how == "skip, then set":
        resumed.set_epoch(epoch)
    if how == "as Trainer does":
        start_epoch(resumed, epoch)
    assert len(resumed) == len(fresh) - 2
    assert seen(resumed) == orders(3)[epoch][2:]
    start_epoch(fresh, epoch + 1)
    assert seen(fresh) == orders(4)[epoch + 1]


class Recorder(torch.nn.Module):
    """A model that learns nothing and remembers which documents it saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, documents):
        self.seen.append(documents.tolist())
        return {"loss": self.weight * documents.float().mean()}


class PackTrainer(Trainer):
    def get_train_dataloader(self):
        return loader_of(make())


def trainer_in(folder, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=1,
        num_train_epochs=3,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return PackTrainer(model=Recorder(), args=arguments)


@pytest.mark.parametrize("accumulation", [1, 2], ids="accumulation{}".format)
def test_trainer_resumes_within_a_later_epoch(tmp_path, accumulation):
    batches = [batch for epoch in orders(3) for batch in epoch]
    updates_per_epoch = -(-len(make()) // accumulation)
    step = updates_per_epoch + 1  # one update into the second epoch
    whole = trainer_in(
        tmp_path,
        gradient_accumulation_steps=accumulation,
        save_strategy="steps",
        save_steps=step,
    )
    whole.train()
    assert whole.model.seen == batches
    assert whole.state.global_step == 3 * updates_per_epoch
    resumed = trainer_in(tmp_path, gradient_accumulation_steps=accumulation, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert resumed.model.seen == batches[len(make()) + accumulation :]
    assert resumed.state.global_step == whole.state.global_step
