"""Wrong arguments of linear algebra: refused by name before anything is launched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import numpy as np
import pytest
from chosen import BACKEND, NAME

import trio_accel as ta
from trio_accel import linalg


@attrs.frozen
class Arrays:
    """The arguments of the wrong requests."""

    device: ta.Device
    matrix: ta.AccelRef
    vector: ta.AccelRef
    single: ta.AccelRef
    whole: ta.AccelRef
    scalar: ta.AccelRef


Ask = Callable[[Arrays], Awaitable[object]]

WRONG: dict[str, tuple[Ask, type[Exception], str]] = {
    "inner lengths": (
        lambda a: linalg.matmul(a.matrix, np.ones((4, 2))),
        ValueError,
        r"linalg\.matmul: the last axis of a and the last but one axis of b .* a of shape \(3, 3\) and b",
    ),
    "inner length of a vector": (
        lambda a: linalg.matmul(a.matrix, np.ones(4)),
        ValueError,
        r"the last axis of a and the only axis of b",
    ),
    "stacks": (
        lambda a: linalg.matmul(np.ones((2, 3, 3)), np.ones((4, 3, 3)), out=a.matrix),
        ValueError,
        r"the leading axes of a and b must broadcast, got a of shape \(2, 3, 3\)",
    ),
    "scalar a": (
        lambda a: linalg.matmul(a.scalar, a.matrix),
        ValueError,
        r"a must have at least one axis, got an array without axes; use scal",
    ),
    "scalar b": (lambda a: linalg.matmul(a.matrix, a.scalar), ValueError, r"b must have at least one axis"),
    "mixed dtypes": (
        lambda a: linalg.matmul(a.matrix, a.single),
        TypeError,
        r"operands must share a dtype, got a float64, b float32; write ",
    ),
    "out of another shape": (
        lambda a: linalg.matmul(a.matrix, a.matrix, out=a.vector),
        ValueError,
        r"out must have shape \(3, 3\) and dtype float64, got shape \(3,\) and dtype float64",
    ),
    "out of another dtype": (
        lambda a: linalg.matmul(a.matrix, a.matrix, out=a.single),
        ValueError,
        r"out must have shape \(3, 3\) and dtype float64, got shape \(3, 3\) and dtype float32",
    ),
    "out is an operand": (
        lambda a: linalg.matmul(a.matrix, np.eye(3), out=a.matrix),
        ValueError,
        r"out must not share memory with a; .*copy\(\)",
    ),
    "out on the host": (
        lambda a: linalg.matmul(a.matrix, a.matrix, out=np.empty((3, 3))),  # type: ignore[arg-type]
        TypeError,
        r"out must be an AccelRef, got ndarray",
    ),
    "a list": (
        lambda a: linalg.matmul(a.matrix, [[1.0]]),  # type: ignore[arg-type]
        TypeError,
        r"b must be an AccelRef or a NumPy array, got list",
    ),
    "no device": (
        lambda a: linalg.matmul(np.eye(3), np.eye(3)),
        TypeError,
        r"matmul: no operand is on a device; copy one there first \(await device\.put\(array\)\)",
    ),
    "objects": (
        lambda a: linalg.matmul(a.matrix, np.array([[None] * 3] * 3)),
        TypeError,
        r"matmul: b: dtype: .* allowed: float64",
    ),
    "lengths of axpy": (
        lambda a: linalg.axpy(1.0, np.ones(4), a.vector),
        ValueError,
        r"axpy: arrays must share a shape, got x of shape \(4,\) and y of shape \(3,\)",
    ),
    "dtypes of axpy": (
        lambda a: linalg.axpy(1.0, np.ones(3, np.float32), a.vector),
        TypeError,
        r"axpy: operands must share a dtype, got x float32, y float64",
    ),
    "integers": (
        lambda a: linalg.axpy(1, a.whole, a.whole),
        TypeError,
        r"axpy: the arrays must have a floating or complex dtype, got int64; use cast\(\)",
    ),
    "axpy with itself": (
        lambda a: linalg.axpy(1.0, a.vector, a.vector),
        ValueError,
        r"y must not share memory with x; .*copy\(\)",
    ),
    "y on the host": (
        lambda a: linalg.axpy(1.0, a.vector, np.ones(3)),  # type: ignore[arg-type]
        TypeError,
        r"axpy: y must be an AccelRef, got ndarray",
    ),
    "complex factor": (
        lambda a: linalg.axpy(1j, np.ones(3), a.vector),
        TypeError,
        r"axpy: alpha 1j is complex, the arrays are float64",
    ),
    "factor true": (
        lambda a: linalg.scal(True, a.vector),
        TypeError,
        r"scal: alpha must be a number, got bool",
    ),
    "factor in text": (
        lambda a: linalg.scal("2", a.vector),  # type: ignore[arg-type]
        TypeError,
        r"scal: alpha must be a number, got str",
    ),
    "an array as factor": (
        lambda a: linalg.scal(np.ones(3), a.vector),  # type: ignore[arg-type]
        TypeError,
        r"scal: alpha must be a number, got ndarray",
    ),
    "factor too large": (
        lambda a: linalg.scal(1e300, a.single),
        ValueError,
        r"scal: alpha 1e\+300 is outside the range of float32",
    ),
    "factor of 400 digits": (
        lambda a: linalg.scal(10**400, a.vector),
        ValueError,
        r"scal: alpha 1000.*000 is outside the range of float64",
    ),
    "scal on the host": (
        lambda a: linalg.scal(2.0, np.ones(3)),  # type: ignore[arg-type]
        TypeError,
        r"scal: no operand is on a device",
    ),
    "dot of matrices": (
        lambda a: linalg.dot(a.matrix, a.matrix),
        ValueError,
        r"dot: x must have one axis, got shape \(3, 3\)",
    ),
    "lengths of dot": (
        lambda a: linalg.dot(a.vector, np.ones(2)),
        ValueError,
        r"dot: y must have shape \(3,\), got x of shape \(3,\) and y of shape \(2,\)",
    ),
    "out of dot": (
        lambda a: linalg.dot(a.vector, a.vector, out=a.vector),
        ValueError,
        r"dot: out must have shape \(\) and dtype float64, got shape \(3,\)",
    ),
    "nrm2 of a matrix": (
        lambda a: linalg.nrm2(a.matrix),
        ValueError,
        r"nrm2: x must have one axis, got shape \(3, 3\)",
    ),
    "nrm2 of integers": (
        lambda a: linalg.nrm2(a.whole),
        TypeError,
        r"nrm2: x has dtype int64; allowed: float16, .* complex128 \(use cast\(\)\)",
    ),
    "nrm2 to a complex": (
        lambda a: _complex_out(a.device),
        ValueError,
        r"nrm2: out must have shape \(\) and dtype float64, got shape \(\) and dtype complex128",
    ),
}


async def _complex_out(device: ta.Device) -> object:
    return await linalg.nrm2(np.ones(3, complex), out=await device.zeros((), complex))


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG.values(), ids=WRONG.keys())
async def test_refused_before_anything_is_launched(
    system: ta.System, device: ta.Device, wrong: Ask, error: type[Exception], message: str
) -> None:
    arrays = Arrays(
        device,
        matrix=await device.put(np.eye(3)),
        vector=await device.put(np.ones(3)),
        single=await device.put(np.eye(3, dtype=np.float32)),
        whole=await device.put(np.ones(3, np.int64)),
        scalar=await device.put(2.0),
    )
    before = await device.statistics()
    with pytest.raises(error, match=message):
        await wrong(arrays)
    await device.synchronize()
    after = await device.statistics()
    assert after.launched - before.launched == (1 if wrong is WRONG["nrm2 to a complex"][0] else 0)
    assert after.memory.used == before.memory.used
    product = await linalg.matmul(arrays.matrix, arrays.vector)
    assert (await product.to_host()).tolist() == [1.0, 1.0, 1.0]
    assert all(node.restarts == 0 for node in system.tree().walk())


@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn", "float8_e5m2"])
async def test_a_product_that_the_backend_does_not_have(
    system: ta.System, device: ta.Device, dtype: str
) -> None:
    x = await device.full((2, 2), 1, dtype)
    with pytest.raises(ta.NotSupportedError, match=f"no matmul for {dtype}; it has float16") as caught:
        await linalg.matmul(x, x)
    error = caught.value
    assert (error.backend, error.device, error.operation) == (BACKEND, NAME, "linalg.Matmul")
    assert (error.generation, (await device.statistics()).launched) == (1, 1)
    await device.synchronize()
    assert (await device.statistics()).memory.blocks == 1
    assert system.tree().find(f"test/{NAME}/context/blas").restarts == 0


async def test_a_sum_that_the_backend_does_not_have(device: ta.Device) -> None:
    x = await device.put(np.ones(3, np.int64))
    with pytest.raises(ta.NotSupportedError, match="no dot for int64; it has float16"):
        await linalg.dot(x, x)
