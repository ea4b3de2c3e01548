"""One language, several executors: each finds the dtypes (NEP 50) and the values that NumPy finds.

The table is NumPy's: the results of each function of two arguments at special values, for each pair of types;
and each cast. Intended differences are in `EXCEPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND

import trio_accel as ta
from trio_accel import graphs, jit
from trio_accel.backends.base.expressions import FUNCTIONS
from trio_accel.expressions import Reduction

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
WEAK: dict[str, complex] = {"int": 3, "float": -2.5, "complex": 1.5 - 2j}
FUNCTIONS_OF_TWO = [
    name
    for name, function in FUNCTIONS.items()
    if function.arity == 2 and isinstance(getattr(np, name, None), np.ufunc)
]

EXCEPTIONS: dict[str, str] = {
    "bfloat16": "a Python float does not make it float32, as it makes no other floating dtype wider",
    "complex order": "complex numbers have no order: NumPy's, by the real part first, is refused",
    "nextafter": "from one zero to the other it is the other one, where NumPy's of float16 stays",
    "power": "integers have powers with negative exponents, rounded towards zero, where NumPy raises",
    "floor_divide": "an infinite quotient is what the standard says, where NumPy has NaN",
}

# Correctly rounded by all; the others differ in the last bits.
SIGNED_ZEROS = {
    "add",
    "subtract",
    "multiply",
    "divide",
    "true_divide",
    "copysign",
    "fmod",
    "nextafter",
    "cast",
}
EXACT = SIGNED_ZEROS | {"fmax", "fmin", "maximum", "minimum"}
TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "complex64": 1e-5}

Numbers: TypeAlias = "npt.NDArray[Any]"
Executor: TypeAlias = "Callable[[Sequence[str], Any, Any], Awaitable[list[ta.AccelRef]]]"


def special(name: str) -> Numbers:
    """Error-prone arguments of a function."""
    dtype = ta.DType(name)
    if dtype.kind == "bool":
        return np.array([False, True])
    if dtype.kind in ("int", "uint"):
        limits = np.iinfo(dtype.dtype)
        bits = 8 * dtype.itemsize
        small = [0, 1, 2, 7, bits - 1, bits, *([-1, -7] if dtype.kind == "int" else [])]
        return np.array([*small, limits.min, limits.max, limits.max - 1], dtype.dtype)
    real = [0.0, -0.0, 1.0, -1.0, 2.5, -7.0, np.inf, -np.inf, np.nan, 6e4, 1e-7]
    if dtype.kind == "complex":
        real = [0.0, -0.0, 1.0, -1.0, 2.5 - 1.5j, 1j, -1j, complex(np.inf, -2), complex(1, np.nan), -np.inf]
    return np.array(real).astype(dtype.dtype)


def by_numpy(function: str, x: Numbers, y: Any) -> Numbers | None:
    """The entry of the table; None if it is missing in NumPy, or an exception."""
    if type(y) is float and x.dtype == ta.DType.bfloat16:
        y = np.asarray(y, x.dtype)  # EXCEPTIONS["bfloat16"]
    try:
        with np.errstate(all="ignore"):
            made = np.asarray(getattr(np, function)(x, y))
    except (TypeError, OverflowError):
        return None
    except ValueError:
        # EXCEPTIONS["power"]: where no exponent is negative.
        return np.asarray(getattr(np, function)(x, np.maximum(y, 0)))
    if function == "nextafter":
        np.copyto(made, y, where=x == y, casting="unsafe")  # EXCEPTIONS["nextafter"]
    kinds = {np.asarray(each).dtype.kind for each in (x, y)}
    if "c" in kinds and function in ("fmax", "fmin", "maximum", "minimum", *_ORDER):
        return None  # EXCEPTIONS["complex order"]
    return made


_ORDER = ("greater", "greater_equal", "less", "less_equal")


def differs(function: str, got: Numbers, want: Numbers, x: Numbers, y: Numbers) -> str:
    """The faults of a result; empty if there are none."""
    if got.dtype != want.dtype:
        return f"{got.dtype} in place of {want.dtype}"
    chosen = np.ones(want.shape, bool)
    if function in ("power", "pow") and want.dtype.kind == "i":
        chosen = ~(y < 0)  # EXCEPTIONS["power"]
    if function == "floor_divide" and want.dtype.kind not in "biu":
        wide = [each.astype(float) for each in (x, y)]
        chosen = ~np.isinf(wide[0]) & ~np.isinf(wide[1]) & (wide[1] != 0)  # EXCEPTIONS["floor_divide"]
    kind = complex if want.dtype.kind == "c" else want.dtype if want.dtype.kind in "biu" else float
    found, wanted = got[chosen].astype(kind), want[chosen].astype(kind)
    if want.dtype.kind in "biu" or (function in EXACT and kind is float):
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        if function in SIGNED_ZEROS and kind is float:
            same &= (np.signbit(found) == np.signbit(wanted)) | np.isnan(wanted)
    else:
        tolerance = TOLERANCES.get(want.dtype.name, 1e-13)
        with np.errstate(all="ignore"):
            same = np.isclose(found, wanted, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True)
    if same.all():
        return ""
    place = int(np.argmin(same))
    return f"{found[place]!r} in place of {wanted[place]!r} of {x[chosen][place]!r} and {y[chosen][place]!r}"


async def elementwise(texts: Sequence[str], x: Any, y: Any) -> list[ta.AccelRef]:
    text = "; ".join(f"o{number} = {each}" for number, each in enumerate(texts))
    names = [f"o{number}" for number in range(len(texts))]
    return [*await jit.elementwise(text, inputs=("x", "y"), outputs=names)(x, y)]


async def in_a_graph(texts: Sequence[str], x: Any, y: Any) -> list[ta.AccelRef]:
    async def step(*arrays: ta.AccelRef) -> list[ta.AccelRef]:
        return await elementwise(texts, arrays[0], arrays[1] if len(arrays) > 1 else y)

    arrays = [each for each in (x, y) if isinstance(each, ta.AccelRef)]
    with await graphs.capture(x.device, step, *arrays) as graph:
        return await graph(*arrays)


async def by_reductions(texts: Sequence[str], x: Any, y: Any) -> list[ta.AccelRef]:
    """Each row has one element, which is its largest."""
    rows = [each.reshape(-1, 1) if isinstance(each, ta.AccelRef) else each for each in (x, y)]
    return [await jit.reduction(text, "max", inputs=("x", "y"))(*rows, axis=1) for text in texts]


async def by_rows(texts: Sequence[str], x: Any, y: Any) -> list[ta.AccelRef]:
    """A reduced condition chooses between twice the same."""
    rows = [each.reshape(-1, 1) if isinstance(each, ta.AccelRef) else each for each in (x, y)]
    made: list[ta.AccelRef] = []
    for text in texts:
        whole = f"t = any(x != x); out = where(t, {text}, {text})"
        function = Reduction(whole, inputs=["x", "y"], precision=None, operation="test.rows")
        found = await x.device.ask(function.compute(*rows, axis=1))
        made.append(found.reshape(-1))
    return made


def _loaded(texts: Sequence[str], y: Any) -> tuple[list[str], str]:
    """The sources with other names, and their values: elements selected by the index k of a loop."""
    names = {"x": "u", "y": "v"} if isinstance(y, ta.AccelRef) else {"x": "u"}
    loads = "; ".join(f"{name} = {of}[k]" for of, name in names.items())
    return [re.sub(r"\b[xy]\b", lambda found: names.get(found[0], found[0]), text) for text in texts], loads


async def in_a_loop(texts: Sequence[str], x: Any, y: Any) -> list[ta.AccelRef]:
    """Each element runs the loop for its own index; before it, there is another element's value."""
    inside, loads = _loaded(texts, y)
    lines = ["k = 0 * i(0)", loads, *[f"o{n} = {text}" for n, text in enumerate(inside)]]
    lines += ["for j in range(i(0), i(0) + 1):", f"    {loads.replace('[k]', '[j]')}"]
    lines += [f"    o{n} = {text}" for n, text in enumerate(inside)]
    inputs = ("x", "y") if any(re.search(r"\by\b", line) for line in lines) else ("x",)
    function = jit.elementwise("\n".join(lines), inputs=inputs, outputs=[f"o{n}" for n in range(len(texts))])
    return [*await x.device.ask(function.compute(*(x, y)[: len(inputs)], shape=x.shape))]


