"""Topologies: ways between devices, islands against a search of all groups, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import trio_accel as ta
from trio_accel.backends.base import AccelBackend


def gpu(index: int) -> ta.DeviceInfo:
    return ta.DeviceInfo(
        backend="gpu",
        index=index,
        description="a GPU",
        total_memory=1 << 30,
        compute_units=8,
        isolations=("inline",),
    )


def joined(pairs: Sequence[tuple[int, int]], count: int) -> ta.Topology:
    """GPUs of which these pairs reach one another."""
    links = [
        ta.DeviceLink(devices=(f"gpu:{a}", f"gpu:{b}"), kind="nvlink", has_peer_access=True, rank=0)
        for a, b in pairs
    ]
    return ta.Topology.of(map(gpu, range(count)), links)


MESH = joined([(0, 1), (3, 2)], 4)


def test_each_pair_has_one_link_in_the_order_of_the_devices() -> None:
    names = [info.name for info in MESH.devices]
    assert [link.devices for link in MESH.links] == list(itertools.combinations(names, 2))
    told = MESH.link("gpu:2", "gpu:3")
    assert told == MESH.link("gpu:3", "gpu:2")
    assert (told.devices, told.kind, told.rank) == (("gpu:2", "gpu:3"), "nvlink", 0)


def test_an_unknown_pair_meets_in_host_memory() -> None:
    link = MESH.link("gpu:0", "gpu:3")
    assert attrs.asdict(link) == {
        "devices": ("gpu:0", "gpu:3"),
        "kind": "host",
        "has_peer_access": False,
        "rank": None,
    }


def test_links_of_devices_that_cannot_be_opened_are_left_out() -> None:
    assert joined([(0, 1), (0, 7)], 2) == joined([(0, 1)], 2)


def test_a_table_of_all_ways() -> None:
    assert str(MESH).splitlines() == [
        "       gpu:0   gpu:1   gpu:2   gpu:3",
        "gpu:0  -       NVLink  host    host",
        "gpu:1  NVLink  -       host    host",
        "gpu:2  host    host    -       NVLink",
        "gpu:3  host    host    NVLink  -",
    ]


@pytest.mark.parametrize(
    ("pairs", "count", "islands"),
    [
        ([], 3, ["0", "1", "2"]),
        ([(0, 1), (2, 3)], 5, ["01", "23", "4"]),
        ([(2, 3)], 4, ["23", "0", "1"]),
        # A chain: the middle one reaches both, which do not reach each other.
        ([(0, 1), (1, 2)], 3, ["01", "2"]),
        # Two rings of four with bridges, as in machines without switches.
        (
            [*itertools.combinations(range(4), 2), *itertools.combinations(range(4, 8), 2), (0, 4), (1, 5)],
            8,
            ["0123", "4567"],
        ),
        (list(itertools.combinations(range(16), 2)), 16, ["0123456789abcdef"]),
    ],
)
def test_islands(pairs: list[tuple[int, int]], count: int, islands: list[str]) -> None:
    expected = tuple(tuple(f"gpu:{int(digit, 16)}" for digit in island) for island in islands)
    assert joined(pairs, count).islands() == expected


SIZE = 6
PAIRS = list(itertools.combinations(range(SIZE), 2))


@settings(max_examples=100, deadline=None)
@given(st.sets(st.sampled_from(PAIRS)))
def test_islands_against_all_groups(pairs: set[tuple[int, int]]) -> None:
    """The largest group with links between all members is taken out, again and again."""
    left: list[int] = list(range(SIZE))
    expected: list[tuple[str, ...]] = []
    while left:
        sizes = range(len(left), 0, -1)
        groups = itertools.chain.from_iterable(itertools.combinations(left, size) for size in sizes)
        found = next(group for group in groups if pairs.issuperset(itertools.combinations(group, 2)))
        expected.append(tuple(f"gpu:{number}" for number in found))
        left = [number for number in left if number not in found]
    assert joined(sorted(pairs), SIZE).islands() == tuple(expected)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"link: b must be one of gpu:0, .*gpu:3, got 'gpu:9'"):
        MESH.link("gpu:0", "gpu:9")
    with pytest.raises(ValueError, match=r"link: a must be one of"):
        MESH.link("cuda", "gpu:0")
    with pytest.raises(ValueError, match=r"link: a and b must be two devices, got 'gpu:1' twice"):
        MESH.link("gpu:1", "gpu:1")


def test_of_this_machine() -> None:
    topology = ta.topology()
    assert topology.devices == ta.list_devices()
    assert len(topology.links) == len(topology.devices) * (len(topology.devices) - 1) // 2
    assert sorted(itertools.chain(*topology.islands())) == sorted(info.name for info in topology.devices)


def test_a_backend_need_not_report_links(backend: AccelBackend) -> None:
    ends = {name for link in backend.links() for name in link.devices}
    assert ends <= {"cpu:0", *(info.name for info in backend.list_devices())}
    assert AccelBackend.links(backend) == ()
