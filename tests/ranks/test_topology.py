"""Find domains of ranks from places, the flag and given rates, and probe links between them."""

from __future__ import annotations

import atexit
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import threads

from hf_longctx.comm.channels import Hub
from hf_longctx.comm.topology import (
    PROBE_BYTES,
    LinkRate,
    Place,
    Topology,
    cpu_place,
    find_topology,
    gather,
    given_levels,
    merge_levels,
    nested_levels,
    node_name,
    own_place,
    pci_place,
    probe,
    probe_neighbours,
)
from hf_longctx.planning.layouts.levels import Levels
from hf_longctx.training.groups import Group, add_channels, make_runtime


def rates(*together: float) -> list[LinkRate]:
    return [LinkRate(together=rate, alone=2 * rate) for rate in together]


# Places


@pytest.mark.parametrize(
    ("places", "sizes", "depths"),
    [
        (["a", "a", "a", "a"], (4,), ()),
        (["a", "b", "c", "d"], (4,), ()),
        (["a", "a", "b", "b"], (2, 2), (0,)),
        (["a", "b", "a", "b"], (4,), ()),  # neighbours share nothing
        (["a"] * 4 + ["b"] * 2, (3, 2), (0,)),  # pairs lie together everywhere
        (["ax"] * 2 + ["ay"] * 2 + ["bx"] * 2 + ["by"] * 2, (2, 2, 2), (0, 1)),
        (["ax"] * 2 + ["ay"] * 2, (2, 2), (1,)),
        (["ax", "ay", "bx", "by"], (2, 2), (0,)),
        (["a"], (1,), ()),
    ],
    ids=str,
)
def test_neighbours_that_share_a_place_are_a_domain(
    places: list[str], sizes: tuple[int, ...], depths: tuple[int, ...]
) -> None:
    assert nested_levels(places) == (Levels(sizes), depths)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"GROUP_RANK": "3", "RANK": "13", "LOCAL_WORLD_SIZE": "8"}, "3"),
        ({"RANK": "13", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, "1"),
        ({"RANK": "13"}, "host"),
        ({}, "host"),
    ],
)
def test_a_launcher_says_which_node(monkeypatch: Any, environment: Any, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    assert node_name(environment) == name


def sys_with(root: Path, devices: dict[str, tuple[str, str]], nodes: list[str]) -> Path:
    """A /sys with PCI devices (address -> path from the host bridge, NUMA domain) and CPU lists."""
    links = root / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for bus, (path, domain) in devices.items():
        place = root / "devices" / path / bus
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{domain}\n")
        (links / bus).symlink_to(place)
    for number, cpus in enumerate(nodes):
        node = root / "devices" / "system" / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    return root


def test_devices_behind_one_switch_share_a_bridge(tmp_path: Path) -> None:
    switch = "pci0000:80/0000:80:01.0/0000:81:00.0"
    devices = {
        "0000:83:00.0": (f"{switch}/0000:82:00.0", "1"),
        "0000:84:00.0": (f"{switch}/0000:82:04.0", "1"),
        "0000:91:00.0": ("pci0000:90/0000:90:01.0", "1"),
        "0000:11:00.0": ("pci0000:10/0000:10:01.0", "0"),
        "0000:12:00.0": ("pci0000:10/0000:10:02.0", "0"),
    }
    sys = sys_with(tmp_path, devices, [])
    assert [pci_place(bus, sys=sys) for bus in devices] == [
        ("1", "0000:81:00.0"),
        ("1", "0000:81:00.0"),
        ("1", "pci0000:90"),
        ("0", "pci0000:10"),
        ("0", "pci0000:10"),
    ]
    assert pci_place("0000:99:00.0", sys=tmp_path) == ("?", "?")


def test_the_cpus_of_a_process_name_its_numa_domain(tmp_path: Path) -> None:
    sys = sys_with(tmp_path, {}, ["0-3,8-11", "4-7,12", ""])  # the last one is memory alone
    cpus: list[set[int]] = [{0, 9}, {12}, {3, 4}, {99}, set()]
    assert [cpu_place(x, sys=sys) for x in cpus] == ["node0", "node1", "?", "?", "?"]
    assert cpu_place({0}, sys=tmp_path / "missing") == "?"


def test_this_process_has_a_place() -> None:
    node, domain, bridge = own_place(torch.device("cpu"))
    assert node and domain and bridge == "?"


# Levels from rates


@pytest.mark.parametrize(
    ("sizes", "together", "merged", "kept"),
    [
        ((2, 4), (1.0, 1.5), (2, 4), (1.0, 1.5)),
        ((2, 4), (1.0, 1.4), (8,), (1.0,)),
        ((2, 4), (1.0, 0.2), (8,), (0.2,)),  # slower inside than out
        ((2, 2, 2), (1.0, 1.2, 9.0), (4, 2), (1.0, 9.0)),
        ((2, 2, 2), (1.0, 9.0, 9.0), (2, 4), (1.0, 9.0)),
        ((2, 2, 2), (1.0, 1.4, 1.8), (4, 2), (1.0, 1.8)),
        ((2, 2, 2), (1.0, 2.0, 4.0), (2, 2, 2), (1.0, 2.0, 4.0)),
        ((6,), (1.0,), (6,), (1.0,)),
    ],
)
def test_levels_merge_where_links_inside_are_not_faster(
    sizes: tuple[int, ...],
    together: tuple[float, ...],
    merged: tuple[int, ...],
    kept: tuple[float, ...],
) -> None:
    levels, left = merge_levels(Levels(sizes), rates(*together))
    assert (levels, [rate.together for rate in left]) == (Levels(merged), list(kept))


# The flag


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("2x4", 4, "longctx_topology=2x4 holds 8 ranks, but 4 share a batch: its sizes, outermost"),
        ("2x4", 4, "must multiply to that; use one of 4x1, 2x2, 1x4, or auto"),
        ("3", 2, "use one of 2x1, 1x2, or auto"),
    ],
)
def test_levels_of_other_ranks_are_refused(text: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        given_levels(text, ranks=ranks)
    assert given_levels(f"{ranks}x1", ranks=ranks) == Levels((ranks, 1))


def test_the_flag_is_taken_as_it_is_and_logged(caplog: Any) -> None:
    here: Place = ("a", "b", "c")
    caplog.set_level(logging.INFO)
    channel = Hub(4).channels()[0]  # nobody answers on it
    found = find_topology("2x2", ranks=4, channel=channel, place=here)
    assert (found.levels, found.rates) == (Levels((2, 2)), ())
    assert caplog.messages == ["topology of 4 ranks: 2x2, as longctx_topology says"]
    assert find_topology("auto", ranks=1, channel=None, place=here).levels == Levels((1,))


# The probe


def test_probes_go_round_the_ranks_that_differ_at_one_level() -> None:
    levels = Levels((3, 2))
    pairs = {
        (level, alone): [probe_neighbours(levels, r, level, alone=alone) for r in range(6)]
        for level in (0, 1)
        for alone in (False, True)
    }
    assert pairs[0, False] == [(2, 4), (3, 5), (4, 0), (5, 1), (0, 2), (1, 3)]
    assert pairs[1, False] == [(1, 1), (0, 0), (3, 3), (2, 2), (5, 5), (4, 4)]
    assert pairs[0, True] == [(2, 2), None, (0, 0), None, None, None]
    assert pairs[1, True] == [(1, 1), (0, 0), None, None, None, None]
    assert probe_neighbours(Levels((2, 1)), 0, 1, alone=False) is None


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 1), (2, 2, 2)], ids=str)
def test_each_send_of_a_probe_has_its_receive(sizes: tuple[int, ...]) -> None:
    levels = Levels(sizes)
    for level in range(len(sizes)):
        for alone in (False, True):
            pairs = [
                probe_neighbours(levels, rank, level, alone=alone) for rank in range(levels.ranks)
            ]
            sends = {(rank, pair[0]) for rank, pair in enumerate(pairs) if pair}
            assert sends == {(pair[1], rank) for rank, pair in enumerate(pairs) if pair}
            assert all(levels.crosses(*ends) == level for ends in sends)


