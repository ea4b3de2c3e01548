"""Wrong arguments are refused by name before anything is launched, and the device is unchanged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import numpy as np
import pytest
import scipy.sparse
from chosen import BACKEND, NAME

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base import Isolation
from trio_accel.devices import ToHost


@attrs.frozen
class Arrays:
    """The arguments of the wrong requests."""

    device: ta.Device
    matrix: ta.AccelRef
    vector: ta.AccelRef
    released: ta.AccelRef
    spoiled: ta.AccelRef
    foreign: ta.AccelRef


Ask = Callable[[Arrays], Awaitable[object]]

WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "shape": (
        lambda a: linalg.matmul(a.matrix, np.ones((5, 2))),
        ValueError,
        r"linalg\.matmul: the last axis of a and .* a of shape \(4, 4\) and b of shape \(5, 2\)",
    ),
    "shape of a large operand": (
        lambda a: linalg.matmul(a.matrix, np.ones((300, 300))),
        ValueError,
        r"linalg\.matmul: .* b of shape \(300, 300\)",
    ),
    "dtype": (
        lambda a: linalg.axpy(1.0, np.ones(4, np.float32), a.vector),
        TypeError,
        r"linalg\.axpy: operands must share a dtype, got x float32, y float64",
    ),
    "dtype of nothing": (lambda a: linalg.scal("2", a.vector), TypeError, r"linalg\.scal: alpha"),  # type: ignore[arg-type]
    "other device": (
        lambda a: linalg.dot(a.vector, a.foreign),
        ValueError,
        rf"linalg\.dot: y is on test/{NAME}#2, this runs on test/{NAME}; copy it there",
    ),
    "other device's lease": (
        lambda a: _lease(a.device, a.foreign),
        ValueError,
        rf"lease: the array is on test/{NAME}#2, not on test/{NAME}",
    ),
    "released": (
        lambda a: linalg.dot(a.vector, a.released),
        ta.StaleRefError,
        r"linalg\.dot: y: its memory was released",
    ),
    "released, a view of it": (
        lambda a: a.released[1:].to_host(),
        ta.StaleRefError,
        r"to_host: .*its memory was released",
    ),
    "released, leased": (lambda a: _lease(a.device, a.released), ta.StaleRefError, r"lease: .* released"),
    "damaged": (
        lambda a: ta.fft.fft(a.spoiled),
        ta.StaleRefError,
        r"fft\.fft: a: .*spoiled by linalg\.scal",
    ),
    "damaged, leased": (lambda a: _lease(a.device, a.spoiled), ta.StaleRefError, r"spoiled by linalg\.scal"),
    "negative size": (lambda a: a.device.zeros((3, -1)), ValueError, r"shape .* got \(3, -1\)"),
    "overlap": (
        lambda a: linalg.matmul(a.matrix, a.matrix, out=a.matrix),
        ValueError,
        r"linalg\.matmul: out must not share memory with a",
    ),
    "overlap of views": (
        lambda a: linalg.axpy(1.0, a.vector[:3], a.vector[1:]),
        ValueError,
        r"linalg\.axpy: y must not share memory with x",
    ),
    "out of another shape": (
        lambda a: linalg.matmul(a.matrix, a.matrix, out=a.vector),
        ValueError,
        r"out must have shape \(4, 4\) and dtype float64, got shape \(4,\)",
    ),
    "out whose elements overlap": (
        lambda a: ta.arrays.sum(np.ones((3, 2, 2)), axis=0, out=ta.arrays.broadcast_to(a.matrix[0], (2, 4))),
        ValueError,
        r"out must have memory of its own for each element, got a view of shape \(2, 4\)",
    ),
    "host out read-only": (
        lambda a: a.vector.to_host(out=np.broadcast_to(0.0, 4)),
        ValueError,
        r"to_host: out .* got a read-only array",
    ),
    "sparse of another width": (
        lambda a: _spmv(a.device),
        ValueError,
        r"sparse\.spmv: .*\(3,\)",
    ),
}


async def _lease(device: ta.Device, ref: ta.AccelRef) -> None:
    async with device.lease(ref):
        raise AssertionError("it was granted")


async def _spmv(device: ta.Device) -> None:
    await ta.sparse.spmv(await ta.sparse.csr(device, scipy.sparse.eye_array(4, format="csr")), np.ones(3))


async def test_each_is_refused_and_named(system: ta.System, device: ta.Device, isolation: Isolation) -> None:
    async with system.open_device(BACKEND, options=ta.DeviceOptions(isolation=isolation)) as other:
        host = np.random.default_rng(1).standard_normal((4, 4))
        arrays = Arrays(
            device,
            await device.put(host),
            await device.put(np.arange(4.0)),
            await device.zeros(4),
            await device.zeros(4),
            await other.zeros(4),
        )
        arrays.released.release()
        ta.testing.inject_fault(device, linalg.Scal, fail=RuntimeError("broken"))
        with pytest.raises(ta.ActorFailedError):
            await device.submit(linalg.Scal(2.0, arrays.spoiled)).wait()
        await device.synchronize()
        for name, (wrong, error, text) in WRONG.items():
            before = await device.statistics()
            with pytest.raises(error, match=text):
                await wrong(arrays)
            await device.synchronize()
            after = await device.statistics()
            made = 3 if name == "sparse of another width" else 0
            assert after.launched == before.launched + made, name
            assert (after.generation, after.memory.blocks) == (1, before.memory.blocks), name
        product = await linalg.matmul(arrays.matrix, arrays.matrix)
        np.testing.assert_allclose(await product.to_host(), host @ host, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(await arrays.vector.to_host(), np.arange(4.0))


async def test_an_array_damaged_while_its_request_waited_is_refused(device: ta.Device) -> None:
    """The request was valid when it was made; its turn followed the failure."""
    x = await device.put(np.ones(3))
    ta.testing.inject_fault(device, linalg.Scal, fail=RuntimeError("broken"))
    broken = device.submit(linalg.Scal(2.0, x))
    reader = device.submit(ToHost(x))
    with pytest.raises(ta.InputFailedError, match=r"was (to be|being) written by linalg\.scal"):
        await reader.wait()
    with pytest.raises(ta.ActorFailedError):
        await broken.wait()
    assert device.generation == 1


async def test_empty_and_strided_arrays_are_accepted(device: ta.Device) -> None:
    empty = await device.put(np.ones((0, 3)))
    product = await linalg.matmul(empty.T, np.ones((0, 2)))
    np.testing.assert_array_equal(await product.to_host(), np.zeros((3, 2)))
    assert (await linalg.scal(2.0, empty)).size == 0
    if BACKEND == "cpu":
        async with empty.lease(write=True) as array:
            assert array.shape == (0, 3)
    host = np.asfortranarray(np.arange(12.0).reshape(3, 4))[:, ::2]
    product = await linalg.matmul(await device.put(np.eye(3)), host)
    np.testing.assert_array_equal(await product.to_host(), host)


async def test_every_use_after_the_end_is_an_error(device: ta.Device) -> None:
    x = await device.put(np.ones(4))
    await device.close()
    for use in (x.to_host, lambda: linalg.scal(2.0, x), lambda: _lease(device, x), device.synchronize):
        with pytest.raises(ta.DeviceLostError, match="the device is closed") as caught:
            await use()
        assert caught.value.device == NAME
    with pytest.raises(ta.DeviceLostError, match="closed"):
        device.submit(linalg.Scal(2.0, x))
    x.release()


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("cuda:7", ta.NotSupportedError, r"'cuda:7': .+; available: cpu:0"),
        ("cpu:7", ValueError, r"'cpu:7': the device does not exist; available: .*cpu:0"),
        ("abacus", ValueError, r"'abacus' names no device; allowed: .*cpu, cpu:<number>"),
    ],
)
async def test_invalid_devices_are_refused(
    system: ta.System,
    monkeypatch: pytest.MonkeyPatch,
    isolation: Isolation,
    spec: str,
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU, with a driver as without one
    with pytest.raises(error, match=text):
        await system.open_device(spec, options=ta.DeviceOptions(isolation=isolation))
    assert system.tree().children == ()
