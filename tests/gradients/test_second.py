"""Gradients of gradients against central differences of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from gradient_cases import CASES_OF_ELEMENTS, Case, numbers
from gradient_cases_of_arrays import CASES_OF_ARRAYS
from gradient_cases_of_libraries import CASES_OF_LIBRARIES
from gradient_cases_of_results import CASES_OF_RESULTS
from gradient_cases_of_slopes import CASES_OF_SLOPES

import trio_accel as ta

a: Any = ta.arrays
CASES = CASES_OF_ELEMENTS | CASES_OF_ARRAYS | CASES_OF_LIBRARIES | CASES_OF_RESULTS | CASES_OF_SLOPES
TWICE = (
    "arrays.abs", "arrays.angle", "arrays.imag",
    "linalg.cho_solve", "linalg.eigh", "linalg.eigvals", "linalg.eigvalsh", "linalg.hessenberg",
    "linalg.ldl", "linalg.lstsq", "linalg.lu", "linalg.lu_solve", "linalg.polar", "linalg.qr", "linalg.schur",
    "linalg.solve_triangular", "linalg.svd",
    "nn.adaptive_avg_pool1d", "nn.avg_pool1d", "nn.batch_norm_training", "nn.binary_cross_entropy",
    "nn.binary_cross_entropy_with_logits", "nn.conv1d", "nn.conv_transpose1d", "nn.conv2d",
    "nn.cross_entropy", "nn.embedding", "nn.gaussian_nll_loss", "nn.gelu", "nn.glu", "nn.group_norm",
    "nn.hinge_embedding_loss", "nn.huber_loss", "nn.instance_norm", "nn.kl_div", "nn.l1_loss", "nn.linear",
    "nn.margin_ranking_loss", "nn.max_pool1d", "nn.max_pool2d", "nn.mse_loss", "nn.poisson_nll_loss",
    "nn.smooth_l1_loss", "nn.soft_margin_loss",
)  # fmt: skip
NUMBERED = [
    (name, number)
    for name, cases in CASES.items()
    for number in range(len(cases) if isinstance(cases, list) else 1)
    if name in TWICE
]


@pytest.mark.parametrize(("name", "number"), NUMBERED)
async def test_second_derivatives_match_differences(device: ta.Device, name: str, number: int) -> None:
    cases = CASES[name]
    case: Case = cases[number] if isinstance(cases, list) else cases
    hosts = case.values()
    try:
        shape = (await (case.f(*[await device.put(one) for one in hosts]) * 1.0)).shape
    except ta.NotSupportedError as error:
        if BACKEND == "cpu":
            raise
        pytest.skip(str(error))
    weights = numbers(shape, 99)
    along = [numbers(one.shape, 50 + place, -1.0, 1.0) for place, one in enumerate(hosts)]

    def loss(parameters: Any) -> Any:
        """The square gives linear functions a second derivative."""
        made = case.f(*parameters)
        return a.sum((made + 0.1 * made * made) * weights)

    def slope(parameters: Any) -> Any:
        """Return the derivative along a direction."""
        found: Any = ta.grad(loss)(parameters)
        total: Any = 0.0
        for one, direction in zip(found, along, strict=True):
            total = total + a.sum(one * direction)
        return total

    async def slope_at(step: float) -> float:
        moved = [await device.put(one + step * other) for one, other in zip(hosts, others, strict=True)]
        found = await ta.grad(loss)(moved)
        parts = [(await one.to_host() * other).sum() for one, other in zip(found, along, strict=True)]
        return float(sum(parts))

    others = [numbers(one.shape, 70 + place, -1.0, 1.0) for place, one in enumerate(hosts)]
    second = await ta.grad(slope)([await device.put(one) for one in hosts])
    parts = [(await one.to_host() * other).sum() for one, other in zip(second, others, strict=True)]
    want = (await slope_at(1e-5) - await slope_at(-1e-5)) / 2e-5
    np.testing.assert_allclose(sum(parts), want, rtol=1e-5, atol=1e-6)


async def test_the_sign_of_a_complex_number_turns_with_it(device: ta.Device) -> None:
    """The sign of a real number is a step."""
    host, direction, weights = numbers((2, 5)), numbers((2, 5), 1), numbers((5,), 2)

    def f(x: Any) -> Any:
        return a.sum(a.real(a.sign(x[0] + 1j * x[1]) * (0.7 - 1.3j)) * weights)

    found = await (await ta.grad(f)(await device.put(host))).to_host()
    sides = [await f(await device.put(host + step * direction)).item() for step in (1e-6, -1e-6)]
    np.testing.assert_allclose((found * direction).sum(), (sides[0] - sides[1]) / 2e-6, rtol=1e-7)
    at_zero = await ta.grad(f)(await device.put(np.zeros((2, 5))))
    assert not (await at_zero.to_host()).any()


async def test_labels_of_small_dtypes_on_the_device(device: ta.Device) -> None:
    host = numbers((3, 4))
    labels = await device.put(np.array([1, 3, 0], "uint8"))
    for f in (ta.nn.cross_entropy, ta.nn.nll_loss):

        def slope(x: Any, labels: Any, f: Any = f) -> Any:
            return a.sum(ta.grad(lambda x: f(x, labels, reduction="sum"))(x) * x)

        found = await ta.grad(slope)(await device.put(host), labels)
        want = await ta.grad(slope)(await device.put(host), np.array([1, 3, 0]))
        np.testing.assert_array_equal(await found.to_host(), await want.to_host())
