"""A refusal gives the name, and the line and column in the user's own source text."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.expressions import DECLARED, expression

pytestmark = pytest.mark.conformance

# The question mark is where the place is; it is at the beginning where there is none.
NAMED = {
    "async for k in range(3): y = x": "'async for' is not allowed",
    "async with x: y = x": "'async with' is not allowed",
    "async def f(): pass": "'async def' is not allowed",
    "def f(): pass": "'def' is not allowed",
    "class A: pass": "'class' is not allowed",
    "y = ?await x": "'await' is not allowed",
    "y = (?z := x) + 1": "an assignment (:=) is not allowed",
    "y = ?lambda: x": "'lambda' is not allowed",
    "y = ?f'{x}'": "an f-string is not allowed",
    "y = ?'x'": "a string is not allowed",
    "y = ?b'x'": "a byte string is not allowed",
    "y = ?None": "'None' is not allowed",
    "y = ?...": "'...' is not allowed",
    "y = maximum(?*x)": "a starred value (*x) is not allowed",
    "y = x[?*x]": "a starred value (*x) is not allowed",
    "y = maximum(x, ?y=x)": "maximum takes its arguments by their places only",
    "y = maximum(x, ?**x)": "maximum takes its arguments by their places only",
    "while x: y = x": "a loop needs a bound",
    "try: y = x\nfinally: y = x": "'try' is not allowed",
    "global y": "'global' is not allowed",
    "nonlocal y": "'nonlocal' is not allowed",
    "import os": "'import' is not allowed",
    "from a import b": "'import' is not allowed",
    "return x": "'return' is not allowed",
    "with x: y = x": "'with' is not allowed",
    "del x": "'del' is not allowed",
    "raise x": "'raise' is not allowed",
    "assert x": "'assert' is not allowed",
    "match x:\n    case 1: y = x": "'match' is not allowed",
    "y: int = x": "an annotation (y: int) is not allowed",
    "a = b = x": "this assignment is not allowed: write name = expression",
    "y[0] += x": "this assignment is not allowed: write name = expression",
    "y = (?yield x)": "'yield' is not allowed",
    "y = ?[x]": "a list is not allowed",
    "y = ?{x}": "a set is not allowed",
    "y = ?{1: x}": "a dict is not allowed",
    "y = ?(x, x)": "a tuple is not allowed",
    "y = ?[x for k in range(3)]": "a list is not allowed",
    "y = ?{x for k in range(3)}": "a set is not allowed",
    "y = ?{k: x for k in range(3)}": "a dict is not allowed",
    "y = ?(x for k in range(3))": "a generator is not allowed",
    "y = x + (?x is x)": "the operator 'is' is not allowed",
    "y = 1 < x < (?x in x)": "the operator 'in' is not allowed",
}


@pytest.mark.parametrize("text", NAMED)
@pytest.mark.no_device
@pytest.mark.one_backend
def test_a_refusal_has_a_name_and_a_place(text: str) -> None:
    column = max(text.find("?"), 0) + 1
    with pytest.raises(ValueError, match=re.escape(NAMED[text])) as caught:
        ta.jit.elementwise(text.replace("?", ""))
    assert f"in line 1, column {column}\n" in str(caught.value)


TEXTS = [
    "  y = ?x.T",
    "\n\n\n    y = ?x.T",
    "\n    a = x\n    b = a + ?a.T\n    ",
    "\n        é = x\n        b = maximum(é, é * (1 < ?x.T < 3))\n",
    "\n    s = 0 * x\n    for k in range(3):\n        s += ?bad(k)\n",
    "\n    y = x\n      \n    # a comment\n\n    z = sum(y for k in range(3) if ?y.T)\n",
    "y = (x\n     + ?x.T)",
    "y = x \\\n + ?x.T",
    "\ty = x\n\tz = ?y.T",
    "# \u2028 \x85 \x1c\ny = ?x.T",
    "y = x\x0c\nz = ?y.T",
    "  y = x\r\n  z = ?y.T",
    "  y = x\r  z = ?y.T",
    "    y = ?(x",
    "\n    y = x\n    z = 5 * y?)",
    "\n    y = x\n      ?z = y",
    "\n    for k in range(3):\n    ?y = x",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.no_device
@pytest.mark.one_backend
def test_a_place_is_that_of_the_users_own_text(text: str) -> None:
    before = re.split("\r\n|\r|\n", text[: text.index("?")])
    with pytest.raises(ValueError, match=r"in line \d+, column \d+\n") as caught:
        ta.jit.elementwise(text.replace("?", ""))
    told, shown, mark = str(caught.value).split("\n")
    assert told.endswith(f"in line {len(before)}, column {len(before[-1]) + 1}")
    rest = re.split("\r\n|\r|\n", text[text.index("?") + 1 :])[0]
    assert shown[mark.index("^") :] == rest


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("\n    a = x\n    b = a + gcd(a, 2.5)\n", (3, 13)),
        ("\n\n  y = x\n  for k in range(3):\n    y = y + 0.5\n", (5, 9)),
        ("  y = sum(x[k] for k in range(3.5))", (1, 31)),
        ("\n    y = 0 < sum(x[0.5] for k in range(3)) < 2", (2, 19)),
        ("\n    y = x\n    z = y + 2 ** 70", (3, 13)),
    ],
)
@pytest.mark.parametrize("isolation", ["inline"])
async def test_a_type_error_gives_the_place_in_the_users_source(
    device: ta.Device, text: str, place: tuple[int, int]
) -> None:
    x = await device.put(np.arange(3, dtype=np.int32))
    with pytest.raises((TypeError, ValueError), match=r"in line {}, column {}\n".format(*place)):
        await device.ask(ta.jit.elementwise(text).compute(x, shape=3))


@pytest.mark.no_device
@pytest.mark.one_backend
def test_a_declared_function_is_reported_with_its_file_and_place() -> None:
    @expression("""
        y = x
        out = bad(y)
    """)
    async def wrong(x: ta.AccelRef) -> ta.AccelRef:  # pyright: ignore[reportReturnType]
        """Refused at its first use."""

    with pytest.raises(TypeError, match=r"test_places\.py:\d+: wrong: there is no .*line 3, column 15\n"):
        wrong.expression.typed(())


@pytest.mark.no_device
@pytest.mark.one_backend
def test_all_functions_of_the_package_have_valid_expressions() -> None:
    # They are parsed at their first use, so nothing else would find an error in one that no test calls.
    for package in (ta.arrays, ta.nn, ta.random, ta.fft, ta.linalg, ta.signal, ta.ndimage):
        assert package.__all__
    own = [one for one in DECLARED.values() if one.__module__.startswith("trio_accel.")]
    assert len(own) > 100
    for function in own:
        assert function.expression.parsed.outputs, function.__name__


@pytest.mark.no_device
@pytest.mark.one_backend
def test_an_unused_expression_can_be_copied() -> None:
    @expression("x + 1")
    async def later(x: ta.AccelRef) -> ta.AccelRef:  # pyright: ignore[reportReturnType]
        """Parsed at its first use."""

    assert copy.copy(later.expression).text == "x + 1"


@pytest.mark.parametrize("isolation", ["inline"])
async def test_the_middle_of_a_chain_is_computed_once(device: ta.Device) -> None:
    x = np.array([-1.0, 0.0, 0.5, 2.0])
    text, want = "x", x
    for _ in range(60):
        # Each would double the one before, if it were read twice.
        text, want = f"(0 <= {text} < 2)", (want >= 0) & (want < 2)
    got = await (await ta.jit.elementwise(f"y = {text}")(await device.put(x))).to_host()
    np.testing.assert_array_equal(got, want, strict=True)
    summed = ta.jit.elementwise("y = 1 < sum(x[k] * x[k] for k in range(i(0))) <= 1.5 != 3")
    got = await (await device.ask(summed.compute(await device.put(x), shape=4))).to_host()
    np.testing.assert_array_equal(got, [1 < (x[:n] * x[:n]).sum() <= 1.5 for n in range(4)])
