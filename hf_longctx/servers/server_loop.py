"""Requests over a bridge -> attention for the trainers of a group: the loop of an extra server.

Layer: servers. A server waits without limit: a trainer that loads data or saves a checkpoint is not
dead. It ends when the trainers say so, or when one of their connections closes; between requests it
keeps nothing but programs.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..comm.channels import Channel, ExchangeError
from ..runtime.executor import Account, Execution, drive
from ..runtime.requests import RequestReceiver
from .handshake import Refused, receive, send

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """What a server did so far.

    Args:
        requests (`int`): Directions of layers.
        account (`Account`): Seconds and peak bytes.
    """

    requests: int = 0
    account: Account = field(default_factory=Account)

    def report(self, channel: Channel) -> dict[str, float]:
        """The figures, for the trainers."""
        return {
            "requests": self.requests,
            "sent": sum(channel.sent.values()),
            "attending": round(self.account.attending, 3),
            "waited": round(self.account.waited, 3),
            "peak_bytes": self.account.peak_bytes,
        }


def serve(bridge: Channel, served: Served) -> None:
    """Answer requests until the trainers are gone. Raises `ExchangeError` then."""
    receiver = RequestReceiver(bridge)
    while True:
        request, program = receiver.receive()
        run = Execution(
            program,
            widths=request.widths,
            dtype=request.dtype,
            backward=request.backward,
            channel=bridge,
            scoring=request.scoring,
            account=served.account,
        )
        for phase in range(int(program.phases[int(request.backward)])):
            drive(run.phase(phase), served.account)
        served.requests += 1


def watch(connection: socket.socket, tell: Callable[[], dict[str, float]]) -> threading.Thread:
    """Answer what the trainers ask beside requests, and end this process with them: code 0 when
    they say so, 1 when they are gone.

    Args:
        connection (`socket.socket`): To the group's first trainer.
        tell (`Callable`): The server's report, sent back when asked and at the end.
    """

    def listen() -> None:
        code = 1
        try:
            while code:
                code = 0 if receive(connection).get("what") == "end" else 1
                send(connection, tell())
        except (OSError, Refused):
            pass
        logger.info("the training ended" if code == 0 else "the trainers closed the connection")
        os._exit(code)  # the main thread waits in a library that cannot be interrupted

    thread = threading.Thread(target=listen, name="longctx trainers", daemon=True)
    thread.start()
    return thread


def run(bridge: Channel, connection: socket.socket) -> None:
    """Serve until the process ends; see `watch`."""
    served = Served()
    ends = watch(connection, lambda: served.report(bridge))
    try:
        serve(bridge, served)
    except ExchangeError as error:
        # at a trainer's end its connections close in any order: the first one gets its say
        ends.join(timeout=2.0)
        logger.error("%s", error)
        os._exit(1)
