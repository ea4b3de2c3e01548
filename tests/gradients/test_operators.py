"""Gradients of powers, and of operators with an operand on the host."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta

a: Any = ta.arrays

# Powers with a base of 0, negative or positive, with exponents of any sign.
BASES = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 3.0, -2.0, -2.0])
EXPONENTS = np.array([0.0, 1.0, 2.0, 0.5, 3.0, -1.0, 0.0, -1.5, 2.5, 0.0, 3.0])


def slopes_of_powers(a: Any, b: Any) -> tuple[Any, Any]:
    """PyTorch's derivatives of a ** b: a power of 0 does not change with its exponent."""
    with np.errstate(all="ignore"):
        of_base = np.where(b == 0, 0.0, b * a ** (b - 1))
        of_exponent = np.where((a == 0) & (b >= 0), 0.0, a**b * np.log(a))
    return of_base, of_exponent


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_powers_of_arrays(device: ta.Device, dtype: str) -> None:
    hosts = BASES.astype(dtype), EXPONENTS.astype(dtype)
    a_on, b_on = [await device.put(one) for one in hosts]
    want = slopes_of_powers(BASES, EXPONENTS)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    both = await ta.grad(lambda p: a.sum(p[0] ** p[1]))([a_on, b_on])
    alone = [
        await ta.grad(lambda p: a.sum(p ** hosts[1]))(a_on),
        await ta.grad(lambda p: a.sum(hosts[0] ** p))(b_on),
    ]
    for found in (both, alone):
        for slope, expected in zip(found, want, strict=True):
            assert slope.dtype == dtype
            np.testing.assert_allclose(await slope.to_host(), expected, rtol=tolerance)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 0.5, -1, -2, 0.0, 2.0, np.float64(0.0), np.float32(2.0)])
async def test_powers_with_numbers(device: ta.Device, number: Any) -> None:
    for place, host in enumerate((BASES, np.array([0.0, 0.5, 1.0, 2.0, -1.0]))):
        if place == 1 and number < 0:
            continue
        x = await device.put(host)
        f = (lambda p: a.sum(p**number)) if place == 0 else (lambda p: a.sum(number**p))
        want = slopes_of_powers(*((host, np.float64(number)) if place == 0 else (np.float64(number), host)))[
            place
        ]
        np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), want, rtol=1e-12)


OPERATORS = ["add", "sub", "mul", "truediv", "pow", "mod", "matmul"]


@pytest.mark.parametrize("is_reflected", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
async def test_operators_with_operands_on_the_host(device: ta.Device, name: str, is_reflected: bool) -> None:
    f, host = getattr(operator, name), numbers((3, 3), 1, 0.3, 2.0)
    x, direction = await device.put(host), numbers((3, 3), 2)
    for other in (
        2.7,
        2,
        np.float64(1.3),
        np.float32(1.5),
        numbers((3, 3), 3, 0.3, 2.0),
        numbers((3,), 4, 0.3, 2.0),
    ):
        if name == "matmul" and not np.ndim(other):
            continue
        of: Any = (
            (lambda p, other=other: f(other, p)) if is_reflected else (lambda p, other=other: f(p, other))
        )
        found = await ta.grad(lambda p, of=of: a.sum(of(p)))(x)
        want = (of(host + 1e-6 * direction).sum() - of(host - 1e-6 * direction).sum()) / 2e-6
        np.testing.assert_allclose((await found.to_host() * direction).sum(), want, rtol=1e-7)
