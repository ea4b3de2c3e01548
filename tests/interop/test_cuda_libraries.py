"""Leases in the hands of CuPy and PyTorch: on the hardware, where they are installed."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND, INLINE

import trio_accel as ta

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(BACKEND != "cuda", reason="TRIO_ACCEL_BACKEND names another backend"),
    pytest.mark.skipif("STAND_IN_DIR" in os.environ, reason="other libraries need the driver itself"),
]

# A third of a second or more on any GPU of today.
CYCLES = 1_000_000_000
# The types of each library that have a name in NumPy.
TYPES = [str(dtype) for dtype in ta.DType if "float8" not in str(dtype) and dtype != "bfloat16"]
TORCHS = [name for name in TYPES if name not in ("uint16", "uint32", "uint64")]

_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;);
}
"""


@pytest.fixture
async def device(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device("cuda", options=INLINE) as device:
        yield device


def values(name: str) -> np.ndarray[Any, Any]:
    return np.arange(12).reshape(3, 4).astype(ta.DType.of(name).dtype)


@pytest.fixture(scope="module")
def cupy() -> Generator[Any, None, None]:
    if BACKEND != "cuda":
        pytest.skip("no CUDA")
    cupy = pytest.importorskip("cupy")
    # Caches of the library's and the driver's first use exist before a test looks.
    cupy.zeros(1).sum().item()
    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()


async def load(device: ta.Device, ref: ta.AccelRef) -> None:
    """Use what is asked for later: NVIDIA's libraries load what they need first only when nothing runs."""
    await ta.linalg.scal(1.0, ref)
    await (await (await device.put(np.ones(3))).copy()).to_host()


class TestCuPy:
    @pytest.mark.parametrize("name", TYPES)
    @pytest.mark.parametrize("take", ["asarray", "from_dlpack"])
    async def test_it_takes_the_memory_itself(
        self, cupy: Any, device: ta.Device, name: str, take: str
    ) -> None:
        ref = await device.put(values(name))
        async with ref.lease(write=True) as array:
            theirs = getattr(cupy, take)(array)
            assert theirs.data.ptr == array.__cuda_array_interface__["data"][0]
            np.testing.assert_array_equal(cupy.asnumpy(theirs), values(name))
            theirs[1] = theirs[2]
        expected = values(name)
        expected[1] = expected[2]
        np.testing.assert_array_equal(await ref.to_host(), expected)

    async def test_views(self, cupy: Any, device: ta.Device) -> None:
        ref, host = await device.put(values("float32")), values("float32")
        async with ref[::-1, 1:3].T.lease(write=True) as array:
            cupy.asarray(array)[...] += 100
        host[::-1, 1:3].T[...] += 100
        np.testing.assert_array_equal(await ref.to_host(), host)

    async def test_read_only_arrays(self, cupy: Any, device: ta.Device) -> None:
        ref = await device.put(values("float64"))
        async with ref.lease() as array:
            assert float(cupy.asarray(array).sum()) == 66.0

    @pytest.mark.parametrize("kind", ["default", "blocking", "non-blocking"])
    async def test_later_operations_follow_its_work(self, cupy: Any, device: ta.Device, kind: str) -> None:
        spin = cupy.RawKernel(_SPIN, "spin")
        spin((1,), (1,), (np.int64(1),))
        stream = None if kind == "default" else cupy.cuda.Stream(non_blocking=kind == "non-blocking")
        current: AbstractContextManager[Any] = stream or nullcontext()
        ref = await device.put(np.ones((64, 64), np.float32))
        await load(device, ref)
        # It is compiled when it is used first, which takes longer than the kernel runs.
        cupy.zeros((64, 64), np.float32)[...] = 3.0
        async with ref.lease(write=True, stream=stream) as array:
            with current:
                spin((1,), (1,), (np.int64(CYCLES),))
                cupy.asarray(array)[...] = 3.0
        pending = device.submit(ta.linalg.Scal(2.0, ref))
        copied = await (await device.put(np.ones(3))).copy()
        assert not pending.is_done
        assert (await copied.to_host()).tolist() == [1.0] * 3
        assert set((await ref.to_host()).ravel()) == {6.0}

    @pytest.mark.parametrize("name", TYPES)
    async def test_put(self, cupy: Any, device: ta.Device, name: str) -> None:
        theirs = cupy.asarray(values(name))
        np.testing.assert_array_equal(await (await device.put(theirs)).to_host(), values(name))
        np.testing.assert_array_equal(
            await (await device.put(theirs.T[::-1])).to_host(), values(name).T[::-1]
        )

    async def test_put_follows_its_stream(self, cupy: Any, device: ta.Device) -> None:
        spin = cupy.RawKernel(_SPIN, "spin")
        spin((1,), (1,), (np.int64(1),))
        theirs = cupy.zeros(1000, np.float32)
        cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Stream(non_blocking=True):
            spin((1,), (1,), (np.int64(CYCLES),))
            theirs[...] = 3.0
            put = await device.put(theirs)
        assert (await put.to_host()).tolist() == [3.0] * 1000


@pytest.fixture(scope="module")
def torch() -> Generator[Any, None, None]:
    if BACKEND != "cuda":
        pytest.skip("no CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch is built without CUDA")
    torch.zeros(1, device="cuda").sum().item()
    yield torch
    torch.cuda.empty_cache()


class TestPyTorch:
    @pytest.mark.parametrize("name", TORCHS)
    @pytest.mark.parametrize("take", ["as_tensor", "from_dlpack"])
    async def test_it_takes_the_memory_itself(
        self, torch: Any, device: ta.Device, name: str, take: str
    ) -> None:
        ref = await device.put(values(name))
        how: dict[str, Callable[[Any], Any]] = {
            "as_tensor": lambda array: torch.as_tensor(array, device="cuda"),
            "from_dlpack": torch.from_dlpack,
        }
        async with ref.lease(write=True) as array:
            theirs = how[take](array)
            assert theirs.data_ptr() == array.__cuda_array_interface__["data"][0]
            np.testing.assert_array_equal(theirs.cpu().numpy(), values(name))
            theirs[1] = theirs[2]
        expected = values(name)
        expected[1] = expected[2]
        np.testing.assert_array_equal(await ref.to_host(), expected)

    @pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
    async def test_types_that_numpy_has_no_name_for(self, torch: Any, device: ta.Device, name: str) -> None:
        ref = await device.put(values(name))
        async with ref.lease(write=True) as array:
            try:
                theirs = torch.from_dlpack(array)
            except (RuntimeError, BufferError) as error:
                if name == "bfloat16":
                    raise
                pytest.skip(f"this PyTorch takes no {name} by DLPack: {error}")
            assert theirs.dtype == getattr(torch, name)
            np.testing.assert_array_equal(theirs.float().cpu().numpy(), values(name).astype(np.float32))
            theirs[0] = theirs[2]
        np.testing.assert_array_equal((await ref.to_host())[0], values(name)[2])

    async def test_views(self, torch: Any, device: ta.Device) -> None:
        ref, host = await device.put(values("float32")), values("float32")
        async with ref[1:, ::2].T.lease(write=True) as array:
            torch.from_dlpack(array).add_(100)
        host[1:, ::2].T[...] += 100
        np.testing.assert_array_equal(await ref.to_host(), host)

    async def test_read_only_arrays(self, torch: Any, device: ta.Device) -> None:
        """It has no read-only arrays: it refuses them by one protocol, and not by the other."""
        ref = await device.put(values("float64"))
        async with ref.lease() as array:
            with pytest.raises(TypeError, match="read only flag"):
                torch.as_tensor(array, device="cuda")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    theirs = torch.from_dlpack(array)
                except BufferError:
                    pytest.skip("this PyTorch speaks DLPack of before 1.0")
            assert theirs.sum().item() == 66.0

    @pytest.mark.parametrize("kind", ["default", "own"])
    async def test_later_operations_follow_its_work(self, torch: Any, device: ta.Device, kind: str) -> None:
        stream = torch.cuda.Stream() if kind == "own" else torch.cuda.default_stream()
        ref = await device.put(np.ones((64, 64), np.float32))
        await load(device, ref)
        async with ref.lease(write=True, stream=stream) as array:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                torch.from_dlpack(array).fill_(3.0)
        pending = device.submit(ta.linalg.Scal(2.0, ref))
        copied = await (await device.put(np.ones(3))).copy()
        assert not pending.is_done
        assert (await copied.to_host()).tolist() == [1.0] * 3
        assert set((await ref.to_host()).ravel()) == {6.0}

    @pytest.mark.parametrize("name", TORCHS)
    async def test_put(self, torch: Any, device: ta.Device, name: str) -> None:
        theirs = torch.from_numpy(values(name)).cuda()
        np.testing.assert_array_equal(await (await device.put(theirs)).to_host(), values(name))
        np.testing.assert_array_equal(await (await device.put(theirs.T[1:])).to_host(), values(name).T[1:])

    async def test_put_follows_the_default_stream(self, torch: Any, device: ta.Device) -> None:
        theirs = torch.zeros(1000, device="cuda")
        torch.cuda._sleep(CYCLES)
        theirs.fill_(3.0)
        assert (await (await device.put(theirs)).to_host()).tolist() == [3.0] * 1000

    async def test_an_array_on_the_host_is_one(self, torch: Any, device: ta.Device) -> None:
        put = await device.put(torch.arange(5))
        assert (await put.to_host()).tolist() == [0, 1, 2, 3, 4]
