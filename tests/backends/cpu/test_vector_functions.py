"""Our own functions of compiled expressions: errors, special values, and bits in vectors of any width."""

from __future__ import annotations

import numpy as np
import pytest
from vector_functions import NAMES, SPECIAL, VARIANTS, Numbers, called, errors, functions, points

from trio_accel.backends.base import DType
from trio_accel.backends.cpu.compiled._compiler import compiler

pytestmark = [
    pytest.mark.no_device,
    pytest.mark.machine,
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]

DTYPES = (DType.float64, DType.float32)
COUNT = 3000
# Units in the last place of float64; all of float32 are rounded once, nearly.
BOUNDS = {
    **dict.fromkeys(("log", "log2", "log10", "log1p"), 0.7),
    **dict.fromkeys(("exp", "exp2", "sin", "cos"), 0.85),
    **dict.fromkeys(("power", "hypot"), 1.0),
    **dict.fromkeys(("expm1", "tanh"), 1.1),
    **dict.fromkeys(("sinh", "cosh", "arctan", "arctan2"), 1.7),
    "erf": 2.2,
    "erfc": 4.1,
}
SHORT = 0.51


def _pairs(dtype: DType) -> tuple[Numbers, Numbers]:
    x, y = zip(*points(COUNT, dtype, seed=4), strict=True)
    return np.concatenate(x), np.concatenate(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_and_bits(dtype: DType) -> None:
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("long double has no more bits than float64")
    x, y = _pairs(dtype)
    wide = x.astype(np.longdouble), y.astype(np.longdouble)
    widest, *others = (functions(NAMES, dtype, options)(x, y) for options in VARIANTS.values())
    for number, name in enumerate(NAMES):
        made = widest[number]
        assert errors(made, called(name, *wide)).max() < (BOUNDS[name] if dtype is DType.float64 else SHORT)
        for other in others:
            assert made.tobytes() == other[number].tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_match_numpy(dtype: DType) -> None:
    with np.errstate(over="ignore", under="ignore"):
        one = np.array([sign * number for number in SPECIAL for sign in (1, -1)]).astype(dtype.dtype)
    x, y = np.repeat(one, len(one)), np.tile(one, len(one))
    for name, made in zip(NAMES, functions(NAMES, dtype, ())(x, y), strict=True):
        want = called(name, x, y)
        is_special = ~np.isfinite(want) | (want == 0) | (want == np.trunc(want)) & (np.abs(want) < 10)
        np.testing.assert_array_equal(made[is_special], want[is_special], name)
        assert (np.signbit(made) == np.signbit(want))[~np.isnan(want)].all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_has_the_same_bits_wherever_it_is(dtype: DType) -> None:
    call = functions(NAMES, dtype, ())
    x, y = (each[::97][:64].copy() for each in _pairs(dtype))
    alone = [
        np.concatenate(each) for each in zip(*(call(x[k:][:1], y[k:][:1]) for k in range(64)), strict=True)
    ]
    for count in (3, 7, 8, 9, 31, 64):
        for name, whole, single in zip(NAMES, call(x[:count], y[:count]), alone, strict=True):
            assert whole.tobytes() == single[:count].tobytes(), name
