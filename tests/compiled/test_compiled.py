"""Compiled expressions of the CPU backend have NumPy's bits, by any number of threads, in any vectors."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from both_executors import Array, Executors, same_bits

import trio_accel as ta
from benchmarks import cpu_expressions as programs
from trio_accel import jit
from trio_accel.backends.base.expressions import FUNCTIONS, parse, typed
from trio_accel.backends.cpu.compiled import _compiler, _plans, _text
from trio_accel.expressions import Reduction

pytestmark = [pytest.mark.no_device, pytest.mark.one_backend]

PAIRS = [
    ("float64", "float64"),
    ("float32", "int64"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("int8", "uint8"),
    ("uint64", "int64"),
    ("int32", "bool"),
    ("complex64", "complex128"),
]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.5,
    -7.0,
    np.inf,
    -np.inf,
    np.nan,
    6e4,
    7e4,
    1e-7,
    3e-8,
    -3e4,
    0.5,
    1.5,
    -0.5,
    1e300,
]


def special(name: str) -> Array:
    """Error-prone arguments of a function, and some ordinary ones."""
    dtype, rng = ta.DType(name), np.random.default_rng(0)
    if dtype.kind == "bool":
        return np.array([False, True])
    if dtype.kind in ("int", "uint"):
        limits = np.iinfo(dtype.dtype)
        more = rng.integers(limits.min, limits.max, 9, dtype.dtype)
        ends = np.array([limits.min, limits.min + 1, limits.max, limits.max - 1], dtype.dtype)
        return np.concatenate([ends, more, np.array([0, 1, 2, 7, 8 * dtype.itemsize - 1], dtype.dtype)])
    real = np.array([*FLOATS, *rng.normal(size=20) * 100])
    if dtype.kind == "complex":
        real = np.array([*map(complex, real, rng.permutation(real))])
    with np.errstate(all="ignore"):
        return real.astype(dtype.dtype)


def is_exact(text: str, names: tuple[str, ...], kinds: tuple[ta.DType, ...]) -> bool:
    try:
        steps = typed(parse(text, names, ("o",)), kinds).steps
    except (TypeError, ValueError, ta.NotSupportedError):
        return False
    return all(_plans.is_exact(step, steps) for step in steps)


@pytest.mark.parametrize(("one", "other"), PAIRS)
async def test_exact_functions(executors: Executors, one: str, other: str) -> None:
    pairs = [*itertools.product(special(one), special(other))]
    x, y = (
        np.array(each, name.dtype)
        for each, name in zip(zip(*pairs, strict=True), map(ta.DType, (one, other)), strict=True)
    )
    kinds = ta.DType(one), ta.DType(other)
    texts: list[str] = []
    for name, function in FUNCTIONS.items():
        given = {1: "x", 2: "x, y", 3: "y != y, x, x"}[function.arity]
        # C lacks such a number, and NumPy has another one in vectors than after them.
        is_undefined = name == "uint32" and kinds[0].is_inexact
        if not is_undefined and is_exact(f"o = {name}({given})", ("x", "y"), kinds):
            texts.append(f"{name}({given})")
    outputs = [f"o{number}" for number in range(len(texts))]
    text = "; ".join(f"{out} = {each}" for out, each in zip(outputs, texts, strict=True))
    assert len(texts) >= 8
    await executors.compare(jit.elementwise(text, inputs=("x", "y"), outputs=outputs), x, y)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("whole", ["int8", "int32", "int64", "uint64"])
async def test_a_number_is_converted_to_an_integer_and_back(
    executors: Executors, dtype: str, whole: str
) -> None:
    """A compiler took `trunc` for both, so there were -0.0, NaN and fractions."""
    with np.errstate(over="ignore"):
        x = np.array([-0.5, 0.5, -0.0, np.nan, np.inf, -np.inf, 1e300, -1e30, 3e9, -2.5, 7.9] * 7).astype(
            dtype
        )
    wide = ["float32", "float64"]
    texts = [f"{name}({whole}(x))" for name in wide] + [f"{whole}({name}(x)) * y" for name in wide]
    texts += [f"where(y > 0, {whole}(x), 0) * {name}(1)" for name in wide]
    outputs = [f"o{number}" for number in range(len(texts))]
    text = "; ".join(f"{out} = {each}" for out, each in zip(outputs, texts, strict=True))
    y = np.where(np.arange(len(x)) % 2, 1.0, -1.0)
    await executors.compare(jit.elementwise(text, inputs=("x", "y"), outputs=outputs), x, y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
async def test_the_larger_one_of_two_zeros(executors: Executors, dtype: str) -> None:
    """NumPy's `fmax` finds either in vectors, and after them the other one."""
    texts = [
        f"{name}({given})"
        for name in ("fmax", "fmin", "maximum", "minimum")
        for given in ("x, y", "y, x", "x, x[0]", "y[0], x")
    ]
    outputs = [f"o{number}" for number in range(len(texts))]
    text = "; ".join(f"{out} = {each}" for out, each in zip(outputs, texts, strict=True))
    ask = jit.elementwise(text, inputs=("x", "y"), outputs=outputs)
    zeros = np.array([0.0, -0.0, 1.0, 0.0, np.nan] * 9).astype(ta.DType(dtype).dtype)
    for count in (1, 3, 8, 13, 33):
        await executors.compare(ask, zeros[:count], -zeros[:count])


