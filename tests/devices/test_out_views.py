"""`out=` of every declared operation may be a view of any strides: the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse
from chosen import IS_STAND_IN

import trio_accel as ta
from trio_accel import linalg
from trio_accel.devices import DECLARED

Array = npt.NDArray[Any]
RNG = np.random.default_rng(5)
SQUARE, OTHER, VECTOR = RNG.normal(size=(4, 4)) + 3 * np.eye(4), RNG.normal(size=(4, 4)), RNG.normal(size=4)
STACK, COMPLEX = RNG.normal(size=(3, 4, 4)), RNG.normal(size=(3, 4, 5)) + 1j * RNG.normal(size=(3, 4, 5))
SINGLE = RNG.normal(size=(8, 8)).astype(np.float32)
SPARSE = scipy.sparse.csr_array(np.where(SQUARE > 0, SQUARE, 0.0))

DRAWS = {"seed": 3, "row": 0, "shape": (3, 5)}
FLOATS = {**DRAWS, "dtype": ta.DType.float64}
# The arguments of each; arrays are put on the device, sparse ones as matrices.
CALLS: dict[str, Mapping[str, Any]] = {
    **{f"fft.{name}": {"a": COMPLEX} for name in ("fft", "ifft", "irfft", "hfft")},
    **{f"fft.{name}": {"a": COMPLEX.real.copy()} for name in ("rfft", "ihfft")},
    **{f"fft.{name}{end}": {"a": COMPLEX} for name in ("fft", "ifft", "irfft", "hfft") for end in "n2"},
    **{f"fft.{name}{end}": {"a": COMPLEX.real.copy()} for name in ("rfft", "ihfft") for end in "n2"},
    "linalg.asum": {"x": VECTOR},
    "linalg.dot": {"x": VECTOR, "y": VECTOR},
    "linalg.fused_matmul": {"a": SINGLE, "b": SINGLE, "bias": SINGLE[0], "activation": "relu"},
    "linalg.fused_matmul_grad": {"a": SINGLE, "b": SINGLE, "aux": SINGLE, "activation": "gelu"},
    "linalg.iamax": {"x": VECTOR},
    "linalg.matmul": {"a": STACK, "b": OTHER},
    "linalg.nrm2": {"x": VECTOR},
    "linalg.trmm": {"alpha": 2.0, "a": SQUARE, "b": OTHER},
    "linalg.trmv": {"a": SQUARE, "x": VECTOR},
    "linalg.trsm": {"alpha": 2.0, "a": SQUARE, "b": OTHER},
    "linalg.trsv": {"a": SQUARE, "x": VECTOR},
    "random.bits": DRAWS,
    "random.exponential": FLOATS,
    "random.integers": {**DRAWS, "low": 0, "high": 9},
    "random.lognormal": FLOATS,
    "random.normal": FLOATS,
    "random.sequence_bits": {"sequence": "xorwow", "state": (1, 2, 3, 4, 5, 6), "shape": (3, 5)},
    "random.rejected": {**FLOATS, "distribution": "gamma", "a": np.full((3, 5), 2.5)},
    "random.uniform": FLOATS,
    "sparse.sddmm": {"matrix": SPARSE, "a": SQUARE, "b": OTHER},
    "sparse.spmm": {"matrix": SPARSE, "b": OTHER},
    "sparse.spmv": {"matrix": SPARSE, "x": VECTOR},
    "sparse.to_dense": {"matrix": SPARSE},
}
# Their reply has several arrays, or they need factors: tests/linalg/test_fused.py, tests/nn/test_linear.py
# and tests/sparse/test_factors.py.
ELSEWHERE = {"linalg.fused_matmul_sums", "nn.linear_weight_grad", "sparse.solve_factored"}
NOT_ON_STAND_IN = {
    *(
        f"linalg.{name}"
        for name in ("fused_matmul", "fused_matmul_grad", "asum", "iamax", "trmm", "trmv", "trsm", "trsv")
    ),
    *("sparse.sddmm", "sparse.spmm"),
}

VIEWS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], Callable[[Any], Any]]]] = {
    "steps": lambda shape: (
        tuple(2 * n for n in shape),
        lambda x: x[(*(slice(None, None, 2),) * len(shape), ...)],
    ),
    "backwards": lambda shape: (shape, lambda x: x[(*(slice(None, None, -1),) * len(shape), ...)]),
    "transposed": lambda shape: (shape[::-1], lambda x: x.T),
    "part": lambda shape: (tuple(n + 2 for n in shape), lambda x: x[(*(slice(1, -1),) * len(shape), ...)]),
}


def test_all_are_here() -> None:
    names = {name for name, one in DECLARED.items() if "out" in one.declaration.parameters}
    of_these = {name for name in names if name.split(".")[0] in ("fft", "linalg", "random", "sparse")}
    assert of_these - ELSEWHERE == set(CALLS)


async def arguments(device: ta.Device, name: str) -> dict[str, Any]:
    return {
        argument: await ta.sparse.csr(device, value)
        if argument == "matrix"
        else await device.put(value)
        if isinstance(value, np.ndarray)
        else value
        for argument, value in CALLS[name].items()
    }


@pytest.mark.parametrize("name", CALLS)
async def test_every_declared_operation(device: ta.Device, name: str) -> None:
    if IS_STAND_IN and name in NOT_ON_STAND_IN:
        pytest.skip("the stand-in has no such operation")
    message, given = DECLARED[name].message, await arguments(device, name)
    want = await (await device.ask(message(**given))).to_host()
    for how, view in VIEWS.items():
        shape, part = view(want.shape)
        around = np.full(shape, 7, want.dtype)
        whole = await device.put(around)
        out = part(whole)
        for _ in range(2):
            # Through a worker, the second one was seen before.
            assert await device.ask(message(**given, out=out)) is out
        part(around)[...] = want
        np.testing.assert_allclose(await whole.to_host(), around, rtol=1e-12, err_msg=how)


async def test_an_addition_reads_its_target_from_the_view(device: ta.Device) -> None:
    if IS_STAND_IN:
        pytest.skip("the stand-in has no such operation")
    matrix, old = await ta.sparse.csr(device, SPARSE), RNG.normal(size=(4, 8))
    whole = await device.put(old)
    await ta.sparse.spmm(matrix, await device.put(OTHER), alpha=2.0, beta=-1.0, out=whole[:, ::2])
    want = old.copy()
    want[:, ::2] = 2 * (SPARSE @ OTHER) - old[:, ::2]
    np.testing.assert_allclose(await whole.to_host(), want, rtol=1e-12)


async def test_reductions_expressions_and_submitted_operations(device: ta.Device) -> None:
    x, whole = await device.put(STACK), await device.zeros((4, 8))
    pending = device.submit(ta.arrays.add.message(x[0], x[1], out=whole[:, 1::2]))
    await ta.arrays.sum(x, 0, out=whole[:, ::2])
    await pending.wait()
    got = await whole.to_host()
    np.testing.assert_allclose(got[:, ::2], STACK.sum(0), rtol=1e-12)
    np.testing.assert_array_equal(got[:, 1::2], STACK[0] + STACK[1])


async def test_an_operation_that_fails_damages_the_view(device: ta.Device) -> None:
    x, whole = await device.put(STACK), await device.zeros((4, 8))
    ta.testing.inject_fault(device, "jit.total", fail=ta.LibraryError("on purpose", library="jit", code=1))
    pending = device.submit(ta.jit.reduction("x", "sum", name="total").compute(x, axis=0, out=whole[:, ::2]))
    with pytest.raises(ta.LibraryError, match="on purpose"):
        await pending.wait()
    with pytest.raises(ta.StaleRefError, match=r"spoiled by jit\.total"):
        await whole.to_host()


async def test_a_graph_replays_the_copies_too(device: ta.Device) -> None:
    x, whole = await device.put(STACK), await device.zeros((4, 8))

    async def step(x: ta.AccelRef, whole: ta.AccelRef) -> None:
        await ta.arrays.sum(x, 0, out=whole[:, ::2])

    graph = await ta.graphs.capture(device, step, x, whole)
    for factor in (1.0, 3.0):
        await x.assign(STACK * factor)
        await graph.replay()
        np.testing.assert_allclose((await whole.to_host())[:, ::2], factor * STACK.sum(0), rtol=1e-12)


async def test_elements_that_overlap_are_refused(device: ta.Device) -> None:
    x = await device.put(VECTOR)
    overlapping = ta.arrays.broadcast_to(x, (4, 4)), ta.arrays.sliding_window_view(x, 2)
    for view in overlapping:
        where = "must have memory of its own for each element, got a view of shape"
        with pytest.raises(ValueError, match=f"arrays.sum: out {where}"):
            await ta.arrays.sum(np.ones((2, *view.shape)), 0, out=view)
        with pytest.raises(ValueError, match=f"assign: array {where}"):
            await view.assign(1.0)
        with pytest.raises(ValueError, match=f"fill: array {where}"):
            await view.fill(1.0)
        with pytest.raises(ValueError, match=f"linalg.scal: x {where}"):
            await linalg.scal(2.0, view)
        with pytest.raises(ValueError, match=f"lease: the array {where}"):
            async with view.lease(write=True):
                pass
    np.testing.assert_array_equal(await x.to_host(), VECTOR)
