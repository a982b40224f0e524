"""`hf-longctx serve`: an attention server that joins a training run.

Layer: cli. Exit codes: 0 the training ended, 1 the trainers went away or gave this server up,
2 refused or wrong flags.
"""

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    serve = commands.add_parser(
        "serve",
        help="join a training run as an attention server, also from another node",
        description=(
            "Joins a run that was started with --longctx_servers N, beside the servers that it "
            "started itself, and attends for it until it ends. The trainers log the HOST:PORT to "
            "join and the file that holds the token; copy that file here, readable by you alone. "
            "Both sides must have the same version of hf_longctx. The server takes its share of "
            "work from the trainers' next optimizer step on; when it is lost, they go on without "
            "it. It uses OMP_NUM_THREADS threads (1 where that is unset)."
        ),
        epilog=(
            "Traffic is neither encrypted nor, after the token, authenticated, as all of "
            "torch.distributed: use a private network. Exit codes: 0 the training ended, 1 the "
            "trainers went away or gave this server up, 2 refused. example: hf-longctx serve "
            "--join 10.0.0.1:40123 --token-file token"
        ),
    )
    serve.add_argument("--join", required=True, metavar="HOST:PORT", help="as the trainers log it")
    serve.add_argument(
        "--token-file", required=True, metavar="FILE", help="the file that the trainers wrote"
    )
    serve.add_argument(
        "--device", default="cpu", metavar="D", help="where to attend; only cpu so far"
    )
    serve.add_argument(
        "--interface",
        default="",
        metavar="I",
        help="network interface for the data, as eth1 (default: the one that leads to HOST)",
    )
    serve.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="how fast this server attends beside a trainer, whose speed is 1 (default: 1)",
    )
    serve.add_argument("--spawned", type=int, default=-1, help=argparse.SUPPRESS)
    serve.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Join and serve; the process ends within, or with the code returned here."""
    from ..servers.handshake import SPEEDS, Visitor, introduce

    host, port = _address(arguments.join)
    if arguments.device != "cpu":
        raise ValueError(
            f"--device {arguments.device}: the kernels are exact on cpu alone so far; use cpu"
        )
    slowest, fastest = SPEEDS
    if not slowest <= arguments.speed <= fastest:
        raise ValueError(
            f"--speed {arguments.speed} must be from {slowest:g} to {fastest:g}, for example 1.0"
        )
    if arguments.parent:
        _end_with(arguments.parent)
    known = [name for _, name in socket.if_nameindex()]
    if arguments.interface and arguments.interface not in known:
        raise ValueError(f"--interface {arguments.interface} is none of this machine's {known}")
    if not Path(arguments.token_file).is_file():
        raise ValueError(
            f"--token-file {arguments.token_file}: there is no such file; copy the one that the "
            "trainers name in their log, while they train"
        )
    token = Path(arguments.token_file).read_bytes().strip()

    from ..servers.rendezvous import answer_call, connect
    from ..servers.server_loop import run as serve

    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(asctime)s hf-longctx serve: %(message)s"
    )
    logger = logging.getLogger(__name__)
    if Path(arguments.token_file).stat().st_mode & 0o077:
        logger.warning(
            "others can read --token-file %s: make it yours alone with chmod 600",
            arguments.token_file,
        )
    visitor = Visitor(
        name=f"process {os.getpid()} on {socket.gethostname()}",
        device=arguments.device,
        speed=arguments.speed,
        spawned=arguments.spawned,
    )
    try:
        connection = connect(host, port)
    except OSError as error:
        raise ValueError(
            f"--join {arguments.join}: nobody listens there ({error}); the address is in the log "
            "of the trainers, which must be training"
        ) from error
    introduce(connection, token=token, visitor=visitor)
    logger.info("accepted by the trainers at %s; waits to be called", arguments.join)
    try:
        answered = answer_call(connection, host=host, interface=arguments.interface)
    except (OSError, RuntimeError) as error:
        logger.error("could not join: %s", str(error).splitlines()[0])
        return 1
    if answered is None:
        logger.info("the training ended before this server was called")
        return 0
    bridge, ranks = answered
    logger.info("serves %d trainer%s", ranks, "s" * (ranks > 1))
    serve(bridge, connection)
    return 1


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--join {text!r} must be HOST:PORT, as 10.0.0.1:40123")
    return host, int(port)


def _end_with(parent: int) -> None:
    """Have Linux end this process with the trainer that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)
