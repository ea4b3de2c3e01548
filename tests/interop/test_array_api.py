"""The blocking namespace of the array API standard: operators, indexing, conversions, where it is called."""

from __future__ import annotations

import gc
import importlib.util
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from array_api_compat import array_namespace
from chosen import BACKEND, INLINE, IS_STAND_IN, SEARCHED
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import trio_accel as ta
from trio_accel.interop import Array, ArrayApi, array_api

HERE = Path(__file__).parent
OPERATORS = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"),
        *("eq", "ne", "lt", "le", "gt", "ge", "iadd", "isub", "imul", "iand", "ior"),
    )
}
FLOATING = {"truediv"}
WHOLE = {"and_", "or_", "xor", "lshift", "rshift", "iand", "ior"}
# Of functions of other libraries, where they are computed; see array_api_callers.py.
CALLERS = {
    "scipy.special.logsumexp": "device",
    "scipy.special.gammaln": "partly",
    "scipy.stats.skew": "device",
    "scipy.stats.quantile": "device",
    "scipy.stats.ttest_ind": "partly",
    "scipy.cluster.vq.whiten": "device",
    "scipy.cluster.hierarchy.fcluster": "partly",
    "sklearn.preprocessing.StandardScaler": "device",
    "sklearn.decomposition.PCA": "device",
    "sklearn.linear_model.LogisticRegression": "device",
    "sklearn.metrics.pairwise.rbf_kernel": "device",
}
any_example = settings(max_examples=20, deadline=None)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@pytest.fixture
async def xp(device: ta.Device) -> ArrayApi:
    return array_api(device)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await trio.to_thread.run_sync(function, *args)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.integers(1, 6, shape) if dtype != "bool" else rng.random(shape) > 0.5).astype(dtype)


def is_there(name: str, kind: str) -> bool:
    """Whether the standard has an operator for a kind of dtypes."""
    if kind == "b":
        return name in ("and_", "or_", "xor", "eq", "ne", "iand", "ior")
    if kind in "iu":
        return name not in FLOATING
    of_order = {"floordiv", "mod", "lt", "le", "gt", "ge"} if kind == "c" else set[str]()
    return name not in WHOLE | of_order


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint16", "complex128", "bool"])
async def test_operators(xp: ArrayApi, dtype: str) -> None:
    await trio.lowlevel.checkpoint()
    kind = np.dtype(dtype).kind
    x, y = numbers((3, 4), dtype), numbers((4,), dtype, 1)
    number: Any = True if kind == "b" else 2

    def work() -> None:
        for name in filter(lambda name: is_there(name, kind), OPERATORS):
            function = OPERATORS[name]
            for first, second in ((x, y), (x, number), (number, y)):
                if name.startswith("i") and first is number:
                    continue
                want = function(np.copy(first) if first is x else first, second)
                made = function(*[one if one is number else xp.asarray(one) for one in (first, second)])
                assert made.dtype == want.dtype, name
                tolerance = 1e-5 if dtype == "float32" else 1e-12
                np.testing.assert_allclose(np.asarray(made), want, rtol=tolerance, err_msg=name)

    await in_thread(work)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "bool"])
async def test_complex_numbers_make_floating_arrays_complex(xp: ArrayApi, dtype: str) -> None:
    await trio.lowlevel.checkpoint()
    host = numbers((3,), dtype)

    def work() -> None:
        x = xp.asarray(host)
        for name in ("add", "sub", "mul", "truediv", "pow", "eq", "ne"):
            function = OPERATORS[name]
            for first, second in ((host, 2 - 1j), (2 - 1j, host)):
                given = [xp.asarray(one) if one is host else one for one in (first, second)]
                if dtype in ("int8", "bool"):
                    with pytest.raises(TypeError, match="does not promote"):
                        function(*given)
                    continue
                want, made = function(first, second), function(*given)
                assert made.dtype == want.dtype
                np.testing.assert_allclose(np.asarray(made), want, rtol=1e-5)
        for name in ("iadd", "isub", "imul", "itruediv", "ipow"):
            with pytest.raises(TypeError, match=r"in place: .*complex|does not promote"):
                getattr(operator, name)(xp.asarray(host), 1j)
        with pytest.raises(TypeError, match="complex"):
            x[0] = 1j
        for name in ("floordiv", "mod", "lt"):
            with pytest.raises(TypeError, match="complex"):
                OPERATORS[name](x, 1j)

    await in_thread(work)


