"""Reject strangers who connect to a run with servers, and report servers that do not start."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from launching import until

from hf_longctx.runtime.executor import Runtime
from hf_longctx.servers import listener as listening
from hf_longctx.servers import server_pool as module
from hf_longctx.servers.handshake import HandshakeError, ServerInfo, introduce
from hf_longctx.servers.listener import Listener, connect
from hf_longctx.servers.server_pool import ServerPool
from hf_longctx.servers.spawn import spawn
from hf_longctx.verify.rank_pool import RankContext

TOKEN, ME = b"a" * 64, ServerInfo(name="me", device="cpu")


def test_a_flood_of_strangers_costs_few_files_and_ends(monkeypatch):
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.5)
    listener = Listener("127.0.0.1", token=TOKEN)
    before = len(os.listdir("/proc/self/fd"))
    flood = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(60)]
    flood[0].sendall(b"\x00")  # a byte now and then buys no more time
    until(lambda: flood[-1].recv(1000) == b"", seconds=60)
    assert len(os.listdir("/proc/self/fd")) - before <= 60 + 16
    time.sleep(1.0)
    with connect("127.0.0.1", listener.port) as connection:
        introduce(connection, token=TOKEN, server=ME)
        until(lambda: len(listener.waiting) == 1, seconds=60)
    for connection in flood:
        connection.close()
    listener.close()


@pytest.mark.parametrize("speed", [0.0, 1e4, float("nan"), "x"], ids=str)
def test_a_server_of_no_usable_speed_is_turned_down(speed):
    listener = Listener("127.0.0.1", token=TOKEN)
    with (
        connect("127.0.0.1", listener.port) as connection,
        pytest.raises(HandshakeError, match=r"with a speed outside \(0.001, 1000.0\)"),
    ):
        introduce(connection, token=TOKEN, server=replace(ME, speed=speed))
    listener.close()


def start_with_one_that_dies(context: RankContext, *, folder: str) -> str:
    """The second rank's server dies before it has said anything; the error of this rank."""
    servers = ServerPool(
        Runtime(channel=context.channel), ranks=2, rank=context.rank, count=2, folder=Path(folder)
    )
    with servers, pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as error:
        dies = partial(spawn, flags=("--device", "cuda") if context.rank else ())
        patch.setattr(module, "spawn", dies)
        servers.start()
    return str(error.value)


def test_all_trainers_learn_at_once_that_a_server_did_not_start(rank_pool, tmp_path):
    started = time.monotonic()
    told = rank_pool.run(start_with_one_that_dies, ranks=2, folder=str(tmp_path))
    assert told[0] == "attention server 1 did not start; the trainer that started it has its log"
    assert re.match(
        "attention server 1 did not start: exit code 2; its log .*--device cuda", told[1]
    )
    assert time.monotonic() - started < module.START_SECONDS