async def test_sums_of_numbers_that_become_whole(executors: Executors) -> None:
    x = np.tile(np.array([-0.5, 0.25, -0.75, 0.5]), 50)
    rows = Reduction(
        "w = 1 / float64(int32(x)); out = w + sum(w)", inputs=["x"], precision=None, operation="test.rows"
    )

    async def of_rows(given: ta.AccelRef) -> ta.AccelRef:
        return await executors.device.ask(rows.compute(given, axis=1))

    (made,) = await executors.compare(of_rows, x.reshape(2, 100))
    assert (made == np.inf).all()
    for reduce in ("mean", "sum"):
        await executors.compare(
            partial(jit.reduction("float64(int32(x))", reduce), axis=0), x.reshape(100, 2)
        )


@pytest.mark.parametrize(
    "text", ["e = exp(x); s = sum(e); y = e / s / sum(x * e)", "e = exp(x); s = sum(e); y = e / sum(e / s)"]
)
async def test_rows_that_reduce_again_after_a_sum_of_their_own_operand(
    executors: Executors, text: str
) -> None:
    rows = Reduction(text, inputs=["x"], precision=None, operation="test.rows")

    async def of_rows(given: ta.AccelRef) -> ta.AccelRef:
        return await executors.device.ask(rows.compute(given, axis=1))

    async def in_place(given: ta.AccelRef) -> ta.AccelRef:
        there = await given.copy()
        return await executors.device.ask(rows.compute(there, axis=1, out=there))

    x = np.random.default_rng(3).random((5, 40))
    e = np.exp(x)
    by = e.sum(1) * (x * e).sum(1) if "x * e" in text else np.ones(5)
    for mode in ("never", "always"):
        for compute in (of_rows, in_place):
            (made,) = await executors.run(mode, compute, x)
            np.testing.assert_allclose(made, e / by[:, None], rtol=1e-12)


async def test_a_kernel_converts_a_number_to_an_integer(executors: Executors) -> None:
    source = 'extern "C" __global__ void cut(double* x) { x[threadIdx.x] = (double)(int)x[threadIdx.x]; }'
    cut = jit.Kernel("cut", source, parameters={"x": jit.updates("float64")}, grid=1, block=8)
    x = await executors.device.put(np.array([-0.5, 0.5, -0.0, -1.5, 2.5, -0.9, 3.0, -3.0]))
    (made,) = await cut(x)
    assert same_bits(await made.to_host(), np.array([0.0, 0.0, 0.0, -1.0, 2.0, 0.0, 3.0, -3.0]))