def in_threads(places: list[Place]) -> list[Topology]:
    """What each rank finds, with ranks as threads of this process."""
    channels = Hub(len(places), timeout=20.0).channels()
    found: list[Any] = [None] * len(places)

    def work(rank: int) -> None:
        found[rank] = find_topology(
            "auto", ranks=len(places), channel=channels[rank], place=places[rank]
        )

    threads(work, ranks=len(places))
    return found


def test_ranks_in_one_place_are_one_domain_and_probe_nothing(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    found = in_threads([("a", "b", "c")] * 3)
    assert [(x.levels, x.rates) for x in found] == [(Levels((3,)), ())] * 3
    (line,) = caplog.messages
    assert line.startswith(
        "topology of 3 ranks: 3, one domain, as all share a node and a NUMA domain"
    )


@pytest.mark.parametrize(
    ("speeds", "levels", "line"),
    [
        ((1e9, 4e9), (2, 2), "topology of 4 ranks: 2x2, by NUMA domain; links from the outside in: "
         "1 GB/s a rank, 2 alone; 4 GB/s a rank, 8 alone"),
        ((1e9, 1.2e9), (4,), "topology of 4 ranks: 4, from 2x2 by NUMA domain, merged where links "
         "inside are not 1.5 times as fast as those outside; links"),
    ],
)  # fmt: skip
def test_the_log_says_which_levels_and_why(
    monkeypatch: Any, caplog: Any, speeds: Any, levels: Any, line: str
) -> None:
    caplog.set_level(logging.INFO)
    given = tuple(rates(*speeds))
    monkeypatch.setattr("hf_longctx.comm.topology.probe", lambda channel, levels: given)
    found = in_threads([("a", domain, "c") for domain in "xxyy"])
    assert [x.levels for x in found] == [Levels(levels)] * 4
    (message,) = caplog.messages
    assert message.startswith(line)


def measure(context: Any, *, sizes: tuple[int, ...]) -> Any:
    """A rank's job: what it measured, and what it sent for that."""
    channel = context.channel
    everyone = gather(channel, torch.tensor([context.rank, 7]), ranks=context.ranks)
    before = dict(channel.sent)
    found = probe(channel, Levels(sizes))
    sent = {peer: n - before.get(peer, 0) for peer, n in channel.sent.items()}
    return everyone.tolist(), found, sent


def test_a_probe_over_gloo_sends_what_it_should_and_ranks_agree(rank_pool: Any) -> None:
    results = rank_pool.run(measure, ranks=4, sizes=(2, 2))
    for everyone, found, _ in results:
        assert everyone == [[rank, 7] for rank in range(4)]
        assert found == results[0][1] and len(found) == 2
        values = (rate for x in found for rate in (x.together, x.alone, x.hop))
        assert all(0 < value < float("inf") for value in values)
    large = [{peer: n // PROBE_BYTES for peer, n in sent.items()} for _, _, sent in results]
    # across and inside: once with all ranks, and rank 0 once more with each of its neighbours
    assert large == [
        {1: 2, 2: 2, 3: 0},
        {0: 2, 2: 0, 3: 1},
        {0: 2, 1: 0, 3: 1},
        {0: 0, 1: 1, 2: 1},
    ]


def widened(context: Any, *, counts: tuple[int, ...]) -> list[list[int]]:
    """A rank's job: what its peer in a group of two said over each channel."""
    group = Group(trainers=4, size=2, index=context.rank // 2, rank=context.rank % 2)
    channel: Any = make_runtime(group, default_seconds=120.0).channel
    atexit.unregister(channel.close)
    for count in counts[group.index :: 2]:
        add_channels(channel, group, channels=count, device=torch.device("cpu"))
    heard = []
    for number, each in enumerate((channel, *channel.more)):
        buffer = torch.zeros(2, dtype=torch.uint8)
        said = torch.tensor([context.rank, number], dtype=torch.uint8)
        peer = 1 - group.rank
        each.post([(peer, said)], [(peer, buffer)], what="a greeting").wait()
        heard.append(buffer.tolist())
    channel.close()
    return heard


def test_groups_that_need_fewer_channels_take_part_in_making_them(rank_pool: Any) -> None:
    # the first group needs two, then six, the second four, then two
    heard = rank_pool.run(widened, ranks=4, counts=(2, 4, 6, 2))
    assert heard == [[[peer, number] for number in range(6)] for peer in (1, 0, 3, 2)]
