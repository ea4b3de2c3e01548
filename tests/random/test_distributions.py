"""Floating numbers: against the distributions of SciPy, and one another's parameters."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import scipy.stats
from chosen import IS_STAND_IN

import trio_accel as ta

SIZE = 20_000
# Name, parameters, and the distribution in SciPy.
FUNCTIONS: list[tuple[str, dict[str, Any], Any]] = [
    ("uniform", {"low": -1, "high": 3}, scipy.stats.uniform(-1, 4)),
    ("normal", {"loc": 2, "scale": 0.5}, scipy.stats.norm(2, 0.5)),
    ("exponential", {"scale": 2.5}, scipy.stats.expon(0, 2.5)),
    ("lognormal", {"mean": -1, "sigma": 0.5}, scipy.stats.lognorm(0.5, 0, np.exp(-1))),
    ("cauchy", {"loc": 1, "scale": 2}, scipy.stats.cauchy(1, 2)),
    ("gumbel", {"loc": 1, "scale": 2}, scipy.stats.gumbel_r(1, 2)),
    ("laplace", {"loc": 1, "scale": 2}, scipy.stats.laplace(1, 2)),
    ("logistic", {"loc": 1, "scale": 2}, scipy.stats.logistic(1, 2)),
    ("pareto", {"a": 3}, scipy.stats.lomax(3)),
    ("rayleigh", {"scale": 2}, scipy.stats.rayleigh(0, 2)),
    ("triangular", {"left": -1, "mode": 0, "right": 3}, scipy.stats.triang(0.25, -1, 4)),
    ("weibull", {"a": 1.5}, scipy.stats.weibull_min(1.5)),
]
REJECTED: list[tuple[str, dict[str, Any], Any]] = [
    ("gamma", {"a": 0.3}, scipy.stats.gamma(0.3)),
    ("gamma", {"a": 1, "scale": 2}, scipy.stats.gamma(1, 0, 2)),
    ("gamma", {"a": 7.5}, scipy.stats.gamma(7.5)),
    ("gamma", {"a": 1e8}, scipy.stats.norm(1e8, 1e4)),
    ("chisquare", {"df": 3}, scipy.stats.chi2(3)),
    ("standard_t", {"df": 2.5}, scipy.stats.t(2.5)),
    ("beta", {"a": 0.2, "b": 1.3}, scipy.stats.beta(0.2, 1.3)),
    ("beta", {"a": 30, "b": 4}, scipy.stats.beta(30, 4)),
]


def name_of(case: Any) -> str:
    return case if isinstance(case, str) else str(case) if isinstance(case, dict) else ""


@pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a", "xorwow"])
@pytest.mark.parametrize(("name", "parameters", "expected"), FUNCTIONS, ids=name_of)
async def test_functions_of_uniform_numbers(
    device: ta.Device, kind: Any, name: str, parameters: dict[str, Any], expected: Any
) -> None:
    generator = ta.random.Generator(device, kind, seed=12)
    for dtype in ("float32", "float64"):
        drawn = await (await getattr(generator, name)((SIZE // 100, 100), dtype, **parameters)).to_host()
        assert (drawn.dtype, drawn.shape) == (dtype, (SIZE // 100, 100))
        assert scipy.stats.kstest(drawn.reshape(-1), expected.cdf).pvalue > 0.001


@pytest.mark.parametrize(("name", "parameters", "expected"), REJECTED, ids=name_of)
async def test_numbers_by_rejection(
    device: ta.Device, name: str, parameters: dict[str, Any], expected: Any
) -> None:
    generator = ta.random.Generator(device, seed=12)
    for dtype in ("float32", "float64"):
        drawn = await (await getattr(generator, name)(SIZE, dtype, **parameters)).to_host()
        assert drawn.dtype == dtype
        assert scipy.stats.kstest(drawn, expected.cdf).pvalue > 0.001


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_number_by_rejection_is_the_same_wherever_it_is(device: ta.Device) -> None:
    long = await (await ta.random.Generator(device, seed=5).gamma(140_000, "float64", a=0.7)).to_host()
    short = await (await ta.random.Generator(device, seed=5).gamma((9, 2), "float64", a=0.7)).to_host()
    np.testing.assert_array_equal(short.reshape(-1), long[:18])
    # A row is 65536 numbers, and two draws share no number.
    assert len(np.unique(long)) == len(long)
    single = await (await ta.random.Generator(device, seed=5).gamma(1000, a=0.7)).to_host()
    np.testing.assert_array_equal(single, long[:1000].astype(np.float32))


async def test_parameters_in_arrays(device: ta.Device) -> None:
    shapes = np.array([0.0, 0.5, 1, 2, 40])
    host = ta.random.Generator(device, seed=5)
    drawn = await (await host.gamma((4000, 5), "float64", a=shapes)).to_host()
    assert not drawn[:, 0].any()
    for column, a in zip(drawn.T[1:], shapes[1:], strict=True):
        assert scipy.stats.kstest(column, scipy.stats.gamma(a).cdf).pvalue > 0.001
    there = ta.random.Generator(device, seed=5)
    again = await (await there.gamma((4000, 5), "float64", a=await device.put(shapes))).to_host()
    np.testing.assert_array_equal(drawn, again)
    one, two = (ta.random.Generator(device, "xorwow", seed=5) for _ in range(2))
    scale = np.array([[1.0], [3.0]])
    wide = await (await one.laplace((2, 50), "float64", scale=scale)).to_host()
    plain = await (await two.laplace((2, 50), "float64", scale=await device.put(np.ones(1)))).to_host()
    np.testing.assert_allclose(wide, plain * scale, rtol=1e-12)


async def test_extremes_are_finite(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=2)
    logs = await (await generator.beta(5000, "float64", a=1e-4, b=1e-4)).to_host()
    assert ((logs >= 0) & (logs <= 1)).all()
    # Such small shapes are close to 0 or to 1, half of them each.
    assert abs((logs > 0.5).mean() - 0.5) < 0.05
    shares = await (await generator.dirichlet(500, np.full(4, 1e-4), "float64")).to_host()
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-12)


async def test_dirichlet(device: ta.Device) -> None:
    alpha = np.array([0.4, 1.0, 6.0])
    drawn = await (
        await ta.random.Generator(device, seed=2).dirichlet((100, 200), alpha, "float64")
    ).to_host()
    assert drawn.shape == (100, 200, 3)
    np.testing.assert_allclose(drawn.sum(-1), 1, rtol=1e-12)
    for share, one in zip(drawn.reshape(-1, 3).T, alpha, strict=True):
        assert scipy.stats.kstest(share, scipy.stats.beta(one, alpha.sum() - one).cdf).pvalue > 0.001
    single = await ta.random.Generator(device, seed=2).dirichlet((), alpha)
    assert (single.shape, single.dtype) == ((3,), ta.DType.float32)


@pytest.mark.parametrize("kind", ["philox4x32_10", "mrg32k3a"])
async def test_multivariate_normal(device: ta.Device, kind: Any) -> None:
    mean, cov = np.array([1.0, -2.0, 0.5]), np.array([[2.0, 1.2, 0.0], [1.2, 1.0, 0.3], [0.0, 0.3, 0.7]])
    generator = ta.random.Generator(device, kind, seed=2)
    drawn = await (await generator.multivariate_normal(mean, cov, (100, 300), "float64")).to_host()
    assert drawn.shape == (100, 300, 3)
    flat = drawn.reshape(-1, 3) - mean
    # The Mahalanobis distances depend on the whole covariance.
    distances = (flat @ np.linalg.inv(cov) * flat).sum(1)
    assert scipy.stats.kstest(distances, scipy.stats.chi2(3).cdf).pvalue > 0.001
    np.testing.assert_allclose(np.cov(flat.T), cov, atol=0.05)
    np.testing.assert_allclose(flat.mean(0), 0, atol=0.03)
    singular = await generator.multivariate_normal([0, 0], [[1, 1], [1, 1]], 50)
    host = await singular.to_host()
    np.testing.assert_allclose(host[:, 0], host[:, 1], atol=1e-5)


async def test_a_draw_declared_like_another(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    gumbel: Any = generator.gumbel
    assert inspect.signature(gumbel) == inspect.signature(generator.cauchy)
    assert (gumbel.__name__, gumbel.__doc__.partition("\n")[0]) == (
        "gumbel",
        "Draw numbers of a Gumbel distribution for largest values, as `numpy.random.Generator.gumbel`.",
    )
    with pytest.raises(TypeError, match=r"random\.gumbel: there is no option 'skale'; did you mean 'scale'"):
        await gumbel(3, skale=2)


async def test_wrong_parameters(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    refused: list[tuple[type[Exception], str, str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "laplace: scale must be finite and >= 0, got -1", "laplace", (3,), {"scale": -1}),
        (ValueError, "gumbel: loc must be finite, got nan", "gumbel", (3,), {"loc": float("nan")}),
        (ValueError, "weibull: a must be finite and > 0, got 0", "weibull", (3,), {"a": 0}),
        (ValueError, "pareto: a must be finite and > 0, got -2", "pareto", (3,), {"a": np.array([1.0, -2])}),
        (ValueError, "gamma: a must be finite and >= 0, got -1", "gamma", (3,), {"a": -1}),
        (ValueError, "gamma: scale must be finite and >= 0", "gamma", (3,), {"a": 1, "scale": -1}),
        (ValueError, "gamma: parameters must broadcast to shape", "gamma", (3,), {"a": np.ones(4)}),
        (ValueError, "beta: b must be finite and > 0, got 0", "beta", (3,), {"a": 1, "b": 0}),
        (
            ValueError,
            "standard_t: df must be finite and > 0, got inf",
            "standard_t",
            (3,),
            {"df": float("inf")},
        ),
        (ValueError, "chisquare: df must be finite and >= 0", "chisquare", (3,), {"df": -1}),
        (ValueError, "dirichlet: alpha must be finite and > 0", "dirichlet", (3, [1, 0]), {}),
        (ValueError, "dirichlet: alpha must be a vector with elements", "dirichlet", (3, []), {}),
        (
            TypeError,
            "laplace: scale must be a real number or an array, got '1'",
            "laplace",
            (3,),
            {"scale": "1"},
        ),
        (TypeError, "laplace: loc must be a real number", "laplace", (3,), {"loc": 1j}),
        (
            ta.NotSupportedError,
            "dtype must be float32 or float64, got float16",
            "laplace",
            (3, "float16"),
            {},
        ),
        (ValueError, "mean must be a vector of n numbers", "multivariate_normal", ([1, 2], np.eye(3)), {}),
        (ValueError, "cov must be symmetric", "multivariate_normal", ([1, 2], [[1, 2], [0, 1]]), {}),
        (
            ValueError,
            "cov must be positive semidefinite",
            "multivariate_normal",
            ([1, 2], [[1, 2], [2, 1]]),
            {},
        ),
        (ValueError, "shape must hold sizes of at least 0", "laplace", (-1,), {}),
    ]
    for error, match, name, arguments, named in refused:
        with pytest.raises(error, match=match):
            await getattr(generator, name)(*arguments, **named)
    for left, mode, right in ((0, 0, 0), (1, 0, 2), (0, 3, 2)):
        with pytest.raises(ValueError, match=f"triangular: .* got {left}, {mode} and {right}"):
            await generator.triangular(3, left=left, mode=mode, right=right)
    other = ta.random.Generator(device, "xorwow", seed=1)
    with pytest.raises(ValueError, match="uniform: low must not be above high"):
        await other.uniform(3, low=2, high=1)
    with pytest.raises(ValueError, match="normal: scale must be finite and >= 0, got -1"):
        await other.normal(3, scale=-1)
    with pytest.raises(TypeError, match="exponential: scale must be one number"):
        await other.exponential(3, scale=np.ones(3))  # type: ignore[arg-type]
    for name in ("gamma", "poisson"):
        named = {"a": 1} if name == "gamma" else {}
        with pytest.raises(ta.NotSupportedError, match="xorwow has no words of its own for each number"):
            await getattr(other, name)(3, **named)
    assert (await device.statistics()).launched == 0


async def test_wrong_parameters_on_the_device(device: ta.Device) -> None:
    generator = ta.random.Generator(device, seed=1)
    wrong = await device.put(np.array([1.0, -1.0]))
    host = await (await generator.laplace(2, "float64", scale=wrong)).to_host()
    assert np.isnan(host).tolist() == [False, True]
    with pytest.raises(ta.LibraryError, match="shape of a gamma distribution must be at least 0, and finite"):
        await generator.gamma(2, a=wrong)
    if not IS_STAND_IN:
        # It works on.
        assert (await (await generator.gamma(2, a=1)).to_host() > 0).all()