async def test_a_step_of_life(executors: Executors) -> None:
    step, by_numpy, _ = programs.life()
    cells = (np.random.default_rng(1).random((programs.SIDE, programs.SIDE)) < 0.3).astype(np.uint8)
    (made,) = await executors.compare(step, cells, shape=cells.shape)
    np.testing.assert_array_equal(made, by_numpy(cells))


async def test_a_step_of_a_flow_and_of_a_cloth(executors: Executors) -> None:
    rng = np.random.default_rng(2)
    flow, by_numpy, _ = programs.boltzmann()
    f = [weight * (1 + 0.01 * rng.normal(size=(programs.LATTICE,) * 2)) for weight in programs.WEIGHTS]
    made = await executors.compare(flow, *f, shape=f[0].shape)
    assert all(map(same_bits, made, by_numpy(*f)))
    verlet, _ = programs.cloth()
    places = [rng.normal(size=(programs.CLOTH,) * 2) for _ in range(6)]
    await executors.compare(verlet, *places, shape=places[0].shape)


LAYOUTS: dict[str, tuple[str, list[Array]]] = {
    "transposed": ("x - y * 2", [np.arange(60.0).reshape(6, 10).T, np.arange(60.0).reshape(10, 6)]),
    "strided": ("x * y", [np.arange(300.0)[::3], np.arange(100, 0, -1.0)[::-1]]),
    "broadcast": ("x + y", [np.arange(7.0)[:, None], np.arange(33.0)[None, :]]),
    "short rows": ("x + y", [np.arange(300.0).reshape(100, 3), np.arange(3.0)]),
    "three axes": ("x + 2 * y", [np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2), np.ones((1, 2, 1))]),
    "no axes": ("x + y", [np.array(2.0), np.array(3.0)]),
    "one element": ("x + y", [np.ones((1, 1)), np.ones((1, 1))]),
}


@pytest.mark.parametrize("name", LAYOUTS)
async def test_layouts(executors: Executors, name: str) -> None:
    text, arrays = LAYOUTS[name]
    await executors.compare(jit.elementwise(text, inputs=("x", "y")), *arrays)


LOADS = {
    "wrapped": "x[(i(0) - 3) % 9, (i(1) + k) % 20]",
    "clipped": "x[clip(i(0) + 2, 0, 8), clip(i(1) - k, 0, 19)]",
    "only below": "x[i(0), maximum(i(1) - k, 0)]",
    "beyond": "x[i(0) + 5, i(1) + k]",
    "from the end": "x[i(0) - 5, -i(1) - 1] + k",
    "transposed": "x[i(1) % 9, i(0) * 2 + k]",
    "along the first axis": "x[(i(1) + k) % 9, 3]",
    "a range": "sum(x[i(0), j] + k for j in range(i(1)))",
    "a window": "sum(x[i(0), (i(1) + d + k) % 20] for d in range(-2, 3))",
    "a loop": "s = 0.0 * k\nfor n in range(9):\n    s += x[n, i(1)]\n    if s > 400:\n        break\no = s",
    "a choice by place": "where((i(1) >= 2) & (i(1) + k < 20), x[i(0), i(1) - 2], -1.0)",
}


@pytest.mark.parametrize("shift", [1, -7, 40, 2**62])
@pytest.mark.parametrize("name", LOADS)
async def test_loads(executors: Executors, name: str, shift: int) -> None:
    ask = jit.elementwise(LOADS[name], inputs=("x", "k"))
    x = np.arange(180.0).reshape(9, 20)
    if shift > 40 and "%" not in LOADS[name]:
        # A sum that wraps around is the same with both, and no index that anyone means.
        shift = 41

    async def shifted(given: ta.AccelRef) -> Any:
        return await ask(given, shift, shape=(9, 20))

    await executors.compare(shifted, x)


