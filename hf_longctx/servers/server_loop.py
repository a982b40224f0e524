"""Answer the trainers' requests for attention: the loop of a server process.

A server waits without limit, since a trainer that loads data or saves a checkpoint is not dead. It
ends when the trainers say so or when one of their connections closes. Between requests it keeps
nothing but programs. Layer: servers.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..comm.channels import Channel, ExchangeError
from ..runtime.executor import Account, Execution, drive
from ..runtime.requests import RequestReceiver
from .handshake import HandshakeError, receive, send

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerStats:
    """What a server has done so far.

    Args:
        requests (`int`): Requests answered: one per layer and direction.
        account (`Account`): Seconds and peak bytes.
    """

    requests: int = 0
    account: Account = field(default_factory=Account)

    def report(self, channel: Channel) -> dict[str, float]:
        """Return the figures that are sent to the trainers."""
        return {
            "requests": self.requests,
            "sent": sum(channel.sent.values()),
            "attending": round(self.account.attending, 3),
            "waited": round(self.account.waited, 3),
            "peak_bytes": self.account.peak_bytes,
        }


def describe_report(report: Mapping[str, float]) -> str:
    """Format a server's report for the trainers' log."""
    return (
        f"{report['requests']:,} requests, {report['attending']:.1f} s of attention, "
        f"{report['waited']:.1f} s of waiting, {report['sent']:,} bytes sent, at most "
        f"{report['peak_bytes']:,} held"
    )


def serve_requests(bridge: Channel, stats: ServerStats) -> None:
    """Answer requests until the trainers are gone. Raises `ExchangeError` then."""
    receiver = RequestReceiver(bridge)  # keeps the programs, which trainers send only once
    while True:
        request, program = receiver.receive()
        execution = Execution(
            program,
            widths=request.widths,
            dtype=request.dtype,
            backward=request.backward,
            channel=bridge,
            scoring=request.scoring,
            account=stats.account,
        )
        for phase in range(int(program.phases[int(request.backward)])):
            drive(execution.phase(phase), stats.account)
        stats.requests += 1


def answer_trainers(
    connection: socket.socket, report: Callable[[], dict[str, float]]
) -> threading.Thread:
    """Answer the first trainer's messages in a thread, and end this process with the training.

    The exit code is 0 if the trainers ended the server, and 1 if they are gone.

    Args:
        connection (`socket.socket`): Control connection to the group's first trainer.
        report (`Callable`): Returns the server's figures, sent on request and at the end.
    """

    def answer() -> None:
        code = 1
        try:
            while code:  # ends after "end", which is answered too
                code = 0 if receive(connection).get("what") == "end" else 1
                send(connection, report())
        except (OSError, HandshakeError):
            pass
        logger.info("the training ended" if code == 0 else "the trainers closed the connection")
        os._exit(code)  # the main thread blocks inside gloo, which nothing can interrupt

    thread = threading.Thread(target=answer, name="longctx trainers", daemon=True)
    thread.start()
    return thread


def run_server(bridge: Channel, connection: socket.socket) -> None:
    """Serve the trainers of one group. Ends the process, see `answer_trainers`."""
    stats = ServerStats()
    ending = answer_trainers(connection, lambda: stats.report(bridge))
    try:
        serve_requests(bridge, stats)
    except ExchangeError as error:
        # Exiting trainers close their connections in any order. The control connection knows
        # whether this is the end of the training, so it may decide the exit code first.
        ending.join(timeout=2.0)
        logger.error("%s", error)
        os._exit(1)
