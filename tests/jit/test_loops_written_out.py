"""Loops of constant bounds are written out: which ones, and with the values that Python finds."""

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
from trio_accel.backends.base.expressions import parse, typed, unrolled
from trio_accel.expressions import Elementwise

Array = npt.NDArray[Any]
inline = pytest.mark.parametrize("isolation", ["inline"])

SUM = "s = x * 0.0\nfor k in range({}):\n    s = s * 0.5 + x * k"
# Texts, and how many of their loops stay.
LOOPS = {
    "of a constant": (SUM.format("5"), 0),
    "from a negative number": (SUM.format("-3, 4"), 0),
    "of no iteration": (SUM.format("4, 4"), 0),
    "that falls": (SUM.format("4, 1"), 0),
    "of one iteration": (SUM.format("7, 8"), 0),
    "of 32 iterations": (SUM.format("32"), 0),
    "of 33 iterations": (SUM.format("33"), 1),
    "of an argument": (SUM.format("n"), 1),
    "from an argument": (SUM.format("n, 5"), 1),
    "of an element": (SUM.format("int64(x), 5"), 1),
    "of far numbers": (SUM.format("9223372036854775800, 9223372036854775807"), 0),
    "with a break": ("s = x\nfor k in range(4):\n    if s > 9: break\n    s = s + s", 1),
    "in one that is written out": ("s = sum(x * a + b for a in range(3) for b in range(4))", 0),
    "as long as another one's index": ("s = sum(x * a + b for a in range(5) for b in range(a + 1))", 0),
    "in one that stays": ("s = sum(x * a + b for a in range(n) for b in range(4))", 1),
    "around one that stays": ("s = sum(x * a + b for a in range(3) for b in range(n))", 2),
    "around one with a break": (
        "s = x\nfor a in range(3):\n    for b in range(3):\n        if s > 4: break\n        s = s + a",
        2,
    ),
    "around one that is long": ("s = sum(x * a + b for a in range(32) for b in range(32))", 1),
    "of many steps": (
        "s = x\nfor k in range(32):\n" + "\n".join(f"    s = s * {n}.5 + x" for n in range(20)),
        1,
    ),
    "behind another one": (
        f"{SUM.format(6)}\nfor k in range(n):\n    s = s + k\nfor k in range(2):\n    s = s * k",
        1,
    ),
    "that swaps": ("s = x\nt = x + 1\nfor k in range(3):\n    u = s\n    s = t\n    t = u * 2", 0),
}


def steps_of(text: str, *, is_checked: bool = False) -> Any:
    parsed = parse(text, None, ("s",))
    kinds = tuple(ta.DType.int64 if name == "n" else ta.DType.float64 for name in parsed.inputs)
    return unrolled(typed(parsed, kinds, (None,), is_checked)).steps


@pytest.mark.no_device
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_constant_bounds_is_written_out(name: str) -> None:
    text, stay = LOOPS[name]
    steps = steps_of(text)
    assert sum(step.function == "loop" for step in steps) == stay
    assert sum(step.function == "end" for step in steps) == stay
    assert len(steps) <= 600
    for number, step in enumerate(steps):
        if step.function == "loop":
            end = steps[int(step.value)]
            assert (end.function, end.steps[0]) == ("end", number)
        # Only breaks and ends name a later step: none.
        assert all(each < number for each in step.steps)


@pytest.mark.no_device
def test_the_longest_source_of_loops_is_no_longer_than_others() -> None:
    nest = "".join(f"{'    ' * depth}for k{depth} in range(32):\n" for depth in range(3))
    steps = steps_of(f"s = x\n{nest}{'    ' * 3}s = s + k0")
    assert sum(step.function == "loop" for step in steps) == 2
    assert len(steps) < 120
    many = "\n".join(f"for k in range(32):\n    s = s * {n}.5 + k" for n in range(200))
    steps = steps_of(f"s = x\n{many}")
    assert 150 < sum(step.function == "loop" for step in steps) < 200
    assert len(steps) < 2500


@pytest.mark.no_device
def test_iterations_share_equal_subexpressions() -> None:
    steps = steps_of("s = sum(x[(i(0) + a) % 9, (i(1) + b) % 7] for a in range(-1, 2) for b in range(-1, 2))")
    assert sum(step.function == "remainder" for step in steps) == 6
    assert sum(step.function == "load" for step in steps) == 9


