"""Expressions without a device: the accepted syntax, its types, and its values by NumPy."""

from __future__ import annotations

import contextlib
import io
import math
import tokenize
from typing import Any

import numpy as np
import pytest
import scipy.special
from expression_cases import DTYPES, NUMPY_NAMES, Case, cases, data
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from trio_accel import NotSupportedError
from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import (
    FUNCTIONS,
    Argument,
    TypedExpression,
    Weak,
    evaluate,
    pack_scalars,
    parse,
    parse_reduction,
    typed,
    unpack_scalars,
)

REFUSED = {
    "x.real": (1, "an attribute"),
    "y = x; z = y.__class__": (12, "an attribute"),
    "x[0:5]": (3, "a slice (a:b)"),
    "__import__('os')": (1, "no function '__import__'"),
    "eval(x)": (1, "no function 'eval'"),
    "x + open(y)": (5, "no function 'open'"),
    "(lambda: x)()": (1, "only functions of the table"),
    "sin(x).real": (1, "an attribute"),
    "sin": (1, "write sin(...)"),
    "sqt(x)": (1, "there is sqrt"),
    "sin(x, y)": (1, "takes 1 arguments, got 2"),
    "sin(x=y)": (5, "by their places"),
    "sin(*x)": (5, "a starred value"),
    "x + 'a' * 9": (5, "a string"),
    "b'a'": (1, "a byte string"),
    "f'{x}'": (1, "an f-string"),
    "None": (1, "'None'"),
    "...": (1, "'...'"),
    "x + 99999999999999999999": (5, "64 bits"),
    "[x]": (1, "a list"),
    "(x, y)": (1, "a tuple"),
    "{x}": (1, "a set"),
    "[x for x in y]": (1, "a list"),
    "(y := x)": (2, ":="),
    "x @ y": (1, "operator '@'"),
    "x is y": (1, "operator 'is'"),
    "x in y": (1, "operator 'in'"),
    "a = b = x": (1, "this assignment"),
    "a, b = x": (1, "this assignment"),
    "a.b = x": (1, "this assignment"),
    "sin = x": (1, "cannot be assigned"),
    "pi = x": (1, "cannot be assigned"),
    "import os": (1, "'Import'"),
    "def f(): pass": (1, "'def'"),
    "y = x; x + 1": (8, "no name is given"),
    "x @= y": (1, "@"),
    "x +": (4, "invalid syntax"),
    "x if y": (1, "else"),
    "é + x.b": (5, "an attribute"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_refused_expression_names_its_place(text: str) -> None:
    column, reason = REFUSED[text]
    with pytest.raises(ValueError, match="line 1") as caught:
        parse(text)
    message = str(caught.value)
    assert reason.lower() in message.lower()
    assert f"column {column}\n    {text}\n    {' ' * (column - 1)}^" in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "\0",
        "(" * 5000 + "x" + ")" * 5000,
        "-" * 3000 + "x",
        "x" + " + x" * 3000,
        "x" + " and x" * 900,
        "x < " * 900 + "x",
        "x\n  y",
        "1" * 9000,
        "x" * 20_000,
        "y = " * 500 + "x",
    ],
    ids=lambda text: text[:9],
)
def test_long_sources_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="xyab.,;:=()[]{}+-*/%<>!&|^~@'\"\\ \n0123456789eEjJ_#", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert found.outputs


@pytest.mark.parametrize(
    "text",
    [
        "a if c else b",
        "e * (a if c > d else b if f else g) - a",
        "t = a if c else b; y = t + d; z = e if t else c",
        "y = a < b < c if d and not e else -f",
        "x[j if m else k, n + i(0)] if p <= q else r[s]",
        "x -= a if c else b",
        "where(maximum(b, a if d else c), e, f)",
        "(a\n if c else\n b) + d",
        "b if é else a",
        "abs(c if b else a) ** d // (f if e else g)",
    ],
)
def test_arguments_are_in_the_order_of_the_text(text: str) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = [token.string for token in tokens if token.type == tokenize.NAME]
    found = parse(text)
    others = {"if", "else", "and", "not", "i", "abs", "where", "maximum", "t", "y", "z"}
    assert found.inputs == tuple(dict.fromkeys(word for word in words if word not in others))


