"""Processor time of compiled expressions, beside another version.

    python -m benchmarks.expression_kernels FOLDER [NAME...] [--beside BEFORE]

Each row is one kernel in one thread: milliseconds of processor time, the least of 24 runs. The folder gets
the C++ source of each. With `--beside`, the sources of another version run in turn with these in the same
process, on the same arrays, and their results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends.cpu.compiled import _compiler, _plans

Ask: TypeAlias = Callable[[], Awaitable[Any]]

_TURNS, _RUNS = 4, 6
_LIFE = """
n = sum(x[(i(0) + a) % h, (i(1) + b) % w] for a in range(-1, 2) for b in range(-1, 2)) - x[i(0), i(1)]
y = where((n == 3) or ((n == 2) and (x[i(0), i(1)] == 1)), 1, 0)
"""
_STEPS = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
_WEIGHTS = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
_BOLTZMANN = "\n".join(
    [
        *[f"f{k} = f[{k}, (i(0) - {dx}) % n, (i(1) - {dy}) % n]" for k, (dx, dy) in enumerate(_STEPS)],
        "rho = " + " + ".join(f"f{k}" for k in range(9)),
        "u = (" + " + ".join(f"{dx} * f{k}" for k, (dx, _) in enumerate(_STEPS) if dx) + ") / rho",
        "v = (" + " + ".join(f"{dy} * f{k}" for k, (_, dy) in enumerate(_STEPS) if dy) + ") / rho",
        *[
            f"c{k} = {dx} * u + {dy} * v\n"
            f"e{k} = rho * {w!r} * (1 + 3 * c{k} + 4.5 * c{k} * c{k} - 1.5 * (u * u + v * v))\n"
            f"o{k} = f{k} + omega * (e{k} - f{k})"
            for k, ((dx, dy), w) in enumerate(zip(_STEPS, _WEIGHTS, strict=True))
        ],
    ]
)
_BREAK = """
z = x * 0
w = x * 0
n = 0 * i(0)
for j in range(0, 60):
    t = z * z - w * w + x
    w = 2 * z * w + y
    z = t
    if z * z + w * w > 4: break
    n = n + 1
