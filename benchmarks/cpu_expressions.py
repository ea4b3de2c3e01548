"""Expressions of the CPU backend beside NumPy and Numba: `python -m benchmarks.cpu_expressions`.

Milliseconds of processor time, and of wall time in brackets: the least of several calls, by turns in one process. Numba
is left out where it is not installed. `TRIO_ACCEL_CPU_COMPILED=never` measures NumPy's executor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import trio

import trio_accel as ta
from trio_accel import jit

Numbers: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]

_TIMES = 11
_COUNT = 10**7
_SIDE, _LATTICE, _CLOTH, _HEIGHT, _WIDTH = 512, 256, 128, 240, 320
_AROUND = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
_STEPS = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1)]
_WEIGHTS = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
_SPRINGS = [*_AROUND, (0, 2), (0, -2), (2, 0), (-2, 0)]
_NEAR = [(a, b) for a in range(-2, 3) for b in range(-2, 3)]


def _life() -> tuple[Any, Function, Function]:
    total = " + ".join(f"x[(i(0) + {a}) % {_SIDE}, (i(1) + {b}) % {_SIDE}]" for a, b in _AROUND)
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


def _boltzmann() -> tuple[Any, Function, Function]:
    lines = [f"g{k} = f{k}[(i(0) - {a}) % {_LATTICE}, (i(1) - {b}) % {_LATTICE}]"
             for k, (a, b) in enumerate(_STEPS)]  # fmt: skip
    lines += ["rho = " + " + ".join(f"g{k}" for k in range(9))]
    lines += ["u = (" + " + ".join(f"{a}*g{k}" for k, (a, _) in enumerate(_STEPS) if a) + ") / rho"]
    lines += ["v = (" + " + ".join(f"{b}*g{k}" for k, (_, b) in enumerate(_STEPS) if b) + ") / rho"]
    lines += ["q = 1 - 1.5*(u*u + v*v)"]
    for k, ((a, b), weight) in enumerate(zip(_STEPS, _WEIGHTS, strict=True)):
        lines += [f"c{k} = {a}*u + {b}*v"]
        lines += [f"o{k} = g{k} + 1.7*({weight}*rho*(q + 3*c{k} + 4.5*c{k}*c{k}) - g{k})"]
    names = [f"f{k}" for k in range(9)], [f"o{k}" for k in range(9)]
    steps, weights = np.array(_STEPS), np.array(_WEIGHTS)

    def by_numpy(*f: Numbers) -> Numbers:
        g = [np.roll(one, step, (0, 1)) for one, step in zip(f, _STEPS, strict=True)]
        rho = sum(g[1:], g[0])
        u = sum(a * one for one, (a, _) in zip(g, _STEPS, strict=True) if a) / rho
        v = sum(b * one for one, (_, b) in zip(g, _STEPS, strict=True) if b) / rho
        q, made = 1 - 1.5 * (u * u + v * v), []
        for one, (a, b), weight in zip(g, _STEPS, _WEIGHTS, strict=True):
            c = a * u + b * v
            made.append(one + 1.7 * (weight * rho * (q + 3 * c + 4.5 * c * c) - one))
        return made

    def loop(f0: Numbers, f1: Numbers, f2: Numbers, f3: Numbers, f4: Numbers, f5: Numbers, f6: Numbers, f7: Numbers,
             f8: Numbers, *out: Numbers) -> None:  # fmt: skip
        height, width = f0.shape
        f = (f0, f1, f2, f3, f4, f5, f6, f7, f8)
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


def _cloth() -> tuple[Any, Function]:
    """Make one step of Verlet of a cloth: twelve springs of each mass, gravity, a row that is held."""
    most, lines = _CLOTH - 1, [f"{axis} = {axis}0[i(0), i(1)]" for axis in "xyz"]
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

    def loop(x0: Numbers, y0: Numbers, z0: Numbers, x1: Numbers, y1: Numbers, z1: Numbers, ox: Numbers, oy: Numbers,
             oz: Numbers) -> None:  # fmt: skip
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


def _bilateral() -> tuple[Any, Function, Function]:
    lines = ["c = x[i(0), i(1)]"]
    for k, (a, b) in enumerate(_NEAR):
        lines += [f"t{k} = x[clip(i(0) + {a}, 0, {_HEIGHT - 1}), clip(i(1) + {b}, 0, {_WIDTH - 1})]"]
        lines += [f"w{k} = exp({-(a * a + b * b) / 8} - 50*(t{k} - c)*(t{k} - c))"]
    above, below = (" + ".join(each.format(k) for k in range(len(_NEAR))) for each in ("w{0}*t{0}", "w{0}"))
    lines += [f"r = ({above}) / ({below})"]

    def by_numpy(x: Numbers) -> Numbers:
        wide, above, below = np.pad(x, 2, mode="edge"), 0.0, 0.0
        for a, b in _NEAR:
            near = wide[2 + a : 2 + a + _HEIGHT, 2 + b : 2 + b + _WIDTH]
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


_FUSED: dict[str, tuple[Function, str]] = {
    "2.5*x + y": (lambda x, y: 2.5 * x + y, "c * x[k] + y[k]"),
    "sqrt(x*x + y*y)": (lambda x, y: np.sqrt(x * x + y * y), "np.sqrt(x[k] * x[k] + y[k] * y[k])"),
    "exp(-x)*sin(y) + x*y": (
        lambda x, y: np.exp(-x) * np.sin(y) + x * y,
        "np.exp(-x[k]) * np.sin(y[k]) + x[k] * y[k]",
    ),
}


def _compiled(loop: Function | None) -> Function | None:
    """Compile by Numba, where it is installed."""
    try:
        import numba
    except ImportError:
        return None
    return None if loop is None else numba.njit(loop)


async def _row(
    name: str,
    ask: Function,
    by_numpy: Function | None,
    loop: Function | None,
    arrays: Sequence[Numbers],
    outs: int = 1,
) -> None:
    """Measure by turns, and compare the results."""
    made = [np.empty_like(arrays[0]) for _ in range(outs)]
    by_numba = _compiled(loop)
    calls: dict[str, Function | None] = {
        "NumPy": by_numpy and (lambda: by_numpy(*arrays)), "Numba": by_numba and (lambda: by_numba(*arrays, *made)),
    }  # fmt: skip
    least = {each: (float("nan"), float("nan")) for each in ("NumPy", "Numba", "trio_accel")}
    kept: Any = None
    for number in range(_TIMES):
        for each in least:
            call = calls.get(each)
            if each != "trio_accel" and call is None:
                continue
            start, wall = time.process_time(), time.perf_counter()
            if call is None:
                kept = await ask()
            else:
                call()
            spent = (time.process_time() - start) * 1e3, (time.perf_counter() - wall) * 1e3
            if number:
                least[each] = tuple(map(np.fmin, least[each], spent))
    refs = kept if isinstance(kept, (list, tuple)) else [kept]
    found = [await ref.to_host() for ref in refs]
    told = ""
    if by_numpy is not None:
        want = by_numpy(*arrays)
        equal = np.mean([np.mean(a == b) for a, b in zip(found, want if outs > 1 else [want], strict=True)])
        told += f"  equal to NumPy {equal:.2%}"
    if by_numba is not None:
        apart = max(
            float(np.max(np.abs(np.subtract(a, b, dtype=float)))) for a, b in zip(found, made, strict=True)
        )
        told += f"  apart from Numba {apart:.1e}"
    columns = "  ".join(f"{each} {spent:7.3f} ({wall:7.3f})" for each, (spent, wall) in least.items())
    print(f"{name:30s}  {columns}{told}", flush=True)


async def main() -> None:
    """Print a line for each expression."""
    rng = np.random.default_rng(0)
    os.environ.setdefault("TRIO_ACCEL_CPU_COMPILED", "always")
    async with ta.open_system("measure") as system, system.open_device("cpu") as device:
        step, by_numpy, loop = _life()
        cells = (rng.random((_SIDE, _SIDE)) < 0.3).astype(np.uint8)
        put = await device.put(cells)
        await _row("life 512 x 512", lambda: step(put, shape=cells.shape), by_numpy, loop, [cells])
        flow, by_numpy, loop = _boltzmann()
        f = [weight * (1 + 0.01 * rng.normal(size=(_LATTICE, _LATTICE))) for weight in _WEIGHTS]
        fs = [await device.put(one) for one in f]
        await _row("lattice Boltzmann 256 x 256", lambda: flow(*fs, shape=f[0].shape), by_numpy, loop, f, 9)
        verlet, loop = _cloth()
        x, y = np.meshgrid(*[np.linspace(0, 1, _CLOTH)] * 2, indexing="ij")
        places = [*(one + 0.001 * rng.normal(size=x.shape) for one in (x, y, 0 * x))] * 2
        ps = [await device.put(one) for one in places]
        await _row("cloth 128 x 128", lambda: verlet(*ps, shape=x.shape), None, loop, places, 3)
        smooth, by_numpy, loop = _bilateral()
        picture = rng.random((_HEIGHT, _WIDTH))
        image = await device.put(picture)
        await _row(
            "bilateral 240 x 320", lambda: smooth(image, shape=picture.shape), by_numpy, loop, [picture]
        )
        for dtype in (np.float64, np.float32):
            x, y = (rng.random(_COUNT).astype(dtype) * 4 for _ in range(2))
            given = await device.put(x), await device.put(y)
            for text, (function, body) in _FUSED.items():
                space: dict[str, Any] = {"np": np, "c": dtype(2.5)}
                exec(f"def loop(x, y, out):\n for k in range(x.size): out[k] = {body}", space)
                fused = jit.elementwise(text, inputs=("x", "y"))
                name = f"{np.dtype(dtype).name} {text}"
                await _row(name, lambda fused=fused: fused(*given), function, space["loop"], [x, y])


if __name__ == "__main__":
    trio.run(main)
