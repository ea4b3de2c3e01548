"""Leases of CUDA arrays by the protocols of other libraries: types, layouts, and refusals."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND, INLINE
from views import VIEWS

import trio_accel as ta

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(BACKEND != "cuda", reason="TRIO_ACCEL_BACKEND names another backend"),
    pytest.mark.usefixtures("the_driver_is_open"),
]

if BACKEND == "cuda":
    from foreign_library import Library, Tensor

# Type code and bits by dlpack.h.
_TYPES = {
    "float64": (2, 64),
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "bool": (6, 8),
}
_NOT_NUMPYS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device("cuda", options=INLINE) as device:
        yield device


async def ones(device: ta.Device) -> ta.AccelRef:
    return await device.put(np.ones(1000, np.float32))


def test_all_types_are_here() -> None:
    assert set(_TYPES) == {str(dtype) for dtype in ta.DType}


@pytest.mark.parametrize("name", _TYPES)
async def test_element_types(device: ta.Device, name: str) -> None:
    dtype = ta.DType.of(name).dtype
    ref = await device.put(np.arange(6).reshape(2, 3).astype(dtype))
    async with ref.lease(write=True) as array:
        tensor = Tensor.of(array)
        assert Tensor.of(array, None) == attrs.evolve(tensor, is_read_only=None)
        assert tensor.type == (*_TYPES[name], 1)
        assert tensor.device == array.__dlpack_device__() == (2, 0)
        assert (array.shape, array.strides, array.dtype) == (
            (2, 3),
            (3 * dtype.itemsize, dtype.itemsize),
            dtype,
        )
        assert array.nbytes == 6 * dtype.itemsize
        if name in _NOT_NUMPYS:
            assert not hasattr(array, "__cuda_array_interface__")
            with pytest.raises(AttributeError, match=f"does not support {name}; use DLPack"):
                array.__cuda_array_interface__  # noqa: B018
        else:
            assert array.__cuda_array_interface__ == {
                "shape": (2, 3),
                "strides": None,
                "typestr": np.dtype(name).str,
                "data": (tensor.address, False),
                "version": 3,
                "stream": None,
            }


@pytest.mark.parametrize("view", VIEWS)
async def test_views_have_the_addresses_of_numpys_views(device: ta.Device, view: str) -> None:
    host = np.arange(20, dtype=np.float32).reshape(4, 5)
    base = await device.put(host)
    ref, expected = VIEWS[view](base), VIEWS[view](host)
    async with base.lease() as whole, ref.lease() as array:
        assert array.shape == expected.shape
        start = Tensor.of(whole).address
        for address, strides in (
            (Tensor.of(array).address, Tensor.of(array).strides),
            (array.__cuda_array_interface__["data"][0], array.__cuda_array_interface__["strides"]),
        ):
            if not expected.size:
                continue
            assert address - start == _offset(expected, host)
            if strides is None:
                assert expected.flags.c_contiguous
            else:
                assert strides == expected.strides


async def test_an_array_without_elements(device: ta.Device) -> None:
    ref = await device.put(np.empty((0, 3), np.float32))
    async with ref.lease(write=True) as array:
        assert array.__cuda_array_interface__["data"] == (0, False)
        assert Tensor.of(array).shape == (0, 3)


async def test_a_lease_for_reading_is_marked_so_or_refused(device: ta.Device) -> None:
    ref = await ones(device)
    async with ref.lease() as array:
        assert array.is_read_only
        assert array.__cuda_array_interface__["data"][1] is True
        assert Tensor.of(array).is_read_only is True
        for version in (None, (0, 8)):
            with pytest.raises(BufferError, match="read-only, which DLPack can say"):
                array.__dlpack__(max_version=version)
    async with ref.lease(write=True) as array:
        assert Tensor.of(array).is_read_only is False


async def test_it_is_neither_copied_nor_moved(device: ta.Device) -> None:
    ref = await ones(device)
    async with ref.lease(write=True) as array:
        with pytest.raises(BufferError, match="copy: a lease hands out the memory itself"):
            array.__dlpack__(copy=True)
        with pytest.raises(BufferError, match=r"dl_device: the array is on \(2, 0\), not on \(1, 0\)"):
            array.__dlpack__(dl_device=(1, 0))
        assert array.__dlpack__(copy=False, dl_device=(2, 0), stream=-1) is not None
        with pytest.raises(TypeError, match="in the memory of a GPU"):
            np.asarray(array)


async def test_capsules_that_outlive_the_lease_hold_its_memory(device: ta.Device) -> None:
    ref = await ones(device)
    async with ref.lease() as array:
        capsule = array.__dlpack__(max_version=(1, 0))
    ref.release()
    del array
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 1
    del capsule
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 0


async def test_nvidias_own_view_takes_it(device: ta.Device, library: Library) -> None:
    from cuda.core.utils import StridedMemoryView

    ref, stream = await device.put(np.arange(12.0).reshape(3, 4)), library.stream()
    async with ref.T[1:3].lease(write=True, stream=stream) as array:
        view = StridedMemoryView.from_any_interface(array, stream_ptr=stream)
        assert (view.ptr, view.readonly) == (array.__cuda_array_interface__["data"][0], False)
        assert (view.shape, view.strides, view.dtype) == ((2, 3), (1, 4), np.dtype(np.float64))


def _offset(view: npt.NDArray[Any], base: npt.NDArray[Any]) -> int:
    first = view.__array_interface__["data"][0]
    return int(first) - int(base.__array_interface__["data"][0])