async def test_operators_of_one_array(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray(np.array([-2, 3], np.int8))
        assert np.asarray(-x).tolist() == [2, -3]
        assert np.asarray(+x).tolist() == [-2, 3]
        assert np.asarray(abs(x)).tolist() == [2, 3]
        assert np.asarray(~x).tolist() == [1, -4]
        matrix = xp.asarray(np.arange(6.0).reshape(2, 3))
        assert np.asarray(matrix @ matrix.T).tolist() == [[5.0, 14.0], [14.0, 50.0]]

    await in_thread(work)


async def test_operators_in_place_change_the_memory_and_no_dtype(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray(np.arange(6, dtype=np.int32))
        part = x[1:4]
        part += 10
        assert np.asarray(x).tolist() == [0, 11, 12, 13, 4, 5]
        # Overlapping elements are read in their old state.
        x[1:] += x[:-1]
        assert np.asarray(x).tolist() == [0, 11, 23, 25, 17, 9]
        with pytest.raises(TypeError, match=r"multiply in place: .*int64 .*which the array of int32"):
            x *= xp.asarray(np.arange(6))
        with pytest.raises(TypeError, match="does not promote"):
            x += 1.5
        square = xp.asarray(np.arange(4.0).reshape(2, 2))
        square @= xp.asarray(np.eye(2, dtype=np.float32) * 2)
        assert np.asarray(square).tolist() == [[0.0, 2.0], [4.0, 6.0]]
        with pytest.raises(TypeError, match=r"in place: .*cannot take on"):
            part += xp.asarray(np.ones((2, 3), np.int32))

    await in_thread(work)


@any_example
@given(data=st.data(), shape=shapes)
async def test_views(data: st.DataObject, shape: tuple[int, ...]) -> None:
    x = numbers(shape, "float32")
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    async with ta.open_system("views") as system, system.open_device(BACKEND, options=INLINE) as device:
        xp = array_api(device)

        def work() -> None:
            on = xp.asarray(x)
            np.testing.assert_array_equal(np.asarray(on[key]), x[key])
            on[key] = 9
            changed = x.copy()
            changed[key] = 9
            np.testing.assert_array_equal(np.asarray(on), changed)
            part = on[key]
            part += 1
            changed[key] += 1
            np.testing.assert_array_equal(np.asarray(on), changed)

        await in_thread(work)


@any_example
@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), seed=st.integers(0, 99))
async def test_indexing_by_arrays(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    rng, x = np.random.default_rng(seed), numbers(shape, "int64", seed)
    kinds = data.draw(st.lists(st.sampled_from(["array", "int", "slice"]), max_size=len(shape), min_size=1))
    index: dict[str, Callable[[int], Any]] = {
        "array": lambda n: rng.integers(-n, n, [(2, 1), (3,), (), (0,)][seed % 4]),
        "int": lambda n: int(rng.integers(-n, n)),
        "slice": lambda n: slice(None, None, -1),
    }
    key = tuple(index[kind](extent) for kind, extent in zip(kinds, shape, strict=False))
    want = x[key]
    # Of one number: a place may be written twice.
    values = [7, np.full(np.shape(want), 5), np.full((*np.shape(want)[:-1], 1)[: np.ndim(want)], 6)]
    async with ta.open_system("index") as system, system.open_device(BACKEND, options=INLINE) as device:
        xp = array_api(device)

        def work() -> None:
            on = xp.asarray(x)
            at = tuple(xp.asarray(part) if isinstance(part, np.ndarray) else part for part in key)
            np.testing.assert_array_equal(np.asarray(on[at]), want)
            for value in values:
                changed = x.copy()
                changed[key] = value
                on[at] = xp.asarray(value) if isinstance(value, np.ndarray) else value
                np.testing.assert_array_equal(np.asarray(on), changed)

        await in_thread(work)


async def test_values_of_several_axes_are_placed_by_index_arrays(xp: ArrayApi) -> None:
    x = np.zeros((3, 4, 5))
    rows, columns = np.array([0, 2]), np.array([[4], [1]])
    keys: list[tuple[Any, ...]] = [
        (slice(None), rows),
        (slice(None), rows, columns),
        (rows, slice(None), columns),
        (..., columns),
        (None, rows),
    ]

    def work() -> None:
        for key in keys:
            want, on = x.copy(), xp.asarray(x)
            values = np.arange(1.0, want[key].size + 1).reshape(want[key].shape)
            want[key] = values
            at = tuple(xp.asarray(part) if isinstance(part, np.ndarray) else part for part in key)
            on[at] = xp.asarray(values)
            np.testing.assert_array_equal(np.asarray(on), want)
            np.testing.assert_array_equal(np.asarray(on[at]), values)

    await in_thread(work)


@any_example
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4), seed=st.integers(0, 99))
async def test_indexing_by_truth_values(shape: tuple[int, ...], seed: int) -> None:
    x = numbers(shape, "float64", seed)
    masks = [numbers(shape[:count], "bool", seed) for count in range(len(shape) + 1)]
    async with ta.open_system("masks") as system, system.open_device(BACKEND, options=INLINE) as device:
        xp = array_api(device)

        def work() -> None:
            for mask in masks:
                on, changed, at = xp.asarray(x), x.copy(), xp.asarray(mask)
                np.testing.assert_array_equal(np.asarray(on[at]), x[mask])
                on[at] = -1
                changed[mask] = -1
                np.testing.assert_array_equal(np.asarray(on), changed)
                values = np.arange(float(x[mask].size)).reshape(x[mask].shape)
                on[at] = xp.asarray(values)
                changed[mask] = values
                np.testing.assert_array_equal(np.asarray(on), changed)

        await in_thread(work)


