"""`python -m benchmarks.cluster`: what a description becomes, and the nodes where they can be made.

Nodes need root or user namespaces; where there are none, the tests that build them are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cluster import Cluster, ClusterUnavailable, main
from benchmarks.cluster_spec import ClusterSpec, build_commands, environment, hosts
from benchmarks.on_cluster import run_on
from hf_longctx.verify.rank_pool import RankContext

ROOT = Path(__file__).resolve().parents[2]
TWO_BY_TWO = "nodes=2,ranks_per_node=2,cross=100mbit"
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
from benchmarks.cluster import Cluster, ClusterSpec
with Cluster(ClusterSpec.parse(sys.argv[1])) as cluster:
    cluster.run(sys.argv[2:])
"""


def test_text_is_read() -> None:
    read = ClusterSpec.parse("nodes=2,ranks_per_node=4,cross=1.5gbit,rails=shared")
    assert read == ClusterSpec(nodes=2, ranks_per_node=4, cross=1_500_000_000, rails="shared")
    assert ClusterSpec.parse("cross=200mbit,nodes=3,ranks_per_node=1").rails == "per_rank"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes=2", "lacks ranks_per_node, cross; write it as nodes=2,"),
        ("nodes=2,ranks_per_node=2,cross=5mbit,rail=shared", "'rail=shared' .* no field"),
        ("nodes=2,ranks_per_node=2,cross=5mbit,nodes=3", "'nodes=3' .* given twice"),
        ("nodes=two,ranks_per_node=2,cross=5mbit", "nodes=two is not a whole number; write it"),
        ("nodes=2,ranks_per_node=2,cross=200", "cross=200 is not a rate; write .* mbit"),
        ("nodes=2,ranks_per_node=2,cross=900kbit", "cross=900000 bit/s is not within 1mbit"),
        ("nodes=2,ranks_per_node=2,cross=60gbit", "cross=60000000000 bit/s is not within"),
        ("nodes=0,ranks_per_node=2,cross=5mbit", "nodes=0 is not within 1 and 250"),
        ("nodes=9,ranks_per_node=200,cross=5mbit", "make 1800 ranks, over .*; lower one"),
        ("nodes=2,ranks_per_node=2,cross=5mbit,rails=both", "rails=both .* per_rank or shared"),
    ],
)
def test_wrong_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterSpec.parse(text)


def test_hosts_are_nodes_or_ranks() -> None:
    own = hosts(ClusterSpec.parse(TWO_BY_TWO))
    assert [host.address for host in own] == ["10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.1.2"]
    assert [host.ranks for host in own] == [(0,), (1,), (2,), (3,)]
    shared = hosts(ClusterSpec.parse(TWO_BY_TWO + ",rails=shared"))
    assert [host.address for host in shared] == ["10.77.0.1", "10.77.1.1"]
    assert [host.ranks for host in shared] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(("rails", "links"), [("per_rank", 4), ("shared", 2)])
def test_only_links_across_nodes_are_shaped(rails: str, links: int) -> None:
    commands = build_commands(ClusterSpec.parse(f"{TWO_BY_TWO},rails={rails}"))
    shaped = [command for command in commands if " tbf " in command]
    assert len(shaped) == 2 * links  # both ends: what is sent, and what arrives
    assert all("cross root tbf rate 100000000bit burst 65536 " in command for command in shaped)
    inside = [command for command in commands if "-intra mtu" in command]
    assert len(inside) == (4 if rails == "per_rank" else 0)  # a shared node has its loopback


def test_fast_links_have_bursts_of_two_milliseconds() -> None:
    commands = build_commands(ClusterSpec(nodes=2, ranks_per_node=1, cross=10**10))
    assert sum("rate 10000000000bit burst 2500000 " in command for command in commands) == 4


