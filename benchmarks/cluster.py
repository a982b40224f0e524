"""`python -m benchmarks.cluster SPEC -- COMMAND`: run a command on emulated nodes of this machine.

The command runs once per rank. Exit codes: that of the first rank that fails, else 0; 2 for a wrong
description and where no cluster can be made, with nothing run.

Nothing is left behind, however this process ends: the nodes are anonymous namespaces that live as
long as their process 1, a shell that waits for orders on a pipe from us. When the pipe closes,
which a SIGKILL does too, the shell ends, the kernel kills every process of its process namespace,
and the networks go with the last of them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Self, TextIO

from benchmarks.cluster_spec import EXAMPLE, ClusterSpec, build_commands, environment, hosts

_HELP = """\
Runs COMMAND once per rank on emulated nodes: network namespaces of this machine, joined by links
of a given rate. Rank, world size and rendezvous are in its environment as launchers set them, so a
program that calls torch.distributed.init_process_group("gloo") runs as it is.

  nodes=2            nodes
  ranks_per_node=4   ranks of each; inside a node they talk as fast as the machine can
  cross=200mbit      rate of a link between nodes, in each direction: kbit, mbit or gbit
  rails=per_rank     each rank has such a link of its own (default)
  rails=shared       the ranks of a node share one

Output comes line by line behind the rank, as `[3] ...`. When a rank fails, the others are killed,
and its exit code is that of the command. Nothing is left behind, also after SIGKILL. Needs Linux,
root or user namespaces, and the tools of util-linux and iproute2.
"""

_EXAMPLES = f"""\
examples:
  python -m benchmarks.cluster {EXAMPLE} -- python my_gloo_script.py
  python -m benchmarks.cluster nodes=2,ranks_per_node=2,cross=1gbit,rails=shared -- \\
      python -m benchmarks.link_probe          # the rates that gloo reaches
  python -m benchmarks.cluster nodes=2,ranks_per_node=1,cross=200mbit -- ip -s link show cross