async def over_ranges(texts: Sequence[str], x: Any, y: Any) -> list[ta.AccelRef]:
    """The largest element of a range of one."""
    loads = {"x": "x[k]", "y": "y[k]" if isinstance(y, ta.AccelRef) else "y"}
    values = [re.sub(r"\b[xy]\b", lambda found: loads[found[0]], text) for text in texts]
    lines = [f"o{n} = max({value} for k in range(i(0), i(0) + 1))" for n, value in enumerate(values)]
    inputs = ("x", "y") if any(re.search(r"\by\b", line) for line in lines) else ("x",)
    function = jit.elementwise("\n".join(lines), inputs=inputs, outputs=[f"o{n}" for n in range(len(texts))])
    return [*await x.device.ask(function.compute(*(x, y)[: len(inputs)], shape=x.shape))]


EXECUTORS: list[Executor] = [elementwise, in_a_graph, by_reductions, by_rows, in_a_loop, over_ranges]
SINGLE = (by_reductions, by_rows)
# On a processor each of these is also compiled.
COMPILED = (in_a_loop, over_ranges)


def others_of(name: str, executor: Executor) -> list[str]:
    """Types of the second argument: a few where each kernel is compiled, and others for each executor."""
    others = [*DTYPES, *WEAK]
    if executor is over_ranges:
        others = [other for other in others if not other.startswith("complex")]
    if BACKEND == "cpu" and executor not in COMPILED:
        return others
    start = DTYPES.index(name) + 4 * EXECUTORS.index(executor)
    count = 1 if executor in (*SINGLE, *COMPILED) else 3
    return [others[(start + 5 * step) % len(others)] for step in range(count)]


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", DTYPES)
async def test_dtypes_and_special_values_match_numpy(
    device: ta.Device, name: str, executor: Executor
) -> None:
    wrong: list[str] = []
    one, compared = special(name), 0
    if executor is over_ranges and one.dtype.kind == "c":
        pytest.skip("complex numbers have no order")
    for other in others_of(name, executor):
        many = np.repeat(one, 1 if other in WEAK else len(special(other)))
        y: Any = WEAK[other] if other in WEAK else np.tile(special(other), len(one))
        table = {function: by_numpy(function, many, y) for function in FUNCTIONS_OF_TWO}
        wanted = {function: want for function, want in table.items() if want is not None}
        if executor in (by_reductions, over_ranges):
            wanted = {function: want for function, want in wanted.items() if want.dtype.kind != "c"}
        if executor is over_ranges:
            # The largest of booleans is an integer.
            wanted = {function: want for function, want in wanted.items() if want.dtype.kind != "b"}
        if BACKEND != "cpu" and executor in SINGLE:
            wanted = dict([*wanted.items()][DTYPES.index(name) % 5 :: 5])
        if not wanted:
            continue
        given = await device.put(many), y if other in WEAK else await device.put(y)
        made = await executor([f"{function}(x, y)" for function in wanted], *given)
        for (function, want), got in zip(wanted.items(), made, strict=True):
            compared += 1
            fault = differs(function, await got.to_host(), want, many, np.broadcast_to(y, many.shape))
            if fault:
                wrong.append(f"{function} of {name} and {other}: {fault}")
    assert not wrong, f"{len(wrong)} of {compared}:\n" + "\n".join(wrong)
    assert compared


