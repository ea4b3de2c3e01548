"""Reductions, permutations and combinations by letters, against NumPy in wider types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensors import TOLERANCES, check, values, wide

import trio_accel as ta

REDUCTIONS: dict[str, Any] = {"add": np.sum, "max": np.max, "min": np.min, "multiply": np.prod}


@pytest.mark.parametrize("op", REDUCTIONS)
async def test_reduce(device: ta.Device, op: Any) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        a = values((3, 4, 2, 5), dtype, seed=1)
        ra = await device.put(a)
        result = await ta.tensor.reduce("abcd->db", ra, op=op)
        assert result.dtype is ta.DType(dtype)
        await check(result, REDUCTIONS[op](wide(a), axis=(0, 2)).T, 6)
        await check(await ta.tensor.reduce("abcd->", ra, op=op), REDUCTIONS[op](wide(a)), 120)
        await check(await ta.tensor.reduce("abcd->dbac", ra, op=op), wide(a).transpose(3, 1, 0, 2))
    whole = np.arange(-6, 6).reshape(3, 4)
    out = await device.zeros((4,), "int64")
    assert await ta.tensor.reduce("ij->j", await device.put(whole), op=op, out=out) is out
    np.testing.assert_array_equal(await out.to_host(), REDUCTIONS[op](whole, axis=0))


async def test_reduce_keeps_the_dtype(device: ta.Device) -> None:
    """Integers wrap around, as in `numpy.einsum`."""
    a = np.full((3, 100), 100, np.int8)
    result = await ta.tensor.reduce("ij->i", await device.put(a))
    np.testing.assert_array_equal(await result.to_host(), np.einsum("ij->i", a))


async def test_reduce_a_diagonal(device: ta.Device) -> None:
    a = values((3, 4, 3), "complex64")
    await check(await ta.tensor.reduce("iji->j", await device.put(a)), np.einsum("iji->j", wide(a)), 3)


@pytest.mark.parametrize("dtype", [*TOLERANCES, "int16", "bool"])
async def test_permute(device: ta.Device, dtype: str) -> None:
    a = values((3, 4, 5), "float64").astype(ta.DType(dtype).dtype)
    ra = await device.put(a)
    result = await ta.tensor.permute("ijk->kij", ra)
    assert result.spec.is_contiguous
    np.testing.assert_array_equal(await result.to_host(), a.transpose(2, 0, 1))
    if dtype in TOLERANCES:
        out = await device.zeros((3, 8, 5), dtype)
        await ta.tensor.permute("ijk->ijk", ra, alpha=-3, out=out[:, ::2])
        await check(out[:, ::2], -3 * wide(a))


async def test_permute_by_an_ellipsis(device: ta.Device) -> None:
    a = values((3, 4, 5, 2))
    await check(await ta.tensor.permute("...ij->j...i", await device.put(a)), np.einsum("...ij->j...i", a))


@pytest.mark.parametrize("dtype", TOLERANCES)
async def test_elementwise(device: ta.Device, dtype: str) -> None:
    a, b, c = values((3, 4), dtype, 1), values((4, 3), dtype, 2), values((4,), dtype, 3)
    ra = await device.put(a)
    x, y, z = wide(a), wide(b).T, wide(c)
    combine = ta.tensor.elementwise
    await check(await combine("ij,ji->ij", ra, b), x + y)
    await check(await combine("ij,ji->ij", ra, b, factors=(1, -2)), x - 2 * y)
    await check(
        await combine("ij,ji,j->ji", ra, b, c, op=("multiply", "add"), factors=(2, 1, -1)), (2 * x * y - z).T
    )
    if not dtype.startswith("complex"):
        await check(
            await combine("ij,ji,j->ij", ra, b, c, op=["max", "min"]), np.minimum(np.maximum(x, y), z)
        )
    out = await device.zeros((3, 4), dtype)
    assert await combine("ij,j->ij", ra, c, op="multiply", out=out) is out
    await check(out, x * z)


async def test_elementwise_of_whole_numbers(device: ta.Device) -> None:
    big = np.array([[2**62 + 1, 3]])
    result = await ta.tensor.elementwise("ij,i->ji", await device.put(big), np.array([5]), factors=(1, 2))
    np.testing.assert_array_equal(await result.to_host(), big.T + 10)


async def test_factors_leave_the_dtype(device: ta.Device) -> None:
    whole, real = await device.put(np.array([1, 2])), await device.put(np.array([1.0, 2.0]))
    truths = await device.put(np.array([True, False]))
    assert (await ta.tensor.permute("i->i", whole, alpha=3)).dtype is ta.DType.int64
    assert (await ta.tensor.elementwise("i,i->i", truths, truths)).dtype is ta.DType.bool
    with pytest.raises(ValueError, match=r"permute: alpha 1.5 is not an integer"):
        await ta.tensor.permute("i->i", whole, alpha=1.5)
    with pytest.raises(TypeError, match="permute: alpha 1j is complex"):
        await ta.tensor.permute("i->i", real, alpha=1j)
    with pytest.raises(TypeError, match=r"elementwise: factors\[1\] 1j is complex"):
        await ta.tensor.elementwise("i,i->i", real, real, factors=(1, 1j))
    single = await real.cast("float32")
    with pytest.raises(ValueError, match=r"elementwise: factors\[0\] 1e\+300 is outside the range"):
        await ta.tensor.elementwise("i,i->i", single, single, factors=(1e300, 1))
    with pytest.raises(TypeError, match="elementwise: the arrays must have a floating or complex dtype"):
        await ta.tensor.elementwise("i,i->i", truths, truths, factors=(2, 1))


async def test_invalid_arguments_are_refused(device: ta.Device) -> None:
    a, b = await device.zeros((2, 3)), await device.zeros((3, 2))
    tensor = ta.tensor
    with pytest.raises(ValueError, match=r"reduce: op must be one of .* got 'mean'"):
        await tensor.reduce("ij->i", a, op="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce: subscripts 'ij->k': letters behind ->"):
        await tensor.reduce("ij->k", a)
    with pytest.raises(ValueError, match="have 2 terms, got 1 operands"):
        await tensor.reduce("ij,jk->i", a)
    with pytest.raises(ValueError, match="are empty, and the reduction has no identity"):
        await tensor.reduce("ij->i", await device.zeros((2, 0)), op="max")
    with pytest.raises(ValueError, match=r"permute: .* both sides must have the same letters"):
        await tensor.permute("ij->i", a)
    with pytest.raises(ValueError, match=r"out must have shape \(3, 2\)"):
        await tensor.permute("ij->ji", a, out=await device.zeros((2, 3)))
    with pytest.raises(ValueError, match="elementwise: op must be one of"):
        await tensor.elementwise("ij,ji->ij", a, b, op="divide")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="elementwise: 2 tensors have 1 operators and 2 factors"):
        await tensor.elementwise("ij,ji->ij", a, b, op=("add", "add"))
    with pytest.raises(ValueError, match="elementwise: 2 tensors have 1 operators and 2 factors"):
        await tensor.elementwise("ij,ji->ij", a, b, factors=(1,))
    with pytest.raises(ValueError, match=r"elementwise: .* the result has not 'j'"):
        await tensor.elementwise("ij,ji->i", a, b)
    with pytest.raises(TypeError, match=r"elementwise: there is no operand|no operand is on a device"):
        await tensor.elementwise("->")
    with pytest.raises(TypeError, match=r"reduce: a must be .*, got list|no operand"):
        await tensor.reduce("i->", [1.0])  # type: ignore[arg-type]
