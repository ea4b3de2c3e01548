"""Expressions of the CPU backend beside NumPy and Numba: `python -m benchmarks.cpu_expressions`.

Milliseconds of processor time for a step, and of wall time in brackets: the least of several turns in one
process. Numba is left out where it is not installed. `TRIO_ACCEL_CPU_COMPILED=never` measures NumPy alone.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import trio

import trio_accel as ta
from trio_accel import jit

Numbers: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]

_TIMES = 11
_COUNT = 10**7
SIDE, LATTICE, CLOTH, HEIGHT, WIDTH = 512, 256, 128, 240, 320
_AROUND = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
_STEPS = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1)]
WEIGHTS = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
_SPRINGS = [*_AROUND, (0, 2), (0, -2), (2, 0), (-2, 0)]
_NEAR = [(a, b) for a in range(-2, 3) for b in range(-2, 3)]


def life() -> tuple[Any, Function, Function]:
    """Make a step of Conway's Game of Life on a torus: an expression, the same by NumPy, and for Numba."""
    total = " + ".join(f"x[(i(0) + {a}) % {SIDE}, (i(1) + {b}) % {SIDE}]" for a, b in _AROUND)
    text = f"n = {total}; c = x[i(0), i(1)]; r = uint8((n == 3) | ((n == 2) & (c == 1)))"

    def by_numpy(x: Numbers) -> Numbers:
        n = sum(np.roll(x, near, (0, 1)) for near in _AROUND)
        return ((n == 3) | ((n == 2) & (x == 1))).astype(np.uint8)

    def loop(x: Numbers, out: Numbers) -> None:
        height, width = x.shape
        for i in range(height):
            up, down = (i - 1) % height, (i + 1) % height
            for j in range(width):
                left, right = (j - 1) % width, (j + 1) % width
                n = x[up, left] + x[up, j] + x[up, right] + x[i, left] + x[i, right]
                n += x[down, left] + x[down, j] + x[down, right]
                out[i, j] = n == 3 or (n == 2 and x[i, j] == 1)

    return jit.elementwise(text, inputs=("x",)), by_numpy, loop


def boltzmann() -> tuple[Any, Function, Function]:
    """Make a step of a flow on a lattice, streaming and collision, likewise."""
    lines = [
        f"g{k} = f{k}[(i(0) - {a}) % {LATTICE}, (i(1) - {b}) % {LATTICE}]" for k, (a, b) in enumerate(_STEPS)
    ]
    lines += ["rho = " + " + ".join(f"g{k}" for k in range(9))]
    lines += ["u = (" + " + ".join(f"{a}*g{k}" for k, (a, _) in enumerate(_STEPS) if a) + ") / rho"]
    lines += ["v = (" + " + ".join(f"{b}*g{k}" for k, (_, b) in enumerate(_STEPS) if b) + ") / rho"]
    lines += ["q = 1 - 1.5*(u*u + v*v)"]
    for k, ((a, b), weight) in enumerate(zip(_STEPS, WEIGHTS, strict=True)):
        lines += [f"c{k} = {a}*u + {b}*v"]
        lines += [f"o{k} = g{k} + 1.7*({weight}*rho*(q + 3*c{k} + 4.5*c{k}*c{k}) - g{k})"]
    names = [f"f{k}" for k in range(9)], [f"o{k}" for k in range(9)]
    steps, weights = np.array(_STEPS), np.array(WEIGHTS)

    def by_numpy(*f: Numbers) -> Numbers:
        g = [np.roll(one, step, (0, 1)) for one, step in zip(f, _STEPS, strict=True)]
        rho = sum(g[1:], g[0])
        u = sum(a * one for one, (a, _) in zip(g, _STEPS, strict=True) if a) / rho
        v = sum(b * one for one, (_, b) in zip(g, _STEPS, strict=True) if b) / rho
        q, made = 1 - 1.5 * (u * u + v * v), list[Numbers]()
        for one, (a, b), weight in zip(g, _STEPS, WEIGHTS, strict=True):
            c = a * u + b * v
            made.append(one + 1.7 * (weight * rho * (q + 3 * c + 4.5 * c * c) - one))
        return made

    def loop(*arrays: Numbers) -> None:
        f, out = arrays[:9], arrays[9:]
        height, width = f[0].shape
        g = np.empty(9)
        for i in range(height):
            for j in range(width):
                rho = u = v = 0.0
                for k in range(9):
                    a, b = steps[k]
                    g[k] = f[k][(i - a) % height, (j - b) % width]
                    rho += g[k]
                    u += a * g[k]
                    v += b * g[k]
                u /= rho
                v /= rho
                q = 1 - 1.5 * (u * u + v * v)
                for k in range(9):
                    c = steps[k][0] * u + steps[k][1] * v
                    out[k][i, j] = g[k] + 1.7 * (weights[k] * rho * (q + 3 * c + 4.5 * c * c) - g[k])

    return jit.elementwise("; ".join(lines), inputs=names[0], outputs=names[1]), by_numpy, loop


