"""Bounded loops: compared with Python, bit for bit, on every backend; and the refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from by_python import by_python
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel import graphs
from trio_accel.expressions import Elementwise, Reduction

pytestmark = pytest.mark.conformance

Array = npt.NDArray[Any]
inline = pytest.mark.parametrize("isolation", ["inline"])
MANDELBROT = """
x = 0.0
y = 0.0
n = 0
for k in range(limit):
    t = x * x - y * y + a
    y = 2 * x * y + b
    x = t
    if x * x + y * y > 4:
        break
    n += 1
"""


async def both(device: ta.Device, text: str, outputs: tuple[str, ...], **arguments: Any) -> list[Array]:
    """Compute a text on a device, and require that Python finds the same for each element."""
    function = ta.jit.elementwise(text, inputs=tuple(arguments), outputs=outputs)
    given = [await device.put(each) if isinstance(each, np.ndarray) else each for each in arguments.values()]
    made = [await each.to_host() for each in await device.ask(function.compute(*given))]
    want = by_python(text, arguments, outputs)
    for number, got in enumerate(made):
        flat = np.array([each[number] for each in want], got.dtype)
        np.testing.assert_array_equal(got.reshape(-1), flat, err_msg=text, strict=True)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_the_mandelbrot_set(device: ta.Device, dtype: str) -> None:
    b, a = np.meshgrid(np.linspace(-1.2, 1.2, 20), np.linspace(-2, 0.6, 30))
    (n,) = await both(device, MANDELBROT, ("n",), a=a.astype(dtype), b=b.astype(dtype), limit=40)
    assert n.dtype == np.int64
    assert n.min() == 0
    assert n.max() == 40
    # A product of complex numbers may be rounded once or twice, and a count may be another one then.
    text = "z = 0.0\nn = 0\nfor k in range(limit):\n    z = z * z + c\n    if abs(z) > 2: break\n    n += 1"
    c = await device.put((a + 1j * b).astype("complex64" if dtype == "float32" else "complex128"))
    by_complex = await (await ta.jit.elementwise(text, inputs=("limit", "c"))(40, c)).to_host()
    assert (by_complex == n).mean() > 0.98


numbers = st.sampled_from(["a", "b", "x", "y", "1.5", "0.5", "k * a", "t"])
conditions = st.sampled_from(["a < b", "a > y", "n % 3 == 1", "k > 2", "x < k", "n > 6 or a > b", "t < 1"])


@st.composite
def bodies(draw: st.DrawFn, depth: int, indent: str) -> list[str]:  # noqa: C901  # one kind after another
    """Statements of a loop with the index k: values are carried, and assigned under conditions; it breaks."""

    def value() -> str:
        operator = draw(st.sampled_from(["+", "-", "*"]))
        return f"{draw(numbers)} {operator} {draw(numbers)}".replace("k *", f"k{depth} *")

    def condition() -> str:
        return draw(conditions).replace("k", f"k{depth}")

    lines = [f"{indent}t = {draw(st.sampled_from(['a - b', 'minimum(a, y)', 'x * 0.5']))}"]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["asside", "add", "if", "else", "break", "found", "for"]))
        if kind == "asside":
            lines.append(f"{indent}{draw(st.sampled_from('ab'))} = {value()}")
        elif kind == "add":
            lines.append(
                f"{indent}n += {draw(st.sampled_from(['1', 'k', 'm', 'n'])).replace('k', f'k{depth}')}"
            )
        elif kind in ("if", "else"):
            lines += [f"{indent}if {condition()}:", f"{indent}    a = {value()}", f"{indent}    n -= 1"]
            if kind == "else":
                lines += [f"{indent}else:", f"{indent}    b = {value()}"]
        elif kind == "break":
            lines += [f"{indent}if {condition()}:", f"{indent}    break"]
        elif kind == "found":
            lines += [f"{indent}if {condition()}:", f"{indent}    n = k{depth}", f"{indent}    break"]
        elif depth < 3:
            over = draw(st.sampled_from(["3", "m", "n % 4", "k, 4"])).replace("k", f"k{depth}")
            lines += [f"{indent}for k{depth + 1} in range({over}):"]
            lines += draw(bodies(depth + 1, indent + "    "))
    return lines


@settings(max_examples=150 if BACKEND == "cpu" else 6, deadline=None)
@given(bodies(1, "    "), st.sampled_from(["m", "6", "n, 5"]), st.integers(0, 99))
async def test_random_loops_match_python(body: list[str], over: str, seed: int) -> None:
    text = "\n".join(["a = x * 1.0", "b = y + x", "n = m + 0", f"for k1 in range({over}):", *body])
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(2, 12))
    async with ta.open_system("loops") as system, system.open_device(BACKEND, options=INLINE) as device:
        await both(device, text, ("a", "b", "n"), x=x, y=y, m=draw.integers(-1, 6, 12))


@inline
async def test_values_are_carried(device: ta.Device) -> None:
    n = np.arange(12)
    # All values of an iteration are taken before any is changed.
    text = "a = 0\nb = 1\nfor k in range(n):\n    c = a\n    a = b\n    b = c + b"
    (fibonacci,) = await both(device, text, ("a",), n=n)
    assert fibonacci[-1] == 89
    # An argument that the loop changes has its own value in the first iteration.
    x = np.linspace(0.5, 3, 12)
    root = """
    for k in range(20):
        step = (x - s / x) * 0.5
        x = x - step
        if abs(step) < 1e-12:
            break
    """
    (found,) = await both(device, root, ("x",), x=x, s=2.0)
    np.testing.assert_allclose(found, np.sqrt(2), rtol=1e-15)
    gcd = "for k in range(100):\n    if b == 0: break\n    r = a % b\n    a = b\n    b = r"
    (found,) = await both(device, gcd, ("a",), a=n * 6, b=n[::-1] * 4)
    np.testing.assert_array_equal(found, np.gcd(n * 6, n[::-1] * 4))
    # Only scalars, and a shape.
    one = await device.ask(ta.jit.elementwise(text, outputs=("a",)).compute(10))
    assert (await one[0].to_host()) == 55


@inline
async def test_conditions_have_two_sides(device: ta.Device) -> None:
    x = np.arange(-6, 7) * 0.5
    sides = """
    low = 0.0
    side = 0
    t = x
    if x < 0:
        t = -x
        side = -1
        low = t * t
    elif x > 2:
        t = x + 1
        side = 1
    else:
        low = t - 3
    out = t + low
    """
    await both(device, sides, ("out", "side"), x=x)
    inside = """
    y = x * 0
    for k in range(4):
        if x > k:
            if y < 3:
                y = y + x
                if k > 1:
                    break
    """
    await both(device, inside, ("y",), x=x)


@inline
async def test_types_of_loop_variables(device: ta.Device) -> None:
    x = await device.put(np.full(3, 0.1, np.float32))
    for text, dtype in (
        ("s = 0\nfor k in range(3): s += x", "float32"),
        ("s = 0\nfor k in range(3): s += 0.5", "float64"),
        ("s = 0\nfor k in range(3): s += k", "int64"),
        ("s = 0\nfor k in range(3): s = s + (x > k)", "int64"),
        ("s = 0\nfor k in range(3): s = s + x * 1j", "complex64"),
        ("s = 0\nfor k in range(3): s += k\ns = s * x", "float32"),
        ("s = x\nfor k in range(3): s = s * k + 0.5", "float32"),
        ("s = float64(x)\nfor k in range(3): s = x", "float64"),
        ("s = False\nfor k in range(3): s = s or x > k", "bool"),
    ):
        function = ta.jit.elementwise(text)
        made = await device.ask(function.compute(*[x for _ in function.inputs], shape=3))
        assert made.dtype == dtype, text


LATE = "s = int32(x)\nfor k in range(3):\n    s = s + 1\n    if s > x: break\n    s = s * 0.5"
WIDER = {
    "s = float32(x)\nfor k in range(3): s = s + x": "the loop makes float64 of s, which is float32 before it",
    "s = x > 1\nfor k in range(3): s = s + 1": "the loop makes int64 of s, which is bool before it: convert",
    LATE: "float64 of s, which is int32 before it: convert the one or the other, in line 5, column 9",
    "s = int8(x)\nfor k in range(3): s = 300": "300 is outside -128 to 127, which int8 holds, in line 2",
}


@inline
@pytest.mark.parametrize("text", WIDER)
async def test_a_widened_value_is_refused(device: ta.Device, text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        await ta.jit.elementwise(text)(await device.zeros(3))
    assert WIDER[text] in str(caught.value)


REFUSED = {
    "while x < 1: x = x * 2": (1, 1, "a loop needs a bound: for k in range(1000): ... if not"),
    "for k in x: y = k": (1, 10, "a loop is over a range only: for k in range(n)"),
    "for k in range(0, 8, 2): y = k": (1, 10, "range takes one or two integers"),
    "for a, b in range(3): y = a": (1, 5, "a loop has one index"),
    "for sin in range(3): y = 1": (1, 5, "a loop has one index, with a name of its own"),
    "y = 0\nfor k in range(3):\n    continue": (3, 5, "continue is not allowed"),
    "y = 0\nfor k in range(3): y = k\nelse: y = 1": (3, 7, "else of a loop is not allowed"),
    "y = x\nbreak": (2, 1, "break is for loops"),
    "y = x\nif x > 1: break": (2, 11, "break is for loops"),
    "y = x\nfor k in range(3): break": (2, 20, "break is the last statement under a condition"),
    "y = x\nfor k in range(3):\n    if y > 1:\n        break\n        y = 2": (4, 9, "break is the last"),
    "for k in range(3): t = x\ny = t": (2, 5, "'t' has no value behind the loop: give it one before"),
    "for k in range(3): t = x * k": (1, 24, "'t' has no value behind the loop: give it one before"),
    "if x > 1: t = x\ny = t": (1, 11, "'t' needs a value before: the condition may not hold"),
    "y = 0\nfor k in range(3): y = k\nz = y + k": (3, 9, "'k' has no value behind the loop"),
    "y = 0\nfor k in range(3): k = x": (2, 20, "'k' is the index of the loop, and cannot be assigned"),
    "y = x\nfor x in range(3): y = x": (2, 1, "'x' has a value: the index of a loop needs a name"),
    "y = 0\nfor k in range(3):\n    y = x[k]\n    x = y": (2, 1, "the loop assigns 'x', and elements"),
    "y = 0\nif x > 1:\n    for k in range(3): y = k": (3, 5, "a loop under a condition is not allowed"),
    "y = 0\nfor a in range(2):\n for b in range(2):\n  for c in range(2):\n   for d in range(2): y = d": (
        5,
        8,
        "loops are nested in each other at most 3 times",
    ),
    "y = 0\nfor k in range(3): y = k; pass": (2, 27, "'pass' is not allowed"),
    "y = range(3)": (1, 5, "no function 'range' in expressions; a range is for loops and reductions"),
    "y = sum(x)": (1, 5, "sum takes vectors, such as vector(x, y), or a range: sum(x[k] for k in range(n))"),
    "y = sum(x[k] for k in z)": (1, 23, "a loop is over a range only"),
    "y = [x for k in range(3)]": (1, 5, "a list is not allowed"),
    "y = sum(x[k] async for k in range(3))": (1, 24, "'async for' is not allowed: for k in range(n)"),
    "y = sum(x[k] for j in range(2) async for k in range(3))": (1, 42, "'async for' is not allowed"),
    "y = sum(x[k] for k in range(3)) + k[0]; k = 1; z = k[0]": (1, 52, "'k' is not an argument"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_an_unbounded_loop_is_refused_with_its_place(text: str) -> None:
    line, column, reason = REFUSED[text]
    with pytest.raises(ValueError, match=r"in line \d+, column \d+") as caught:
        ta.jit.elementwise(text)
    assert reason in str(caught.value)
    assert f"in line {line}, column {column}\n" in str(caught.value)


# Loads beyond the array, and the result if no iteration makes them, or else the reported index.
CHECKED: dict[str, tuple[str, list[float] | int]] = {
    "an empty range": ("sum(x[5] for k in range(n[i(0)] - 1))", [0, 0, 0]),
    "a range that falls": ("sum(x[5] for k in range(4, n[i(0)]))", [0, 0, 0]),
    "a range of one element": ("sum(x[i(0) + 2] for k in range(n[i(0)]))", [3, 0, 0]),
    "a nested range": ("sum(x[j + 9] for j in range(2) for k in range(j, 0))", [0, 0, 0]),
    "a loop in a loop": ("sum(sum(x[j + 9] for k in range(j, 0)) for j in range(2))", [0, 0, 0]),
    "behind a break": (
        "y = 0.0\nfor k in range(3):\n    if x[k] > 0:\n        break\n    y += x[i(0) + 7]",
        [0, 0, 0],
    ),
    "behind a break of all": (
        "y = 0.0\nfor k in range(3):\n    if k < 5:\n        break\n    y += x[7]",
        [0, 0, 0],
    ),
    "behind the end of any": ("any(x[7 * k] > 0 for k in range(3)) + 0.0", [1, 1, 1]),
    "the last iteration": ("sum(x[3 * k] for k in range(n[i(0)] + 1))", 3),
    "both sides are computed": ("sum(x[7] for k in range(3) if k > 5)", 7),
    "behind the loop": ("y = 0.0\nfor k in range(0):\n    y += x[9]\ny += x[9]", 9),
}


@inline
@pytest.mark.parametrize("name", CHECKED)
async def test_an_index_is_checked_if_an_iteration_runs(device: ta.Device, name: str) -> None:
    text, want = CHECKED[name]
    given = {"x": np.arange(1.0, 4.0)} | ({"n": np.array([1, 0, 0])} if "n[" in text else {})
    function = Elementwise[ta.AccelRef](text, inputs=tuple(given), operation="test.checked", is_checked=True)
    made = function.compute(*[await device.put(each) for each in given.values()], shape=3)
    if isinstance(want, list):
        np.testing.assert_array_equal(await (await device.ask(made)).to_host(), want)
    else:
        with pytest.raises(ta.OutOfRangeError) as caught:
            await device.ask(made)
        assert (caught.value.index, caught.value.axis, caught.value.length) == (want, 0, 3)


@inline
async def test_neighbours_with_loops_are_joined_and_keep_their_bits(device: ta.Device) -> None:
    draw = np.random.default_rng(4)
    x, table = await device.put(draw.normal(size=50)), await device.put(draw.normal(size=9))
    # Names of indices are names that a fused expression gives to values.
    over = ta.jit.elementwise("sum(table[x0] * x for x0 in range(9))")
    loop = ta.jit.elementwise("s = x\nfor t0_0 in range(5):\n    s = s * 0.5 + t0_0\n    if s > 2: break")
    found = set[bytes]()
    for _ in range(8):
        made = await loop(over(table, x) + 1.0)
        found.add((await made.to_host()).tobytes())
    assert len(found) == 1
    first = draw = (await (await over(table, x)).to_host()) + 1.0
    want = by_python(
        "s = x\nfor k in range(5):\n    s = s * 0.5 + k\n    if s > 2: break", {"x": first}, ["s"]
    )
    assert found == {np.array(want)[:, 0].tobytes()}


async def test_loops_in_graphs_in_place_and_in_reductions(device: ta.Device) -> None:
    x = np.linspace(-2, 2, 24).reshape(4, 6)
    polynomial = ta.jit.elementwise("y = 0.0\nfor k in range(4): y = y * x + k")
    on = await device.put(x)

    async def step(x: ta.AccelRef) -> ta.AccelRef:
        return await polynomial(x)

    want = ((0 * x + 1) * x + 2) * x + 3
    with await graphs.capture(device, step, on) as graph:
        np.testing.assert_array_equal(await (await graph(on)).to_host(), want)
    total = ta.jit.reduction("sum(x ** k for k in range(3))", "sum")
    np.testing.assert_allclose(await (await total(on, axis=1)).to_host(), (1 + x + x * x).sum(1), rtol=1e-14)
    rows = Reduction(
        "y = x - max(x); out = sum(y * k for k in range(3))",
        inputs=["x"],
        precision=None,
        operation="test.rows",
    )
    made = await (await device.ask(rows.compute(on, axis=1))).to_host()
    np.testing.assert_array_equal(made, (x - x.max(1, keepdims=True)) * 3)
    await polynomial(on, out=on)
    np.testing.assert_array_equal(await on.to_host(), want)
    with pytest.raises(ValueError, match=r"map: has i\(axis\) or x\[\.\.\.\], which only functions of each"):
        ta.jit.reduction("sum(x[k] for k in range(3))", "sum")


@inline
async def test_a_checked_index_is_checked_in_loops(device: ta.Device) -> None:
    x, n = await device.put(np.arange(5.0)), np.array([0, 5, 3])
    over = Elementwise[ta.AccelRef]("sum(x[k] for k in range(n))", operation="test.over", is_checked=True)
    got = await over(x, await device.put(n))
    assert (await got.to_host()).tolist() == [0, 10, 3]
    with pytest.raises(ta.OutOfRangeError, match="5 is outside axis 0 of x, which has length 5"):
        await (await over(x, await device.put(n + 1))).to_host()
    # Elements after an early end are not read.
    ends = Elementwise[ta.AccelRef](
        "s = 0.0\nfor k in range(99):\n    if k == 5 - n: break\n    s += x[k + n]",
        operation="test.ends",
        is_checked=True,
    )
    assert (await (await ends(n=await device.put(n), x=x)).to_host()).tolist() == [10, 0, 7]


async def test_a_loop_over_more_elements_than_are_computed_at_a_time(device: ta.Device) -> None:
    x = np.random.default_rng(8).normal(size=(300, 1000)).astype(np.float32)
    count = "n = 0\ns = x\nfor k in range(12):\n    s = s * 0.5 + y\n    if s > 1.5: break\n    n += 1"
    y = x[:1] + 1
    got = await (await ta.jit.elementwise(count, outputs=("n",))(await device.put(x), y=await device.put(y)))[
        0
    ].to_host()
    s, n, active = x.copy(), np.zeros(x.shape, np.int64), np.ones(x.shape, bool)
    for _ in range(12):
        s = np.where(active, s * np.float32(0.5) + y, s)
        active &= ~(s > 1.5)
        n += active
    np.testing.assert_array_equal(got, n)