async def test_an_index_out_of_range(executors: Executors) -> None:
    x, told = np.arange(10.0).reshape(2, 5), list[str]()
    for mode in ("never", "always"):
        executors.choose(mode)
        given = [await executors.device.put(each) for each in (x, np.array([0, 4, -6, 3, 12]))]
        with pytest.raises(ta.OutOfRangeError) as caught:
            await ta.arrays.take(*given, axis=1)
        assert (caught.value.index, caught.value.axis, caught.value.length) == (-6, 1, 5)
        told.append(str(caught.value))
    assert told[0] == told[1]
    places = np.array([[4, -5], [0, -1]])
    (made,) = await executors.compare(partial(ta.arrays.take, axis=1), x, places)
    np.testing.assert_array_equal(made, np.take(x, places, 1))


@pytest.mark.parametrize("reduce", ["set", "add", "multiply", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "int16", "float16"])
async def test_values_at_places_in_order(executors: Executors, reduce: Any, dtype: str) -> None:
    rng = np.random.default_rng(3)
    places, values = rng.integers(-7, 7, 200), rng.normal(size=200).astype(dtype)

    async def scatter(into: ta.AccelRef, index: ta.AccelRef, value: ta.AccelRef) -> ta.AccelRef:
        return await ta.arrays.scatter(into, index, value, reduce=reduce)

    await executors.compare(scatter, np.ones(7, dtype), places, values)
    executors.choose("always")
    into, index, value = [await executors.device.put(each) for each in (np.ones(6, dtype), places, values)]
    with pytest.raises(ta.OutOfRangeError, match="is outside axis 0"):
        await scatter(into, index, value)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_value_that_all_elements_share_is_added_once_for_each(
    executors: Executors, count: int
) -> None:
    async def scatter(into: ta.AccelRef, index: ta.AccelRef, value: ta.AccelRef) -> ta.AccelRef:
        shared = [ta.arrays.broadcast_to(each, (count,)) for each in (index, value)]
        return await ta.arrays.scatter(into, *shared, reduce="add")

    (made,) = await executors.compare(scatter, np.zeros(2), np.ones(1, np.int64), np.full(1, 5.0))
    np.testing.assert_array_equal(made, [0, 5.0 * count])


@pytest.mark.parametrize("name", ["bool", "int8", "int32", "uint64", "float16", "float32", "float64"])
async def test_reductions_of_conditions(executors: Executors, name: str) -> None:
    """A compiler made wrong code of vectors whose elements had other sizes than their sums."""
    for count in (5, 64, 300, 1000):
        x = (np.arange(count) % 3).astype(name)
        executors.choose("always")
        given, before = await executors.device.put(x), _compiler.counts.compiled
        assert await (await ta.arrays.count_nonzero(given)).to_host() == np.count_nonzero(x)
        found = await ta.jit.reduction("where(x > 1, 3, 1)", "sum")(given)
        assert await found.to_host() == np.where(x > 1, 3, 1).sum()
        assert _compiler.counts.compiled == before + 2


async def test_two_threads_make_the_same_bits(executors: Executors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "usable_cores", lambda: 3)
    monkeypatch.setattr(_plans.NUMPY, "started", 3)
    monkeypatch.setattr(_plans, "_SHARE", 1)
    x, parts = np.random.default_rng(4).normal(size=(101, 37)), list[int]()
    run = _plans.run_split

    def counted(entry: Any, data: bytes, count: int, number: int) -> bool:
        parts.append(number)
        return run(entry, data, count, number)

    monkeypatch.setattr(_plans, "run_split", counted)
    ask = jit.elementwise("exp(y) + x[(i(0) + 1) % 101, i(1)]", inputs=("x", "y"))
    (shared,) = await executors.run("always", ask, x, x)
    monkeypatch.setattr(_plans, "_SHARE", 1 << 40)
    (alone,) = await executors.run("always", ask, x, x)
    assert same_bits(shared, alone)
    assert parts == [3, 0]