def cloth() -> tuple[Any, Function]:
    """Make a step of Verlet of a cloth, twelve springs of each mass and a row that is held, and for Numba."""
    most, lines = CLOTH - 1, [f"{axis} = {axis}0[i(0), i(1)]" for axis in "xyz"]
    for k, (a, b) in enumerate(_SPRINGS):
        place = f"clip(i(0) + {a}, 0, {most}), clip(i(1) + {b}, 0, {most})"
        inside = f"(i(0) + {a} >= 0) & (i(0) + {a} <= {most}) & (i(1) + {b} >= 0) & (i(1) + {b} <= {most})"
        lines += [f"d{axis}{k} = {axis}0[{place}] - {axis}" for axis in "xyz"]
        lines += [f"s{k} = sqrt(dx{k}*dx{k} + dy{k}*dy{k} + dz{k}*dz{k})"]
        lines += [f"w{k} = where({inside}, 40.0*(1 - {(a * a + b * b) ** 0.5 / most} / s{k}), 0.0)"]
    for axis in "xyz":
        force = " + ".join(f"w{k}*d{axis}{k}" for k in range(len(_SPRINGS)))
        moved = f"1.99*{axis} - 0.99*{axis}1[i(0), i(1)] + 0.0001*({force}{' - 9.81' if axis == 'z' else ''})"
        lines += [f"o{axis} = where(i(0) > 0, {moved}, {axis})"]
    names = [f"{axis}{n}" for n in range(2) for axis in "xyz"]
    springs, rest = np.array(_SPRINGS), np.array([(a * a + b * b) ** 0.5 / most for a, b in _SPRINGS])

    def loop(*arrays: Numbers) -> None:
        x0, y0, z0, x1, y1, z1, ox, oy, oz = arrays
        size = x0.shape[0]
        for i in range(size):
            for j in range(size):
                x, y, z = x0[i, j], y0[i, j], z0[i, j]
                fx = fy = fz = 0.0
                for k in range(len(rest)):
                    a, b = i + springs[k, 0], j + springs[k, 1]
                    if 0 <= a < size and 0 <= b < size:
                        dx, dy, dz = x0[a, b] - x, y0[a, b] - y, z0[a, b] - z
                        w = 40.0 * (1 - rest[k] / np.sqrt(dx * dx + dy * dy + dz * dz))
                        fx += w * dx
                        fy += w * dy
                        fz += w * dz
                if i > 0:
                    ox[i, j] = 1.99 * x - 0.99 * x1[i, j] + 0.0001 * fx
                    oy[i, j] = 1.99 * y - 0.99 * y1[i, j] + 0.0001 * fy
                    oz[i, j] = 1.99 * z - 0.99 * z1[i, j] + 0.0001 * (fz - 9.81)
                else:
                    ox[i, j], oy[i, j], oz[i, j] = x, y, z

    return jit.elementwise("; ".join(lines), inputs=names, outputs=("ox", "oy", "oz")), loop


def bilateral() -> tuple[Any, Function, Function]:
    """Make a bilateral filter of 5 x 5, likewise."""
    lines = ["c = x[i(0), i(1)]"]
    for k, (a, b) in enumerate(_NEAR):
        lines += [f"t{k} = x[clip(i(0) + {a}, 0, {HEIGHT - 1}), clip(i(1) + {b}, 0, {WIDTH - 1})]"]
        lines += [f"w{k} = exp({-(a * a + b * b) / 8} - 50*(t{k} - c)*(t{k} - c))"]
    above, below = (" + ".join(each.format(k) for k in range(len(_NEAR))) for each in ("w{0}*t{0}", "w{0}"))
    lines += [f"r = ({above}) / ({below})"]

    def by_numpy(x: Numbers) -> Numbers:
        wide, above, below = np.pad(x, 2, mode="edge"), 0.0, 0.0
        for a, b in _NEAR:
            near = wide[2 + a : 2 + a + HEIGHT, 2 + b : 2 + b + WIDTH]
            weight = np.exp(-(a * a + b * b) / 8 - 50 * (near - x) ** 2)
            above, below = above + weight * near, below + weight
        return above / below

    def loop(x: Numbers, out: Numbers) -> None:
        height, width = x.shape
        for i in range(height):
            for j in range(width):
                above = below = 0.0
                for a in range(-2, 3):
                    for b in range(-2, 3):
                        t = x[min(max(i + a, 0), height - 1), min(max(j + b, 0), width - 1)]
                        w = np.exp(-(a * a + b * b) / 8 - 50 * (t - x[i, j]) * (t - x[i, j]))
                        above += w * t
                        below += w
                out[i, j] = above / below

    return jit.elementwise("; ".join(lines), inputs=("x",)), by_numpy, loop


def _axpy(x: Numbers, y: Numbers) -> Numbers:
    return 2.5 * x + y


def _length(x: Numbers, y: Numbers) -> Numbers:
    return np.sqrt(x * x + y * y)


def _waves(x: Numbers, y: Numbers) -> Numbers:
    return np.exp(-x) * np.sin(y) + x * y


