"""Reject each wrong flag and training argument with a clear ValueError, also from code."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import documents, tiny
from train_cases import Case, arguments
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_longctx import LongCtxArguments, LongCtxTrainer, LongCtxTrainingArguments
from hf_longctx.config import validate_removed_flags
from hf_longctx.support import NAMES, NESTED, validate_extension_lock, validate_unread_flags
from hf_longctx.training.groups import find_group

SMALL = Case(lengths=(20, 9))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"longctx_max_tokens_per_rank": 0}, "longctx_max_tokens_per_rank=0 must be at least 1"),
        ({"longctx_group_size": 0}, "longctx_group_size=0 must be at least 1 and divide"),
        ({"longctx_lookahead": 0}, "longctx_lookahead=0 must be at least 1"),
        ({"longctx_tolerance": -0.1}, "longctx_tolerance=-0.1 must be 0 or more"),
        ({"longctx_tolerance": float("nan")}, "longctx_tolerance=nan must be 0 or more"),
        ({"longctx_layout": "zigzga"}, "longctx_layout='zigzga' must be one of 'auto', "),
        ({"longctx_layout": "zigzga"}, "did you mean 'zigzag'?"),
        ({"longctx_layout": None}, "longctx_layout=None must be one of 'auto', "),
        ({"longctx_overlap": "on"}, "'none', 'heads', 'pingpong'; did you mean 'none'?"),
        ({"longctx_max_tokens_per_rank": -5}, "longctx_max_tokens_per_rank=-5 must be at least 1"),
        ({"longctx_max_tokens_per_rank": "4096"}, "'4096' is a str, but must be of type int"),
        ({"longctx_max_tokens_per_rank": 48.0}, "=48.0 is a float, but must be of type int"),
        ({"longctx_max_tokens_per_rank": True}, "=True is a bool, but must be of type int"),
        ({"longctx_max_tokens_per_rank": float("nan")}, "=nan is a float, but must be of type int"),
        ({"longctx_max_tokens_per_rank": None}, "=None is a NoneType, but must be of type int"),
        ({"longctx_group_size": "2"}, "longctx_group_size='2' is a str, but must be of type int"),
        ({"longctx_group_size": 1.0}, "longctx_group_size=1.0 is a float"),
        ({"longctx_tolerance": "0.05"}, "'0.05' is a str, but must be of type float; the default"),
        ({"longctx_tolerance": None}, "=None is a NoneType, but must be of type float"),
        ({"longctx_servers": False}, "longctx_servers=False is a bool, but must be of type int"),
        ({"longctx_topology": ["2x4"]}, "longctx_topology=['2x4'] is a list, but must be of"),
        ({"longctx_balance": "attention"}, "longctx_balance='attention' is not built yet"),
        ({"longctx_servers": -1}, "longctx_servers=-1 must be 0 or more; 0 means the trainers"),
        ({"longctx_server_devices": "cuda"}, "longctx_server_devices='cuda' is not built yet"),
        ({"longctx_server_timeout": 0.0}, "longctx_server_timeout=0.0 must be above 0; 30 is"),
        ({"longctx_server_memory": 0}, "longctx_server_memory=0 must be at least 1; leave it out"),
        ({"longctx_topology": "2*4"}, "longctx_topology='2*4': write nodes x ranks, outermost"),
        ({"longctx_topology": "2x0"}, "longctx_topology='2x0': write nodes x ranks, outermost"),
        ({"longctx_ulysses_size": 0}, "longctx_ulysses_size=0 must be at least 1, and divide"),
        (
            {"longctx_overlap": "heads", "longctx_softmax": "ring"},
            "longctx_overlap=heads with longctx_softmax=ring: only distca cuts its exchanges by",
        ),
        ({"longctx_overflow": "wrap"}, "longctx_overflow='wrap'"),
    ],
)
def test_values_are_refused_by_name(tmp_path, given, message):
    for make in (LongCtxArguments, lambda **x: arguments(SMALL, tmp_path, **x)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**given)


def refuse_unread(given: LongCtxArguments, name: str) -> None:
    validate_unread_flags(given, name=name, algorithm=given.algorithm(name))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"longctx_topology": "2x4"}, "longctx_topology=2x4 under attn_implementation='distca'"),
        ({"longctx_topology": "2x4"}, "leave it at auto, or use charm or ring or ulysses"),
        ({"longctx_ulysses_size": 2}, "longctx_ulysses_size=2 under attn_implementation='distca'"),
        ({"longctx_scan": "tree"}, "longctx_scan=tree under attn_implementation='distca': it runs"),
        ({"longctx_softmax": "ring"}, "leave it at distca, or use zeco_linear"),
    ],
)
def test_flags_are_refused_under_names_that_do_not_look_at_them(given, message):
    made = LongCtxArguments(**given)
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse_unread(made, "distca")
    domains = {"longctx_topology", "longctx_ulysses_size"} & {*given}
    for name in NESTED if domains else ("zeco_linear",):
        refuse_unread(made, name)
    refuse_unread(LongCtxArguments(), "distca")


def test_the_layout_suits_the_name():
    suited = {"distca": "spread", "charm": "zigzag", "ring": "zigzag", "ulysses": "contiguous"}
    suited |= {"zeco_linear": "contiguous"}
    assert {name: LongCtxArguments().layout_for(name) for name in NAMES} == suited
    assert LongCtxArguments(longctx_layout="spread").layout_for("charm") == "spread"
    for layout in ("zigzag", "spread"):
        with pytest.raises(ValueError, match=f"longctx_layout={layout} .* use contiguous"):
            LongCtxArguments(longctx_layout=layout).layout_for("zeco_linear")


def test_softmax_layers_of_a_hybrid_are_planned_by_a_name_of_their_own():
    given = LongCtxArguments(longctx_softmax="charm", longctx_topology="2x2")
    assert given.algorithm("zeco_linear") == "charm" and given.algorithm("ring") == "ring"
    refuse_unread(given, "zeco_linear")
    with pytest.raises(ValueError, match="its plans do not use domains"):
        refuse_unread(LongCtxArguments(longctx_topology="2x2"), "zeco_linear")


def test_a_misspelt_attention_name_is_answered_with_the_right_one(tmp_path):
    assert arguments(SMALL, tmp_path, longctx_attention="charm").longctx_attention == "charm"
    with pytest.raises(ValueError, match="'chram' is not a name of hf_.* mean 'charm'?"):
        arguments(SMALL, tmp_path, longctx_attention="chram")


def test_a_topology_of_other_ranks_is_refused_before_the_first_step(tmp_path):
    given = arguments(SMALL, tmp_path, longctx_topology="2x2")
    with pytest.raises(ValueError, match="longctx_topology=2x2 holds 4 ranks, but 1 share a batch"):
        LongCtxTrainer(model=tiny("ring"), args=given, train_dataset=documents([9]))


def test_values_of_the_right_type_are_taken(tmp_path):
    given = {"longctx_max_tokens_per_rank": np.int64(7), "longctx_tolerance": 0}
    for make in (LongCtxArguments, lambda **x: arguments(SMALL, tmp_path, **x)):
        assert {key: getattr(make(**given), key) for key in given} == given


@pytest.mark.parametrize(
    ("seed", "message"),
    [(-1, "data_seed=-1 must be 0 or more"), ("7", "data_seed='7' is a str"), (1.5, "is a float")],
)
def test_seeds_of_the_data_order_are_refused(tmp_path, seed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(SMALL, tmp_path, data_seed=seed)


@dataclass
class MixedArguments(LongCtxArguments, TrainingArguments):
    """As one mixes the flags into a Trainer's own arguments, those of TRL for example."""


