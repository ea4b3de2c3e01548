"""Derived gradients of expressions: random ones, loads and loops, against central differences."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import evaluate, parse, typed, unrolled
from trio_accel.derivatives._derive import gradient

a: Any = ta.arrays
F = DType.float64
SHAPE = (3, 4)
LARGEST = (1 << 63) - 1

SAFE = (
    "sin({})", "cos({})", "tanh({})", "exp(0.3 * {})", "log(1.5 + {0} * {0})", "sqrt(0.5 + {0} * {0})",
    "arctan({})", "expm1(0.3 * {})", "log1p({0} * {0})", "erf({})", "1 / (2 + {0} * {0})", "({})**2",
    "({0} * {0} + 1) ** 1.5", "arcsinh({})", "square({})", "cbrt({0} * {0} + 1)", "-({})", "sinh(0.5 * {})",
    "arcsin(0.9 * sin({}))", "erfc({})", "lgamma(1.5 + {0} * {0})", "bessel_i0({})", "erfcx(abs({}))",
)  # fmt: skip
PAIRS = (
    "({} + {})",
    "({} - {})",
    "({} * {})",
    "({} / (2 + abs({})))",
    "hypot({}, 1 + abs({}))",
    "arctan2({}, 2 + abs({}))",
    "where({} > 0.3, {}, 0.5)",
    "logaddexp({}, {})",
    "clip({}, -0.7, 0.7) * {}",
    "((1.1 + abs({})) ** sin({}))",
    "maximum({}, {})",
    "minimum({}, {})",
)


def trees(*leaves: str) -> st.SearchStrategy[str]:
    """Expressions of names."""

    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        ones = st.tuples(st.sampled_from(SAFE), inner).map(lambda pair: pair[0].format(pair[1]))
        twos = st.tuples(st.sampled_from(PAIRS), inner, inner).map(lambda two: two[0].format(*two[1:]))
        return ones | twos

    return st.recursive(st.sampled_from(leaves), more, max_leaves=5)


def value(text: str, arrays: dict[str, Any], weights: Any, changed: dict[str, Any]) -> float:
    """Compute the weighted sum of an expression by NumPy."""
    made = arrays | changed
    parsed = parse(text, tuple(made))
    (found,) = evaluate(typed(parsed, (F,) * len(made)), list(made.values()))
    return float((np.broadcast_to(found, SHAPE) * weights).sum())


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=trees("x", "y", "0.7"), seed=st.integers(0, 1000))
def test_random_expressions(text: str, seed: int) -> None:
    """The gradient by each argument is the central difference, away from kinks."""
    rng = np.random.default_rng(seed)
    arrays = {"x": rng.uniform(-1.5, 1.5, SHAPE), "y": rng.uniform(-1.5, 1.5, SHAPE)}
    text = f"out = {text} + 0 * x * y"
    weights = rng.uniform(-1, 1, SHAPE)
    program = typed(parse(text, ("x", "y")), (F, F))
    for place, name in enumerate(arrays):
        made = gradient(program, 2, place, has_result=False)
        derived = attrs.evolve(program, steps=made.steps, outputs=made.outputs)
        (slope,) = evaluate(derived, [*arrays.values(), weights])
        slope = np.broadcast_to(slope, SHAPE)
        # One of the elements may lie on a kink: they are compared one by one, and at two distances.
        for at in np.ndindex(*SHAPE):
            direction = np.zeros(SHAPE)
            direction[at] = 1.0
            differences = [
                (
                    value(text, arrays, weights, {name: arrays[name] + h * direction})
                    - value(text, arrays, weights, {name: arrays[name] - h * direction})
                )
                / (2 * h)
                for h in (1e-4, 1e-5)
            ]
            if abs(differences[0] - differences[1]) < 1e-5 * (1 + abs(differences[1])):
                assert abs(slope[at] - differences[1]) <= 1e-4 * (1 + abs(differences[1])), (text, at)


LOOPS = {
    "a sum that changes": "t = x\nfor k in range(0, 5):\n    t = t + 0.1 * sin(t * y)\nout = t",
    "two variables": (
        "t = x\nu = y * 0\nfor k in range(0, 2 + (i(1) % 3)):\n    u = u + 0.5 * sin(t + x)\n"
        "    t = 0.8 * t + 0.3 * tanh(u + y)\nout = t * u"
    ),
    "a break": (
        "t = x\nu = y * 0\nfor k in range(0, 6):\n    u = u + 0.5 * sin(t)\n    t = 1.3 * t + 0.3 * y\n"
        "    if abs(t) > 1.4: break\n    u = u + t\nout = t * u"
    ),
    "a loop in a loop": (
        "t = x\nfor k in range(3):\n    u = t\n    for j in range(2):\n        u = u * cos(u * y)\n"
        "    t = t + 0.2 * u\n"
        "out = t"
    ),
    "swapped variables": (
        "t = x\nu = y\nfor k in range(3):\n    v = t\n    t = u * 1.1\n    u = v * u\nout = t + u"
    ),
    "a loop that does not run": "t = x\nfor k in range(5, 2):\n    t = t * y\nout = t * t + y",
    "the largest bounds of a loop that does not run": (
        f"t = x\nfor k in range({LARGEST}, -{LARGEST}):\n    t = t * y\nout = t * t + y"
    ),
    "bounds whose difference wraps around": (
        f"t = x\nfor k in range({LARGEST}, i(1) - 9):\n    t = t * y\nout = t * t + y"
    ),
}
LOADS = {
    "neighbours": "out = x[i(0), i(1) - 1] * w + x[i(0), i(1) + 1] ** 2",
    "life with wrap": "out = w * x[(i(0) + 1) % 3, (i(1) - 1) % 4] * x[i(0), i(1)]",
    "clamped": "out = x[maximum(i(0) - 1, 0), minimum(i(1) + 1, 3)] * w",
    "far outside": "out = x[i(0) + 7, i(1) - 9] * w",
    "a range": "out = sum(x[i(0), k] * x[2 - i(0), k] * w for k in range(i(1), i(1) + 3))",
    "a range of elements": "out = w * sum(x[k, 1] ** 2 for k in range(0, i(1)))",
    "in a loop that changes": (
        "t = w\nfor k in range(3):\n    t = t * x[k, i(1)] + sin(t)\n    if t > 2: break\nout = t"
    ),
    "in two loops": (
        "t = 0 * w\nfor k in range(2):\n    for j in range(3):\n"
        "        t = t * 0.5 + x[k, j] * sin(x[j, k] * w)\nout = t"
    ),
    "an index from the end": "out = w * x[i(0), -1 - i(1)]",
    "the last axis": "out = w * x[i(-2), i(-1)] + sum(x[i(-2), k] for k in range(i(-1)))",
    "a column": "out = w * x[i(0), 0] * x[i(0), i(1)]",
    "one element": "out = w * x[2, 1]",
}
# Loads with gathers for gradients. `n` and `m` are the extents.
WRAPS = {
    "by numbers": "out = w * x[(i(0) + 1) % 3, (i(1) - 1) % 4] * x[(1 + i(0)) % 3, i(1)]",
    "by arguments": "out = w * x[(i(0) - (-1)) % n, (i(1) - (2)) % m] ** 2",
    "by the extent before": "out = w * x[(i(0) + n - 1) % n, (m - 1 + i(1)) % m] * x[(i(0) + 2) % 3, i(1)]",
    "axes from the end": "out = w * x[(i(-2) + 1) % 3, (i(-1) + 1) % m]",
    "more than the extent": "out = w * x[(i(0) + 7) % n, (i(1) - 10) % m]",
    "clipped": "out = w * x[clip(i(0) + 1, 0, n - 1), clip(i(1) - 2, 0, m - 1)] ** 2",
    "in a loop": (
        "out = -x[i(0), i(1)]\nfor a in range(-1, 2):\n    for b in range(-1, 2):\n"
        "        out = out + w * sin(x[(i(0) + a) % 3, (i(1) + b) % m])"
    ),
    "in a range": "out = w * sum(x[(i(0) + a) % n, i(1)] for a in range(-1, 2))",
}


async def slopes(
    device: ta.Device, kernel: Any, hosts: dict[str, Any], weights: Any
) -> tuple[list[Any], list[float], list[Any]]:
    """Return gradients, the differences along a direction, and the directions."""
    on = {name: await device.put(host) for name, host in hosts.items()}

    async def total(changed: dict[str, Any]) -> float:
        given_now = on | {name: await device.put(host) for name, host in changed.items()}
        return float((await (await kernel(**given_now)).to_host() * weights).sum())

    w = await device.put(weights)
    found = await ta.grad(lambda p: a.sum(kernel(**p) * w))(on)
    made, wanted, directions = [], [], []
    for place, (name, host) in enumerate(hosts.items()):
        direction = np.random.default_rng(place).uniform(-1, 1, host.shape)
        sides = [await total({name: host + h * direction}) for h in (1e-6, -1e-6)]
        made.append(await found[name].to_host())
        wanted.append((sides[0] - sides[1]) / 2e-6)
        directions.append(direction)
    return made, wanted, directions


@pytest.mark.parametrize("name", LOOPS)
async def test_loops(device: ta.Device, name: str) -> None:
    rng = np.random.default_rng(3)
    hosts = {"x": rng.uniform(0.3, 0.9, SHAPE), "y": rng.uniform(-0.9, 0.9, (4,))}
    kernel = ta.jit.elementwise(LOOPS[name], inputs=["x", "y"], outputs=None)
    for made, want, direction in zip(
        *await slopes(device, kernel, hosts, rng.uniform(-1, 1, SHAPE)), strict=True
    ):
        np.testing.assert_allclose((made * direction).sum(), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOADS)
async def test_loads(device: ta.Device, name: str) -> None:
    rng = np.random.default_rng(4)
    hosts = {
        "x": rng.uniform(0.3, 0.9, SHAPE if "two loops" not in name else (4, 4)),
        "w": rng.uniform(-0.9, 0.9, SHAPE),
    }
    kernel = ta.jit.elementwise(LOADS[name], inputs=["x", "w"])
    for made, want, direction in zip(
        *await slopes(device, kernel, hosts, rng.uniform(-1, 1, SHAPE)), strict=True
    ):
        np.testing.assert_allclose((made * direction).sum(), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", WRAPS)
async def test_gradients_of_shifted_loads_are_gathers(
    device: ta.Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gather adds in one order on each backend, so that a run after a loss has the same bits."""
    scattered: list[Any] = []
    monkeypatch.setattr("trio_accel.gradients._elementwise.is_ordered", scattered.append)
    rng = np.random.default_rng(4)
    hosts = {"x": rng.uniform(0.3, 0.9, SHAPE), "w": rng.uniform(-0.9, 0.9, SHAPE)}
    # Each input must be read.
    text = f"{WRAPS[name]}\nout = out + 0 * n * m"
    made = ta.jit.elementwise(text, inputs=["x", "w", "n", "m"], outputs="out")

    def kernel(x: Any, w: Any) -> Any:
        return made(x, w, *SHAPE)

    for slope, want, direction in zip(
        *await slopes(device, kernel, hosts, rng.uniform(-1, 1, SHAPE)), strict=True
    ):
        np.testing.assert_allclose((slope * direction).sum(), want, rtol=1e-6, atol=1e-9)
    assert not scattered


