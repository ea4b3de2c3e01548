"""Expressions along axes with several results, such as the gradients of several operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gradient_cases import numbers

import trio_accel as ta
from trio_accel.expressions import Reduction

a: Any = ta.arrays
g: Any = ta.gradients
# The text, and the same in NumPy.
TEXTS: dict[str, tuple[str, Any]] = {
    "two for each element": (
        "m = mean(x * y); d = x - m; s = sum(d * d); u = d / sqrt(s); v = y * m",
        lambda x, y, m, s: ((x - m(x * y)) / np.sqrt(s((x - m(x * y)) ** 2)), y * m(x * y)),
    ),
    "two for each row": (
        "m = mean(x * y); s = sum(x * x * y); u = m * s; v = m + s",
        lambda x, y, m, s: (m(x * y) * s(x * x * y), m(x * y) + s(x * x * y)),
    ),
    "one for each row": (
        "m = mean(x * y); u = x * m; v = m * m",
        lambda x, y, m, s: (x * m(x * y), m(x * y) ** 2),
    ),
}
SHAPES = [((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 1), (4, 3)), ((3,), (2, 3))]
AXES: list[Any] = [1, 0, (0, 1), None, -1]


def expected(name: str, x: Any, y: Any, axis: Any) -> Any:
    """Compute the results by NumPy, with reduced axes of one element."""
    shape = np.broadcast_shapes(np.shape(x), np.shape(y))

    def whole(f: Any) -> Any:
        return lambda z: f(np.broadcast_to(z, shape), axis=axis, keepdims=True)

    results = TEXTS[name][1](x, y, whole(np.mean), whole(np.sum))
    return results if name == "two for each row" else [np.broadcast_to(each, shape) for each in results]


def made(name: str) -> Reduction:
    return Reduction(TEXTS[name][0], inputs=("x", "y"), outputs=("u", "v"), operation="tests.several")


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_values(device: ta.Device, name: str, dtype: str) -> None:
    reduction = made(name)
    for shapes in [*SHAPES, ((2, 140_000), (2, 140_000)), ((300, 5), (5,)), ((0, 3), (3,))]:
        hosts = [numbers(shape, 1 + k).astype(dtype) for k, shape in enumerate(shapes)]
        operands = [await device.put(host) for host in hosts]
        for axis in AXES if 0 not in shapes[0] else (1,):
            wants = expected(name, *[host.astype(np.float64) for host in hosts], axis)
            for keepdims in (False, True) if name == "two for each row" else (False,):
                found = await reduction(*operands, axis=axis, keepdims=keepdims)
                for ours, kept in zip(found, wants, strict=True):
                    is_reduced = name == "two for each row" and not keepdims
                    want = np.squeeze(kept, axis) if is_reduced else kept
                    assert (ours.shape, str(ours.dtype)) == (want.shape, dtype)
                    scale = max(1.0, np.abs(want).max(initial=0))
                    atol = scale * (1e-12 if dtype == "float64" else 2e-5)
                    np.testing.assert_allclose(await ours.to_host(), want, rtol=0, atol=atol)


async def test_an_output_is_refused(device: ta.Device) -> None:
    x = await device.put(numbers((3,), 1))
    with pytest.raises(TypeError, match="out is for one result, and it has 2"):
        await made("one for each row")(x, x, axis=0, out=x)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("is_half", [False, True])
async def test_gradients_of_both_orders(device: ta.Device, name: str, shapes: Any, is_half: bool) -> None:
    reduction, hosts = made(name), [numbers(shape, 3 + k) + 0.3 for k, shape in enumerate(shapes)]
    directions = [numbers(shape, 7 + k) for k, shape in enumerate(shapes)]
    for axis in AXES[:4]:

        def loss(x: Any, y: Any, axis: Any = axis) -> Any:
            u, v = reduction(x, y, axis=axis)
            value = a.sum(a.sin(v)) * 1.3
            return value if is_half else a.sum(u * u * u) * 0.7 + value

        def on_host(x: Any, y: Any, axis: Any = axis) -> Any:
            u, v = expected(name, x, y, axis)
            return (0.0 if is_half else 0.7) * (u**3).sum() + 1.3 * np.sin(v).sum()

        await check_gradients(device, loss, on_host, hosts, directions)


async def check_gradients(device: ta.Device, loss: Any, on_host: Any, hosts: Any, directions: Any) -> None:
    """Compare gradients with differences, and products with the Hessian with differences of gradients."""

    async def slopes(f: Any, arrays: Any) -> list[Any]:
        return [await slope.to_host() for slope in await f(*[await device.put(host) for host in arrays])]

    both = ta.grad(loss, (0, 1))
    found = await slopes(both, hosts)
    for place, slope in enumerate(found):
        (alone,) = await slopes(ta.grad(loss, (place,)), hosts)
        np.testing.assert_allclose(alone, slope, rtol=1e-12, atol=1e-12)
        sides = []
        for sign in (1, -1):
            moved = [*hosts]
            moved[place] = hosts[place] + sign * 1e-6 * directions[place]
            sides.append(on_host(*moved))
        want = (sides[0] - sides[1]) / 2e-6
        assert (slope * directions[place]).sum() == pytest.approx(want, rel=1e-6, abs=1e-7)
    operands, tangents = [[await device.put(host) for host in each] for each in (hosts, directions)]
    product = [await part.to_host() for part in await g.hvp(loss, operands, tangents)]
    moved = [
        await slopes(both, [host + sign * way for host, way in zip(hosts, directions, strict=True)])
        for sign in (1e-5, -1e-5)
    ]
    for ours, plus, minus in zip(product, *moved, strict=True):
        want = (plus - minus) / 2e-5
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-6 * (1 + np.abs(want).max()))


async def test_gradients_of_two_operands_are_one_launch(device: ta.Device) -> None:
    operands = [await device.put(numbers((8, 5), seed)) for seed in (1, 2)]
    counts = []
    for argnums in ((0,), (0, 1)):
        slopes: Any = ta.grad(lambda x, y: a.sum(a.cosine_similarity(x, y, axis=1)), argnums)
        with await ta.graphs.capture(device, slopes, *operands) as graph:
            counts.append(len(graph))
    assert counts[0] == counts[1]


async def test_a_batch_of_several_results(device: ta.Device) -> None:
    hosts = [numbers((3, 4), 1), numbers((3, 4), 2)]
    x, y = [await device.put(host) for host in hosts]
    for name in TEXTS:
        reduction = made(name)
        for axis in (0, None):
            f = partial(reduction, axis=axis)
            found = await ta.gather(*ta.vmap(lambda x, y, f=f: tuple(f(x, y)))(x, y))
            rows = [await reduction(x[k], y[k], axis=axis) for k in range(3)]
            for ours, wants in zip(found, zip(*rows, strict=True), strict=True):
                want = np.stack([await row.to_host() for row in wants])
                np.testing.assert_allclose(await ours.to_host(), want, rtol=1e-13)
