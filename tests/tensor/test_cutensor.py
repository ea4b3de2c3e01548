"""Contractions by cuTENSOR's functions, which NumPy computes, on the stand-in driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from chosen import BACKEND, INLINE, IS_STAND_IN
from tensors import TOLERANCES, check, values, wide

import trio_accel as ta

IS_HERE = BACKEND == "cuda" and IS_STAND_IN

pytestmark = pytest.mark.skipif(not IS_HERE, reason="they compute in memory of the stand-in")

if IS_HERE:
    from fake_cutensor import Cutensor
    from nvmath.bindings import cutensor


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cutensor]:
    """cuTENSOR of devices in this process."""
    fake = Cutensor()
    for name, function in fake.functions().items():
        monkeypatch.setattr(cutensor, name, function)
    yield fake
    assert fake.live == {}, "all is given back"


@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_contractions(system: ta.System, library: Cutensor, dtype: str) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        a, b = values((3, 1, 4, 5), dtype, 1), values((5, 6, 3, 1), dtype, 2)
        ra, rb = await device.put(a), await device.put(b)
        product = np.einsum("axbc,cday->xybd", wide(a), wide(b)).reshape(1, 4, 6)
        for _ in range(4):
            result = await ta.tensor.contract("axbc,cdax->xbd", ra, rb)
            await check(result, product, 15)
        # One plan for the first, and one for the chain that all others are; an axis of one element is none.
        assert (library.planned, library.ran) == (["abc,cda->bd"] * 2, 4)
        c = values((1, 4, 6), dtype, 3)
        rc = await device.put(c)
        result = await ta.tensor.contract("axbc,cdax->xbd", ra, rb, rc, alpha=2, beta=-0.5)
        await check(result, 2 * product - 0.5 * wide(c), 16)
        await check(rc, wide(c))
        await ta.tensor.contract("axbc,cdax->xbd", ra, rb, rc, alpha=2, beta=-0.5, out=rc)
        await check(rc, 2 * product - 0.5 * wide(c), 16)
        assert library.ran == 6


async def test_views_at_any_address(system: ta.System, library: Cutensor) -> None:
    a, b = values((4, 6, 10), "float32", 1), values((10, 3, 6), "float32", 2)
    async with system.open_device(BACKEND, options=INLINE) as device:
        ra, rb = await device.put(a), await device.put(b)
        whole = await device.zeros((3, 6, 11), "float32")
        # From multiples of 16 bytes, of 8 and of 4: each has its own plan.
        for first in (0, 2, 1):
            out = whole[:, :, first : first + 8 : 2]
            result = await ta.tensor.contract("abc,cdb->dba", ra[..., first::2], rb[first::2], out=out)
            await check(result, np.einsum("abc,cdb->dba", wide(a)[..., first::2], wide(b)[first::2]), 5)
        assert library.planned == ["abc,cdb->dba"] * 3
        assert library.ran == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_halves_at_an_odd_element_go_by_cublas(
    system: ta.System, library: Cutensor, dtype: str
) -> None:
    a, b = values((4, 6, 5), dtype, 1), values((5, 3, 4), dtype, 2)
    async with system.open_device(BACKEND, options=INLINE) as device:
        ra, rb = await device.put(a), await device.put(b)
        expected = np.einsum("abc,cda->db", wide(a)[:, 1:], wide(b))
        await check(await ta.tensor.contract("abc,cda->db", ra[:, 1:], rb), expected, 20)
        assert library.ran == 0
        # From a multiple of four bytes it is cuTENSOR's.
        await check(await ta.tensor.contract("abc,cda->db", ra[:, 2:], rb), expected[:, 1:], 20)
        assert library.ran == 1


async def test_calls_outside_its_range_use_cublas(system: ta.System, library: Cutensor) -> None:
    a, b = values((4, 6, 5), seed=1), values((5, 3, 4), seed=2)
    async with system.open_device(BACKEND, options=INLINE) as device:
        ra, rb = await device.put(a), await device.put(b)
        expected = np.einsum("abc,cda->db", a, b)
        # Matrices in place; a reversed axis; and cases without a kernel.
        await check(await ta.tensor.contract("bk,kd->bd", ra[0], rb[:, 0]), a[0] @ b[:, 0], 5)
        await check(await ta.tensor.contract("abc,cda->db", ra[:, ::-1], rb), expected[:, ::-1], 20)
        library.refused = int(cutensor.Status.NOT_SUPPORTED)
        await check(await ta.tensor.contract("abc,cda->db", ra, rb), expected, 20)
        assert library.ran == 0


async def test_without_a_handle_there_is_cublas(
    system: ta.System, library: Cutensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create() -> int:
        raise cutensor.cuTENSORError(int(cutensor.Status.INSUFFICIENT_DRIVER))

    monkeypatch.setattr(cutensor, "create", create)
    a, b = values((4, 6, 5), seed=1), values((5, 3, 4), seed=2)
    async with system.open_device(BACKEND, options=INLINE) as device:
        result = await ta.tensor.contract("abc,cda->db", await device.put(a), b)
        await check(result, np.einsum("abc,cda->db", a, b), 20)


async def test_its_error_restarts_the_library(
    system: ta.System, library: Cutensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = values((4, 6, 5), seed=1), values((5, 3, 4), seed=2)
    async with system.open_device(BACKEND, options=INLINE) as device:
        ra, expected = await device.put(a), np.einsum("abc,cda->db", a, b)
        await check(await ta.tensor.contract("abc,cda->db", ra, b), expected, 20)
        with monkeypatch.context() as broken:
            broken.setattr(cutensor, "contract", _fail)
            with pytest.raises(ta.ActorFailedError, match="INTERNAL_ERROR"):
                await ta.tensor.contract("abc,cda->db", ra, b)
        await check(await ta.tensor.contract("abc,cda->db", ra, b), expected, 20)
        # The second ask was a chain with a plan of its own, and the third is planned again.
        assert library.planned == ["abc,cda->db"] * 3


def _fail(*_: int) -> None:
    raise cutensor.cuTENSORError(int(cutensor.Status.INTERNAL_ERROR))