async def test_refused_indices(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray(np.zeros((2, 3)))
        for key, error, message in (
            (xp.asarray([True, False, True]), IndexError, r"truth values of shape \(3,\) do not fit"),
            (xp.asarray([[True] * 3] * 3), IndexError, "do not fit"),
            (xp.asarray([5]), IndexError, "5"),
            ((0, 0, 0), IndexError, "3 axes are indexed"),
            ((..., ...), IndexError, "at most one"),
            (xp.asarray([1.0]), IndexError, "an integer dtype or bool, got float64"),
            ((xp.asarray([0, 1]), xp.asarray([0, 1, 2])), IndexError, "do not broadcast"),
            ("x", TypeError, "'x'"),
        ):
            with pytest.raises(error, match=message):
                _ = x[key]

    await in_thread(work)


async def test_one_element_is_a_number_of_python(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray(np.array([[3]], np.int16))
        assert (int(x), float(x), complex(x), operator.index(x), bool(x)) == (3, 3.0, 3 + 0j, 3, True)
        assert [1, 2, 3, 4][x] == 4
        assert np.arange(5)[1 : int(x)].tolist() == [1, 2]
        # A bound may also be an array.
        assert xp.arange(5)[xp.asarray(1) : x[0, 0]].shape == (2,)
        assert int(xp.asarray(2.7)) == 2
        for convert, array in (
            (float, xp.asarray(1j)),
            (int, xp.asarray(1j)),
            (operator.index, xp.asarray(1.0)),
            (bool, xp.asarray([True, False])),
            (float, xp.zeros(0)),
        ):
            with pytest.raises(TypeError, match="the array must be a single element of kind"):
                convert(array)

    await in_thread(work)


async def test_lengths_and_iteration(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray(np.arange(6).reshape(2, 3))
        assert len(x) == 2
        assert [row.shape for row in x] == [(3,), (3,)]
        with pytest.raises(TypeError, match="without axes"):
            iter(xp.asarray(1))
        with pytest.raises(TypeError, match="unhashable"):
            hash(x)

    await in_thread(work)


async def test_the_repr_of_an_array_in_trios_thread(xp: ArrayApi, device: ta.Device) -> None:
    """It would block the loop there, so it shows no numbers."""
    assert repr(await in_thread(xp.asarray, [1.0])) == f"<Array float64 (1,) on {device.path}>"


async def test_attributes_of_an_array(xp: ArrayApi, device: ta.Device) -> None:
    def work() -> None:
        x = xp.asarray(np.zeros((2, 3), np.float32))
        assert (x.dtype, x.shape, x.ndim, x.size, x.device) == (xp.float32, (2, 3), 2, 6, device)
        assert x.T.shape == x.mT.shape == (3, 2)
        numbers = "[[0., 0., 0.],\n       [0., 0., 0.]]"
        assert repr(x) == f"Array({numbers}, dtype=float32, device={device.path})"
        assert repr(xp.zeros(1000)).startswith("Array([0., 0., ")
        assert repr(xp.zeros(1001)) == f"<Array float64 (1001,) on {device.path}>"
        x.ref.release()
        assert repr(x) == f"<Array float32 (2, 3) on {device.path}>"
        x = xp.asarray(np.zeros((2, 3), np.float32))
        assert x.ref.shape == (2, 3)
        with pytest.raises(ValueError, match=r"T: the array must have two axes, got shape \(3,\)"):
            _ = x[0].T
        assert x.to_device(device).ref is x.ref
        with pytest.raises(ValueError, match="stream must be None"):
            x.to_device(device, stream=1)  # type: ignore[arg-type]

    await in_thread(work)


async def test_arrays_on_another_device(xp: ArrayApi, system: ta.System) -> None:
    async with system.open_device(BACKEND, options=INLINE) as other:

        def work() -> None:
            x = xp.asarray([1.0, 2.0])
            y = x.to_device(other)
            assert (y.device, np.asarray(y).tolist()) == (other, [1.0, 2.0])
            for made in (
                xp.zeros(2, device=other),
                xp.ones_like(x, device=other),
                xp.astype(x, xp.int8, device=other),
                xp.asarray([1], device=other),
                xp.fft.fftfreq(2, device=other),
            ):
                assert made.device is other
            assert xp.zeros_like(y).device is other
            with pytest.raises(ValueError, match="copy=False"):
                xp.asarray(x, device=other, copy=False)

        await in_thread(work)


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_memory_is_shared_by_dlpack(xp: ArrayApi) -> None:
    def check_copies() -> None:
        x = xp.asarray(np.arange(6.0).reshape(2, 3))
        host = np.from_dlpack(x) if x.__dlpack_device__() == (1, 0) else np.from_dlpack(x, device="cpu")
        x[0, 0] = 9
        assert host.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        with pytest.raises(BufferError, match="has to be copied"):
            x.__dlpack__(copy=False, dl_device=(1, 0))

    def check_views() -> None:
        x = xp.asarray(np.arange(6.0).reshape(2, 3))
        host = np.from_dlpack(x.T, copy=False)
        x[0, 1] = 9
        assert host[1, 0] == 9
        host[1, 0] = 7
        assert float(x[0, 1]) == 7
        del x
        gc.collect()
        # The memory is nobody else's while the other library has the array.
        others = [xp.asarray(np.ones((2, 3))) for _ in range(3)]
        assert host.tolist() == [[0.0, 3.0], [7.0, 4.0], [2.0, 5.0]]
        assert np.from_dlpack(others[0], copy=True).tolist() == np.ones((2, 3)).tolist()
        with pytest.raises(BufferError, match="dl_device"):
            others[0].__dlpack__(dl_device=(7, 3))

    def check_own() -> None:
        x = xp.asarray([1.0, 2.0])
        same = xp.from_dlpack(x)
        same[0] = 5
        assert float(x[0]) == 5

    # The host also addresses the memory of the CPU's workers.
    await in_thread(check_views if BACKEND == "cpu" else check_copies)
    await in_thread(check_own)


async def test_arrays_are_made_from_existing_objects(xp: ArrayApi) -> None:
    def work() -> None:
        for what, dtype in (
            (True, "bool"),
            (1, "int64"),
            (1.0, "float64"),
            (1j, "complex128"),
            ([[1, 2], [3, 4]], "int64"),
            (np.float32(2), "float32"),
            (np.arange(3, dtype=np.uint8)[::-1], "uint8"),
            (memoryview(b"ab"), "uint8"),
        ):
            made = xp.asarray(what)
            assert made.dtype == dtype
            np.testing.assert_array_equal(np.asarray(made), np.asarray(what))
        x = xp.asarray([1, 2], dtype=xp.float32)
        assert xp.asarray(x).ref is x.ref
        assert xp.asarray([x[0], x[1]]).dtype == "float32"
        assert xp.asarray(x, copy=True).ref is not x.ref
        for there in ([1.0], x):
            with pytest.raises(ValueError, match="copy=False"):
                xp.asarray(there, dtype=xp.int8, copy=False)
        with pytest.raises(BufferError, match="copy=False"):
            xp.from_dlpack(np.zeros(2), copy=False)
        assert np.asarray(xp.from_dlpack(np.arange(2))).tolist() == [0, 1]
        with pytest.raises(TypeError, match="complex numbers do not become float32"):
            xp.asarray([1j], dtype=xp.float32)
        with pytest.raises(OverflowError):
            xp.asarray([300], dtype=xp.int8)
        assert np.asarray(xp.full(2, xp.asarray(3))).tolist() == [3, 3]
        assert xp.full(2, 1.5).dtype == xp.float64
        with pytest.raises(ValueError, match="copied to the host"):
            x.__array__(copy=False)
        assert np.asarray(x, np.int32).dtype == np.int32

    await in_thread(work)


async def test_functions_composed_of_others(xp: ArrayApi) -> None:
    x = np.array([[3, 1, 2], [5, 4, 1]])

    def work() -> None:
        on = xp.asarray(x)
        for made, want in (
            (xp.repeat(on, xp.asarray([0, 2, 1]), axis=1), np.repeat(x, [0, 2, 1], axis=1)),
            (xp.repeat(on, xp.asarray([2])), np.repeat(x, 2)),
            (xp.repeat(on, 2, axis=0), np.repeat(x, 2, axis=0)),
            (xp.diff(on, prepend=on[:, :1], append=on[:, :2]), np.diff(x, prepend=x[:, :1], append=x[:, :2])),
            (xp.diff(on, n=2, axis=1), np.diff(x, n=2, axis=1)),
            (xp.isin(on, xp.asarray([1, 5], dtype=xp.int8)), np.isin(x, [1, 5])),
            (xp.isin(on, 4, invert=True), np.isin(x, 4, invert=True)),
            (xp.isin(on, xp.zeros(0, dtype=xp.int64)), np.isin(x, [])),
            (xp.fft.fftshift(on), np.fft.fftshift(x)),
            (xp.fft.ifftshift(on, axes=1), np.fft.ifftshift(x, axes=1)),
            (xp.fft.fftfreq(5, d=0.1), np.fft.fftfreq(5, 0.1)),
            (xp.fft.rfftfreq(6, dtype=xp.float32), np.fft.rfftfreq(6)),
            (xp.matmul(on, xp.asarray([1, 0, 2], dtype=xp.int8)), x @ [1, 0, 2]),
        ):
            assert made.dtype in (want.dtype, xp.float32)
            np.testing.assert_allclose(np.asarray(made), want, rtol=1e-6)
        parts = xp.broadcast_arrays(on, on[:1, :])
        assert isinstance(parts, tuple)
        assert [part.shape for part in parts] == [(2, 3), (2, 3)]
        assert xp.broadcast_shapes((2, 1), (3,)) == (2, 3)
        with pytest.raises(TypeError, match="does not promote int64, a Python float to one dtype"):
            xp.searchsorted(on[0, :], 1.5)
        with pytest.raises(TypeError, match="dtype must be float32 or float64, got int64"):
            xp.fft.fftfreq(3, dtype=xp.int64)

    await in_thread(work)


async def test_functions_of_several_steps_are_one_request(xp: ArrayApi, device: ta.Device) -> None:
    chains: Any = device.chains  # type: ignore[attr-defined]  # an open device has them

    def work() -> None:
        x, wide = xp.asarray(np.eye(3, dtype=np.float32)), xp.asarray(np.ones((3, 3)))
        mask = xp.asarray(np.eye(3, dtype=bool))

        def add(x: Array) -> None:
            x += x

        for steps in (
            lambda: add(x),
            lambda: xp.matmul(x, wide),
            lambda: xp.isin(x, wide, invert=True),
            lambda: operator.setitem(x, mask, 2.0),
        ):
            steps()
            before = chains.kept.counts.hits
            steps()
            assert chains.kept.counts.hits == before + 1
        assert np.asarray(x).tolist() == (2 * np.eye(3)).tolist()

    await in_thread(work)


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
async def test_solvers(xp: ArrayApi) -> None:
    def work() -> None:
        # Arrays of two dtypes are promoted, and results have the names of the standard.
        solved = xp.linalg.solve(xp.eye(2), xp.ones(2, dtype=xp.float32))
        assert (solved.dtype, np.asarray(solved).tolist()) == (xp.float64, [1.0, 1.0])
        assert type(xp.linalg.qr(xp.eye(2)))._fields == ("Q", "R")

    await in_thread(work)


async def test_dtypes(xp: ArrayApi) -> None:
    await trio.lowlevel.checkpoint()
    assert xp.float32 == ta.DType.float32
    limits = xp.finfo(xp.complex64)
    assert (limits.bits, limits.eps, limits.dtype) == (32, 2.0**-23, xp.float32)
    assert xp.finfo(xp.bfloat16).smallest_normal == 2.0**-126
    assert (xp.iinfo(xp.uint8).max, xp.iinfo(xp.int16).min, xp.iinfo(xp.int16).bits) == (255, -32768, 16)
    with pytest.raises(TypeError, match="type must be floating or complex, got int8"):
        xp.finfo(xp.int8)
    with pytest.raises(TypeError, match="type must be an integer dtype, got float64"):
        xp.iinfo(xp.float64)
    assert xp.isdtype(xp.float16, "real floating")
    assert xp.isdtype(xp.int8, ("bool", "integral"))
    assert not xp.isdtype(xp.int8, xp.int16)
    with pytest.raises(ValueError, match="kind must be one of bool"):
        xp.isdtype(xp.int8, "whole")
    assert xp.result_type(xp.int8, xp.uint8) == xp.int16
    assert xp.result_type(xp.float32, xp.complex64, 1j, 2.0) == xp.complex64
    for real, wide in (("float16", "complex64"), ("bfloat16", "complex64"), ("float32", "complex64")):
        assert xp.result_type(ta.DType(real), 1j) == wide
    assert xp.result_type(1j, xp.float64) == xp.complex128
    for wrong in ((xp.int8, xp.float32), (xp.uint64, xp.int8), (xp.int8, 1.5), (xp.int8, 1j), (1, 2), ()):
        with pytest.raises(TypeError, match="the array API standard does not promote"):
            xp.result_type(*wrong)
    assert xp.can_cast(xp.int8, xp.int32)
    assert not xp.can_cast(xp.int32, xp.int8)
    assert not xp.can_cast(xp.int8, xp.float32)


async def test_attributes_of_the_namespace(xp: ArrayApi, device: ta.Device) -> None:
    await trio.lowlevel.checkpoint()
    info = xp.__array_namespace_info__()
    assert info.devices() == (info.default_device(),) == (device,)
    assert info.capabilities()["data-dependent shapes"]
    assert info.default_dtypes()["integral"] == xp.int64
    assert set(info.dtypes(kind="complex floating")) == {"complex64", "complex128"}
    assert len(info.dtypes()) == 13
    assert repr(xp) == f"<ArrayApi of {device.path}>"
    assert xp == array_api(device)
    assert len({xp, array_api(device)}) == 1
    assert xp != 1
    assert {"add", "asarray", "matmul", "float32"} - {"float32"} <= set(dir(xp))
    assert xp.add is xp.add


async def test_the_protocol(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray([1.0])
        of: Any = array_namespace(x, x)
        assert of is xp
        assert x.__array_namespace__(api_version="2022.12") is xp
        with pytest.raises(ValueError, match=r"api_version must be one of .*2025\.12, got '1999\.01'"):
            x.__array_namespace__(api_version="1999.01")

    await in_thread(work)


async def test_missing_functions_are_reported(xp: ArrayApi) -> None:
    await trio.lowlevel.checkpoint()
    with pytest.raises(ta.NotSupportedError, match=r"array_api\.no_such_function is not there"):
        _ = xp.no_such_function
    # Libraries look for these: a namespace of functions, a message, a function that NumPy has in another way.
    for name in ("special", "Sum", "ArraysActor", "put_along_axis", "__file__"):
        assert not hasattr(xp, name)
    with pytest.raises(ta.NotSupportedError, match=r"linalg\.no is not there"):
        _ = xp.linalg.no


async def test_numpys_numbers_are_pythons(xp: ArrayApi) -> None:
    def work() -> None:
        x = xp.asarray(np.ones(2, np.float32))
        for made in (x * np.float64(2), np.float64(2) * x, x + np.int64(1), np.float32(1) + x):
            assert isinstance(made, Array)
            assert made.dtype == xp.float32
            assert np.asarray(made).tolist() == [2.0, 2.0]
        for wrong in ("x", None, [1, 2]):
            with pytest.raises(TypeError):
                x + wrong
            with pytest.raises(TypeError):
                wrong + x
        for other in ("x", None):
            assert not operator.eq(x, other)
            assert operator.ne(x, other)

    await in_thread(work)


async def test_refused_in_trios_thread(xp: ArrayApi) -> None:
    x = await in_thread(xp.asarray, [1.0, 2.0])
    for call in (lambda: x + 1, lambda: xp.sqrt(x), lambda: bool(x[0]), lambda: np.asarray(x)):
        with pytest.raises(RuntimeError, match=r"would block the Trio loop; .*to_thread.*await ta\.arrays\."):
            call()
    assert x.shape == (2,)


async def test_refused_after_the_device_was_closed(system: ta.System) -> None:
    async with system.open_device(BACKEND, options=INLINE) as device:
        xp = array_api(device)
        x = await in_thread(xp.asarray, [1.0])
    with pytest.raises(RuntimeError, match=r"add: this namespace no longer has a device .*closed") as caught:
        await in_thread(operator.add, x, 1.0)
    assert isinstance(caught.value.__cause__, ta.DeviceLostError)


async def test_a_worker_thread_of_another_run_waits_as_any_thread(xp: ArrayApi) -> None:
    async def other() -> None:
        assert await in_thread(lambda: float(xp.sum(xp.ones(3)))) == 3.0

    await trio.to_thread.run_sync(trio.run, other)


async def test_a_cancelled_task_cancels_its_thread(xp: ArrayApi) -> None:
    ended: list[type[BaseException]] = []

    def work(scope: trio.CancelScope) -> None:
        trio.from_thread.run_sync(scope.cancel)
        try:
            xp.zeros(2)
        except BaseException as error:
            ended.append(type(error))
            raise

    with trio.CancelScope() as scope:
        await trio.to_thread.run_sync(work, scope)
    assert ended == [trio.Cancelled]


async def test_nothing_stays_on_the_device(xp: ArrayApi, device: ta.Device) -> None:
    def work() -> None:
        x = xp.asarray(np.arange(100.0))
        x[x > 50] = 0
        np.from_dlpack(x + 1, device="cpu")

    await in_thread(work)
    gc.collect()
    await device.synchronize()
    assert (await device.statistics()).memory.used == 0


@pytest.fixture(scope="module")
def callers() -> dict[str, str]:
    """The place where functions of SciPy and scikit-learn compute; they read the environment at import."""
    done = subprocess.run(
        [sys.executable, str(HERE / "array_api_callers.py"), *CALLERS],
        env={**os.environ, "PYTHONPATH": SEARCHED},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


@pytest.mark.slow
@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in has no solvers")
@pytest.mark.parametrize("name", CALLERS)
def test_functions_of_other_libraries(callers: dict[str, str], name: str) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip("it is not installed")
    assert callers[name] == CALLERS[name]
