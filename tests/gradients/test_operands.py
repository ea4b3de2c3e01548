"""Gradients where an operand is an array of the host, or has another dtype than the others.

The oracle is the gradient of the same numbers as float64 arrays of the device, which `test_functions` holds
against central differences.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays
# A combination that the function itself refuses is no case for its gradient.
REFUSED = (TypeError, ValueError, IndexError, ta.NotSupportedError)
# These call another function of the moved operand alone, which needs a device unless a chain is recorded.
ALONE = {
    ("arrays.gradient", 3),
    ("arrays.interp", 1),
    ("arrays.select", 0),
    ("linalg.cho_solve", 0),
    ("linalg.cho_solve", 1),
    ("linalg.eigh", 8),
    ("linalg.eigh", 9),
    ("linalg.lu_solve", 6),
    ("linalg.lu_solve", 7),
    ("linalg.lu_solve", 8),
    ("ndimage.map_coordinates", 4),
}


def case_of(name: str, number: int) -> Case:
    cases = CASES[name]
    return cases[number] if isinstance(cases, list) else cases


async def shape_of(device: ta.Device, case: Case, operands: list[Any]) -> tuple[int, ...] | None:
    """Return the shape of a function's result; None if it refuses these operands."""
    try:
        return (await (case.f(*operands) * 1.0)).shape
    except REFUSED:
        return None


async def slopes(case: Case, operands: list[Any], weights: Any) -> list[Any]:
    """Return the gradients by the operands on the device; None for the others."""
    places = [place for place, operand in enumerate(operands) if isinstance(operand, ta.AccelRef)]

    def f(parameters: Any) -> Any:
        filled = list(operands)
        for place, parameter in zip(places, parameters, strict=True):
            filled[place] = parameter
        return a.sum(case.f(*filled) * weights)

    found = await ta.grad(f)([operands[place] for place in places])
    result: list[Any] = [None] * len(operands)
    for place, slope in zip(places, found, strict=True):
        result[place] = slope
    return result


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_a_host_operand_leaves_the_other_gradients_as_they_are(
    device: ta.Device, name: str, number: int
) -> None:
    case = case_of(name, number)
    values = case.values()
    if len(values) < 2 or (name, number) in ALONE:
        pytest.skip("no other operand, or no host operand")
    operands = [await device.put(value) for value in values]
    if (shape := await shape_of(device, case, operands)) is None:
        pytest.skip(f"{BACKEND} has no {name}")
    weights = numbers(shape, 99)
    want = await slopes(case, operands, weights)
    for place, value in enumerate(values):
        mixed = [*operands[:place], value, *operands[place + 1 :]]
        if await shape_of(device, case, mixed) is None:
            continue
        # The plan that this makes is kept, and must not hold the numbers of these arrays.
        with suppress(ta.AccelError, ValueError):
            await slopes(case, [*operands[:place], value * 0.9, *operands[place + 1 :]], weights * 0.9)
        for slope, right in zip(await slopes(case, mixed, weights), want, strict=True):
            if slope is not None:
                assert slope.dtype == "float64"
                np.testing.assert_allclose(
                    await slope.to_host(), await right.to_host(), rtol=1e-9, atol=1e-11, err_msg=f"{place}"
                )


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_a_gradient_has_the_dtype_of_its_argument(device: ta.Device, name: str, number: int) -> None:
    case = case_of(name, number)
    # The same numbers in both dtypes.
    values = [value.astype(np.float32).astype(np.float64) for value in case.values()]
    operands = [await device.put(value) for value in values]
    if (shape := await shape_of(device, case, operands)) is None:
        pytest.skip(f"{BACKEND} has no {name}")
    # float64 weights join a float32 result, so that its gradient has another dtype.
    weights = numbers(shape, 99)
    want = await slopes(case, operands, weights)
    narrow = [await device.put(value.astype(np.float32)) for value in values]
    places = [{place} for place in range(len(values))]
    for narrowed in [*places, set(range(len(values)))] if len(values) > 1 else places:
        mixed = [(narrow if place in narrowed else operands)[place] for place in range(len(values))]
        if await shape_of(device, case, mixed) is None:
            continue
        for place, slope in enumerate(await slopes(case, mixed, weights)):
            assert slope.dtype == ("float32" if place in narrowed else "float64")
            right = await want[place].to_host()
            # Some cases take differences of large float32 numbers.
            bound = 2e-3 * max(1.0, np.abs(right).max(initial=0.0))
            np.testing.assert_allclose(
                await slope.to_host(), right, rtol=2e-3, atol=bound, err_msg=f"{narrowed}"
            )


def narrowed(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes that broadcast to a shape: with one element along an axis, or without the first."""
    ones = [(*shape[:axis], 1, *shape[axis + 1 :]) for axis in range(len(shape))]
    return [*ones, shape[1:]] if len(shape) > 1 else ones


# A case may fail in the middle, because it does not take the other shapes.
@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_a_broadcast_operand_gets_the_sum(device: ta.Device, name: str, number: int) -> None:
    case = case_of(name, number)
    if len(case.shapes) < 2 or name == "linalg.eigh":
        pytest.skip("no other operand, or equal eigenvalues")
    for place, shape in enumerate(case.shapes):
        for other in narrowed(shape):
            shapes = (*case.shapes[:place], other, *case.shapes[place + 1 :])
            await check_against_differences(device, attrs.evolve(case, shapes=shapes), f"{shapes}")


async def check_against_differences(device: ta.Device, case: Case, label: str) -> None:
    values = case.values()
    operands = [await device.put(value) for value in values]
    if (shape := await shape_of(device, case, operands)) is None:
        return
    weights = numbers(shape, 99)
    found = await slopes(case, operands, weights)
    for place, (value, slope) in enumerate(zip(values, found, strict=True)):
        direction = numbers(value.shape, 50, -1.0, 1.0)
        sides = []
        for sign in (1, -1):
            moved = [
                *operands[:place],
                await device.put(value + sign * 1e-5 * direction),
                *operands[place + 1 :],
            ]
            sides.append((await (await (case.f(*moved) * 1.0)).to_host() * weights).sum())
        assert slope.shape == value.shape
        np.testing.assert_allclose(
            (await slope.to_host() * direction).sum(),
            (sides[0] - sides[1]) / 2e-5,
            rtol=2e-6,
            atol=1e-7,
            err_msg=f"{label} by operand {place}",
        )


async def test_views_of_a_0d_array(device: ta.Device) -> None:
    x = await device.put(np.array(3.0))
    for key in ((), None, ..., (None, ..., None)):
        slope = await ta.grad(lambda x, k=key: a.sum(x[k] ** 2))(x)
        assert await slope.item() == 6.0
