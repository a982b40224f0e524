"""`nodes=2,ranks_per_node=4,cross=200mbit` -> namespaces, addresses, and the commands making them.

Nothing is run here. A switch namespace holds the outer ends of all devices and the
bridges between them; the ranks run in hosts around it:

    rails=per_rank   a host per rank: `cross` (shaped) to the core, `intra` to its node's bridge
    rails=shared     a host per node: `cross` (shaped) to the core; inside it, the loopback

Both devices of a rank carry the rank's one address; `intra` has the route with the longer prefix.
So a program that knows a single interface, as gloo does, is fast inside a node and shaped across
nodes. Rates are emulated, latency is not: many kernels lack netem.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self, get_args

Rails = Literal["per_rank", "shared"]

EXAMPLE = "nodes=2,ranks_per_node=4,cross=200mbit,rails=per_rank"
MASTER_PORT = 29500  # always free: the namespaces are new

_MOST_RANKS = 1000  # a bridge has 1,024 ports
_SLOWEST, _FASTEST = 10**6, 50 * 10**9  # half a second of a faster link is more than tbf can count
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_QUEUE = "500ms"  # a short queue drops packets of several senders, and TCP falls below the rate
# Headers of 1,500-byte packets take 5 % of the rate. BBR, the default of some systems, pauses and
# shares a link unevenly; Reno is in every kernel.
_MTU, _CONTROL = 9000, "reno"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes of ranks, joined by links of one rate.

    Args:
        nodes (`int`): Nodes, 1 to 250.
        ranks_per_node (`int`): Ranks of each, 1 to 250; at most 1,000 ranks in all.
        cross (`int`): Bits per second that a link between nodes carries, in each direction.
        rails (`Rails`, *optional*, defaults to `"per_rank"`): `per_rank`: each rank has a link of
            its own; `shared`: the ranks of a node share one.
        burst (`int`, *optional*, defaults to 65536): Bytes that an idle link lets pass at once, at
            least a packet; by default one segment of TCP offload, which costs the least CPU. A link
            that carries more in two milliseconds has that.

    Raises:
        ValueError: A value is out of range.
    """

    nodes: int
    ranks_per_node: int
    cross: int
    rails: Rails = "per_rank"
    burst: int = 65_536

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if not 1 <= getattr(self, name) <= 250:
                raise ValueError(f"{name}={getattr(self, name)} is not within 1 and 250; choose so")
        if self.ranks > _MOST_RANKS:
            raise ValueError(
                f"nodes={self.nodes} of ranks_per_node={self.ranks_per_node} make {self.ranks} "
                f"ranks, over the {_MOST_RANKS} that one machine emulates; lower one of them"
            )
        if not _SLOWEST <= self.cross <= _FASTEST:
            raise ValueError(f"cross={self.cross} bit/s is not within 1mbit and 50gbit; choose so")
        if self.rails not in get_args(Rails):
            choices = " or ".join(get_args(Rails))
            raise ValueError(f"rails={self.rails} is unknown; choose {choices}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a text as `EXAMPLE`; `rails` may be left out.

        Raises:
            ValueError: A field is unknown, repeated, missing, unreadable or out of range.
        """
        given: dict[str, str] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in ("nodes", "ranks_per_node", "cross", "rails") or name in given:
                wrong = "given twice" if name in given else "no field of a cluster"
                raise ValueError(f"{part!r} in {text!r} is {wrong}; write it as {EXAMPLE}")
            given[name] = value
        missing = [name for name in ("nodes", "ranks_per_node", "cross") if name not in given]
        if missing:
            raise ValueError(f"{text!r} lacks {', '.join(missing)}; write it as {EXAMPLE}")
        return cls(
            nodes=_count("nodes", given["nodes"]),
            ranks_per_node=_count("ranks_per_node", given["ranks_per_node"]),
            cross=_rate(given["cross"]),
            rails=given.get("rails", "per_rank"),  # type: ignore[arg-type]  # checked above
        )

    @property
    def ranks(self) -> int:
        """Ranks of all nodes: the world size."""
        return self.nodes * self.ranks_per_node


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{name}={text} is not a whole number; write it as {EXAMPLE}")
    return int(text)


def _rate(text: str) -> int:
    """`200mbit` -> bits per second."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if not match:
        raise ValueError(f"cross={text} is not a rate; write a number with kbit, mbit or gbit")
    return round(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One network namespace.

    Args:
        name (`str`): Of the namespace; its devices' outer ends begin with it.
        node (`int`): The node that it is or belongs to.
        address (`str`): IPv4, `10.77.node.n`.
        ranks (`tuple[int, ...]`): Those that run in it.
    """

    name: str
    node: int
    address: str
    ranks: tuple[int, ...]


def hosts(spec: ClusterSpec) -> tuple[Host, ...]:
    """The namespaces in the order of their ranks: one per node with shared rails, or per rank."""
    kind, size = ("node", spec.ranks_per_node) if spec.rails == "shared" else ("rank", 1)
    made = []
    for number, first in enumerate(range(0, spec.ranks, size)):
        node, local = divmod(first, spec.ranks_per_node)
        made.append(
            Host(
                name=f"{kind}{number}",
                node=node,
                address=f"10.77.{node}.{local + 1}",  # a last byte of 0 names a network
                ranks=tuple(range(first, first + size)),
            )
        )
    return tuple(made)


def build_commands(spec: ClusterSpec) -> tuple[str, ...]:
    """The commands of iproute2 that make the cluster, run as root in the switch namespace."""
    return tuple(_commands(spec))


def _commands(spec: ClusterSpec) -> Iterator[str]:
    inside = spec.rails == "per_rank" and spec.ranks_per_node > 1
    yield from _bridge("core")
    if inside:
        for node in range(spec.nodes):
            yield from _bridge(f"node{node}")
    # Small enough that a message hardly gains from it.
    burst = max(spec.burst, spec.cross // 8 // 500)
    shape = f"root tbf rate {spec.cross}bit burst {burst} latency {_QUEUE}"
    for host in hosts(spec):
        yield f"ip netns add {host.name}"
        yield f"ip -n {host.name} link set lo up"
        yield from _device(host, name="cross", bridge="core", network="10.77.0.0/16")
        yield f"tc -n {host.name} qdisc add dev cross {shape}"  # what the host sends
        yield f"tc qdisc add dev {host.name}-cross {shape}"  # what arrives, from all others
        if inside:
            network = f"10.77.{host.node}.0/24"
            yield from _device(host, name="intra", bridge=f"node{host.node}", network=network)


def _bridge(name: str) -> Iterator[str]:
    yield f"ip link add {name} type bridge"
    yield f"ip link set {name} up"


def _device(host: Host, *, name: str, bridge: str, network: str) -> Iterator[str]:
    """A veth pair: `name` in the host, which reaches `network` there, its outer end on a bridge."""
    inside, outer = f"ip -n {host.name}", f"{host.name}-{name}"
    yield f"ip link add {outer} mtu {_MTU} type veth peer name {name} mtu {_MTU} netns {host.name}"
    yield f"ip link set {outer} master {bridge} up"
    yield f"{inside} link set {name} up"
    yield f"{inside} addr add {host.address}/32 dev {name}"
    yield f"{inside} route add {network} dev {name} src {host.address} congctl {_CONTROL}"


def environment(spec: ClusterSpec, *, rank: int) -> dict[str, str]:
    """What one rank finds in its environment, as `init_process_group("gloo")` and launchers use it.

    Args:
        spec (`ClusterSpec`): The cluster.
        rank (`int`): 0 to `spec.ranks - 1`.
    """
    node, local = divmod(rank, spec.ranks_per_node)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(spec.ranks),
        "LOCAL_WORLD_SIZE": str(spec.ranks_per_node),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": hosts(spec)[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": "cross",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # lines are shown as they come
    }