def cast_by_numpy(x: Numbers, to: ta.DType) -> tuple[Numbers, npt.NDArray[np.bool_]] | None:
    """A cast, and where C defines it; None where a part of a complex number would be lost."""
    if x.dtype.kind == "c" and to.kind not in ("complex", "bool"):
        return None
    defined = np.ones(x.shape, bool)
    if to.kind in ("int", "uint") and x.dtype.kind not in "biu":
        limits, wide = np.iinfo(to.dtype), x.astype(float)
        defined = (wide > float(limits.min) - 1) & (wide < float(limits.max))
    with np.errstate(all="ignore"):
        return x.astype(to.dtype), defined


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", DTYPES)
async def test_casts_match_numpy(device: ta.Device, name: str, executor: Executor) -> None:
    x, wrong = special(name), list[str]()
    table = {other: cast_by_numpy(x, ta.DType(other)) for other in DTYPES}
    wanted = {other: found for other, found in table.items() if found is not None}
    if executor in (by_reductions, over_ranges):
        wanted = {other: found for other, found in wanted.items() if not other.startswith("complex")}
    if executor is over_ranges:
        wanted.pop("bool")
    if BACKEND != "cpu" and executor in SINGLE:
        wanted = dict([*wanted.items()][DTYPES.index(name) % 4 :: 4])
    texts = [f"where(y, {other}(x), {other}(x))" for other in wanted]
    if not texts:
        return
    made = await executor(texts, await device.put(x), await device.put(np.ones(len(x), bool)))
    for (other, (want, defined)), ref in zip(wanted.items(), made, strict=True):
        got = await ref.to_host()
        fault = differs("cast", got[defined], want[defined], x[defined], x[defined])
        if fault:
            wrong.append(f"{other} of {name}: {fault}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("name", ["complex64", "complex128"])
async def test_complex_powers_match_numpy_at_all_infinities(device: ta.Device, name: str) -> None:
    parts = [0.0, -0.0, 1.0, -1.0, 2.5, -3.0, np.inf, -np.inf, np.nan]
    numbers = np.array([complex(real, imaginary) for real in parts for imaginary in parts], name)
    x, y = np.repeat(numbers, len(numbers)), np.tile(numbers, len(numbers))
    with np.errstate(all="ignore"):
        wanted = np.power(x, y)
    got = await (await ta.arrays.pow(await device.put(x), await device.put(y))).to_host()
    # A part much smaller than the other one has the other one's rounding.
    sizes = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
    for part in ("real", "imag"):
        found, want = getattr(got, part), getattr(wanted, part)
        is_finite = np.isfinite(want)
        np.testing.assert_array_equal(found[~is_finite], want[~is_finite])
        limits = TOLERANCES.get(name, 1e-12) * sizes[is_finite] + 1e-9
        assert (np.abs(found[is_finite] - want[is_finite]) <= limits).all()
