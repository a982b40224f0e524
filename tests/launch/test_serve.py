"""Let servers join a run: whom trainers accept, what both sides log, and who gives whom up."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import Rows, differentiate, gather, reference, scoring, shard
from launching import until

from hf_longctx.cli import main as cli
from hf_longctx.data.batch import LongCtxBatch
from hf_longctx.kernels.softmax import Scoring
from hf_longctx.planning.layouts.layout import cut
from hf_longctx.planning.planners.options import PlanOptions
from hf_longctx.planning.planners.plan import make_plan
from hf_longctx.planning.program.counts import Widths, peak_bytes
from hf_longctx.planning.program.program import pack, unpack
from hf_longctx.runtime.autograd import Layer, attend
from hf_longctx.runtime.executor import Runtime
from hf_longctx.runtime.requests import Request, _RecentPrograms, send_requests
from hf_longctx.servers import handshake
from hf_longctx.servers import server_pool as module
from hf_longctx.servers.handshake import HandshakeError, ServerInfo, introduce
from hf_longctx.servers.listener import Listener, connect, own_address
from hf_longctx.servers.rendezvous import BUILD_SECONDS, accept_invitation
from hf_longctx.servers.server_pool import ServerPool
from hf_longctx.servers.spawn import SERVER_COMMAND, spawn
from hf_longctx.training.groups import Group, servers_per_group
from hf_longctx.training.steps import limit_server_memory
from hf_longctx.verify.rank_pool import RankContext

TOKEN, ME = b"a" * 64, ServerInfo(name="me", device="cpu")


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", token=TOKEN)
    yield found
    found.close()


def test_whoever_knows_the_token_waits_until_it_leaves(listener):
    connection = connect("127.0.0.1", listener.port)
    introduce(connection, token=TOKEN, server=ME)
    until(lambda: len(listener.waiting) == 1, seconds=60)
    assert listener.waiting[0].info == ME and listener.waiting[0].is_alive()
    assert listener.take(spawned=3) is None
    connection.close()
    until(lambda: listener.take() is None, seconds=60)
    assert not listener.waiting


def test_who_waits_in_vain_is_told_that_the_training_ended():
    listener = Listener("127.0.0.1", token=TOKEN)
    with connect("127.0.0.1", listener.port) as connection:
        introduce(connection, token=TOKEN, server=ME)
        until(lambda: len(listener.waiting) == 1, seconds=60)
        listener.close()
        assert accept_invitation(connection, host="127.0.0.1") is None


def test_another_token_is_turned_down_on_both_sides(listener, caplog):
    with (
        connect("127.0.0.1", listener.port) as connection,
        pytest.raises(HandshakeError, match="rejected this server: its token is not that of this"),
    ):
        introduce(connection, token=b"b" * 64, server=ME)
    until(lambda: "rejected a server" in caplog.text, seconds=60)
    assert "from 127.0.0.1: its token is not that of this run; copy the token" in caplog.text
    assert not listener.waiting


def test_another_version_is_turned_down_on_both_sides(listener, caplog, monkeypatch):
    mine = handshake.versions()
    theirs = iter([mine | {"plan format": 0}, mine, mine])  # the server's first, then the trainers'
    monkeypatch.setattr(handshake, "versions", lambda: next(theirs))
    with (
        connect("127.0.0.1", listener.port) as connection,
        pytest.raises(
            HandshakeError, match="'plan format': 0}, the trainers have .* same version on"
        ),
    ):
        introduce(connection, token=TOKEN, server=ME)
    until(lambda: "install the same version on both" in caplog.text, seconds=60)
    assert not listener.waiting


def test_strangers_are_turned_down_and_keep_nobody_out(listener, caplog):
    silent = connect("127.0.0.1", listener.port)  # says nothing, for as long as it likes
    with connect("127.0.0.1", listener.port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: "does not speak as an hf_longctx" in caplog.text, seconds=60)
    with connect("127.0.0.1", listener.port) as connection:
        introduce(connection, token=TOKEN, server=ME)
    silent.close()


def test_a_server_finds_out_who_does_not_know_the_token():
    def pretend(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            handshake.send(connection, {"magic": handshake.MAGIC, "number": "0"})
            handshake.receive(connection)
            handshake.send(connection, {"proof": "0" * 64})

    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = threading.Thread(target=pretend, args=(listening,))
        other.start()
        with (
            connect("127.0.0.1", listening.getsockname()[1]) as connection,
            pytest.raises(HandshakeError, match="does not know the token; check HOST:PORT"),
        ):
            introduce(connection, token=TOKEN, server=ME)
        other.join()


def test_the_token_does_not_travel(listener):
    said = bytearray()

    class Heard(socket.socket):
        def sendall(self, data: Any, *given: Any) -> None:
            said.extend(data)
            super().sendall(data, *given)

        def recv(self, *given: Any) -> bytes:
            data = super().recv(*given)
            said.extend(data)
            return data

    with Heard() as connection:
        connection.connect(("127.0.0.1", listener.port))
        introduce(connection, token=TOKEN, server=ME)
    assert b"proof" in said and TOKEN not in said


def test_the_listener_is_on_one_interface(listener):
    assert own_address("127.0.0.1") == "127.0.0.1"
    others = {a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"} or {"127.0.0.2"}:
        with pytest.raises(OSError):
            socket.create_connection((address, listener.port), timeout=2).close()


def test_a_program_and_a_request_travel_unchanged():
    layout = cut([2000, 2, 900], ranks=3, layout="spread")
    rows = Rows.random(1)
    plan = make_plan(layout, kind=rows.kind(), options=PlanOptions(tolerance=0.0, speeds=(1.0,)))
    program = plan.program(3)
    packed = pack(program)
    again = unpack(packed.columns)
    assert str(again) == str(program) and packed.exchanges
    assert pack(again).digest == packed.digest != pack(plan.program(0)).digest
    alone = make_plan(
        cut([8], ranks=1, layout="contiguous"), kind=rows.kind(), options=PlanOptions()
    )
    assert not pack(alone.program(0)).exchanges
    widths = Widths(heads=4, kv_heads=2, head_dim=8, value_dim=6)
    request = Request(True, widths, torch.bfloat16, Scoring(scale=0.1, window=9, softcap=30.0))
    assert Request.read(request.header(2**62, 12)) == (request, 2**62, 12)


@pytest.mark.parametrize("limit", [1, 250_000, 10**9])
def test_a_server_short_of_memory_gets_less_work(limit):
    rows = Rows.random(1)
    layout = cut([2000, 2, 900], ranks=2, layout="spread")
    batch = LongCtxBatch(layout, 0, PlanOptions(tolerance=0.0, speeds=(1.0, 1.0)))
    layers = [(rows.kind(), rows.widths)] * 2
    limit_server_memory(batch, algorithm="distca", layers=layers, limit=limit)
    plan = batch.plan("distca", rows.kind())
    for server in (2, 3):
        for backward in (False, True):
            assert peak_bytes(plan.program(server), rows.widths, backward=backward) <= limit
    assert (batch.options.speeds == (1.0, 1.0)) == (limit == 10**9)
    assert (plan.work(balanced=True)[2:].sum() > 0) == (limit > 1)


def test_both_sides_forget_the_same_programs():
    layout = cut([8], ranks=1, layout="contiguous")
    program = make_plan(layout, kind=Rows.random(1).kind(), options=PlanOptions()).program(0)
    noise = np.random.default_rng(0)
    sides = _RecentPrograms(), _RecentPrograms()
    sent = 0
    for digest in noise.integers(0, 100, 1000).tolist():
        if sides[0].find(digest) is None:  # as the trainers do, then as the server does
            sent += 1
            sides[0].keep(digest, program)
            sides[1].keep(digest, program)
        assert sides[1].find(digest) is not None
    assert 100 < sent < 1000


LENGTHS = [2000, 1, 900, 2, 99]


def attend_once(context: RankContext, servers: ServerPool) -> float:
    """Attention, forward and backward, over the ranks and the present servers; its error."""
    rows = Rows.random(sum(LENGTHS))
    layout = cut(LENGTHS, ranks=context.ranks, layout="spread")
    speeds = servers.speeds
    plan = make_plan(layout, kind=rows.kind(), options=PlanOptions(tolerance=0.0, speeds=speeds))
    runtime, program = servers.runtime, plan.program(context.rank)
    layer = Layer(program, runtime.channel, scoring(plan), runtime.account)
    if speeds:
        layer.call = partial(send_requests, runtime.channel, runtime.senders, plan)
    own = shard(layout, context.rank, rows)
    mine = differentiate(lambda q, k, v: attend(layer, q, k, v)[0], own)
    everyone: list[Any] = [None] * context.ranks
    dist.all_gather_object(everyone, mine, group=context.group)
    return gather(layout, everyone).error(reference(rows, LENGTHS))


def join_and_drop(context: RankContext, *, folder: str) -> list[Any]:
    """One server is started, another joins; the first is given up, then the other is."""
    runtime, found = Runtime(channel=context.channel), []
    servers = ServerPool(
        runtime, ranks=context.ranks, rank=context.rank, count=1, folder=Path(folder), timeout=10.0
    )
    with servers:
        servers.start()
        found.append((servers.speeds, attend_once(context, servers)))
        servers.admit()  # nobody waits
        if context.ranks == 1:
            time.sleep(BUILD_SECONDS + 1)  # no time-out ends a server that has nothing to do
        if context.rank == 0:
            assert servers.joining() == 0 and servers._listener is not None
            other = spawn(
                -1,
                join=f"{servers._listener.host}:{servers._listener.port}",
                token_file=servers._token_file,
                log=Path(folder) / "joined.log",
                flags=("--speed", "0.5"),
            )
            until(lambda: servers.joining() == 1, seconds=60)
        dist.barrier(group=context.group)
        servers.admit()
        found.append((servers.speeds, attend_once(context, servers)))
        reports = servers.report()
        servers.drop({0})
        assert not servers._processes
        found.append((servers.speeds, attend_once(context, servers)))
        found.append((servers.lost, servers.joining(), [r["requests"] for r in reports]))
        servers.drop({0})
        found.append((servers.speeds, attend_once(context, servers)))
    if context.rank == 0:
        found.append(other.process.wait(timeout=10))
        found.append(other.last_log_line())
    return found


@pytest.mark.parametrize("ranks", [1, 2], ids="ranks{}".format)
def test_servers_join_and_are_dropped_at_steps(rank_pool, tmp_path, ranks):
    first, *others = rank_pool.run(join_and_drop, ranks=ranks, folder=str(tmp_path))
    for found in (first, *others):
        speeds, errors = zip(*(found[at] for at in (0, 1, 2, 4)), strict=True)
        assert speeds == ((1.0,), (1.0, 0.5), (0.5,), ())
        assert max(errors) < 1e-12
        assert found[3][0] == frozenset()
    assert first[3][1:] == (0, [4, 2])  # two directions each time
    assert first[5] == 1 and first[6].endswith("the trainers closed the connection")


@pytest.mark.parametrize(
    ("servers", "groups", "nodes", "each"), [(0, 2, 2, 0), (1, 1, 1, 1), (4, 2, 2, 2), (6, 3, 2, 2)]
)
def test_groups_and_nodes_share_servers_evenly(monkeypatch, servers, groups, nodes, each):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(12 // nodes))
    group = Group(trainers=12, size=12 // groups, index=0, rank=0)
    assert servers_per_group(asked(servers), group, name="distca") == each


@pytest.mark.parametrize(
    ("given", "name", "message"),
    [
        (
            {"servers": 3},
            "distca",
            "longctx_servers=3 must be divided evenly over 2 group(s) and 3 node(s); use a "
            "multiple of 6",
        ),
        ({"servers": 6}, "ring", "longctx_servers=6 under attn_implementation='ring': only distca"),
        (
            {"servers": 6, "longctx_server_timeout": 120.0},
            "distca",
            "longctx_server_timeout=120.0 must be below 120, the seconds after which trainers",
        ),
        ({"servers": 6, "ddp_timeout": 60}, "distca", "=30.0 must be below 30, the seconds"),
    ],
)
def test_servers_that_no_run_can_have_are_refused(monkeypatch, given, name, message):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    group = Group(trainers=12, size=6, index=0, rank=0)
    with pytest.raises(ValueError, match=re.escape(message)):
        servers_per_group(asked(**given), group, name=name)


def asked(servers: int, **changes: Any) -> SimpleNamespace:
    given = {"longctx_server_timeout": 30.0, "ddp_timeout": 600} | changes
    return SimpleNamespace(longctx_servers=servers, **given)


def test_a_server_that_does_not_start_ends_the_run_with_its_last_line(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "spawn", partial(spawn, flags=("--device", "cuda")))
    servers = ServerPool(Runtime(), ranks=1, rank=0, count=1, folder=tmp_path)
    with servers, pytest.raises(RuntimeError, match="server 0 did not start: .*--device cuda: ker"):
        servers.start()
    assert not list(tmp_path.glob("*.token"))


def turned_down(listener: Listener, folder: Path, *start: str) -> str:
    """What a server says that is started by `python START serve` with a wrong token."""
    (folder / "token").write_bytes(b"b" * 64)
    join = ("--join", f"127.0.0.1:{listener.port}", "--token-file", str(folder / "token"))
    command = [sys.executable, *start, "serve", *join]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    return ended.stderr


def test_a_wrong_token_ends_the_command_with_2_and_why(listener, tmp_path):
    said = turned_down(listener, tmp_path, "-m", "hf_longctx.cli.main")
    assert "hf-longctx serve: the trainers rejected this server: its token" in said


def test_a_trainers_server_imports_no_transformers(listener, tmp_path):
    _, *start, _ = SERVER_COMMAND
    said = turned_down(listener, tmp_path, "-X", "importtime", *start)
    imported = {line.split("|")[-1].strip() for line in said.splitlines() if "|" in line}
    assert {
        "torch",
        "hf_longctx.servers.server_loop",
    } <= imported and "transformers" not in imported


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--join", "here"), "--join 'here' must be HOST:PORT"),
        (("--join", "a:1", "--device", "cuda"), "--device cuda: kernels are exact on cpu"),
        (
            ("--join", "a:1", "--interface", "no0"),
            "--interface no0 is not an interface of this machine; use one of [",
        ),
        (("--join", "a:1", "--speed", "0"), "--speed 0.0 must be from 0.001 to 1000"),
        (("--join", "a:1", "--token-file", "no_such"), "--token-file no_such: no such file"),
        (("--join", "127.0.0.1:1"), "--join 127.0.0.1:1: nothing listens there"),
    ],
)
def test_wrong_flags_are_refused_with_the_remedy(capsys, tmp_path, flags, message):
    (tmp_path / "token").write_bytes(TOKEN)
    assert cli.main(["serve", "--token-file", str(tmp_path / "token"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for fact in (
        "--longctx_servers N",
        "use a private network",
        "Exit codes:",
        "example: hf-longc",
    ):
        assert fact in told
    assert "--parent" not in told