# An expression, the same by NumPy, and an element of it for Numba.
_FUSED: Sequence[tuple[str, Function, str]] = (
    ("2.5*x + y", _axpy, "c * x[k] + y[k]"),
    ("sqrt(x*x + y*y)", _length, "np.sqrt(x[k] * x[k] + y[k] * y[k])"),
    ("exp(-x)*sin(y) + x*y", _waves, "np.exp(-x[k]) * np.sin(y[k]) + x[k] * y[k]"),
)


def _compiled(loop: Function | None) -> Function | None:
    """Compile by Numba, where it is installed."""
    if loop is None or importlib.util.find_spec("numba") is None:
        return None
    made: Function = importlib.import_module("numba").njit(loop)
    return made


async def _row(
    name: str,
    ask: Function,
    by_numpy: Function | None,
    loop: Function | None,
    arrays: Sequence[Numbers],
    steps: int = 1,
) -> None:
    """Measure by turns of so many steps, and compare the results."""
    refs = await _listed(ask)
    found = [await ref.to_host() for ref in refs]
    made, by_numba = [np.empty_like(one) for one in found], _compiled(loop)
    calls: dict[str, Function | None] = {
        "NumPy": by_numpy and (lambda: by_numpy(*arrays)),
        "Numba": by_numba and (lambda: by_numba(*arrays, *made)),
        "trio_accel": ask,
    }
    columns: list[str] = []
    spent = {each: list[tuple[float, float]]() for each in calls}
    for _ in range(_TIMES):
        for each, call in calls.items():
            start, wall = time.process_time(), time.perf_counter()
            for _ in range(steps if call is not None else 0):
                assert call is not None
                kept = call()
                if each == "trio_accel":
                    kept = await kept
            spent[each].append((time.process_time() - start, time.perf_counter() - wall))
    for each, call in calls.items():
        if call is not None:
            processor, wall = (min(one) * 1e3 / steps for one in zip(*spent[each][1:], strict=True))
            columns.append(f"{each} {processor:7.3f} ({wall:7.3f})")
    if by_numpy is not None:
        wanted = by_numpy(*arrays)
        pairs = zip(found, wanted if len(found) > 1 else [wanted], strict=True)
        same: list[Any] = [a == b for a, b in pairs]
        equal = sum(np.count_nonzero(each) / each.size for each in same) / len(found)
        columns.append(f"equal to NumPy {equal:.2%}")
    if by_numba is not None:
        apart = [np.abs(np.subtract(a, b, dtype=float)).max() for a, b in zip(found, made, strict=True)]
        columns.append(f"apart from Numba {max(apart):.1e}")
    print(f"{name:30s}", "  ".join(columns), flush=True)  # noqa: T201  # it is a program


async def _listed(ask: Function) -> list[ta.AccelRef]:
    made = await ask()
    return [made] if isinstance(made, ta.AccelRef) else [*made]


async def main() -> None:
    """Print a line for each expression."""
    rng = np.random.default_rng(0)
    os.environ.setdefault("TRIO_ACCEL_CPU_COMPILED", "always")
    async with ta.open_system("measure") as system, system.open_device("cpu") as device:
        step, by_numpy, loop = life()
        cells = (rng.random((SIDE, SIDE)) < 0.3).astype(np.uint8)
        put = await device.put(cells)
        await _row("life 512 x 512", lambda: step(put, shape=cells.shape), by_numpy, loop, [cells], 20)
        flow, by_numpy, loop = boltzmann()
        f = [weight * (1 + 0.01 * rng.normal(size=(LATTICE, LATTICE))) for weight in WEIGHTS]
        fs = [await device.put(one) for one in f]
        name = "lattice Boltzmann 256 x 256"
        await _row(name, lambda: flow(*fs, shape=f[0].shape), by_numpy, loop, f, 20)
        verlet, loop = cloth()
        square = np.meshgrid(*[np.linspace(0, 1, CLOTH)] * 2, indexing="ij")
        places = [one + 0.001 * rng.normal(size=one.shape) for one in (*square, 0 * square[0])] * 2
        ps = [await device.put(one) for one in places]
        await _row("cloth 128 x 128", lambda: verlet(*ps, shape=places[0].shape), None, loop, places, 20)
        smooth, by_numpy, loop = bilateral()
        picture = rng.random((HEIGHT, WIDTH))
        image = await device.put(picture)
        name = "bilateral 240 x 320"
        await _row(name, lambda: smooth(image, shape=picture.shape), by_numpy, loop, [picture], 5)
        for dtype in (np.float64, np.float32):
            x, y = (rng.random(_COUNT).astype(dtype) * 4 for _ in range(2))
            given = await device.put(x), await device.put(y)
            for text, function, body in _FUSED:
                space: dict[str, Any] = {"np": np, "c": dtype(2.5)}
                exec(f"def loop(x, y, out):\n for k in range(x.size): out[k] = {body}", space)  # noqa: S102
                ask = partial(jit.elementwise(text, inputs=("x", "y")), *given)
                await _row(f"{np.dtype(dtype).name} {text}", ask, function, space["loop"], [x, y])


if __name__ == "__main__":
    trio.run(main)
