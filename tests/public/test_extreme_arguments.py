"""Extreme arguments of every function: refused in the caller's task, or computed; no actor ends."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from test_refusals import (
    FUNCTIONS,
    ON_DEVICE,
    OTHER_PACKAGES,
    OWN_CODE,
    PACKAGES,
    SAMPLES,
    Surroundings,
    call,
    own_samples,
)

import trio_accel as ta

pytestmark = [
    pytest.mark.skipif(BACKEND != "cpu", reason="what a backend has not, it refuses first"),
    pytest.mark.filterwarnings("ignore"),
]

# Needs a result of another function.
WITHOUT_SAMPLES = {"signal.evaluate_spline"}
DTYPES = ("int64", "uint64", "int8", "uint8", "float64", "float32", "float16", "complex128", "bool")
HUGE = 10**400
REFUSALS = (TypeError, ValueError, IndexError, ta.AccelError)


def ends(dtype: str, shape: tuple[int, ...]) -> Any:
    """Make an array of the numbers at the ends of a dtype, and of NaN, infinity and -0.0."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.resize(np.array([False, True]), shape)
    if kind in "iu":
        whole = np.iinfo(dtype)
        return np.resize(np.array([whole.min, whole.max, whole.min + 1, whole.max - 1, 0], dtype), shape)
    limits = np.finfo(dtype)
    real = np.array([math.nan, math.inf, -math.inf, -0.0, limits.max, limits.min, limits.smallest_subnormal])
    return np.resize((real + 1j * real[::-1] if kind == "c" else real).astype(dtype), shape)


def numbers() -> dict[str, Any]:
    whole = [2**63, 2**64, -(2**63) - 1, HUGE, -HUGE, 2**63 - 1, -(2**63), 2**31, -(2**31), -1, 0]
    floats = [math.inf, -math.inf, math.nan, -0.0, 1.7e308, 5e-324, complex(math.nan, math.inf)]
    scalars = [np.float64("nan"), np.float32("inf"), np.int64(-(2**63)), np.uint64(2**64 - 1), np.bool(1)]
    scalars += [
        np.float16(1),
        np.complex64(1j),
        np.int8(1),
        np.longdouble("nan"),
        np.array(1),
        np.array(np.nan),
    ]
    large = [(2**63,), [2**64], (2**62, 2**62), (2**40, 2**40), (2**31, 2**32), (-(2**63),), (2**63 - 1,) * 2]
    large += [(HUGE,), (HUGE, 1), [(HUGE, 1)], [[HUGE]], ((0,), (2**64,)), [10**5000]]
    small: list[Any] = [(-1,), (-1, -2), (0, 0), (0,), (1, 0), [], (True,), (math.nan,), (math.inf, 1), (1j,)]
    small += [(0,) * 70, (1,) * 70, (np.array(1),), (np.int64(1),), [[1], [1, 2]], range(3), {1}]
    others = [np.array([-(2**63), 2**63 - 1]), np.array([HUGE], object), b"abc", slice(2**63), ...]
    found = [*whole, *floats, *scalars, *large, *small, *others]
    return {f"number {index}": one for index, one in enumerate(found)}


def arrays_of_all() -> dict[str, Any]:
    found = {f"{dtype} {shape}": ends(dtype, shape) for dtype in DTYPES for shape in ((4,), (4, 4), ())}
    for shape in ((0,), (0, 4), (4, 0), (0, 0), (1,), (1, 1), (1,) * 8, (2,) * 9, (1, 2, 3, 3)):
        found |= {f"{dtype} {shape}": np.ones(shape, dtype) for dtype in ("float64", "int64")}
    found |= {"all NaN": np.full((4, 4), np.nan), "all infinite": np.full((4, 4), np.inf)}
    return found | {"all large": np.full((4, 4), 1.79e308), "all least": np.full(4, -(2**63))}