def test_names_are_found_in_their_order() -> None:
    found = parse("d = x - mean; y = d * d / x")
    assert (found.inputs, found.outputs) == (("x", "mean"), ("y",))
    found = parse("s = sin(x)\nc = cos(x)\n")
    assert (found.inputs, found.outputs) == (("x",), ("s", "c"))
    assert parse("x = x + y; x = x * 2").outputs == ("x",)
    assert parse("x += y").inputs == ("x", "y")
    assert parse("a * pi + b").outputs == ("out",)
    assert parse("t = a; y = t", None, ("t", "y")).outputs == ("t", "y")
    assert parse("b - a", ("a", "b")).inputs == ("a", "b")
    for arguments in (
        ("a - b", ("a",)),
        ("a", ("a", "b")),
        ("a", ("a", "a")),
        ("y = a", None, ("z",)),
        ("y = a", None, ()),
    ):
        with pytest.raises(ValueError, match=r"inputs|output"):
            parse(*arguments)


def assert_same(got: Any, want: Any, what: str) -> None:
    """Require equal elements; NumPy's testing does not know bfloat16's NaN."""
    assert got.dtype == want.dtype, what
    if got.dtype == DType.bfloat16:
        got, want = got.astype(float), want.astype(float)
    np.testing.assert_array_equal(got, want, err_msg=what)


def types_of(function: str, dtype: DType) -> TypedExpression | None:
    """A function of arrays with one dtype; None if there is none."""
    expression = parse(f"{function}({', '.join('xyz'[: FUNCTIONS[function].arity])})")
    try:
        return typed(expression, (dtype,) * len(expression.inputs))
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("name", DTYPES)
def test_functions_have_the_types_and_values_of_numpy(name: str) -> None:
    dtype, count = DType(name), 0
    for function in sorted(NUMPY_NAMES):
        found = types_of(function, dtype)
        if found is None:
            continue
        count += 1
        arrays = [data(dtype, 50, seed) for seed in range(FUNCTIONS[function].arity)]
        if FUNCTIONS[function].name == "power" and dtype.kind == "int":
            arrays[1] &= 15
        with np.errstate(all="ignore"):
            want = np.asarray(getattr(np, function)(*arrays))
        (got,) = evaluate(found, arrays)
        assert got.dtype == found.dtypes[0], function
        if function == "log1p" and dtype.kind == "complex":
            # NumPy's own loses bits: see the next test.
            np.testing.assert_allclose(got, want, rtol=1e-6 if name == "complex64" else 1e-13)
        else:
            assert_same(got, want, function)
    # Missing functions are missing in NumPy too, except for the order of complex numbers.
    assert count >= (30 if dtype.kind in ("complex", "bool") else 55)


def test_log1p_of_small_complex_numbers_keeps_their_real_parts() -> None:
    sizes = 10.0 ** np.arange(-300, 0, 7)
    x = np.concatenate([sizes + 0j, 1j * sizes, -sizes + 2j * sizes, sizes**2 / 2 + 1j * sizes])
    (got,) = evaluate(typed(parse("log1p(x)"), (DType.complex128,)), [x])
    wide = x.astype(np.clongdouble)
    real = np.log1p(wide.real * (2 + wide.real) + wide.imag**2) / 2
    np.testing.assert_allclose(got.real, real.astype(float), rtol=1e-15)
    np.testing.assert_allclose(got.imag, np.arctan2(wide.imag, 1 + wide.real).astype(float), rtol=1e-15)


def test_whole_powers_with_negative_exponents_are_rounded_towards_zero() -> None:
    base, exponent = np.meshgrid(np.array([-3, -2, -1, 0, 1, 2, 100]), np.array([-4, -3, -1, 0, 1, 6]))
    (got,) = evaluate(typed(parse("x ** y"), (DType.int64, DType.int64)), [base, exponent])
    # Python's fractions divide by zero.
    want = [
        0 if not b and e < 0 else int(float(b) ** e) for b, e in zip(base.flat, exponent.flat, strict=True)
    ]
    np.testing.assert_array_equal(got.ravel(), want)