@pytest.mark.parametrize(
    "index", ["minimum(i(0) + 1, n - 1) % n", "(i(0) + 1) % (n + 1)", "i(0) + n - 1", "int64(i(0) + 1.5)"]
)
async def test_indices_other_than_shifts(device: ta.Device, index: str) -> None:
    """They look like shifts, and have other values at an edge."""
    rng = np.random.default_rng(4)
    hosts = {"x": rng.uniform(0.3, 0.9, 5), "w": rng.uniform(-0.9, 0.9, 5)}
    made = ta.jit.elementwise(f"x[{index}] * w + 0 * n", inputs=["x", "w", "n"])

    def kernel(x: Any, w: Any) -> Any:
        return made(x, w, 5)

    for slope, want, direction in zip(
        *await slopes(device, kernel, hosts, rng.uniform(-1, 1, 5)), strict=True
    ):
        np.testing.assert_allclose((slope * direction).sum(), want, rtol=1e-6, atol=1e-9)


def test_stores_in_a_loop_are_not_merged() -> None:
    """Each store changes an element again, and a load after it has another value."""
    text = "t = w\nfor k in range(3):\n    t = t + x[0 * k] + x[0 * k + 1]\nout = t"
    loop = typed(parse(text, ("x", "w")), (F, F))
    first, second = [number for number, step in enumerate(loop.steps) if step.function == "load"]
    index = loop.steps[second].steps
    store = attrs.evolve(loop.steps[second], function="store_add", steps=(first, *index))
    steps = tuple(store if number == second else step for number, step in enumerate(loop.steps))
    for program, stores in ((loop, 0), (attrs.evolve(loop, steps=steps), 3)):
        made = [step.function for step in unrolled(program).steps]
        assert "loop" not in made
        assert made.count("store_add") == stores
        assert made.count("load") == (3 if stores else 2)


