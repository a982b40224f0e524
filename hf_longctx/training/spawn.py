"""A token and an address -> attention-server processes of this trainer, which end with it.

Floor: training.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# By its path: a server must not import Transformers, see there. `-P` keeps its folder off sys.path.
_COMMAND = (sys.executable, "-P", str(Path(__file__).parents[1] / "attention_server.py"), "serve")
_END_SECONDS = 5.0  # that a server may take to end by itself


@dataclass(frozen=True, slots=True)
class Spawned:
    """A server that this trainer started.

    Args:
        process (`subprocess.Popen`): Its process.
        log (`Path`): What it says.
    """

    process: "subprocess.Popen[bytes]"
    log: Path

    def last_words(self) -> str:
        """The last line of its log, for the trainer's own."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end_in_words(self) -> str:
        """How it ended, or that it did not."""
        code = self.process.poll()
        how = "it still runs" if code is None else f"exit code {code}"
        return f"{how}; its log {self.log.resolve()} ends: {self.last_words()}"

    def end(self, *, seconds: float = _END_SECONDS) -> None:
        """Wait so long for its end, then kill it: a stopped process can be killed too."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def in_words(report: Mapping[str, float]) -> str:
    """What a server says at its end, for people; see `runtime.server.Served`."""
    return (
        f"{report['requests']:,} requests, {report['attending']:.1f} s of attention, "
        f"{report['waited']:.1f} s of waits, {report['sent']:,} bytes sent, at most "
        f"{report['peak_bytes']:,} held"
    )


def write_token(path: Path, token: bytes) -> None:
    """A file that only its owner can read, also while it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # another run's, perhaps with other rights
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(token)


def spawn(
    number: int, *, join: str, token_file: Path, log: Path, flags: Sequence[str] = ()
) -> Spawned:
    """Start one server in a session of its own, so that a Ctrl-C reaches the trainer alone.

    Args:
        number (`int`): By which the trainers know it again.
        join (`str`): `HOST:PORT` of the group's first trainer.
        token_file (`Path`): See `write_token`.
        log (`Path`): Where its output goes.
        flags (`Sequence[str]`): More flags of `hf-longctx serve`.
    """
    command = [*_COMMAND, "--join", join]
    command += ["--token-file", str(token_file), "--spawned", str(number)]
    command += ["--parent", str(os.getpid()), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return Spawned(process, log)