# Of an infinite quotient and a finite number NumPy's is NaN.
_INFINITE_QUOTIENT = Case(
    "(x // y // 2) * 1", ("x", "y"), (Argument(DType.float32, True),) * 2, (np.ones(5, "f"), np.zeros(5, "f"))
)


@settings(max_examples=60, deadline=None)
@given(cases())
@example(_INFINITE_QUOTIENT)
def test_random_expressions_match_python_and_numpy(case: Case) -> None:
    want = None
    with contextlib.suppress(OverflowError):
        want = case.by_numpy()
    pairs = zip(case.arguments, case.values, strict=True)
    numbers = {number: value for number, (argument, value) in enumerate(pairs) if not argument.is_array}
    try:
        found = typed(parse(case.text, case.names), tuple(argument.kind for argument in case.arguments))
        found.check_held(numbers, case.names)
    except ValueError:
        # A number of Python's that a dtype does not hold; NumPy compares such numbers, and knows larger ones.
        reject()
    assert want is not None
    (got,) = evaluate(found, case.values)
    assert got.dtype == want.dtype == found.dtypes[0]
    if want.dtype.kind == "c":
        # NumPy multiplies complex numbers with and without a fused step, by how many there are.
        np.testing.assert_allclose(np.broadcast_to(got, want.shape), want, 64 * np.finfo(want.dtype).eps)
        return
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


def result(text: str, *kinds: Any) -> DType:
    (dtype,) = typed(parse(text), kinds).dtypes
    return dtype


def test_python_numbers_are_weak() -> None:
    assert result("x * 2.5", DType.float32) is DType.float32
    assert result("x + 1", DType.uint8) is DType.uint8
    assert result("x * 0.5", DType.int8) is DType.float64
    assert result("x * 1j", DType.float32) is DType.complex64
    assert result("a * x", Weak.float, DType.float16) is DType.float16
    assert result("(a + 1) / 2 * x", Weak.int, DType.float16) is DType.float16
    assert result("a / b", Weak.int, Weak.int) is DType.float64
    assert result("sin(a) * x", Weak.float, DType.float32) is DType.float64
    assert result("where(x > 0, x, 0.0)", DType.float32) is DType.float32
    assert result("x if x > 0 else 0", DType.int16) is DType.int16
    # A comparison of two of them is not a Python number.
    assert result("x + (2 < 3)", DType.float32) is DType.float32
    assert result("x + (2 < 3) * 1", DType.float32) is DType.float64
    assert result("clip(x, 0, 10)", DType.int16) is DType.int16
    # NumPy itself would take float32 for the first of these.
    assert result("x * 2.5", DType.bfloat16) is DType.bfloat16
    assert result("x + y", DType.bfloat16, DType.float16) is DType.float32


def held(text: str, values: dict[int, complex], *kinds: Any) -> TypedExpression:
    expression = parse(text)
    found = typed(expression, kinds)
    found.check_held(values, expression.inputs)
    return found


def test_numbers_computed_from_constants_are_refused_as_written_ones_are() -> None:
    for text in ("x + (1 - 2)", "x * (100 * 3 - 1)", "x + (2 ** 9 % -3 * 1)"):
        with pytest.raises(ValueError, match=r"is outside 0 to 255, which uint8 holds.*column"):
            typed(parse(text), (DType.uint8,))
    for value in (1, 258):
        with pytest.raises(ValueError, match=r"a number that is made of Python .*-1|256 is outside 0 to 255"):
            held("(a - 2) * x", {0: value}, Weak.int, DType.uint8)
    (got,) = evaluate(held("(a - 2) * x", {0: 3}, Weak.int, DType.uint8), [np.int64(3), np.uint8([7])])
    np.testing.assert_array_equal(got, np.uint8([7]), strict=True)
    # Python's integers have any size, those of a device 64 bits.
    with pytest.raises(ValueError, match="64 bits"):
        typed(parse("x * (2 ** 40 * 2 ** 40)"), (DType.float32,))
    with pytest.raises(ValueError, match="which int64 holds"):
        held("x * (a * a)", {1: 1 << 40}, DType.float32, Weak.int)
    with pytest.raises(ValueError, match="divided by zero, in line 1, column 5"):
        typed(parse("x + 3 // 0"), (DType.int32,))
    with pytest.raises(ValueError, match="divided by zero"):
        held("x + 3 // a", {1: 0}, DType.int32, Weak.int)
    with pytest.raises(ValueError, match="64 bits"):
        typed(parse("x + 7 ** 999999999999"), (DType.float32,))


