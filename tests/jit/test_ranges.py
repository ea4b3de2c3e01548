"""Reductions over ranges: against Python's own loops, bit for bit, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from by_python import by_python
from chosen import BACKEND
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

pytestmark = pytest.mark.conformance

Array = npt.NDArray[Any]
INLINE = ta.DeviceOptions(isolation="inline")
inline = pytest.mark.parametrize("isolation", ["inline"])
DTYPES = ("bool", "int8", "uint8", "int32", "uint64", "int64", "float32", "float64", "complex64")
ROWS = "sum(data[j] * x[column[j]] for j in range(start[i(0)], start[i(0) + 1]))"

some = settings(max_examples=25 if BACKEND == "cpu" else 8, deadline=None)


def numbers(dtype: str, count: int, seed: int) -> Array:
    """Numbers that round, small whole ones, and both truths."""
    draw = np.random.default_rng(seed)
    if dtype == "bool":
        return draw.random(count) < 0.5
    if dtype.startswith(("int", "uint")):
        return draw.integers(0, 100, count).astype(dtype)
    real = draw.normal(size=count)
    return (real + 1j * draw.normal(size=count) if dtype == "complex64" else real).astype(dtype)


def assert_same(got: Array, want: list[list[Any]], otherwise: Any = 0) -> None:
    """Require the same bits; `otherwise` is the value of an empty range."""
    flat = [each[0] if each[0] is not None else otherwise for each in want]
    np.testing.assert_array_equal(got, np.array(flat, got.dtype).reshape(got.shape), strict=True)


async def run(text: str, *arguments: Any, **options: Any) -> Array:
    """Compute an expression on a device of its own."""
    refused: TypeError | None = None
    async with ta.open_system("ranges") as system, system.open_device(BACKEND, options=INLINE) as device:
        made = ta.jit.elementwise(text)
        given = [await device.put(each) if isinstance(each, np.ndarray) else each for each in arguments]
        try:
            return await (await device.ask(made.compute(*given, **options))).to_host()
        except TypeError as error:
            refused = error  # nurseries would put it into a group
    raise refused


@some
@given(
    st.sampled_from(["sum", "prod", "min", "max"]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(0, 99),
)
async def test_a_reduction_over_ranges_is_the_loop_that_python_runs(
    reduce: str, dtype: str, counts: list[int], seed: int
) -> None:
    start = np.cumsum([0, *counts]).astype(np.int32)
    x, order = numbers(dtype, 20, seed), np.random.default_rng(seed).integers(0, 20, max(int(start[-1]), 1))
    text = f"{reduce}(x[order[j]] for j in range(start[i(0)], start[i(0) + 1]))"
    if dtype == "complex64" and reduce in ("min", "max"):
        with pytest.raises(TypeError, match=r"m\w+imum does not take .*complex64, in line 1"):
            await run(text, x, order, start, shape=len(counts))
        return
    got = await run(text, x, order, start, shape=len(counts))
    kind = x.dtype.kind
    whole = {"u": np.uint64, "i": np.int64, "b": np.int64}
    is_ordered = reduce in ("min", "max") and kind != "b"
    assert got.dtype == (x.dtype if is_ordered else whole.get(kind, x.dtype))
    want = by_python(text, {}, ["out"], loaded={"x": x, "order": order, "start": start}, shape=(len(counts),))
    identity: dict[str, Any] = {"sum": 0, "prod": 1, "min": np.inf, "max": -np.inf}
    if kind in "iub" and reduce in ("min", "max"):
        limits = np.iinfo(got.dtype)
        identity = {"min": limits.max, "max": limits.min}
    if dtype == "complex64" and reduce == "prod":
        # NumPy multiplies complex numbers with and without a fused step, by how many there are.
        flat = np.array([1 if each[0] is None else each[0] for each in want])
        np.testing.assert_allclose(got, flat, rtol=1e-5)
        return
    assert_same(got, want, identity[reduce])


@some
@given(st.integers(1, 30), st.integers(-4, 6), st.integers(-4, 12), st.sampled_from(["float32", "float64"]))
async def test_ranges_equal_for_all_elements(rows: int, first: int, stop: int, dtype: str) -> None:
    x = numbers(dtype, rows, 3)
    text = "sum(x[i(0) + k] * (k + 1) for k in range(first, stop))"
    got = await run(text, x, first, stop, shape=rows)
    want = by_python(text, {"first": first, "stop": stop}, ["out"], loaded={"x": x}, shape=(rows,))
    assert got.dtype == x.dtype
    assert_same(got, want)


@some
@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(0, 99))
async def test_any_and_all_end_early_and_have_conditions(counts: list[int], seed: int) -> None:
    x, n = numbers("float64", 30, seed), np.array(counts)
    over = "for k in range(n) if x[k] < 1"
    got = await run(f"any(x[k + i(0)] > 0.5 {over}) + 2 * all(x[k] > -0.5 {over})", x, n)
    want: list[list[int]] = []
    for at, count in enumerate(counts):
        chosen = [k for k in range(count) if x[k] < 1]
        inside = [x[min(k + at, 29)] > 0.5 for k in chosen]
        want.append([any(inside) + 2 * all(x[k] > -0.5 for k in chosen)])
    assert_same(got, want)


@inline
async def test_a_sparse_product(device: ta.Device) -> None:
    import scipy.sparse

    a = scipy.sparse.random_array((50, 40), density=0.1, rng=np.random.default_rng(2), format="csr")
    x = np.random.default_rng(3).normal(size=40)
    product = ta.jit.elementwise(ROWS, name="csr_product")
    arrays = [await device.put(each) for each in (a.data, x, a.indices, a.indptr)]
    got = await (await product(*arrays, shape=50)).to_host()
    np.testing.assert_array_equal(got, a @ x)


@inline
async def test_forces_of_particles_in_cells_match_a_plain_loop(device: ta.Device) -> None:
    """The three cells of a row are adjacent, so there is one range for each row of cells."""
    side, count, radius = 9, 300, 1 / 9
    draw = np.random.default_rng(7)
    p = draw.random((count, 2))
    cell = (p[:, 0] * side).astype(int) * side + (p[:, 1] * side).astype(int)
    p, start = p[np.argsort(cell, kind="stable")], np.searchsorted(np.sort(cell), np.arange(side**2 + 1))
    forces = ta.jit.elementwise(
        """
        q = p[i(0), 0:2]
        gx = int(q.x * side)
        gy = int(q.y * side)
        fx = 0.0
        fy = 0.0
        for a in range(maximum(gx - 1, 0), minimum(gx + 2, side)):
            for j in range(start[a * side + maximum(gy - 1, 0)], start[a * side + minimum(gy + 2, side)]):
                d = q - p[j, 0:2]
                d2 = dot(d, d)
                w = (radius / sqrt(d2) - 1) * 0.5 if 0 < d2 < radius * radius else 0.0
                fx += w * d.x
                fy += w * d.y
        """,
        inputs=("p", "start", "side", "radius"),
        outputs=("fx", "fy"),
    )
    made = await forces(await device.put(p), await device.put(start), side, radius, shape=count)
    got = np.stack([await each.to_host() for each in made], axis=1)
    want, hits = np.zeros((count, 2)), 0
    for i in range(count):
        gx, gy = int(p[i, 0] * side), int(p[i, 1] * side)
        for a in range(max(gx - 1, 0), min(gx + 2, side)):
            for j in range(start[a * side + max(gy - 1, 0)], start[a * side + min(gy + 2, side)]):
                dx, dy = p[i] - p[j]
                d2 = dx * dx + dy * dy
                if 0 < d2 < radius * radius:
                    w = (radius / np.sqrt(d2) - 1) * 0.5
                    want[i] += w * dx, w * dy
                    hits += 1
    assert hits > count
    np.testing.assert_array_equal(got, want)


@inline
async def test_ranges_in_ranges(device: ta.Device) -> None:
    x = await device.put(np.arange(12.0).reshape(3, 4))
    n = await device.put(np.array([0, 1, 2, 3]))
    over = ta.jit.elementwise("sum(x[a, b] for a in range(3) for b in range(n) if a != b)")
    got = await (await over(x, n)).to_host()
    host = np.arange(12.0).reshape(3, 4)
    want = [sum(host[a, b] for a in range(3) for b in range(k) if a != b) for k in range(4)]
    np.testing.assert_array_equal(got, want)
    inner = ta.jit.elementwise("max(sum(x[a, b] for b in range(a + n)) for a in range(2))")
    got = await (await inner(x, n)).to_host()
    want = [max(sum(host[a, min(b, 3)] for b in range(a + k)) for a in range(2)) for k in range(4)]
    np.testing.assert_array_equal(got, want)


@inline
async def test_types_of_ranges_match_numpy(device: ta.Device) -> None:
    x = await device.put(np.full(300, 0.1, np.float32))
    got = await (
        await ta.jit.elementwise("sum(x[k] for k in range(300)) + 0 * i(0)", dtypes="float32")(x, shape=1)
    ).to_host()
    want = np.float32(0)
    for _ in range(300):
        want = want + np.float32(0.1)
    assert got[0] == want != np.float32(30)
    wide = await (await ta.jit.elementwise("sum(float64(x[k]) for k in range(300))")(x, shape=())).to_host()
    assert wide == np.cumsum(np.full(300, np.float64(np.float32(0.1))))[-1]
    # An index is a Python number, which widens nothing; nor does a sum of such.
    for text in (
        "y * sum(k for k in range(4))",
        "sum(y * k for k in range(4))",
        "y + sum(1 for k in range(6))",
    ):
        assert (
            await (await ta.jit.elementwise(text)(await device.put(np.ones(2, np.float32)))).to_host()
            is not None
        )
        made = await ta.jit.elementwise(text)(await device.put(np.full(2, 1.5, np.float32)))
        assert made.dtype == "float32"
    low = await ta.jit.elementwise("sum(x[k] for k in range(4))")(
        await device.put(np.full(4, 100, np.int8)), shape=2
    )
    assert low.dtype == "int64"
    assert (await low.to_host()).tolist() == [400, 400]


@inline
async def test_a_falling_range_is_empty_and_an_index_outside_takes_the_nearest(
    device: ta.Device,
) -> None:
    x, first = await device.put(np.arange(4.0)), await device.put(np.array([3, 0, -2]))
    over = ta.jit.elementwise("sum(x[j] for j in range(first, stop))")
    assert (await (await over(x, first, -1)).to_host()).tolist() == [0, 0, 2]
    assert (await (await over(x, first, 6)).to_host()).tolist() == [9, 12, 17]
    least = ta.jit.elementwise("min(x[j] for j in range(first, stop))")
    assert (await (await least(x, first, 0)).to_host()).tolist() == [np.inf, np.inf, 2]


@inline
async def test_a_range_of_other_numbers_is_refused(device: ta.Device) -> None:
    x = await device.zeros(3)
    for text, column in (("sum(1 for j in range(x))", 24), ("sum(1 for j in range(2, y[0]))", 25)):
        with pytest.raises(TypeError, match="a range takes integers, got float64: int64") as caught:
            await ta.jit.elementwise(text)(x, shape=3)
        assert f"column {column - (2 if 'x)' in text else 0)}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uint64(18446744073709551615) - x", [(1 << 64) - 2, (1 << 64) - 3]),
        ("sum(1 for k in range(18446744073709551615, 3)) + x", [1, 2]),
        ("float64(18446744073709551615) * x", [float((1 << 64) - 1), 2 * float((1 << 64) - 1)]),
    ],
)
async def test_integers_beyond_int64(device: ta.Device, text: str, expected: list[float]) -> None:
    x = await device.put(np.array([1, 2], np.uint64))
    found = await (await ta.jit.elementwise(text, inputs=["x"])(x)).to_host()
    assert found.tolist() == expected
