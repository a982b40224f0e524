"""Start `accelerate launch`, as a command or as forks, and end whatever it started.

Python, torch, Transformers and Accelerate take each process of a launch longer to import than most
runs take. As forks, Accelerate's launcher runs in a child of a process that has imported them, and
forks its ranks in its turn; arguments, environment, rendezvous, watching and signals are those of
the command. Whichever way, nothing outlives the tests, also when those are killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKER = "HF_LONGCTX_TEST"  # in the environment of a launch's programs
PRELOADED = [  # without trl: `hf_longctx.run` must meet scripts that import it later
    "hf_longctx",
    "accelerate.commands.launch",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "peft",
    "hypothesis",
    "pytest",
]


def fork_server() -> None:
    """Have a fork server run that has imported all this; `RankPool` forks from it, too."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch under way.

    Args:
        process (`BaseProcess`): The launcher, or what waits for it where that is a command; it
            leads a session.
        marker (`str`): In the environment of its programs.
        output (`Path`): What all of its processes print.
    """

    process: BaseProcess
    marker: str
    output: Path

    def wait(self, *, seconds: float) -> int:
        """The launcher's exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"it still runs: {self.printed()[-8000:]}"
        return self.process.exitcode

    def printed(self) -> str:
        """What was printed so far."""
        return self.output.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Those that still run: the launcher, its ranks, and what they started."""
        assert self.process.pid is not None
        return _processes_of(self.marker, session=self.process.pid)


def _processes_of(marker: str, *, session: int) -> list[int]:
    """Programs that were started with a marker, and forks in a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARKER}={marker}".encode() in (place / "environ").read_bytes()
            if marked or os.getsid(int(place.name)) == session:
                found.append(int(place.name))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def _kill(processes: Iterable[int]) -> None:
    for number in processes:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@contextmanager
def launching(*arguments: str, forked: bool = True, **more: str) -> Iterator[Launch]:
    """Start a launch; what is left of it in the end is killed.

    Args:
        arguments (`str`): Of `accelerate launch`, behind the committed configuration.
        forked (`bool`, *optional*): Not as a command.
        more (`str`): Environment variables.
    """
    command = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_2.yaml"), *arguments]
    given = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), given]))
    marker = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": paths, MARKER: marker, **more}
    fork_server()
    with tempfile.TemporaryDirectory(prefix="hf_longctx_launch_") as folder:
        output = Path(folder, "output")
        output.touch()
        process = multiprocessing.get_context("forkserver").Process(
            target=_launcher, args=(command, environment, str(output), forked)
        )
        process.start()
        launch = Launch(process=process, marker=marker, output=output)
        try:
            yield launch
        finally:
            _kill(launch.processes())
            process.join()


def until(done: Callable[[], bool], *, seconds: float) -> None:
    """Return once `done()` is true; fail where it takes longer."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def _launcher(
    command: list[str], environment: Mapping[str, str], output: str, forked: bool
) -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None and tests.is_alive()
    gc.freeze()  # each run collects garbage once, for 0.3 s where all imports are looked through
    os.setsid()
    os.chdir(ROOT)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    ends_with = (tests, environment[MARKER])
    threading.Thread(target=_end_with, args=ends_with, daemon=True).start()
    if not forked:
        words = [sys.executable, "-m", "accelerate.commands.launch", *command]
        sys.exit(subprocess.call(words, env=environment))
    os.environ.clear()
    os.environ.update(environment)

    import torch.distributed.run as torchrun
    from accelerate.commands.launch import launch_command, launch_command_parser

    torchrun.run = partial(_run, torchrun.run)
    launch_command(launch_command_parser().parse_args(command))


def _end_with(tests: Any, marker: str) -> None:
    """Kill the launch when the process is gone that wanted it."""
    tests.join()
    for _ in range(2):
        _kill({*_processes_of(marker, session=os.getpid())} - {os.getpid()})
        time.sleep(0.2)  # that some take which are just being started
    _kill([os.getpid()])


def _run(run: Any, arguments: Any) -> None:
    """As torchrun's own, with ranks that are forks of this process."""
    import torch.distributed.run as torchrun

    torchrun.run_script_path = _module if arguments.module else _script
    arguments.start_method, arguments.run_path = "fork", True
    run(arguments)


def _script(script: str, *arguments: str) -> None:
    """A rank: as `python -u SCRIPT ARGUMENTS`."""
    _become_a_rank(script, *arguments)
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _module(name: str, *arguments: str) -> None:
    """A rank: as `python -u -m NAME ARGUMENTS`."""
    _become_a_rank(name, *arguments)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _become_a_rank(*words: str) -> None:
    from torch.multiprocessing import _prctl_pr_set_pdeathsig

    from hf_longctx.training import groups

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the launcher's agent handles them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    groups._LAUNCHER = os.getppid()  # it was imported in another process
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [*words]