@pytest.mark.conformance
@inline
@pytest.mark.parametrize("name", LOOPS)
async def test_values_match_python(device: ta.Device, name: str) -> None:
    text, _ = LOOPS[name]
    x = np.array([0.25, -1.5, 3.0, 0.0])
    names = parse(text, None, ("s",)).inputs
    function = ta.jit.elementwise(text, inputs=names, outputs=("s",))
    given = {"x": await device.put(x), "n": 3}
    (made,) = await device.ask(function.compute(*[given[name] for name in names]))
    want = by_python(text, {"x": x, "n": 3}, ("s",))
    np.testing.assert_array_equal(await made.to_host(), [value for (value,) in want], err_msg=text)


bounds = st.sampled_from(["3", "0", "-2, 2", "1", "4, 2", "n", "m, 3", "5"])
values = st.sampled_from(
    [
        "x",
        "k{0}",
        "s * 0.5",
        "x * k{0}",
        "z[i(0) + k{0}]",
        "z[k{0}]",
        "z[m + k{0}]",
        "minimum(s, x)",
        "float64(n)",
    ]
)


@st.composite
def bodies(draw: st.DrawFn, depth: int = 0) -> list[str]:
    """Draw nested loops, with constants, numbers and elements for bounds; some have a `break`."""
    indent, lines = "    " * (depth + 1), [f"{'    ' * depth}for k{depth} in range({draw(bounds)}):"]
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["add", "add", "swap", "choose", "break", "for", "for"]))
        value = draw(values).format(draw(st.integers(0, depth)))
        if kind == "for" and depth < 2:
            lines += draw(bodies(depth + 1))
        elif kind == "swap":
            lines += [f"{indent}u = s", f"{indent}s = t + {value}", f"{indent}t = u"]
        elif kind == "choose":
            lines += [
                f"{indent}if s > t:",
                f"{indent}    t = {value}",
                f"{indent}else:",
                f"{indent}    s = {value}",
            ]
        elif kind == "break":
            lines += [f"{indent}if s > 4: break", f"{indent}t = t - {value}"]
        else:
            lines.append(f"{indent}s = s + {value}")
    return lines


@pytest.mark.no_device
@settings(max_examples=150 if BACKEND == "cpu" else 6, deadline=None)
@given(bodies(), st.integers(0, 99))
async def test_random_loops(body: list[str], seed: int) -> None:
    text = "\n".join(["s = x * 1.0", "t = x - 1", *body, "r = s - t"])
    draw = np.random.default_rng(seed)
    x, z, m = draw.normal(size=7), draw.normal(size=5), draw.integers(-1, 3, 7)
    names = parse(text, None, ("r", "s")).inputs
    function = ta.jit.elementwise(text, inputs=names, outputs=("r", "s"))
    async with ta.open_system("loops") as system, system.open_device(BACKEND, options=INLINE) as device:
        given = {"n": 2} | {name: await device.put(each) for name, each in (("x", x), ("m", m), ("z", z))}
        made = await device.ask(function.compute(*[given[name] for name in names]))
        got = [await each.to_host() for each in made]
    want = by_python(text, {"x": x, "m": m, "n": 2}, ("r", "s"), loaded={"z": z})
    for number, each in enumerate(got):
        np.testing.assert_array_equal(each, [values[number] for values in want], err_msg=text)


@pytest.mark.conformance
@inline
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("sum(x[i(0) + k] for k in range(3))", 3),
        ("sum(x[k] for k in range(-5, 2))", -5),
        ("sum(x[k, 0] + y[0, 2 * k] for k in range(3))", 4),
        ("y = 0.0\nfor k in range(0):\n    y += x[9]", None),
        ("sum(x[9] for k in range(2) for j in range(1, 1))", None),
    ],
)
async def test_an_index_is_checked_in_an_unrolled_loop(
    device: ta.Device, text: str, want: int | None
) -> None:
    array = (
        np.arange(9.0).reshape(3, 3) if "," in text.partition("[")[2].partition("]")[0] else np.arange(3.0)
    )
    names = ("x", "y") if "y[" in text else ("x",)
    function = Elementwise[ta.AccelRef](text, inputs=names, operation="test.checked", is_checked=True)
    made = function.compute(*[await device.put(array) for _ in names], shape=3)
    if want is None:
        assert not (await (await device.ask(made)).to_host()).any()
        return
    with pytest.raises(ta.OutOfRangeError, match=f"{want} is outside axis") as caught:
        await device.ask(made)
    assert caught.value.index == want
    assert caught.value.length == 3


@pytest.mark.conformance
@inline
async def test_reductions_and_rows_have_written_out_loops(device: ta.Device) -> None:
    x = np.linspace(-1, 1, 21).reshape(3, 7)
    on = await device.put(x)
    total = ta.jit.reduction("sum(x ** k for k in range(4))", "sum")
    want = (1 + x + x**2 + x**3).sum(1)
    np.testing.assert_allclose(await (await total(on, axis=1)).to_host(), want, rtol=1e-14)
