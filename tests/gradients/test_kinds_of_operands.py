"""Gradients of views, of empty arrays, and within a step, for each function of the table.

The oracle of views and steps is the gradient by contiguous arrays outside of steps, which `test_functions`
holds against central differences. The gradient of an empty array is empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import Case, numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays
# A case that the function itself refuses is no case for its gradient.
REFUSED = (TypeError, ValueError, IndexError, ta.NotSupportedError, ta.LinAlgError, ta.LibraryError)


def case_of(name: str, number: int) -> Case:
    cases = CASES[name]
    return cases[number] if isinstance(cases, list) else cases


async def weights_of(device: ta.Device, case: Case, operands: list[Any]) -> Any:
    try:
        return numbers((await (case.f(*operands) * 1.0)).shape, 99)
    except REFUSED:
        return None


async def strided(device: ta.Device, value: Any, step: int) -> Any:
    """Return a view with these elements, at steps along the last axis of a larger array."""
    if not value.ndim:
        return await device.put(value)
    if step == -1:
        return (await device.put(np.ascontiguousarray(value[..., ::-1])))[..., ::-1]
    wide = np.full((*value.shape[:-1], step * value.shape[-1]), np.nan)
    wide[..., ::step] = value
    return (await device.put(wide))[..., ::step]


@pytest.mark.parametrize("step", [2, -1])
@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_by_views(device: ta.Device, name: str, number: int, step: int) -> None:
    case = case_of(name, number)
    values = case.values()
    operands = [await device.put(value) for value in values]
    if (weights := await weights_of(device, case, operands)) is None:
        pytest.skip(f"{BACKEND} has no {name}")
    views = [await strided(device, value, step) for value in values]
    if await weights_of(device, case, views) is None:
        pytest.skip("it takes no views")
    slopes = ta.grad(lambda parameters: a.sum(case.f(*parameters) * weights))
    for found, want in zip(await slopes(views), await slopes(operands), strict=True):
        np.testing.assert_allclose(await found.to_host(), await want.to_host(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_gradients_within_a_step(device: ta.Device, name: str, number: int) -> None:
    case = case_of(name, number)
    operands = [await device.put(value) for value in case.values()]
    if (weights := await weights_of(device, case, operands)) is None:
        pytest.skip(f"{BACKEND} has no {name}")
    slopes: Any = ta.grad(lambda parameters: a.sum(case.f(*parameters) * weights))

    @ta.step
    def inside(parameters: Any) -> Any:
        return [slope * 1.0 for slope in slopes(parameters)]

    for found, want in zip(await inside(operands), await slopes(operands), strict=True):
        np.testing.assert_allclose(await found.to_host(), await want.to_host(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_the_gradient_of_an_empty_array_is_empty(device: ta.Device, name: str, number: int) -> None:
    case = case_of(name, number)
    tried = 0
    for axis in range(max(map(len, case.shapes))):
        shapes = [
            (*shape[:axis], 0, *shape[axis + 1 :]) if axis < len(shape) else shape for shape in case.shapes
        ]
        operands = [await device.put(np.zeros(shape)) for shape in shapes]
        if (weights := await weights_of(device, case, operands)) is None:
            continue
        tried += 1
        found = await ta.grad(lambda parameters, w=weights: a.sum(case.f(*parameters) * w))(operands)
        for slope, operand in zip(found, operands, strict=True):
            assert slope.shape == operand.shape
            host = await slope.to_host()
            assert not host.size or np.isfinite(host).all()
    if not tried:
        pytest.skip("it takes no empty arrays")