def test_numbers_that_a_dtype_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"300 is outside -128 to 127.*column 5"):
        typed(parse("x + 300"), (DType.int8,))
    with pytest.raises(ValueError, match="64 bits"):
        typed(parse("x + -9223372036854775809"), (DType.float64,))
    with pytest.raises(ValueError, match="-1 is negative, which neither uint64"):
        typed(parse("x * -1"), (DType.uint64,))
    assert typed(parse("a * x"), (Weak.int, DType.int8)).bounds == ((0, DType.int8),)
    assert typed(parse("a * x"), (Weak.int, DType.float32)).bounds == ()
    assert result("x + 18446744073709551615", DType.uint64) is DType.uint64


@pytest.mark.parametrize(
    ("text", "kinds", "column", "reason"),
    [
        ("x < y", (DType.complex64, DType.complex64), 1, "less does not take complex64, complex64"),
        ("1 + x & y", (DType.float32, DType.int8), 1, "bitwise_and does not take float32, int8"),
        ("y = 2 * -x", (DType.bool,), 9, "negative does not take bool"),
        ("float32(x)", (DType.complex64,), 1, "real(...)"),
        ("floor(x)", (DType.complex128,), 1, "floor does not take complex128"),
        ("arctan2(x, 1)", (DType.complex128,), 1, "arctan2 does not take"),
        ("x ** -1", (DType.int8,), 6, "power of integers"),
    ],
)
def test_types_that_do_not_fit_are_refused_with_their_place(
    text: str, kinds: tuple[DType, ...], column: int, reason: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=r"line 1") as caught:
        typed(parse(text), kinds)
    assert reason in str(caught.value)
    assert f"column {column}\n" in str(caught.value)


def test_float8_is_not_computed_with() -> None:
    with pytest.raises(NotSupportedError, match="float8_e5m2"):
        typed(parse("x + 1"), (DType.float8_e5m2,))


def test_chains_and_conditions_match_python() -> None:
    x = np.arange(-3.0, 8.0)
    (got,) = evaluate(typed(parse("0 < x < 5 and not x == 2 or x > 6"), (DType.float64,)), [x])
    np.testing.assert_array_equal(got, [(0 < each < 5 and each != 2) or each > 6 for each in x])
    (got,) = evaluate(typed(parse("x if x > 0 else -x if x > -2 else 0"), (DType.float64,)), [x])
    np.testing.assert_array_equal(got, [each if each > 0 else -each if each > -2 else 0 for each in x])
    (got,) = evaluate(typed(parse("-x ** 2 // 3 % 4"), (DType.float64,)), [x])
    np.testing.assert_array_equal(got, [-(each**2) // 3 % 4 for each in x])


REDUCED = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
    "any": np.any,
    "all": np.all,
    "argmin": np.argmin,
    "argmax": np.argmax,
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("reduce", REDUCED)
def test_reductions_have_the_types_and_values_of_numpy(reduce: str, name: str) -> None:
    dtype = DType(name)
    x = data(dtype, 3 * 4 * 5, 7).reshape(3, 4, 5)
    try:
        found = typed(parse_reduction("x", reduce), (dtype,))
    except TypeError:
        assert dtype.kind == "complex"
        assert reduce in ("min", "max", "argmin", "argmax")
        return
    for axes in [(0,), (2,)] if "arg" in reduce else [(0, 1, 2), (1,), (0, 2), ()]:
        (got,) = evaluate(found, [x], shape=x.shape, axes=axes)
        got = got.squeeze(axes)
        wide = {"float32": float, "complex64": complex, "float16": float, "bfloat16": float}.get(name)
        with np.errstate(all="ignore"):
            source = x.astype(wide) if wide and reduce in ("sum", "prod") else x
            axis: Any = axes[0] if "arg" in reduce else axes
            want = np.asarray(REDUCED[reduce](source, axis=axis))
            narrow = REDUCED[reduce](x, axis=axis)
            want = want.astype(narrow.dtype)
        assert_same(got, want, f"{reduce} {name} {axes}")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 13])