async def test_a_gather_by_indices_of_an_array(device: ta.Device) -> None:
    x, j, w = np.arange(9.0), np.array([3, 0, 0, 8, -1, 20]), np.arange(6.0) + 1
    kernel = ta.jit.elementwise("out = x[j] ** 2 * w", inputs=["x", "j", "w"])
    on = [await device.put(one) for one in (x, j, w)]
    of_x, of_w = await ta.grad(lambda x, w: a.sum(kernel(x, on[1], w)), argnums=(0, 1))(on[0], on[2])
    want = np.zeros(9)
    np.add.at(want, np.clip(j, -9, 8), 2 * x[np.clip(j, -9, 8)] * w)
    np.testing.assert_allclose(await of_x.to_host(), want)
    np.testing.assert_allclose(await of_w.to_host(), x[np.clip(j, -9, 8)] ** 2)


async def test_a_loop_with_a_data_dependent_length_is_refused_for_loads(device: ta.Device) -> None:
    kernel = ta.jit.elementwise("sum(x[k] for k in range(0, n))", inputs=["x", "n"], name="partial")
    x, n = await device.put(np.arange(4.0)), await device.put(np.array([1, 3]))
    with pytest.raises(
        ta.NotSupportedError, match=r"jit.partial has no gradient by x: elements or another loop"
    ):
        await ta.grad(lambda x: a.sum(kernel(x, n)))(x)


