"""Second derivatives of each function with a gradient, against central differences of the first ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import numbers
from test_functions import CASES, NUMBERED

import trio_accel as ta

a: Any = ta.arrays


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_second_order(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case = cases[number] if isinstance(cases, list) else cases
    values = case.values()
    try:
        shape = (await (case.f(*[await device.put(one) for one in values]) * 1.0)).shape
    except ta.NotSupportedError as error:
        if BACKEND == "cpu":
            raise
        pytest.skip(str(error))
    weights = numbers(shape, 99)
    directions = [numbers(one.shape, 50 + k, -1.0, 1.0) for k, one in enumerate(values)]

    def first(parameters: Any) -> Any:
        return a.sum(case.f(*parameters) * weights)

    def along(parameters: Any) -> Any:
        slopes = ta.grad(first)(parameters)
        total = a.sum(slopes[0] * directions[0])
        for slope, direction in zip(slopes[1:], directions[1:], strict=True):
            total = total + a.sum(slope * direction)
        return total

    try:
        found = await ta.grad(along)([await device.put(one) for one in values])
    except ta.NotSupportedError as error:
        pytest.skip(f"refused: {error.message}")
    moves = []
    for sign in (1, -1):
        moved = [one + sign * 1e-5 * way for one, way in zip(values, directions, strict=True)]
        slopes = await ta.grad(first)([await device.put(one) for one in moved])
        moves.append([await slope.to_host() for slope in slopes])
    # The Hessian is symmetric, so its product with the directions is the change of the gradient along them.
    for slope, ahead, behind in zip(found, *moves, strict=True):
        want = (ahead - behind) / 2e-5
        np.testing.assert_allclose(
            await slope.to_host(), want, rtol=1e-5, atol=1e-6 * (1 + abs(want).max(initial=0))
        )