"""


_TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")
_REMEDY = (
    "run it on Linux as root or with user namespaces allowed, in a container with CAP_SYS_ADMIN "
    "and CAP_NET_ADMIN, and with util-linux and iproute2 installed"
)
_POLL = 0.02  # seconds between two looks at the ranks

# Named namespaces are files, in a mount that only the cluster sees. Another names the hosts:
# torch.distributed looks up the names of its peers and warns of each that has none.
_PLACES = """\
mkdir -p /run/netns || { mount -t tmpfs tmpfs /run && mkdir /run/netns; }
mount -t tmpfs tmpfs /run/netns
cat - /etc/hosts > /run/netns/hosts << end
%s
end
mount --bind /run/netns/hosts /etc/hosts && rm /run/netns/hosts"""
# `kill -1` reaches all processes of the process namespace but its process 1, which must be us.
_ORDERS = """\
[ $$ -eq 1 ]
echo ready
while read -r order; do kill -KILL -1 2>&- || true; echo ended; done"""


class ClusterUnavailable(OSError):
    """This machine cannot make the cluster: why, and what to do."""


class Cluster:
    """Emulated nodes, there while the context is entered.

    Args:
        spec (`ClusterSpec`): What to make.

    Raises:
        ClusterUnavailable: On entering: not Linux, no rights, or a tool or kernel module missing.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self._places = {rank: host.name for host in hosts(spec) for rank in host.ranks}

    def __enter__(self) -> Self:
        missing = [tool for tool in _TOOLS if not shutil.which(tool)]
        if missing:
            raise ClusterUnavailable(f"no {', '.join(missing)} on this machine; {_REMEDY}")
        self._user = [] if os.geteuid() == 0 else ["--user"]
        self._holder = subprocess.Popen(
            [
                *("unshare", *self._user, *(["--map-root-user"] if self._user else [])),
                *("--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard is ours to handle
        )
        said = []
        with suppress(BrokenPipeError):  # then its output says why
            self._tell(_script(self.spec))
        while (line := self._hear()) not in ("ready", ""):
            said.append(line)
        if line != "ready":
            self.__exit__()
            raise ClusterUnavailable(f"cannot make the nodes ({'; '.join(said)}); {_REMEDY}")
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._holder.wait()
        self._stdout.close()

    def run(
        self,
        command: Sequence[str],
        *,
        extra: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> int:
        """Run a command once per rank, in the directory where the cluster was made.

        What the ranks write is passed on line by line, behind `[rank]`. When one fails, the others
        are killed; what ranks leave in the background is killed at the end, too.

        Args:
            command (`Sequence[str]`): Program and arguments.
            extra (`Mapping[str, str]`, *optional*): Added to the environment, which is this
                process's with that of `cluster_spec.environment`.
            seconds (`float`, *optional*): How long the ranks may take.

        Returns:
            0, or the first other exit code; 128 + n for a rank that signal n ended.

        Raises:
            TimeoutError: Names the ranks that still run after `seconds`.
        """
        ranks: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        try:
            for rank in range(self.spec.ranks):
                ranks.append(self._start(command, rank=rank, extra=extra or {}))
                readers += _readers(ranks[-1], rank=rank)
            return _first_failure(ranks, seconds=seconds)
        finally:
            # Those on their way into the process namespace first: no order reaches them there.
            for process in ranks:
                process.kill()
                process.wait()
            with suppress(BrokenPipeError):
                self._tell("end")
                self._hear()
            for reader in readers:
                reader.join()

    def _start(
        self, command: Sequence[str], *, rank: int, extra: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start one rank in its network, with the files and processes of the cluster."""
        holder = f"/proc/{self._holder.pid}"
        return subprocess.Popen(
            [
                *("nsenter", f"--target={self._holder.pid}", "--mount", "--wd"),
                *self._user,
                *(["--preserve-credentials"] if self._user else []),
                f"--pid={holder}/ns/pid_for_children",
                f"--net={holder}/root/run/netns/{self._places[rank]}",
                *("--", *command),
            ],
            env={**os.environ, **environment(self.spec, rank=rank), **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _tell(self, text: str) -> None:
        self._stdin.write(text + "\n")
        self._stdin.flush()

    def _hear(self) -> str:
        """The next line of process 1; empty when it has ended."""
        return self._stdout.readline().rstrip("\n")

    @property
    def _stdin(self) -> IO[str]:
        assert self._holder.stdin is not None
        return self._holder.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._holder.stdout is not None
        return self._holder.stdout


def _script(spec: ClusterSpec) -> str:
    """What process 1 does: make the nodes, say `ready`, kill all others at each order."""
    names = [
        f"{prefix}{host.address} {host.name}"
        for host in hosts(spec)
        for prefix in ("", "::ffff:")  # as a socket for both families sees its peer
    ]
    places = _PLACES % "\n".join(names)
    return "\n".join(["set -e", places, *build_commands(spec), _ORDERS])


def _first_failure(ranks: Sequence[subprocess.Popen[str]], *, seconds: float | None) -> int:
    """Wait for all to end with 0, or for one that does not; the exit code."""
    started = time.monotonic()
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        if None not in codes:
            return 0
        if seconds is not None and time.monotonic() - started > seconds:
            running = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise TimeoutError(f"after {seconds:g} s ranks {running} of the cluster still run")
        time.sleep(_POLL)


def _readers(process: subprocess.Popen[str], *, rank: int) -> list[threading.Thread]:
    """Threads that pass on what a rank writes, until no process holds its pipes."""
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [
        threading.Thread(target=_copy, args=(source, target, f"[{rank}] "), daemon=True)
        for source, target in streams
    ]
    for thread in threads:
        thread.start()
    return threads


def _copy(source: IO[str], target: TextIO, prefix: str) -> None:
    with source, suppress(BrokenPipeError):  # nobody reads ours: closed, the rank learns it too
        for line in source:
            target.write(f"{prefix}{line.rstrip()}\n")  # one write: lines of ranks do not mix
            target.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cluster and run the command on it.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        usage=f"python -m benchmarks.cluster {EXAMPLE} -- COMMAND ...",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("description", metavar="NODES", help=f"as {EXAMPLE}")
    parser.add_argument("program", metavar="COMMAND", nargs=argparse.REMAINDER, help="after --")
    arguments = parser.parse_args(argv)
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    try:
        if not program:
            raise ValueError(f"no COMMAND to run; write it as {EXAMPLE} -- COMMAND")
        with Cluster(ClusterSpec.parse(arguments.description)) as cluster:
            return cluster.run(program)
    except KeyboardInterrupt:
        return 130  # as a shell reports it
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks.cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