def extremes(name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the parameter, the argument in words, and the argument."""
    hosts = arrays_of_all()
    values = numbers() | hosts | {f"{word}{ON_DEVICE}": host for word, host in hosts.items()}
    for one in inspect.signature(FUNCTIONS[name]).parameters.values():
        if one.name != "self" and one.kind is not one.VAR_KEYWORD:
            yield from ((one.name, word, value) for word, value in values.items())


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)], id="all"),
        pytest.param(30, id="some"),
    ],
)
@pytest.mark.parametrize("package", [*PACKAGES, *OTHER_PACKAGES, "random"])
async def test_extreme_arguments_end_no_actor(system: ta.System, package: str, share: int) -> None:
    wrong: list[str] = []
    options = ta.DeviceOptions(isolation="inline", memory_limit=1 << 27)
    names = [one for one in sorted(FUNCTIONS) if one.startswith(f"{package}.") and one not in WITHOUT_SAMPLES]
    async with system.open_device(BACKEND, name="extreme", options=options) as device:
        for name in names:
            for parameter, word, value in extremes(name):
                is_left_out = zlib.crc32(f"{name} {parameter} {word}".encode()) % share
                if is_left_out or (parameter, word) in OWN_CODE:
                    continue
                try:
                    given = await device.put(value) if word.endswith(ON_DEVICE) else value
                    await call(name, Surroundings(device), parameter, given)
                except REFUSALS:
                    pass
                except Exception as error:  # noqa: BLE001  # any other one is told
                    wrong.append(f"{name}({parameter}: {word}) {type(error).__name__}: {error}"[:300])
        assert device.generation == 1
    assert not wrong, "\n".join([f"{len(wrong)} errors:", *wrong])


def _arrays(name: str) -> list[str]:
    """Return the parameters with an array for a sample, except `out`."""
    samples = SAMPLES | own_samples(name)
    given = {one: samples.get(one) for one in inspect.signature(FUNCTIONS[name]).parameters if one != "out"}
    others = ("DEVICE", "GENERATOR", "SOBOL")
    return [key for key, one in given.items() if isinstance(one, str) and one.isupper() and one not in others]


@pytest.mark.parametrize(
    "share", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(9, id="some")]
)
@pytest.mark.parametrize("kind", ["number", "no axes"])
async def test_numbers_in_place_of_all_arrays_end_no_actor(system: ta.System, kind: str, share: int) -> None:
    """An array to write to determines the device, so each function may be given only numbers."""
    wrong: list[str] = []
    options = ta.DeviceOptions(isolation="inline", memory_limit=1 << 27)
    async with system.open_device(BACKEND, name="numbers", options=options) as device:
        given: Any = 3.0 if kind == "number" else await device.put(np.array(3.0))
        for name in sorted(set(FUNCTIONS) - WITHOUT_SAMPLES):
            has_out = "out" in inspect.signature(FUNCTIONS[name]).parameters
            if not has_out or zlib.crc32(name.encode()) % share:
                continue
            for out in (np.zeros(()), np.zeros((4, 4))):
                changed = dict.fromkeys(_arrays(name), given) | {"out": await device.put(out)}
                try:
                    await call(name, Surroundings(device), **changed)
                except REFUSALS as error:
                    if "crashed" in str(error) or "out of range" in str(error):
                        wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
        assert device.generation == 1
    assert not wrong, "\n".join([f"{len(wrong)} errors:", *wrong])


def _integers(name: str) -> list[str]:
    """Return the parameters with an integer for a sample."""
    samples = SAMPLES | own_samples(name)
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    return [one for one in parameters if type(samples.get(one)) is int]


async def _host(result: Any) -> Any:
    if isinstance(result, ta.AccelRef):
        return await result.to_host()
    if isinstance(result, (tuple, list)):
        return [await _host(one) for one in result]
    return result if isinstance(result, (int, float, np.generic, np.ndarray)) else None


@pytest.mark.parametrize("package", [*PACKAGES, *OTHER_PACKAGES])
async def test_an_integer_of_numpy_means_the_same(system: ta.System, package: str) -> None:
    """Also where sums and products with it would not fit into its dtype, or would change it in place."""
    wrong: list[str] = []
    options = ta.DeviceOptions(isolation="inline", memory_limit=1 << 27)
    names = [one for one in sorted(FUNCTIONS) if one.startswith(f"{package}.") and one not in WITHOUT_SAMPLES]
    async with system.open_device(BACKEND, name="integers", options=options) as device:
        for name in names:
            for parameter in _integers(name):
                number = (SAMPLES | own_samples(name))[parameter]
                try:
                    plain = await _host(await call(name, Surroundings(device), parameter, number))
                except ValueError:
                    continue  # other arguments must be given with it
                others = [
                    np.int64(number),
                    np.array(number),
                    *([np.int8(number)] if abs(number) < 128 else []),
                    *([np.uint64(number)] if number >= 0 else []),
                ]
                for other in others:
                    try:
                        made = await _host(await call(name, Surroundings(device), parameter, other))
                    except (TypeError, ValueError) as error:
                        # Operands promote by the array API standard, and a seed may be only Python's.
                        if "an index is an integer" in str(error):
                            wrong.append(f"{name}({parameter}={other!r}): {error}")
                        continue
                    try:
                        np.testing.assert_equal(made, plain)
                    except AssertionError as error:
                        wrong.append(f"{name}({parameter}={other!r}): {error}"[:300])
        assert device.generation == 1
    assert not wrong, "\n".join(wrong)