def test_a_burst_can_be_as_small_as_a_packet() -> None:
    spec = ClusterSpec(nodes=2, ranks_per_node=1, cross=10**7, burst=10_000)
    assert sum("rate 10000000bit burst 10000 " in command for command in build_commands(spec)) == 4


def test_environment_is_that_of_launchers() -> None:
    found = environment(ClusterSpec(nodes=2, ranks_per_node=4, cross=10**9), rank=6)
    assert found.items() >= {
        "RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "10.77.0.1",
    }.items()  # fmt: skip


def test_missing_tools_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([TWO_BY_TWO, "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "no unshare, nsenter, mount, ip, tc" in said and "as root" in said


def test_refused_namespaces_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    refusing.chmod(0o755)
    for tool in ("nsenter", "mount", "ip", "tc"):
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    spec = ClusterSpec.parse(TWO_BY_TWO)
    with pytest.raises(ClusterUnavailable, match="Operation not permitted.*CAP_SYS_ADMIN"):
        Cluster(spec).__enter__()


@pytest.mark.parametrize("words", [[TWO_BY_TWO], [TWO_BY_TWO, "--"]])
def test_command_is_required(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "no COMMAND" in capsys.readouterr().err


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips where this machine cannot make nodes."""
    for tool in ("unshare", "nsenter", "mount", "ip", "tc"):
        if not shutil.which(tool):
            pytest.skip(f"nodes need the program {tool}")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    probe = ["unshare", *user, "--net", "--pid", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"nodes need root or user namespaces: {tried.stderr.strip()}")


@pytest.fixture(scope="module")
def cluster(namespaces: None) -> Iterator[Cluster]:
    with Cluster(ClusterSpec.parse(TWO_BY_TWO)) as made:
        yield made


@pytest.mark.parametrize("rails", ["per_rank", "shared"])
def test_gloo_across_nodes_is_held_to_the_links_rate(
    namespaces: None, rails: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A busy machine stays below a rate, so that only what is too fast is wrong."""
    size, rounds = 2_000_000, 5
    probe = [sys.executable, str(ROOT / "benchmarks/link_probe.py"), f"--megabytes={size / 1e6}"]
    probe += [f"--rounds={rounds}", f"--json={tmp_path / 'rates.json'}"]
    with Cluster(ClusterSpec.parse(f"{TWO_BY_TWO},rails={rails}")) as made:
        assert made.run(probe) == 0
        sys.stdout.write(capfd.readouterr().out)  # for people
        assert made.run(["tc", "-s", "qdisc", "show", "dev", "cross"]) == 0
    said = capfd.readouterr().out
    assert len(re.findall("tbf .* rate 100Mbit burst 64Kb lat 500", said)) == 4
    sent = {int(rank): int(n) for rank, n in re.findall(r"\[(.)\] +Sent (\d+) bytes", said)}
    # Ranks 0 and 2 send in two cases across nodes. What travels inside them passes other devices.
    own = {rank: rounds * size * (1 + (rank % 2 == 0)) for rank in range(4)}
    for rank, across in own.items():
        expected = across + own[rank ^ 1] if rails == "shared" else across
        assert expected < sent[rank] < expected + rounds * size
    rates = json.loads((tmp_path / "rates.json").read_text())
    most = 100 / (1 - 65_536 / size)  # a full bucket goes ahead of the rate
    alone = rates["across nodes, one rank each"]
    assert min(alone[::2]) > 0 and max(alone) <= most and alone[1::2] == [0, 0]
    together = rates["across nodes"]
    assert min(together) > 0 and max(together) <= most
    if rails == "shared":  # the last of two to end has waited for the bytes of both
        half = 50 / (1 - 65_536 / (2 * size))
        assert max(min(together[:2]), min(together[2:])) <= half


def test_lines_are_passed_on_behind_their_rank(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    words = 'echo "$LOCAL_RANK $WORD"; printf "no newline" >&2; pwd'
    assert cluster.run(["sh", "-c", words], extra={"WORD": "word"}) == 0
    said = capfd.readouterr()
    here = [f"[{rank}] {os.getcwd()}" for rank in range(4)]
    assert sorted(said.out.splitlines()) == sorted(
        ["[0] 0 word", "[1] 1 word", "[2] 0 word", "[3] 1 word", *here]
    )
    assert sorted(said.err.splitlines()) == [f"[{rank}] no newline" for rank in range(4)]


@pytest.mark.parametrize(
    ("end", "code"), [("exit 7", 7), ("kill -KILL $$", 137)], ids=["exit", "signal"]
)
def test_one_failure_ends_all(cluster: Cluster, end: str, code: int) -> None:
    """Also what a rank started, and what no longer holds its pipes."""
    started = time.monotonic()
    words = f"(exec >&- 2>&-; sleep 613) & [ $RANK = 2 ] && {end}; sleep 613"
    assert cluster.run(["sh", "-c", words]) == code
    assert time.monotonic() - started < 60
    assert ended("cmdline", b"sleep\x00613\x00")


def test_a_rank_that_ends_well_leaves_nothing_running(cluster: Cluster) -> None:
    assert cluster.run(["sh", "-c", "(exec >&- 2>&-; sleep 614) & sleep 0.2"]) == 0
    assert ended("cmdline", b"sleep\x00614\x00")


def test_c30_ranks_that_run_too_long_are_named_and_ended(cluster: Cluster) -> None:
    message = "after 1 s ranks 0, 2, 3 of the cluster still run"
    with pytest.raises(TimeoutError, match=message):
        cluster.run(["sh", "-c", "[ $RANK = 1 ] || sleep 615"], seconds=1.0)
    assert ended("cmdline", b"sleep\x00615\x00")


def wait_for_a_rank_that_sleeps(context: RankContext) -> None:
    """Rank 0 joins no barrier."""
    if context.rank == 0:
        time.sleep(600)
    torch.distributed.barrier(context.group)


@pytest.mark.slow
def test_c30_ranks_that_run_too_long_say_where(
    namespaces: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    spec = ClusterSpec(nodes=2, ranks_per_node=1, cross=10**9)
    with pytest.raises(TimeoutError, match="ranks 0, 1 of the cluster still run"):
        run_on(spec, wait_for_a_rank_that_sleeps, seconds=20.0)
    said = capfd.readouterr().err
    for rank in range(2):
        assert re.search(rf"^\[{rank}\] +File .* in wait_for_a_rank_that_sleeps$", said, re.M), said


def test_command_line_returns_the_ranks_code(namespaces: None) -> None:
    description = "nodes=2,ranks_per_node=1,cross=1gbit"
    assert main([description, "--", "sh", "-c", "exit $((3 * $RANK))"]) == 3


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_killed_cluster(namespaces: None, signal_number: int) -> None:
    """No process of its process namespace; networks and mounts live no longer than those."""
    show = "readlink /proc/self/ns/pid; exec sleep 615"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, TWO_BY_TWO, "sh", "-c", show],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        lines = [owner.stdout.readline().split() for _ in range(4)]
        assert len(spaces := {space for _, space in lines}) == 1
        space = spaces.pop().encode()
        assert len(processes_of("ns/pid", space)) >= 5  # four ranks and process 1
        owner.send_signal(signal_number)
        owner.wait(timeout=30)
    assert ended("ns/pid", space)


def ended(name: str, content: bytes) -> bool:
    """Whether no process is left within five seconds: a killed one takes some milliseconds."""
    until = time.monotonic() + 5
    while processes_of(name, content):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def processes_of(name: str, content: bytes) -> list[int]:
    """Processes of this machine whose `/proc` file, or link, `name` is `content`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        path = entry / name
        try:
            read = os.readlink(path).encode() if name.startswith("ns/") else path.read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        if read == content:
            found.append(int(entry.name))
    return found