def test_flags_mix_into_other_training_arguments(tmp_path):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    mixed = MixedArguments(**given, warmup_steps=0.5, eval_strategy="no")
    assert mixed.eval_strategy is IntervalStrategy.NO  # TrainingArguments' own checks have run
    with pytest.raises(ValueError, match="longctx_tolerance=-1.0 must be 0 or more"):
        MixedArguments(**given, longctx_tolerance=-1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size=2"),
        ({"per_device_eval_batch_size": 8}, "per_device_eval_batch_size=8"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    ],
)
def test_training_arguments_are_refused_also_when_set_later(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        arguments(SMALL, tmp_path, **given)
    late = arguments(SMALL, tmp_path)
    for name, value in given.items():
        setattr(late, name, value)
    with pytest.raises(ValueError, match=message):
        LongCtxTrainer(model=tiny("distca"), args=late, train_dataset=documents([9]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--longctx_layuot", "spread"], "--longctx_layuot"),
        (["--longctx_layout", "spiral"], "invalid choice"),
        (["--longctx_group_size", "two"], "invalid"),
        (["--longctx_server", "2", "--longctx_foo"], "longctx_server"),
    ],
)
def test_flags_of_a_script_are_refused(tmp_path, capsys, flags, message):
    parser = HfArgumentParser(LongCtxTrainingArguments)
    with pytest.raises((ValueError, SystemExit)) as refusal:
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu", *flags])
    assert message in str(refusal.value) + capsys.readouterr().err


@pytest.mark.parametrize("given", [["--lr", "1", "--longctx-verify=off"], {"longctx_verify": 1}])
def test_a_removed_flag_is_answered_with_what_replaces_it(given):
    with pytest.raises(ValueError, match="longctx_verify was removed: .*run `hf-longctx verify`"):
        validate_removed_flags(given)
    validate_removed_flags(["--longctx_servers", "1"])


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_group_size_that_does_not_divide_is_refused(size):
    given = SimpleNamespace(world_size=1, process_index=0, longctx_group_size=size)
    with pytest.raises(ValueError, match=rf"longctx_group_size={size} must divide the 1 trainers"):
        find_group(given)


def test_a_group_size_over_several_trainers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    given = SimpleNamespace(world_size=6, process_index=5, longctx_group_size=None)
    assert (find_group(given).size, find_group(given).rank) == (6, 5)
    given.longctx_group_size = 2
    group = find_group(given)
    assert (group.groups, group.index, group.rank) == (3, 2, 1)
    given.longctx_group_size = 4
    with pytest.raises(ValueError, match=re.escape("6 trainers; use one of [1, 2, 3, 6]")):
        find_group(given)


@pytest.mark.parametrize("folder", ["", "py311_cpu"], ids=["own root", "default root"])
def test_c30_a_lock_that_a_killed_build_left_is_named(tmp_path, monkeypatch, caplog, folder):
    lock = tmp_path / folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed.ops", raising=False)
    with_deepspeed, without = SimpleNamespace(deepspeed={}), SimpleNamespace(deepspeed=None)
    validate_extension_lock(with_deepspeed)  # it may be building now
    assert f"if none is running, remove {lock}" in caplog.text
    os.utime(lock, (time.time() - 3000,) * 2)
    validate_extension_lock(without)
    message = f"{re.escape(str(lock))} is 50 minutes old: .* Remove the file and start again"
    with pytest.raises(ValueError, match=message):
        LongCtxTrainingArguments(output_dir=str(tmp_path), use_cpu=True, deepspeed={})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=message):
        validate_extension_lock(without)
    monkeypatch.setitem(sys.modules, "deepspeed.ops", SimpleNamespace(__compatible_ops__={}))
    validate_extension_lock(with_deepspeed)  # extensions are switched off
    lock.unlink()
    monkeypatch.delitem(sys.modules, "deepspeed.ops")
    validate_extension_lock(with_deepspeed)