"""
_STENCIL = "0.25 * (x[i(0) - 1, i(1)] + x[i(0) + 1, i(1)] + x[i(0), i(1) - 1] + x[i(0), i(1) + 1])"
_POLYNOMIAL = "s = x * 0\nfor k in range(16):\n    s = s * x + k\n"
_CONVOLUTION = "y = sum(x[i(0) + a, i(1) + b] * w[a, b] for a in range(5) for b in range(5))"
# Gradients by rules: each choice is a `where` with a zero.
_HARDSWISH = """
t = x + 3; m = maximum(t, 0)
y = g * minimum(m, 6) / 6 + where(t > 0, where(m < 6, g * x / 6, 0), 0)
"""
_LEAKY = "y = where(x >= 0, g, 0) + a * where(x >= 0, 0, g)"
_BOUNDED = "d = x - z; y = g * minimum(maximum(d, -delta), delta)"


@attrs.define(eq=False)
class Taken:
    """The last kernel that ran: its plan, its function and its packed arguments."""

    plan: Any = None
    entry: Any = None
    data: bytes = b""


async def cases(device: ta.Device) -> AsyncIterator[tuple[str, Ask]]:
    """Return names of expressions, and functions that ask for them."""
    rng = np.random.default_rng(1)

    async def put(*shape: int, dtype: str = "float64") -> ta.AccelRef:
        return await device.put(rng.standard_normal(shape).astype(dtype))

    a, b, c, square = await put(1000, 1000), await put(1000, 1), await put(1000), await put(1024, 1024)
    x32, w32 = await put(2000, 1000, dtype="float32"), await put(1000, dtype="float32")
    life = await device.put((rng.random((512, 512)) < 0.3).astype("uint8"))
    flow = await device.put(rng.random((9, 256, 256)) + 1)
    index, one = await device.put(rng.integers(0, 5000, 10**6)), await put(10**6)
    grid = [await device.put(v) for v in np.meshgrid(np.linspace(-2, 1, 300), np.linspace(-1.2, 1.2, 300))]
    kernel = await put(5, 5)
    yield "elements", lambda: jit.elementwise("sqrt(x * x + y * y) * z + 1")(a, b, c)
    yield "transposed", lambda: jit.elementwise("x * 2.5 + y")(square.T, square[:, ::-1])
    yield "exp-sin", lambda: jit.elementwise("exp(-x) * sin(x) + x * x")(x32)
    stencil = jit.elementwise(_STENCIL, inputs=["x"])
    yield "stencil", lambda: stencil(a, shape=(1000, 1000))
    yield "sum-last", lambda: jit.reduction("x * x", "sum")(a, axis=1)
    yield "sum-first", lambda: jit.reduction("x * x", "sum")(a, axis=0)
    yield "mean", lambda: jit.reduction("x * x", "mean")(x32, axis=1)
    yield "softmax-rows", lambda: ta.arrays.softmax(x32, axis=-1)
    yield "softmax-columns", lambda: ta.arrays.softmax(x32, axis=0)
    yield "layer-norm", lambda: ta.arrays.layer_norm(x32, w32, w32)

    async def scatter() -> Any:
        return await ta.arrays.scatter(await device.put(np.zeros(5000)), index, one, reduce="add")

    yield "scatter", scatter
    boltzmann = jit.elementwise(_BOLTZMANN, inputs=["f", "n", "omega"], outputs=[f"o{k}" for k in range(9)])
    yield "boltzmann", lambda: boltzmann(flow, 256, 1.7, shape=(256, 256))
    yield "break", lambda: jit.elementwise(_BREAK, inputs=["x", "y"], outputs=["n"])(*grid)
    step = jit.elementwise(_LIFE, inputs=["x", "h", "w"], outputs=["y"])
    yield "life-range", lambda: step(life, 512, 512, shape=(512, 512))
    wide = jit.elementwise(_CONVOLUTION, inputs=["x", "w"], outputs=["y"])
    yield "convolution-range", lambda: wide(a, kernel, shape=(996, 996))
    yield "polynomial-range", lambda: jit.elementwise(_POLYNOMIAL, inputs=["x"], outputs=["s"])(a)
    for name, ask in choices(*[await put(200_000, dtype="float32") for _ in range(3)]):
        yield name, ask


def choices(g: ta.AccelRef, x: ta.AccelRef, z: ta.AccelRef) -> Iterator[tuple[str, Ask]]:
    """Return expressions that choose by conditions."""
    yield "clamp", lambda: jit.elementwise("maximum(minimum(x, 1), -1)")(g)
    yield "choice", lambda: jit.elementwise("where(x > 0, sqrt(x), x * y)")(g, x)
    yield "hardswish-derived", lambda: jit.elementwise(_HARDSWISH, inputs=["g", "x"], outputs=["y"])(g, x)
    yield (
        "leaky-relu-derived",
        lambda: jit.elementwise(_LEAKY, inputs=["g", "x", "a"], outputs=["y"])(g, x, 0.01),
    )
    yield "prelu-derived", lambda: jit.elementwise(_LEAKY, inputs=["g", "x", "a"], outputs=["y"])(g, x, z)
    bounded = jit.elementwise(_BOUNDED, inputs=["g", "x", "z", "delta"], outputs=["y"])
    yield "bounded-difference", lambda: bounded(g, x, z, 0.8)
    yield "huber-loss-grad", lambda: ta.nn.huber_loss_grad(g, x, z, delta=0.8, reduction="none")
    yield "leaky-relu-grad", lambda: ta.nn.leaky_relu_grad(g, x, 0.01)


def _run(entry: Any, taken: Taken, runs: int) -> float:
    least = math.inf
    for _ in range(runs):
        start = time.process_time()
        entry(taken.data, 0, taken.plan.count)
        least = min(least, time.process_time() - start)
    return least * 1e3


async def _bits(made: Any) -> list[bytes]:
    refs: Sequence[ta.AccelRef] = [made] if isinstance(made, ta.AccelRef) else made
    return [(await ref.to_host()).tobytes() for ref in refs]


async def measure(name: str, ask: Ask, taken: Taken, folder: Path, beside: Path | None) -> float | None:
    """Print the row of an expression, and return its ratio to the other version's time."""
    taken.plan = None
    made = await ask()
    if taken.plan is None:
        print(f"{name:20} is not compiled")
        return None
    (folder / f"{name}.cpp").write_text(taken.plan.text(), encoding="utf-8")
    other = beside / f"{name}.cpp" if beside is not None else None
    entries = {"now": taken.entry}
    if other is not None and other.exists():
        found = _compiler.compile_text(other.read_text(encoding="utf-8"))
        assert found is not None, f"{other} does not compile"
        entries = {"before": found, "now": taken.entry}
    bits, times = list[list[bytes]](), dict.fromkeys(entries, math.inf)
    for entry in entries.values():
        entry(taken.data, 0, taken.plan.count)
        bits.append(await _bits(made))
    for _ in range(_TURNS):
        for version, entry in entries.items():
            times[version] = min(times[version], _run(entry, taken, _RUNS))
    columns = [f"{version} {spent:8.3f} ms" for version, spent in times.items()]
    if len(entries) == 1:
        print(f"{name:20}", *columns, flush=True)
        return None
    # Each run of a scatter changes its result.
    told = "" if name == "scatter" else "same bits" if bits[0] == bits[1] else "OTHER BITS"
    ratio = times["now"] / times["before"]
    print(f"{name:20}", *columns, f"ratio {ratio:6.3f}", told, flush=True)
    return ratio


async def main(folder: Path, beside: Path | None, names: Sequence[str]) -> None:
    """Print a row for each expression."""
    os.environ["TRIO_ACCEL_CPU_COMPILED"] = "always"
    taken, run, ratios = Taken(), _plans.LoopPlan.run, list[float]()

    def observed(plan: _plans.LoopPlan, entry: Any, data: bytes, *, is_split: bool = True) -> bool:
        taken.plan, taken.entry, taken.data = plan, entry, data
        return run(plan, entry, data, is_split=is_split)

    setattr(_plans.LoopPlan, "run", observed)  # noqa: B010  # a type checker refuses another method
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("measure") as system, system.open_device("cpu:0", options=options) as device:
        async for name, ask in cases(device):
            if not names or name in names:
                ratio = await measure(name, ask, taken, folder, beside)
                ratios += [] if ratio is None else [ratio]
    if ratios:
        print(f"geometric mean of the ratios {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expression_kernels")
    parser.add_argument("folder", type=Path, help="where the C++ sources are written")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows; all by default")
    parser.add_argument("--beside", type=Path, metavar="BEFORE", help="a folder of another version's sources")
    given = parser.parse_intermixed_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    trio.run(main, given.folder, given.beside, given.names)
