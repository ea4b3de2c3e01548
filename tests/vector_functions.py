"""Errors and times of our own functions against NumPy's: `python tests/vector_functions.py`.

The reference is NumPy's long double, with 64 bits, which are 11 more than float64 has. Errors are the
greatest in units of the last place, of points in many ranges; times are nanoseconds of an element, in the
caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import scipy.special

from trio_accel import DType
from trio_accel.backends.base.expressions import Argument, encode_program, parse, typed
from trio_accel.backends.cpu.compiled._compiler import compiler, load
from trio_accel.backends.cpu.compiled._functions import VECTOR
from trio_accel.backends.cpu.compiled._loops import text_of
from trio_accel.backends.cpu.compiled._text import Access, LoopLayout

Numbers: TypeAlias = Any
# NumPy does not have these.
ALONE = ("erf", "erfc")
OF_TWO = ("arctan2", "hypot", "power")
# Composed functions have errors of their own.
NAMES = tuple(sorted(VECTOR - {"logaddexp"}))
VARIANTS = {"widest": (), "AVX2": ("-mno-avx512f", "-mavx2", "-mfma"), "scalar": ("-fno-tree-vectorize",)}
SPECIAL = (0.0, 1.0, 0.5, 2.0, 3.0, 1e300, 1e-300, 5e-324, np.inf, np.nan, 709.7827128933841, 2**30.0, 1e22)


def functions(names: Sequence[str], dtype: DType, options: tuple[str, ...]) -> Callable[..., list[Numbers]]:
    """Compile functions by the C++ compiler of this machine, with options more, into one loop of x and y."""
    calls = [f"r{n} = {name}({'x, y' if name in OF_TWO else 'x'})" for n, name in enumerate(names)]
    inputs = ("x", "y") if any(name in OF_TWO for name in names) else ("x",)
    expression = parse("; ".join(calls), inputs, tuple(f"r{n}" for n in range(len(names))))
    arguments = (Argument(dtype, True),) * len(inputs)
    encoded = encode_program(typed(expression, (dtype,) * len(inputs)), arguments)
    found = compiler()
    assert found is not None
    dense: Access = "dense"
    text = text_of(encoded, LoopLayout(1, (dense,) * (len(names) + len(inputs))))
    run = load(found.compile(text, options))

    def call(x: Numbers, y: Numbers, *out: Numbers) -> list[Numbers]:
        made = list(out) or [np.empty_like(x) for _ in names]
        addresses = [each.ctypes.data for each in (*made, *(x, y)[: len(inputs)])]
        # The fields after these addresses: the loaded value, a number, the shape, and strides.
        fields = [*addresses, 0, 0, 0, x.size, *[x.itemsize] * len(addresses), 0, 0, 0]
        run(np.array(fields, np.uint64).tobytes(), 0, x.size)
        return made

    return call


def points(count: int, dtype: DType, seed: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Make pairs of numbers in all ranges, and where functions are hard."""
    rng = np.random.default_rng(seed)

    def uniform(low: float, high: float) -> Numbers:
        return rng.uniform(low, high, count)

    def any_size(low: int, high: int) -> Numbers:
        return np.ldexp(uniform(1, 2) * rng.choice([-1, 1], count), rng.integers(low, high, count))

    least, most = (-149, 128) if dtype is DType.float32 else (-1074, 1024)
    special = np.array([sign * number for number in SPECIAL for sign in (1, -1)])
    pairs = [
        (any_size(least, most), any_size(-5, 5)),
        (any_size(least, most), any_size(least, most)),
        (uniform(-1, 1), uniform(-1, 1)),
        (uniform(-10, 10), uniform(-300, 300)),
        (uniform(-750, 750), uniform(-30, 30)),
        (uniform(0.5, 2), uniform(-1100, 1100)),
        (1 + any_size(-50, -2), any_size(0, 50)),
        (np.arange(1, count + 1) * (np.pi / 2), uniform(0, 2)),
        (rng.integers(1, 2**31, count) * (np.pi / 2), uniform(0, 2)),
        (np.repeat(special, len(special)), np.tile(special, len(special))),
    ]
    with np.errstate(over="ignore"):
        yield from ((x.astype(dtype.dtype), y.astype(dtype.dtype)) for x, y in pairs)


# NumPy does not have these: the C library has them in 64 bits, and SciPy in the dtype of the argument.
_BY_C = """
typedef long long i64;
extern "C" __attribute__((visibility("default"))) i64 run(const void *const *at, i64 first, i64 end)
{
    const long double *x = (const long double *)at[0];
    for (i64 i = first; i < end; i++)
        ((long double *)at[1])[i] = __builtin_NAMEl(x[i]);
    return 0;
}
"""


@cache
def _by_c(name: str) -> Callable[[Numbers], Numbers]:
    found = compiler()
    assert found is not None
    run = load(found.compile(_BY_C.replace("NAME", name), ()))

    def call(x: Numbers) -> Numbers:
        made, given = np.empty_like(x), np.ascontiguousarray(x)
        run(np.array([given.ctypes.data, made.ctypes.data], np.uint64).tobytes(), 0, x.size)
        return made

    return call


def called(name: str, x: Numbers, y: Numbers, out: Numbers | None = None) -> Numbers:
    """Compute by NumPy, or by SciPy what NumPy does not have."""
    if name in ALONE:
        return _by_c(name)(x) if x.dtype == np.longdouble else getattr(scipy.special, name)(x, out=out)
    with np.errstate(all="ignore"):
        return getattr(np, name)(*((x, y) if name in OF_TWO else (x,)), out=out)


def errors(got: Numbers, want: Numbers) -> Numbers:
    """Return errors in units of the last place in `got`; infinite if infinite or NaN elements differ."""
    with np.errstate(all="ignore"):
        near = want.astype(got.dtype)
        is_same = (near == got) | (np.isnan(near) & np.isnan(got))
        apart = np.abs(got.astype(np.longdouble) - want) / np.spacing(np.abs(near))
    return np.where(np.isfinite(near) & np.isfinite(got), apart, np.where(is_same, 0, np.inf)).astype(float)


def _nanoseconds(call: Callable[[], object], count: int) -> float:
    best = 1e9
    for _ in range(25):
        begin = time.thread_time_ns()
        call()
        best = min(best, (time.thread_time_ns() - begin) / count)
    return best


def _row(name: str, dtype: DType, count: int, seeds: int) -> str:
    calls = [functions((name,), dtype, options) for options in VARIANTS.values()]
    most, by_numpy = 0.0, 0.0
    for seed in range(seeds):
        for x, y in points(count, dtype, seed):
            want = called(name, x.astype(np.longdouble), y.astype(np.longdouble))
            most = max(most, errors(calls[0](x, y)[0], want).max())
            by_numpy = max(by_numpy, errors(called(name, x, y), want).max())
    rng = np.random.default_rng(1)
    x, y = rng.uniform(0.1, 3, (2, 1 << 15)).astype(dtype.dtype)
    out = np.empty_like(x)
    times = [_nanoseconds(partial(call, x, y, out), len(x)) for call in calls]
    times.append(_nanoseconds(partial(called, name, x, y, out), len(x)))
    cells = " | ".join(f"{number:.2f}" for number in times)
    return f"| {name} | {dtype} | {most:.3f} | {by_numpy:.2f} | {cells} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="points of each range")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print(
        f"| function | dtype | ulp | NumPy's | {' | '.join(f'ns, {name}' for name in VARIANTS)} | NumPy's |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in NAMES:
        for dtype in (DType.float64, DType.float32):
            print(_row(name, dtype, given.count, given.seeds), flush=True)


if __name__ == "__main__":
    main()
