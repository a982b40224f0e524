"""`hf-longctx serve`: run an attention server that joins a training run.

Modules that import torch are imported inside `run`, because `main` sets OMP_NUM_THREADS first. Exit
codes: 0 the training ended, 1 the trainers went away or dropped this server, 2 rejected by the
trainers or wrong flags. Layer: cli.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    serve = commands.add_parser(
        "serve",
        help="join a training run as an attention server, also from another node",
        description=(
            "Joins a run that was started with --longctx_servers N, in addition to the servers "
            "that the run started itself, and computes attention for it until it ends. The "
            "trainers log the HOST:PORT to join and the file that holds the token; copy that file "
            "here, readable by you alone. Both sides need the same version of hf_longctx. The "
            "server gets work from the next optimizer step on. If it is lost, the training goes on "
            "without it. It uses OMP_NUM_THREADS threads (default: 1)."
        ),
        epilog=(
            "Traffic is not encrypted, and authenticated only while the server joins, as in all of "
            "torch.distributed: use a private network. Exit codes: 0 the training ended, 1 the "
            "trainers went away or dropped this server, 2 rejected or wrong flags. example: "
            "hf-longctx serve --join 10.0.0.1:40123 --token-file token"
        ),
    )
    serve.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="address in the trainers' log"
    )
    serve.add_argument(
        "--token-file", required=True, metavar="FILE", help="copy of the file the trainers wrote"
    )
    serve.add_argument(
        "--device", default="cpu", metavar="D", help="where to compute; only cpu so far"
    )
    serve.add_argument(
        "--interface",
        default="",
        metavar="I",
        help="network interface for the data, such as eth1 (default: the one that leads to HOST)",
    )
    serve.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="attention speed of this server relative to a trainer (default: 1)",
    )
    # Given by the trainer that starts a server, see servers/spawn.py.
    serve.add_argument("--spawned", type=int, default=-1, help=argparse.SUPPRESS)
    serve.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Join and serve. The process ends within, or with the code returned here."""
    from ..servers.handshake import ServerInfo, introduce
    from ..servers.listener import connect
    from ..servers.rendezvous import accept_invitation
    from ..servers.server_loop import run_server
    from ..servers.spawn import end_with_parent

    # First of all: a server must not outlive a trainer that dies while the server still starts.
    if arguments.parent and not end_with_parent(arguments.parent, signal=signal.SIGKILL):
        return 1
    host, port = _validate_flags(arguments)
    token_file = Path(arguments.token_file)
    token = token_file.read_bytes().strip()
    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(asctime)s hf-longctx serve: %(message)s"
    )
    logger = logging.getLogger(__name__)
    if token_file.stat().st_mode & 0o077:
        logger.warning(
            "other users can read --token-file %s: restrict it with chmod 600", token_file
        )
    info = ServerInfo(
        name=f"process {os.getpid()} on {socket.gethostname()}",
        device=arguments.device,
        speed=arguments.speed,
        spawned=arguments.spawned,
    )
    try:
        connection = connect(host, port)
    except OSError as error:
        raise ValueError(
            f"--join {arguments.join}: nothing listens there ({error}); take the address from the "
            "trainers' log while they train"
        ) from error
    introduce(connection, token=token, server=info)
    logger.info("accepted by the trainers at %s, waiting for an invitation", arguments.join)
    try:
        joined = accept_invitation(connection, host=host, interface=arguments.interface)
    except (OSError, RuntimeError) as error:
        logger.error("could not join: %s", str(error).splitlines()[0])
        return 1
    if joined is None:
        logger.info("the training ended before it invited this server")
        return 0
    bridge, ranks = joined
    logger.info("serving %d trainer%s", ranks, "s" * (ranks > 1))
    run_server(bridge, connection)
    return 1  # not reached: run_server ends the process, whose other threads may be in gloo


def _validate_flags(arguments: argparse.Namespace) -> tuple[str, int]:
    """Check all flags; return host and port. Raises `ValueError` for a wrong one."""
    from ..servers.handshake import SPEEDS

    host, _, port = arguments.join.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--join {arguments.join!r} must be HOST:PORT, such as 10.0.0.1:40123")
    if arguments.device != "cpu":
        raise ValueError(
            f"--device {arguments.device}: kernels are exact on cpu only so far; use --device cpu"
        )
    slowest, fastest = SPEEDS
    if not slowest <= arguments.speed <= fastest:  # also rejects NaN
        raise ValueError(
            f"--speed {arguments.speed} must be from {slowest:g} to {fastest:g}, for example 1.0"
        )
    known = [name for _, name in socket.if_nameindex()]
    if arguments.interface and arguments.interface not in known:
        raise ValueError(
            f"--interface {arguments.interface} is not an interface of this machine; use one of "
            f"{known}"
        )
    if not Path(arguments.token_file).is_file():
        raise ValueError(
            f"--token-file {arguments.token_file}: no such file; while the trainers train, copy "
            "the file named in their log"
        )
    return host, int(port)
