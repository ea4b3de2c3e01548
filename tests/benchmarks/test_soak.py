"""The soak for a few seconds, and that it finds what is wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import trio_accel as ta
from benchmarks import soak
from benchmarks._soak_lives import Training
from benchmarks._soak_work import Kept, WrongNumbersError

pytestmark = pytest.mark.own_launcher

HOLDINGS = soak.Holdings(
    descriptors=100, processes=7, threads=10, memory=64 << 20, resident=96 << 20, objects=100_000, used=65_924
)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_seconds_of_everything_under_kills() -> None:
    said: list[str] = []
    faults = await soak.main(6.0, 4, say=said.append)
    # What a library loads late is no growth, and so short a run cannot tell it from that.
    assert [fault for fault in faults if " grew from " not in fault] == []
    assert len(said) == 7
    assert "11 processes" in said[0]
    assert "wrong" not in said[-1].lower()


def training(*losses: float) -> Training:
    return Training((), Path("nowhere"), losses)


def finished(*held: soak.Holdings, **outcomes: int) -> soak.Soak:
    service: Any = None
    return soak.Soak(service, training(), 6.0, outcomes=Counter(outcomes), held=list(held))


def test_a_run_in_which_all_is_right_has_no_faults() -> None:
    assert finished(*[HOLDINGS] * 6, begun=3, right=2, left=1).faults() == []


@pytest.mark.parametrize(
    "name", ["descriptors", "processes", "threads", "memory", "resident", "objects", "used"]
)
def test_what_grows_is_named(name: str) -> None:
    before = getattr(HOLDINGS, name)
    more = attrs.evolve(HOLDINGS, **{name: 2 * before})
    found = finished(*[HOLDINGS] * 4, *[more] * 2, begun=1, right=1).faults()
    assert found == [f"{name} grew from {before} to {2 * before}"]


def test_a_request_without_an_outcome_is_a_fault() -> None:
    assert finished(*[HOLDINGS] * 6, begun=2, right=1).faults() == [
        "the outcomes are not as many as the requests"
    ]


async def test_an_array_that_has_changed_is_seen(device: ta.Device) -> None:
    kept = Kept(await device.put(np.arange(4.0)), np.arange(4.0))
    await kept.check()
    await kept.ref[2].assign(7.0)
    with pytest.raises(WrongNumbersError, match="an array that was kept"):
        await kept.check()
