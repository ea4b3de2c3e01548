"""Vectors of two to four numbers in expressions: against NumPy's functions and Python, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chosen import BACKEND, INLINE
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

pytestmark = pytest.mark.conformance

Array = npt.NDArray[Any]
inline = pytest.mark.parametrize("isolation", ["inline"])
AXES = "xyzw"


async def run(text: str, outputs: tuple[str, ...], *arguments: Any, shape: Any = None) -> list[Array]:
    """Compute an expression on a device of its own."""
    async with ta.open_system("vectors") as system, system.open_device(BACKEND, options=INLINE) as device:
        function = ta.jit.elementwise(text, outputs=outputs)
        given = [await device.put(each) if isinstance(each, np.ndarray) else each for each in arguments]
        made = await device.ask(function.compute(*given, shape=shape))
        return [await each.to_host() for each in made]


@settings(max_examples=20 if BACKEND == "cpu" else 4, deadline=None)
@given(st.integers(2, 4), st.sampled_from(["float32", "float64", "int32"]), st.integers(0, 99))
async def test_arithmetic_is_component_wise(count: int, dtype: str, seed: int) -> None:
    a, b = (np.random.default_rng(seed).normal(size=(2, count, 9)) * 9).astype(dtype)
    names = [f"{name}{n}" for name in "ab" for n in range(count)]
    text = "\n".join(
        [
            f"a = vector({', '.join(names[:count])})",
            f"b = vector({', '.join(names[count:])})",
            "v = (a + b * 2) * a - b",
            "v -= abs(b)",
            "w = where(a < b, a, 1) + (b if a0 > 0 else a)",
            "d = dot(a, b)",
            "same = all(a == a) and any(a != b)",
            *[f"v{n} = v.{AXES[n]}; w{n} = w.{AXES[n]}" for n in range(count)],
        ]
    )
    outputs = (*[f"{name}{n}" for name in "vw" for n in range(count)], "d", "same")
    function = ta.jit.elementwise(text, inputs=tuple(names), outputs=outputs)
    async with ta.open_system("vectors") as system, system.open_device(BACKEND, options=INLINE) as device:
        made = await function(*[await device.put(each) for each in (*a, *b)])
        found = [await each.to_host() for each in made]
    v, w = (a + b * 2) * a - b - abs(b), np.where(a < b, a, 1) + np.where(a[0] > 0, b, a)
    dot = a[0] * b[0]
    for one, other in zip(a[1:], b[1:], strict=True):
        dot = dot + one * other
    for got, want in zip(found, (*v, *w, dot, (a != b).any(0)), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


async def test_lengths_and_products() -> None:
    p, q = np.random.default_rng(2).normal(size=(2, 50, 3))
    text = """
    p = rows[i(0), 0:3]
    q = others[i(0), :3]
    c = cross(p, q)
    cx = c.x
    cy = c.y
    cz = c.z
    n = normalize(p)
    nx = n.x
    far = length(p - q)
    most = max(p)
    total = sum(p) + prod(q) - min(q)
    """
    cx, cy, cz, nx, far, most, total = await run(
        text, ("cx", "cy", "cz", "nx", "far", "most", "total"), p, q, shape=50
    )
    np.testing.assert_array_equal(np.stack([cx, cy, cz], 1), np.cross(p, q))
    squares = p * p
    length = np.sqrt(squares[:, 0] + squares[:, 1] + squares[:, 2])
    np.testing.assert_array_equal(nx, p[:, 0] / length)
    np.testing.assert_allclose(far, np.linalg.norm(p - q, axis=1), rtol=1e-14)
    np.testing.assert_array_equal(most, p.max(1))
    np.testing.assert_array_equal(
        total, (p[:, 0] + p[:, 1] + p[:, 2]) + q[:, 0] * q[:, 1] * q[:, 2] - q.min(1)
    )


async def test_vectors_are_carried_and_reduced_over_ranges() -> None:
    p = np.random.default_rng(3).normal(size=(20, 2)).astype(np.float32)
    text = """
    q = p[i(0), 0:2]
    f = sum((p[j, 0:2] - q) / (1 + dot(p[j, 0:2], q)) for j in range(i(0), 20) if j % 3 != 1)
    top = max(p[j, 0:2] for j in range(20))
    v = vector(0.0, 1.0)
    for k in range(4):
        v = v * 0.5 + q
        if v.x > v.y:
            v = -v
            break
    fx = f.x
    fy = f.y
    tx = top.x
    vx = v.x
    vy = v.y
    """
    fx, fy, tx, vx, vy = await run(text, ("fx", "fy", "tx", "vx", "vy"), p, shape=20)
    one, two = np.float32(0.5), np.float32(1)
    for n, q in enumerate(p):
        f, v = np.zeros(2, np.float32), np.array([0, 1], np.float32)
        for j in range(n, 20):
            if j % 3 != 1:
                f = f + (p[j] - q) / (two + (p[j, 0] * q[0] + p[j, 1] * q[1]))
        for _ in range(4):
            v = v * one + q
            if v[0] > v[1]:
                v = -v
                break
        assert (fx[n], fy[n], tx[n], vx[n], vy[n]) == (f[0], f[1], p[:, 0].max(), v[0], v[1])
    assert fx.dtype == vx.dtype == np.float32


async def test_names_of_functions_of_vectors_are_free() -> None:
    (made,) = await run("out = length + dot * cross", ("out",), np.arange(3.0), 2, 4)
    assert made.tolist() == [8, 9, 10]
    # A heavy expression is computed once, however many components read it.
    (made,) = await run(
        "v = vector(x, 2.0, 3.0)\n"
        + "v = normalize(cross(v, v * 2 + 1) * exp(dot(v, v)) + v)\n" * 9
        + "out = v.x",
        ("out",),
        np.ones(3),
    )
    assert np.isfinite(made).all()


REFUSED = {
    "v = vector(x, y)": (1, 12, "v is a vector, and a result is a number: write v_x = v.x, v_y = v.y"),
    "vector(x, y, z)": (1, 8, "out is a vector, and a result is a number: write out_x = out.x, out_y"),
    "x[i(0), 0:3]": (1, 1, "out is a vector"),
    "vector(x)": (1, 1, "a vector has two to four numbers: vector(x, y, z)"),
    "vector(1, 2, 3, 4, 5)": (1, 1, "a vector has two to four numbers"),
    "vector(vector(x, y), 1).x": (1, 1, "a vector has two to four numbers"),
    "v = vector(x, y); u = v.z": (1, 23, "a vector of 2 has .x .y, and no .z"),
    "v = vector(x, y); u = v + vector(1, 2, 3)": (1, 23, "add of a vector of 2 and a vector of 3"),
    "v = vector(x, y); u = cross(v, v)": (1, 23, "cross takes two vectors of 3 numbers"),
    "v = vector(x, y); u = dot(v, x)": (1, 23, "dot takes vectors, such as vector(x, y)"),
    "v = vector(x, y); u = dot(v)": (1, 23, "dot takes 2 arguments, got 1"),
    "v = vector(x, y); u = p[v]": (1, 25, "a vector is not a number here: take .x, length(...)"),
    "v = vector(x, y); u = 1\nfor k in range(3):\n if v > 1: break": (3, 5, "a vector is not a number here"),
    "v = x\nv = vector(x, y)": (2, 1, "'v' was a number, and is a vector of 2 here"),
    "v = vector(x, y)\nv += 1\nv = x": (3, 1, "'v' was a vector of 2, and is a number here"),
    "v = x; u = v.x": (1, 12, "an attribute (.name) is not allowed"),
    "u = length(p[i(0), 1:7])": (1, 20, "a slice (a:b) is not allowed here; one of two to four elements"),
    "u = length(p[i(0), n:3])": (1, 20, "a slice (a:b) is not allowed here"),
    "u = length(p[0:2, 0:2])": (1, 19, "a slice (a:b) is not allowed"),
    "u = any(vector(x, y) > k for k in range(3))": (
        1,
        9,
        "a vector is not a number here: take .x, length(...), all(...)",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_an_invalid_vector_is_refused_with_its_place(text: str) -> None:
    line, column, reason = REFUSED[text]
    with pytest.raises(ValueError, match=r"in line \d+, column \d+") as caught:
        ta.jit.elementwise(text)
    assert reason in str(caught.value)
    assert f"in line {line}, column {column}\n" in str(caught.value)
