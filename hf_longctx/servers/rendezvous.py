"""Build bridges between the trainers of a group and the servers that join it.

A bridge is a gloo group of the group's ranks and one server, outside the default group, so losing a
server breaks no collective of the trainers. It is built over a store that listens on one interface.
No trainer builds a bridge before the server has said `ready`: gloo's constructor blocks, so a
server that never comes would hold up every trainer. Layer: servers.
"""

import json
import logging
import socket
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.channels import GlooChannel, cause
from .handshake import ServerInfo, receive, send
from .listener import WaitingServer, own_address

logger = logging.getLogger(__name__)
BUILD_SECONDS = 10.0  # for an invited server to answer, and for all sides to build a bridge
STEP_SECONDS = 1800.0  # how much later than others one trainer may reach a step boundary
_FOREVER_SECONDS = 30 * 86400.0  # a server waits for as long as its trainers live
_ADDRESS_BYTES = 512  # a broadcast needs one length on all ranks


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where a group's first trainer accepts servers and stores what builds bridges.

    Args:
        host (`str`): Address of its interface.
        port (`int`): Port of its listener.
        store_port (`int`): Port of its store.
        token (`str`): Token that servers must know.
    """

    host: str
    port: int
    store_port: int
    token: str

    @property
    def join(self) -> str:
        """`HOST:PORT` for `hf-longctx serve --join`."""
        return f"{self.host}:{self.port}"


def broadcast_address(
    address: RendezvousAddress | None, peers: GlooChannel | None
) -> RendezvousAddress:
    """Send the first rank's address to every rank of the group.

    Args:
        address (`RendezvousAddress`, *optional*): Given on the first rank alone.
        peers (`GlooChannel`, *optional*): Channel to the other ranks; `None` for a single rank.
    """
    # As bytes: torch's broadcast of objects would pickle them.
    text = json.dumps(astuple(address)) if address else ""
    data = torch.frombuffer(bytearray(text.ljust(_ADDRESS_BYTES).encode()), dtype=torch.uint8)
    if peers is not None:
        dist.broadcast(data, group=peers.group, group_src=0)
    return RendezvousAddress(*json.loads(data.numpy().tobytes()))


def open_store(host: str, port: int | None = None, *, seconds: float) -> dist.TCPStore:
    """Open the store over which a group's bridges are built.

    Args:
        host (`str`): Address of the interface it listens on.
        port (`int`, *optional*): Port of a running store; by default one is started here.
        seconds (`float`): Longest wait for a key.
    """
    timeout = timedelta(seconds=seconds)
    if port is not None:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    listening = socket.create_server((host, 0))  # a store's own socket listens on all interfaces
    return dist.TCPStore(
        host, int(listening.getsockname()[1]), is_master=True, wait_for_workers=False,
        timeout=timeout, master_listen_fd=listening.detach(),
    )  # fmt: skip


class Bridge(GlooChannel):
    """A channel between the ranks of a group and one server, which is numbered after them.

    Args:
        store (`dist.Store`): Store of the group.
        name (`str`): Name of the bridge, unique in the store.
        rank (`int`): Number of this process.
        ranks (`int`): Ranks of the group, and so the server's number.
        host (`str`, *optional*): Address of the interface to use.
        interface (`str`, *optional*): Name of the interface, instead of its address.
        timeout (`float`): Seconds that one exchange may take.

    Raises:
        RuntimeError: if one of the processes does not come in time.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        rank: int,
        ranks: int,
        host: str = "",
        interface: str = "",
        timeout: float,
    ) -> None:
        # Built by hand: new_group() would need the server to be part of the default group.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=BUILD_SECONDS), 1
        at = {"interface": interface} if interface else {"hostname": host}
        options._devices = [dist.ProcessGroupGloo.create_device(**at)]
        prefixed = dist.PrefixStore(name, store)  # all bridges of a group share the store
        group = dist.ProcessGroupGloo(prefixed, rank, ranks + 1, options)
        super().__init__(group, timeout=timeout)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the connections. Whoever waits on them gets an error."""
        del self.group  # torch knows nothing of this group, so nothing is left to destroy


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One trainer's part in building its group's bridges.

    Args:
        store (`dist.TCPStore`): Store of the group.
        host (`str`): Address of this process.
        rank (`int`): Rank of this process.
        ranks (`int`): Ranks of the group.
        timeout (`float`): Seconds that an exchange with a server may take.
    """

    store: dist.TCPStore
    host: str
    rank: int
    ranks: int
    timeout: float

    def invite(self, name: str, waiting: WaitingServer | None) -> None:
        """Invite a server to bridge `name`; tell all ranks whether it comes. First rank only."""
        answer = ""
        if waiting is not None:
            with suppress(OSError, RuntimeError):  # it is gone, or did not answer in time
                invitation = {"bridge": name, "store": self.store.port, "ranks": self.ranks}
                send(waiting.connection, invitation)
                self.store.wait([f"{name}/ready"], timedelta(seconds=BUILD_SECONDS))
                answer = json.dumps(asdict(waiting.info))
        # Set in every case: the other ranks wait for this key.
        self.store.set(f"{name}/go", answer)

    def build(self, name: str) -> tuple[Bridge, ServerInfo] | None:
        """Build bridge `name` once its server was invited; `None` unless every rank succeeds."""
        info = self.store.get(f"{name}/go")
        if not info:
            return None
        bridge: Bridge | None = None
        try:
            bridge = Bridge(
                self.store, name,
                rank=self.rank, ranks=self.ranks, host=self.host, timeout=self.timeout,
            )  # fmt: skip
        except RuntimeError as error:
            logger.warning("could not build a bridge: %s", cause(error))
        # Plans depend on the servers, so ranks agree: one that failed makes all give the bridge up.
        self.store.set(f"{name}/built/{self.rank}", "0" if bridge is None else "1")
        built = [self.store.get(f"{name}/built/{rank}") for rank in range(self.ranks)]
        if bridge is not None and b"0" not in built:
            return bridge, ServerInfo(**json.loads(info))
        if bridge is not None:
            bridge.close()
        return None


def accept_invitation(
    connection: socket.socket, *, host: str, interface: str = ""
) -> tuple[Bridge, int] | None:
    """Wait for an invitation and build the bridge, on the server's side.

    Args:
        connection (`socket.socket`): Control connection to the group's first trainer.
        host (`str`): Address of that trainer.
        interface (`str`, *optional*): Network interface for the bridge; by default the one that
            leads to `host`.

    Returns:
        The bridge and the number of ranks; `None` if the training ended without an invitation.

    Raises:
        OSError: if the connection is lost.
        RuntimeError: if the bridge cannot be built.
    """
    connection.settimeout(None)  # the next step may be an hour away
    invitation = receive(connection)
    if "bridge" not in invitation:
        return None
    name, ranks = invitation["bridge"], invitation["ranks"]
    store = open_store(host, invitation["store"], seconds=BUILD_SECONDS)
    store.set(f"{name}/ready", "1")
    if not store.get(f"{name}/go"):
        raise RuntimeError("the trainers waited too long for this server; start it again")
    bridge = Bridge(
        store, name, rank=ranks, ranks=ranks,
        host=own_address(host), interface=interface, timeout=_FOREVER_SECONDS,
    )  # fmt: skip
    return bridge, ranks
