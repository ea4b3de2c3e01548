"""The rules by which work is placed, without devices: against models of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from trio_accel.devices import DeviceLoad, available, by_key, by_load


@attrs.frozen
class Member:
    name: str
    is_available: bool = True
    is_dead: bool = False


def members(*numbers: int) -> list[Member]:
    return [Member(f"cuda:{number}") for number in numbers]


def places(keys: Sequence[str | bytes | int], candidates: Sequence[Member]) -> dict[str | bytes | int, str]:
    return {key: by_key(key, candidates).name for key in keys}


# Few values, so that there are many equal ones.
FEW = st.integers(0, 2)
LOADS = st.lists(st.tuples(FEW, FEW, FEW), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(LOADS)
def test_the_least_load_is_first_in_the_documented_order(
    facts: list[tuple[int, int, int]],
) -> None:
    """Against NumPy's sort by several keys, the last of which counts most; of equal ones the first."""
    device: Any = SimpleNamespace()
    loads = [
        DeviceLoad(device=device, name=str(place), in_flight=one[0], free=one[1], turn=one[2])
        for place, one in enumerate(facts)
    ]
    in_flight, free, turn = np.array(facts).T
    assert by_load(loads) is loads[np.lexsort((turn, -free, in_flight))[0]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), st.booleans())
def test_who_is_able(states: list[tuple[bool, bool]], skips: bool) -> None:
    """Of the live devices, the working ones; if none works, or none is skipped, all."""
    candidates = [Member(str(n), is_available, is_dead) for n, (is_available, is_dead) in enumerate(states)]
    alive = {one.name for one in candidates if not one.is_dead}
    working = {one.name for one in candidates if one.is_available and not one.is_dead}
    found = [one.name for one in available(candidates, skips=skips)]
    assert set(found) == (working if skips and working else alive)
    assert found == sorted(found)


def test_keys_are_spread_evenly() -> None:
    """Within four standard deviations of a binomial distribution."""
    count, size = 8000, 5
    found = Counter(places(range(count), members(*range(size))).values())
    deviation = math.sqrt(count / size * (1 - 1 / size))
    assert len(found) == size
    assert all(abs(number - count / size) < 4 * deviation for number in found.values())


def test_only_keys_of_the_lost_device_move_and_they_move_to_all_others() -> None:
    before, after = places(range(2000), members(0, 1, 2, 3)), places(range(2000), members(0, 1, 3))
    moved = Counter(after[key] for key in before if before[key] == "cuda:2")
    assert all(after[key] == before[key] for key in before if before[key] != "cuda:2")
    assert set(moved) == {"cuda:0", "cuda:1", "cuda:3"}
    assert min(moved.values()) > 100


def test_a_new_device_takes_its_share_and_no_other_key_moves() -> None:
    before, after = places(range(2000), members(0, 1, 2)), places(range(2000), members(0, 1, 2, 3))
    moved = [key for key in before if after[key] != before[key]]
    assert {after[key] for key in moved} == {"cuda:3"}
    assert {before[key] for key in moved} == {"cuda:0", "cuda:1", "cuda:2"}
    assert 400 < len(moved) < 600


def test_the_order_of_the_candidates_does_not_count() -> None:
    expected = places(range(50), members(0, 1, 2, 3))
    for order in itertools.permutations((0, 1, 2, 3)):
        assert places(range(50), members(*order)) == expected


def test_keys_of_several_types_differ() -> None:
    keys = [key for number in range(40) for key in (number, str(number), str(number).encode())]
    found = places(keys, members(*range(16)))
    for first, second in ((int, str), (str, bytes), (bytes, int)):
        pairs = itertools.product(
            [key for key in keys if isinstance(key, first)], [key for key in keys if isinstance(key, second)]
        )
        equal = [found[a] == found[b] for a, b in pairs if str(a).strip("b'") == str(b).strip("b'")]
        assert len(equal) == 40
        assert sum(equal) < 10


def test_no_key() -> None:
    bad: Any = 1.5
    with pytest.raises(TypeError, match=r"a key must be a str, bytes or an int, got 1\.5"):
        by_key(bad, members(0))
