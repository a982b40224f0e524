"""Start attention-server processes that end with the trainer that started them.

A server gets a log file and a session of its own, and finds the trainers as any other server does:
by `hf-longctx serve --join`. Layer: servers.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Run by path because a server must not import Transformers, see there. `-P` keeps the script's
# folder off sys.path, where its files would hide modules of the same names.
SERVER_COMMAND = (
    sys.executable, "-P", str(Path(__file__).with_name("attention_server.py")), "serve",
)  # fmt: skip
_STOP_SECONDS = 5.0  # for a server to end by itself
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server process that this trainer started.

    Args:
        process (`subprocess.Popen`): The process.
        log (`Path`): File with its output.
    """

    process: "subprocess.Popen[bytes]"
    log: Path

    def last_log_line(self) -> str:
        """Return the last line of its log, to quote in the trainer's own."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(nothing)"

    def describe_exit(self) -> str:
        """Describe how the process ended, or that it still runs."""
        code = self.process.poll()
        how = "it still runs" if code is None else f"exit code {code}"
        return f"{how}; its log {self.log.resolve()} ends with: {self.last_log_line()}"

    def stop(self, *, seconds: float = _STOP_SECONDS) -> None:
        """Wait for the process to end by itself, then kill it."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()  # SIGKILL also ends a process that was stopped by SIGSTOP
            self.process.wait()


def write_token(path: Path, token: bytes) -> None:
    """Write a file that only its owner can read, at no moment anybody else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an earlier run's file may have wider permissions
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(token)


def spawn(
    number: int, *, join: str, token_file: Path, log: Path, flags: Sequence[str] = ()
) -> ServerProcess:
    """Start one server.

    Args:
        number (`int`): Number by which the trainers recognise it.
        join (`str`): `HOST:PORT` of the group's first trainer.
        token_file (`Path`): File with the token, see `write_token`.
        log (`Path`): File for its output.
        flags (`Sequence[str]`, *optional*): Further flags of `hf-longctx serve`.
    """
    command = [*SERVER_COMMAND, "--join", join, "--token-file", str(token_file)]
    command += ["--spawned", str(number), "--parent", str(os.getpid()), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the trainer alone, which then ends its servers
        )
    return ServerProcess(process, log)


def end_with_parent(parent: int, *, signal: int) -> bool:
    """Have Linux send this process a signal when its parent ends, however that ends.

    Args:
        parent (`int`): Process id of the parent.
        signal (`int`): Signal to send.

    Returns:
        Whether the parent is still alive. If not, no signal will come.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal)
    # Asked after the call above: the parent may have ended before it.
    return os.getppid() == parent