async def test_vectors_of_any_width_make_the_same_bits(executors: Executors) -> None:
    found = _compiler.compiler()
    assert found is not None
    if "avx512f" not in " ".join(_compiler.machine()):
        pytest.skip("the processor has no AVX-512")
    names, x = ("exp", "log", "sin", "cos", "tanh", "log1p", "expm1"), np.geomspace(1e-9, 300, 203)
    text = (
        "; ".join(f"o{n} = {name}(x)" for n, name in enumerate(names))
        + "; p = x ** y; q = x * y % 1.5 + sqrt(x)"
    )
    outputs = [*(f"o{n}" for n in range(len(names))), "p", "q"]
    kept: list[tuple[_plans.LoopPlan, bytes]] = []
    run = _plans.LoopPlan.run

    def noted(plan: _plans.LoopPlan, entry: Any, data: bytes, **named: Any) -> bool:
        kept.append((plan, data))
        return run(plan, entry, data, **named)

    executors.monkeypatch.setattr(_plans.LoopPlan, "run", noted)
    executors.choose("always")
    for dtype in ("float64", "float32"):
        given = [await executors.device.put(each.astype(dtype)) for each in (x, x[::-1])]
        made = await jit.elementwise(text, inputs=("x", "y"), outputs=outputs)(*given)
        wide = [await each.to_host() for each in made]
        plan, data = kept[-1]
        assert plan.text is not None
        for option in ("-mno-avx512f", "-fno-tree-vectorize"):
            for each in made:
                await each.fill(0)
            entry = _compiler.load(found.compile(plan.text(), (option,)))
            assert entry(data, 0, plan.count) == 0
            for name, each, want in zip(outputs, made, wide, strict=True):
                assert same_bits(await each.to_host(), want), f"{name} of {dtype} with {option}"


async def test_a_costly_expression_is_compiled_in_the_background(executors: Executors, fresh: Any) -> None:
    executors.choose("auto")
    executors.monkeypatch.setattr(_plans, "_WORTH", 4 * 1000 * 8 * 3)
    ask, x = jit.elementwise("x * 2.0 + 1.0", inputs=("x",)), np.arange(1000.0)
    given, before = await executors.device.put(x), attrs.evolve(_compiler.counts)
    for _ in range(3):
        np.testing.assert_array_equal(await (await ask(given)).to_host(), x * 2 + 1)
    assert (_compiler.counts.kernels, _compiler.counts.compiled) == (before.kernels, before.compiled)
    with trio.fail_after(60):
        while _compiler.counts.kernels == before.kernels:
            await trio.sleep(0.01)
            np.testing.assert_array_equal(await (await ask(given)).to_host(), x * 2 + 1)
    np.testing.assert_array_equal(await (await ask(given)).to_host(), x * 2 + 1)
    assert _compiler.counts.compiled > before.compiled
    assert _compiler.counts.kernels == before.kernels + 1
    assert _compiler.counts.by_numpy > before.by_numpy


@pytest.mark.parametrize("text", ["exp(x)", "exp(x) + sin(x)", "exp(x[i(0)])", "tan(x) + tan(2 * x)"])
async def test_the_expression_decides_which_executor_runs(executors: Executors, text: str) -> None:
    executors.choose("auto")
    before = _compiler.counts.compiled
    shape: dict[str, Any] = {"shape": (9,)} if "[" in text else {}
    await jit.elementwise(text, inputs=("x",))(await executors.device.put(np.ones(9)), **shape)
    assert _compiler.counts.compiled - before == (text in {"exp(x) + sin(x)", "exp(x[i(0)])"})


def test_the_head_of_a_source_has_the_called_functions() -> None:
    assert "own::" not in _text.head()
    assert "LOOPED(sin, double" in _text.head(frozenset({"sin"}))
    assert "LOOPED(cos, double" not in _text.head(frozenset({"sin"}))