async def test_a_refused_gradient_in_a_gradient_leaves_no_warning(device: ta.Device) -> None:
    kernel = ta.jit.elementwise("sum(x[k] for k in range(0, n))", inputs=["x", "n"], name="partial")
    x, n = await device.put(np.arange(4.0)), await device.put(np.array([1, 3]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ta.NotSupportedError, match=r"jit\.partial has no gradient by x"):
                await ta.grad(lambda x: a.sum(ta.grad(lambda x: a.sum(kernel(x, n)))(x)))(x)
            gc.collect()
    assert not [one.message for one in warned if "never awaited" in str(one.message)]


@pytest.mark.parametrize("text", ["x * sin(x)", "exp(-x * x)", "maximum(x, 0.5) ** 3", LOOPS["a break"]])
async def test_second_derivatives(device: ta.Device, text: str) -> None:
    """A gradient in a function is composed of calls, so it has a gradient itself."""
    hosts = {"x": np.linspace(0.2, 0.9, 5)} | ({"y": np.linspace(-0.5, 0.4, 5)} if "y" in text else {})
    kernel = ta.jit.elementwise(text, inputs=list(hosts))
    on = {name: await device.put(host) for name, host in hosts.items()}

    def inner(x: Any) -> Any:
        return a.sum(kernel(**on | {"x": x}))

    second = await (await ta.grad(lambda x: a.sum(ta.grad(inner)(x)))(on["x"])).to_host()
    first = ta.grad(inner)
    moved = [await (await first(await device.put(hosts["x"] + h))).to_host() for h in (1e-6, -1e-6)]
    np.testing.assert_allclose(second, (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-7)


async def test_ties_and_bounds(device: ta.Device) -> None:
    """Equal arrays share the gradient; at a constant bound it is 0, as in PyTorch."""
    host = np.array([0.0, 1.0, -1.0, 0.5, np.nan])
    x, y = await device.put(host), await device.put(np.array([0.0, 1.0, 1.0, 0.5, 0.0]))
    for f, want in (
        (lambda x: a.sum(a.maximum(x, y)), [0.5, 0.5, 0.0, 0.5, 0.0]),
        (lambda x: a.sum(a.minimum(x, y)), [0.5, 0.5, 1.0, 0.5, 0.0]),
        (lambda x: a.sum(a.maximum(x, 0)), [0.0, 1.0, 0.0, 1.0, 0.0]),
        (lambda x: a.sum(a.maximum(x, 0.5)), [0.0, 1.0, 0.0, 0.0, 0.0]),
        (lambda x: a.sum(a.clip(x, 0, 1)), [0.0, 0.0, 0.0, 1.0, 0.0]),
        (lambda x: a.sum(a.abs(x)), [0.0, 1.0, -1.0, 1.0, np.nan]),
        (lambda x: a.sum(ta.nn.relu(x)), [0.0, 1.0, 0.0, 1.0, 1.0]),
    ):
        np.testing.assert_array_equal(await (await ta.grad(f)(x)).to_host(), want)
    big = await device.put(np.array([3.0, 1.0, 3.0]))
    np.testing.assert_array_equal(await (await ta.grad(a.max)(big)).to_host(), [0.5, 0.0, 0.5])


@pytest.mark.parametrize("name", ["prod", "nanprod"])
@pytest.mark.parametrize("axis", [None, 0, 1])
async def test_products_with_zeros(device: ta.Device, name: str, axis: int | None) -> None:
    """Rows and columns with no zero, one, two and three; each slope is the product of the others."""
    host = np.array([[2.0, 0.0, 3.0], [0.0, 5.0, 0.0], [7.0, 0.0, 4.0], [0.0, 0.0, 0.0], [2.0, -0.0, 3.0]])
    for part in (host[:1], host[:2], host):
        x = await device.put(part)
        found = await (await ta.grad(lambda x: a.sum(getattr(a, name)(x, axis=axis)))(x)).to_host()
        want = np.empty_like(part)
        for row, column in np.ndindex(part.shape):
            others = part.copy()
            others[row, column] = 1.0
            line = (slice(None), slice(None)) if axis is None else (slice(None), column)
            want[row, column] = np.prod(others[row] if axis == 1 else others[line])
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_the_gradient_has_the_dtype_of_the_array(device: ta.Device, dtype: str) -> None:
    x = await (await device.put(np.linspace(0.1, 2.0, 7))).cast(dtype)
    kernel = ta.jit.elementwise("sqrt(x) * sin(0.5 * x) + maximum(x, 1)")
    found = await ta.grad(lambda x: a.sum(kernel(x)))(x)
    assert found.dtype == dtype
    host = np.asarray(await (await x.cast("float64")).to_host())
    want = 0.5 / np.sqrt(host) * np.sin(host / 2) + np.sqrt(host) * np.cos(host / 2) / 2 + (host > 1)
    eps = {"float32": 1e-6, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    np.testing.assert_allclose(await (await found.cast("float64")).to_host(), want, rtol=eps)


@pytest.mark.parametrize("name", ["neighbours", "a range", "in a loop that changes", "far outside"])
async def test_a_gpu_adds_by_sorted_places(
    device: ta.Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Atomic additions would have other bits in each run."""
    rng = np.random.default_rng(4)
    hosts = {"x": rng.uniform(0.3, 0.9, SHAPE), "w": rng.uniform(-0.9, 0.9, SHAPE)}
    kernel = ta.jit.elementwise(LOADS[name], inputs=["x", "w"])
    weights = rng.uniform(-1, 1, SHAPE)
    by_scatter, _, _ = await slopes(device, kernel, hosts, weights)
    for module in ("_scatter", "_elementwise", "_nn_rules"):
        monkeypatch.setattr(f"trio_accel.gradients.{module}.is_ordered", lambda g: False)
    by_sort, _, _ = await slopes(device, kernel, hosts, weights)
    for one, other in zip(by_scatter, by_sort, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13)


async def test_rules_of_gathers_by_sorted_places(device: ta.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await device.put(np.random.default_rng(1).uniform(-1, 1, (4, 3)))
    w = await device.put(np.random.default_rng(2).uniform(-1, 1, (2, 2, 3)))
    rows = np.array([[3, 0], [0, -1]])
    on = await device.put(rows % 4)
    functions = [
        lambda x: a.sum(a.take(x, rows, axis=0) * w),
        lambda x: a.sum(a.take_along_axis(x, np.array([[2, 0, 2], [1, -1, 1], [0, 0, 0]]), axis=0) ** 2),
        lambda x: a.sum(a.gather_nd(x, (on,)) * w),
        lambda x: a.sum(ta.nn.embedding(on, x, 3) * w),
        lambda x: a.sum(a.gather_nd(x, (on, on % 3)) ** 3),
    ]
    before = [await (await ta.grad(f)(x)).to_host() for f in functions]
    for module in ("_scatter", "_elementwise", "_nn_rules"):
        monkeypatch.setattr(f"trio_accel.gradients.{module}.is_ordered", lambda g: False)
    for f, want in zip(functions, before, strict=True):
        np.testing.assert_allclose(await (await ta.grad(f)(x)).to_host(), want, rtol=1e-13)


@given(function=st.sampled_from(["+", "-", "*"]), number=st.integers(-LARGEST, LARGEST))
def test_integers_of_unrolled_loops_wrap_around_as_in_numpy(function: str, number: int) -> None:
    text = f"t = x\nfor k in range(-2, 3):\n    t = t + x * (k {function} ({number}))\nout = t"
    program = unrolled(typed(parse(text, ("x",)), (F,)))
    made = gradient(program, 1, 0, has_result=False)
    derived = attrs.evolve(program, steps=made.steps, outputs=made.outputs)
    (slope,) = evaluate(derived, [np.ones(1), np.ones(1)])
    numpy_function: Any = {"+": np.add, "-": np.subtract, "*": np.multiply}[function]
    factors = numpy_function(np.arange(-2, 3), np.int64(number))
    np.testing.assert_allclose(slope, 1 + factors.astype(float).sum(), rtol=1e-12, atol=1e4)