def test_an_expression_combines_any_number_of_elements(count: int) -> None:
    reduction = parse_reduction("x * x", "a + b", identity=0, post="sqrt(a) + n")
    found = typed(reduction, (DType.float64,))
    x = np.arange(2.0 * count).reshape(2, count)
    (got,) = evaluate(found, [x], shape=x.shape, axes=(1,))
    np.testing.assert_allclose(got[:, 0], np.sqrt((x * x).sum(axis=1)) + count, rtol=1e-15)


def test_a_combination_keeps_the_type_that_it_ends_in() -> None:
    found = typed(parse_reduction("x", "a + b * 1.0"), (DType.int32,))
    assert [step.dtype for step in found.steps if step.function == "fold"] == [DType.float64]
    assert found.dtypes == (DType.float64,)
    found = typed(parse_reduction("x", "a + b * 1.0", dtype=DType.float32), (DType.int32,))
    assert found.dtypes == (DType.float32,)
    with pytest.raises(ValueError, match=r"reduce: an attribute"):
        parse_reduction("x", "a.b")
    for reduce, identity, post in (
        ("a + c", None, None),
        ("median", None, None),
        ("sum", 1, None),
        ("sum", None, "a + b"),
    ):
        with pytest.raises(ValueError, match=r"reduce|identity|post"):
            parse_reduction("x", reduce, identity=identity, post=post)
    with pytest.raises(ValueError, match="map: must have exactly one result"):
        parse_reduction("a = x; b = y", "sum")


def test_scalars_are_bytes_of_their_types() -> None:
    values: list[complex] = [True, -(2**63), 2**64 - 1, 1.5, 2 - 3j, math.nan]
    dtypes = [DType.bool, DType.int64, DType.uint64, DType.float16, DType.complex128, DType.float32]
    packed = pack_scalars(values, dtypes)
    assert len(packed) == 16 * len(values)
    assert [repr(each.item()) for each in unpack_scalars(packed, dtypes)] == [repr(each) for each in values]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("function", ["erf", "erfc"])
def test_error_functions_match_scipy(function: str, name: str) -> None:
    dtype = DType(name)
    found = typed(parse(f"{function}(x)"), (dtype,))
    assert found.dtypes == (dtype,)
    x = data(dtype, 50, 1)
    (got,) = evaluate(found, [x])
    want = getattr(scipy.special, function)(x.astype(np.float32 if x.itemsize < 4 else dtype.dtype))
    assert_same(got, want.astype(dtype.dtype), function)
    with pytest.raises(TypeError, match=function):
        typed(parse(f"{function}(x)"), (DType.complex64,))


@pytest.mark.parametrize("name", [name for name, each in FUNCTIONS.items() if each.rule == "ufunc"])
def test_each_function_has_values_by_numpy(name: str) -> None:
    """A function with the types of another one's ufunc is not computed by that ufunc."""
    function = FUNCTIONS[name]
    dtype = DType.float64 if "float" in function.kinds else DType.int64
    given = [np.array([1, 2], dtype.dtype)] * function.arity
    text = f"{name}({', '.join('abc'[: function.arity])})"
    (made,) = evaluate(typed(parse(text), (dtype,) * function.arity), given)
    assert made.shape == (2,)
