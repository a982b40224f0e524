"""Keep unit tests free of processes: whatever would start one fails, and says where it belongs."""

import multiprocessing.process
import multiprocessing.util
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

STARTERS: tuple[tuple[Any, str], ...] = (
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "system"),
    (subprocess.Popen, "__init__"),
    # These two do not pass through os.fork where a fork server runs already.
    (multiprocessing.process.BaseProcess, "start"),
    (multiprocessing.util, "spawnv_passfds"),
)


def _refusing(name: str, original: Any) -> Any:
    def refuse(*given: Any, **more: Any) -> Any:
        if name == "__init__" and given[1][0] == "git":
            return original(*given, **more)  # the house rules read the list of tracked files
        pytest.fail(
            f"a unit test starts a process ({name}{given[-1:]}). Move it to tests/ranks (rank "
            "processes) or tests/launch (commands, scripts, launches, servers)."
        )

    return refuse


@pytest.fixture(scope="module", autouse=True)
def no_processes() -> Iterator[None]:
    """Fail the test that starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STARTERS:
            patch.setattr(owner, name, _refusing(name, getattr(owner, name)))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the session's ranks, which may run already when a unit test asks for them."""
    for item in items:
        if item.path.parent.name == "unit" and "rank_pool" in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid} uses rank_pool: move it to tests/ranks")
