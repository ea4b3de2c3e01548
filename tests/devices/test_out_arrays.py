"""Host arrays to fill: any layout with memory for each element, and no other."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import trio_accel as ta
from trio_accel.devices.base._views import overlaps_itself

pytestmark = pytest.mark.conformance

Host = npt.NDArray[Any]


def broadcast() -> Host:
    array = np.broadcast_to(np.zeros(3), (2, 3))
    with warnings.catch_warnings():
        # NumPy warns of just that.
        warnings.simplefilter("ignore")
        array.flags.writeable = True
    return array


OVERLAPPING: dict[str, Host] = {
    "broadcast": broadcast(),
    "zero strides": as_strided(np.zeros(3), (2, 3), (0, 8)),
    "one element": as_strided(np.zeros(1), (2, 3), (0, 0)),
    "a window": sliding_window_view(np.zeros(4), 3, writeable=True),
    "half an element": as_strided(np.zeros(6), (2, 3), (20, 4)),
    "backwards": as_strided(np.zeros(8)[7:], (2, 3), (-8, -8)),
}

APART: dict[str, Host] = {
    "ordinary": np.zeros((2, 3)),
    "Fortran's": np.zeros((2, 3), order="F"),
    "a part": np.zeros((4, 9))[1::2, ::3],
    "backwards": np.zeros((2, 3))[::-1, ::-1],
    "real parts": np.zeros((2, 3), complex).real,
    "a field": np.zeros((2, 3), [("a", "i1"), ("b", "f8")])["b"],
    "an axis of one": as_strided(np.zeros(6), (2, 3), (24, 8)),
}


async def test_overlapping_arrays_are_refused(device: ta.Device) -> None:
    a = await device.put(np.arange(6.0).reshape(2, 3))
    launched = (await device.statistics()).launched
    for out in OVERLAPPING.values():
        with pytest.raises(ValueError, match="out must have memory of its own for each element") as caught:
            await a.to_host(out=out)
        assert str(caught.value) == (
            "to_host: out must have memory of its own for each element, got an array of shape (2, 3) "
            f"with strides {out.strides}, whose elements overlap; give np.empty(shape, dtype), or none for a "
            "new array"
        )
        with pytest.raises(ValueError, match="elements overlap"):
            device.submit(ta.devices.ToHost(a, out))
    assert (await device.statistics()).launched == launched
    # To read from, they are as good as any.
    back = await (await device.put(np.broadcast_to(np.arange(3.0), (2, 3)))).to_host()
    assert back.tolist() == [[0.0, 1.0, 2.0]] * 2


async def test_all_others_are_filled(device: ta.Device) -> None:
    host = np.arange(6.0).reshape(2, 3)
    a = await device.put(host)
    for out in APART.values():
        assert await a.to_host(out=out) is out
        np.testing.assert_array_equal(out, host)
    line = as_strided(np.zeros(3), (1, 3), (0, 8))
    assert (await a[:1].to_host(out=line)).tolist() == [[0.0, 1.0, 2.0]]
    nothing = as_strided(np.zeros(1), (0, 3), (0, 0))
    assert await a[:0].to_host(out=nothing) is nothing


@settings(deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(-12, 12), min_size=3, max_size=3),
)
def test_layouts_reported_as_disjoint_are_disjoint(shape: list[int], strides: list[int]) -> None:
    """Compared with the addresses of all bytes; layouts refused without need are made by hand."""
    steps = strides[: len(shape)]
    memory = np.zeros(1024, np.uint8)
    array = as_strided(memory[512:].view(np.int16), shape, steps)
    starts = [
        sum(step * place for step, place in zip(steps, places, strict=True))
        for places in itertools.product(*map(range, shape))
    ]
    used = [start + byte for start in starts for byte in range(2)]
    if len(set(used)) < len(used):
        assert overlaps_itself(array)
    elif len(shape) == 1:
        assert not overlaps_itself(array)
