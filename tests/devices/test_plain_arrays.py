"""Arrays that mean more than their elements are refused by name, by every way in; others are taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.sparse
import trio

import trio_accel as ta
from trio_accel import arrays, linalg, random, sparse

MASKED = np.ma.array([5.0, 1e9, 7.0], mask=[False, True, False])


class Quantity(np.ndarray):
    """Numbers with a unit."""

    unit = "m"


def quantity(host: Any) -> Any:
    return np.ma.getdata(host).view(Quantity)


async def asked_by_a_thread(function: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(function)


async def by_scipy(device: ta.Device, x: Any) -> Any:
    backend = ta.interop.scipy_fft(device)

    def transform() -> Any:
        with scipy.fft.set_backend(backend, only=True):
            return scipy.fft.fft(x)

    return await asked_by_a_thread(transform)


async def by_api(device: ta.Device, x: Any, dtype: Any = None) -> Any:
    api = ta.interop.array_api(device)
    return await asked_by_a_thread(lambda: api.asarray(x, dtype=dtype))


async def set_by_api(device: ta.Device, x: Any) -> Any:
    api = ta.interop.array_api(device)
    return await asked_by_a_thread(lambda: api.zeros(3).__setitem__(slice(None), x))


async def drawn(device: ta.Device, x: Any) -> Any:
    return await random.Generator(device, seed=1).laplace((3,), loc=x)


async def of_sparse(device: ta.Device, x: Any) -> Any:
    matrix = scipy.sparse.csr_array(np.diag([1.0, 2.0, 3.0]))
    matrix.data = x
    return await sparse.csr(device, matrix)


async def ones(device: ta.Device, *shape: int) -> ta.AccelRef:
    return await device.full(shape, 1.0)


async def quantile(device: ta.Device, x: Any) -> Any:
    return await arrays.quantile(await ones(device, 3), x / 1e10)


async def with_it(function: Any, device: ta.Device, x: Any) -> Any:
    return await function(await ones(device, 3), x)


async def join_it(device: ta.Device, x: Any) -> Any:
    return await arrays.concat([await ones(device, 3), x])


async def assign_it(device: ta.Device, x: Any, *shape: int) -> Any:
    return await (await ones(device, *(shape or (3,)))).assign(x)


async def out_it(device: ta.Device, x: Any) -> Any:
    return await (await ones(device, 3)).to_host(out=x.copy())


async def stack_it(device: ta.Device, x: Any) -> Any:
    async def model(stack: Any) -> Any:
        return stack

    return await ta.patterns.stacked(model, device)([x, x])


WAYS: dict[str, Callable[[ta.Device, Any], Awaitable[Any]]] = {
    "put": lambda device, x: device.put(x),
    "put of a list": lambda device, x: device.put([x, x]),
    "asarray": arrays.asarray,
    "asarray with a dtype": lambda device, x: arrays.asarray(device, x, dtype="float32"),
    "asarray of a list": lambda device, x: arrays.asarray(device, [([x], [x])]),
    "asarray of the api": by_api,
    "asarray of the api with a dtype": lambda device, x: by_api(device, x, "float32"),
    "asarray of the api of a list": lambda device, x: by_api(device, [x]),
    "elements of the api": set_by_api,
    "scipy.fft": by_scipy,
    "a parameter of a distribution": drawn,
    "a sparse matrix": of_sparse,
    "shares": quantile,
    "an operand": lambda device, x: with_it(arrays.add, device, x),
    "one of an expression": lambda device, x: with_it(ta.jit.elementwise("a + b"), device, x),
    "one of a product": lambda device, x: with_it(linalg.dot, device, x),
    "one of a join": join_it,
    "assign": assign_it,
    "assign by broadcasting": lambda device, x: assign_it(device, x, 2, 3),
    "out": out_it,
    "an item of a batch": stack_it,
}


@pytest.mark.parametrize("way", WAYS)
async def test_they_are_refused(device: ta.Device, way: str) -> None:
    with pytest.raises(TypeError, match=r"masked array; fill it first: array\.filled"):
        await WAYS[way](device, MASKED)
    with pytest.raises(TypeError, match=r"type Quantity, .*these first: np\.asarray"):
        await WAYS[way](device, quantity(MASKED))


@pytest.mark.parametrize("value", [np.ma.masked, MASKED[1]])
async def test_a_masked_number_is_refused(device: ta.Device, value: Any) -> None:
    x = await ones(device, 3)
    for call in (
        x.fill(value),
        x.assign(value),
        device.full((3,), value),
        arrays.asarray(device, [1.0, value]),
    ):
        with pytest.raises(TypeError, match="masked"):
            await call
    np.testing.assert_array_equal(await x.to_host(), np.ones(3))


@pytest.mark.parametrize(
    "host",
    [
        np.array([1.0, None], object),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([3], "timedelta64[s]"),
        np.array(["a"]),
        np.array([b"a"]),
    ],
    ids=lambda host: host.dtype.kind,
)
async def test_an_array_of_objects_is_refused(device: ta.Device, host: Any) -> None:
    for way in (
        lambda: device.put(host),
        lambda: arrays.asarray(device, host),
        lambda: arrays.asarray(device, host, dtype="float64"),
        lambda: by_api(device, host),
        lambda: by_api(device, host, "float64"),
        lambda: with_it(arrays.add, device, host),
        lambda: assign_it(device, host, 1),
        lambda: drawn(device, host),
    ):
        with pytest.raises(TypeError):
            await way()
    if host.dtype.kind != "O":
        # As SciPy, which looks for numbers in strings, and takes None for NaN.
        with pytest.raises((TypeError, ValueError)):
            await by_scipy(device, host)


async def test_a_matrix_and_a_mapped_file_are_arrays(device: ta.Device, tmp_path: Any) -> None:
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    mapped = np.memmap(tmp_path / "file", np.float64, "w+", shape=(2, 2))
    mapped[:] = matrix
    expected = np.array([[1.0, 2.0], [3.0, 4.0]])
    for host in (matrix, mapped, matrix.T.T):
        one = await device.put(host)
        np.testing.assert_array_equal(await one.to_host(), expected)
        np.testing.assert_array_equal(await (await arrays.asarray(device, host)).to_host(), expected)
        np.testing.assert_array_equal(await (await arrays.add(one, host)).to_host(), 2 * expected)
        np.testing.assert_array_equal(await (await linalg.matmul(one, host)).to_host(), expected @ expected)
        await one.assign(host)
        np.testing.assert_array_equal(await one.to_host(), expected)
