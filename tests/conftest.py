"""Settings that must hold before any test module imports torch or a Hugging Face library."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from hf_longctx.verify.rank_pool import RankPool

# Files that take long for their number of tests, the longest first.
LONG = (
    "test_verify", "test_recurrent_ranks", "test_families", "test_parity", "test_checker",
    "test_lost_servers", "test_resume", "test_serve", "test_bad_input", "test_pingpong_training",
    "test_trainer", "test_relays", "test_all_families", "test_evaluate", "test_fault_injection",
    "test_state_scans",
    "test_executor", "test_pingpong", "test_cluster", "test_server_runs", "test_recurrent_verify",
    "test_verify_command", "test_bench_distca", "test_run", "test_bench_charm", "test_recurrent",
    "test_replay", "test_wrappers", "test_recurrent_trainers", "test_recipe", "test_head_overlap",
    "test_four_trainers", "test_recurrent_training",
)  # fmt: skip

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that asks the hub for a file fails at once
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores; sums keep one order
os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would look for a device as it is imported
# Modeling files that find flash-linear-attention take its kernels, which no CPU runs.
sys.modules["fla"] = None  # type: ignore[assignment]

# No deadlines: a busy machine would miss them. `helpers.examples` scales by `max_examples`.
settings.register_profile(
    "all", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fast", settings.get_profile("all"), max_examples=40)
settings.load_profile("all")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer random examples where the slow tests are left out, too."""
    if config.getoption("markexpr") == "not slow":
        settings.load_profile("fast")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator["RankPool"]:
    """Four gloo ranks, started by the first test that sends them a job."""
    from launching import fork_server  # after the settings above

    from hf_longctx.verify.rank_pool import RankPool

    fork_server()
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def references() -> dict[Any, Any]:
    """What `references_once` keeps."""
    return {}


@pytest.fixture(scope="module")
def references_once(references: dict[Any, Any]) -> Iterator[None]:
    """References depend on the model and the documents alone: many cases share them."""
    from hf_longctx.verify import compare  # after the settings above

    plain = compare.run_reference

    def once(case: Any, **given: Any) -> Any:
        key = case.model, case.lengths, *given.values()
        if key not in references:
            references[key] = plain(case, **given)
        return references[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_reference", once)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first: short ones fill the workers' ends."""
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    """What was imported stays: no garbage collection looks through it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint with its tokenizer, and texts, for scripts that know nothing of us."""
    from run_scripts import make_checkpoint  # after the settings above

    place: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(place)
    return place
