"""If and else in expressions, nested in each other: the numbers match Python's own branches."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta
from trio_accel.backends.base.expressions import evaluate, parse, typed

pytestmark = pytest.mark.conformance

NAMES = ("a", "b", "c")
READ = st.sampled_from(("x", "y", *NAMES, "1.0", "2.0"))
VALUES = st.builds("{} {} {}".format, READ, st.sampled_from("+-*"), READ)
TESTS = st.builds("{} {} {}".format, READ, st.sampled_from(("<", ">=")), READ)
ASSIGNED = st.builds(
    lambda name, sign, value: [f"{name} {sign} {value}"],
    st.sampled_from(NAMES),
    st.sampled_from(("=", "=", "=", "+=")),
    VALUES,
)


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def branches(blocks: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    both = st.builds(
        lambda test, first, second: [f"if {test}:", *indented(first), "else:", *indented(second)],
        TESTS,
        blocks,
        blocks,
    )
    three = st.builds(
        lambda test, first, other, second, third: [
            f"if {test}:",
            *indented(first),
            f"elif {other}:",
            *indented(second),
            "else:",
            *indented(third),
        ],
        TESTS,
        blocks,
        TESTS,
        blocks,
        blocks,
    )
    one = st.builds(lambda test, body: [f"if {test}:", *indented(body)], TESTS, blocks)
    return several(both | both | three | one | ASSIGNED)


def several(statements: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    return st.lists(statements, min_size=1, max_size=3).map(
        lambda found: [line for one in found for line in one]
    )


PROGRAMS = st.recursive(several(ASSIGNED), branches, max_leaves=8).map("\n".join)
X = np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0])
Y = np.array([1.0, -1.0, 0.0, 2.0, 0.5, 3.0, -2.0])


def by_python(text: str, name: str) -> list[float]:
    """Run the text once for each element; a name without a value is a `NameError`."""
    found: list[float] = []
    for x, y in zip(X.tolist(), Y.tolist(), strict=True):
        space: dict[str, Any] = {"x": x, "y": y}
        exec(text, {}, space)
        found.append(space[name])
    return found


@settings(max_examples=300, deadline=None)
@given(PROGRAMS)
def test_branches_match_python(text: str) -> None:
    """The taken branch has Python's numbers for all names that it reads or returns."""
    text = f"{text}\nout = x + y + {' + '.join(sorted(assigned(text)))}"
    try:
        expression = parse(text, ("x", "y"), ("out",))
    except ValueError:
        return
    [made] = evaluate(typed(expression, (ta.DType.float64, ta.DType.float64)), [X, Y])
    np.testing.assert_array_equal(np.broadcast_to(made, X.shape), by_python(text, "out"))


def assigned(text: str) -> set[str]:
    return {
        each.id
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


ACCEPTED = {
    "both": "if x > 1:\n    z = x\nelse:\n    z = y",
    "three": "if x > 1:\n    z = 1.0\nelif y > 0:\n    z = 2.0\nelse:\n    z = y",
    "nested": "if x > 0:\n  if y > 0:\n    z = 1.0\n  else:\n    z = x\nelse:\n  z = y\n  z += 1",
    "first a part": "if x > 0:\n    z = y\n    if y > 0:\n        z = x\nelse:\n    z = 3.0",
    "two names": "if x > 0:\n    t = x\n    z = t * y\nelse:\n    t = y\n    z = t - x\nz = z + t",
    "inside of one": "s = 0.0\nif x > 0:\n  if y > 0:\n    t = x\n  else:\n    t = y\n  s = t\nz = s",
    "twice": "if x > 0:\n    t = 1.0\nelse:\n    t = 2.0\nif y > 0:\n    t = x\nelse:\n    t += 1\nz = t",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
async def test_a_name_that_both_branches_assign_needs_no_value_before(device: ta.Device, text: str) -> None:
    function: Any = ta.jit.elementwise(text, inputs=("x", "y"), outputs=("z",))
    (found,) = await function(await device.put(X), await device.put(Y))
    np.testing.assert_array_equal(await found.to_host(), by_python(text, "z"))


async def test_both_branches_in_a_loop_have_no_value_of_the_round_before(device: ta.Device) -> None:
    text = "s = 0.0\nfor k in range(4):\n  if x > k:\n    t = x\n  else:\n    t = y * k\n  s += t\nz = s"
    function: Any = ta.jit.elementwise(text, inputs=("x", "y"), outputs=("z",))
    (found,) = await function(await device.put(X), await device.put(Y))
    np.testing.assert_array_equal(await found.to_host(), by_python(text, "z"))


def test_an_argument_changed_by_one_branch_is_read_after_it() -> None:
    assert parse("if x > 1:\n    x = 2.0\nz = x", ("x",)).outputs == ("z",)


REFUSED = {
    "if x > 1:\n    z = x": "'z' needs a value before: the condition may not hold; or give it one",
    "if x > 1:\n    z = x\nelse:\n    t = x": "write z = a if condition else b",
    "if x > 1:\n    z = x\nelse:\n    t = z\n    z = t": "'z' has no value here: give it one before the if",
    "if x > 1:\n  if x > 2:\n    z = x\n  t = z\n  z = t\nelse:\n  z = x\n  t = x": "'z' has no value",
    "z = x @ x": "await (x @ y) multiplies matrices",
    "z = x is x": "compare by ==",
    "z = x in x": "x == 1 or x == 2",
    "z = [x, x]": "vector(x, y) has several numbers",
    "z = [x[k] for k in x]": "sum(x[k] for k in range(n))",
    "z = x.shape": "pass what it is as an argument",
    "z = lambda a: a": "write what it computes",
    "z = x && x": "write x and y",
    "z = !x": "write not x",
    "z = x ? 1 : 2": "write a if condition else b",
    "x++": "write x += 1",
    "z = frob(x)": "compute it before, and pass the result as an argument",
    "z = min(x, 1, 2)": "write minimum(x, y)",
    "x; x": "write name = expression",
    "pi = x": "choose another name",
}


@pytest.mark.parametrize(("text", "told"), REFUSED.items())
def test_a_refusal_gives_a_remedy(text: str, told: str) -> None:
    with pytest.raises(ValueError) as info:  # noqa: PT011  # what it says is compared
        parse(text)
    assert told in str(info.value)
