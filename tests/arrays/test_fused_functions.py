"""`ta.fused` of every function against that function, and of random trees against NumPy in float64."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_numbers import DTYPES, numbers
from chosen import BACKEND, IS_STAND_IN
from fused_checks import assert_same, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

import trio_accel as ta

xp = ta.fused.xp
# The stand-in's compiler takes a second for each kernel.
STEP = 7 if IS_STAND_IN else 1
ALONG_AXES = [name for name in ta.arrays.__all__ if hasattr(getattr(ta.arrays, name), "text")]
BY_ELEMENT = [
    "clip",
    *[name for name in ta.arrays.__all__ if hasattr(getattr(ta.arrays, name), "elementwise")],
]


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("name", BY_ELEMENT[::STEP])
async def test_every_function_of_each_element(device: ta.Device, name: str) -> None:
    """The dtype, or the refusal, is that of the function without fusing."""
    function = getattr(ta.arrays, name)
    several = ("x", "min", "max") if name == "clip" else function.elementwise.inputs
    named = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True} if name == "isclose" else {}
    several = [each for each in several if each not in named]
    call = ", ".join([*several, *(f"{each}={value}" for each, value in named.items())])
    fused = ta.fused(eval(f"lambda {', '.join(several)}: xp.{name}({call})", {"xp": xp}))
    kinds = DTYPES[::6] if IS_STAND_IN else DTYPES
    pairs = [(one, one) for one in kinds] + [
        *itertools.pairwise(kinds),
        ("float32", "complex64"),
        ("int8", 2),
    ]
    compared = 0
    for first, second in [
        *pairs,
        (2.5, "float32"),
        ("int64", 1.5),
        (True, "bool"),
        ("float16", np.float64(2)),
    ]:
        made = [numbers((5,), each, 7) if isinstance(each, str) else each for each in (first, second)]
        arguments = {
            1: made[:1],
            2: made,
            3: [numbers((5,), "bool"), *made] if name == "where" else [*made, made[1]],
        }[len(several)]
        if not any(isinstance(each, np.ndarray) for each in arguments):
            continue
        given = [await device.put(each) if isinstance(each, np.ndarray) else each for each in arguments]
        found = await outcome(fused(*given))
        want = await outcome(function(*given, **named))
        if isinstance(found, type) or isinstance(want, type):
            assert found is want, (name, first, second)
        else:
            await assert_same(found, want, (name, first, second))
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize("name", ALONG_AXES)
async def test_every_function_along_axes(device: ta.Device, name: str) -> None:
    function = getattr(ta.arrays, name)

    def call(*arrays: Any, **options: Any) -> Any:
        return getattr(xp, name)(*arrays, **options)

    def one(x: Any, *, options: Any = ()) -> Any:
        return call(x, **dict(options))

    def two(x: Any, y: Any, *, options: Any = ()) -> Any:
        return call(x, y, **dict(options))

    fused = ta.fused(two if name == "cosine_similarity" else one)
    takes_keepdims = "keepdims" in inspect.signature(function).parameters
    compared = 0
    for kind in DTYPES[::STEP]:
        seeds = (3, 4)[: 1 + (name == "cosine_similarity")]
        arrays = [await device.put(numbers((3, 4, 5), kind, seed)) for seed in seeds]
        for axis, keepdims in itertools.product(
            (None, 0, -1, (0, 2), ()), (False, True)[: 1 + takes_keepdims]
        ):
            if IS_STAND_IN and axis not in (None, -1):
                continue
            options = {"axis": axis, **({"keepdims": keepdims} if takes_keepdims else {})}
            found = await outcome(fused(*arrays, options=tuple(options.items())))
            want = await outcome(function(*arrays, **options))
            if isinstance(found, type) or isinstance(want, type):
                assert found is want, (name, kind, axis)
            else:
                await assert_same(found, want, (name, kind, axis, keepdims))
                compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", ["sum", "prod"])
async def test_sums_of_other_dtypes(device: ta.Device, name: str) -> None:
    function = getattr(ta.arrays, name)
    fused = ta.fused(lambda x, *, dtype: getattr(xp, name)(x + x, axis=0, dtype=dtype))
    for kind, dtype in (
        ("int8", "int8"),
        ("int8", "float32"),
        ("bool", "int32"),
        ("float16", "float64"),
        ("uint8", "uint8"),
    ):
        x = numbers((9, 6), kind) if kind != "bool" else numbers((9, 6), "int16")
        found = await fused(await device.put(x), dtype=dtype)
        await assert_same(found, await function(await ta.arrays.add(await device.put(x), x), 0, dtype=dtype))
        assert found.dtype == dtype


UNARY = ("sin", "exp", "abs", "tanh", "square", "negative", "floor", "expm1", "atan", "sign", "isfinite")
BINARY = (
    *("add", "subtract", "multiply", "maximum", "minimum"),
    *("less", "hypot", "atan2", "where", "copysign"),
)
ALONG = ("sum", "max", "min", "mean", "var", "std", "prod", "any", "argmax", "count_nonzero")
STEPS = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(UNARY)),
    st.tuples(st.just("binary"), st.sampled_from(BINARY)),
    st.tuples(st.just("along"), st.sampled_from(ALONG)),
)
CHOICES = st.lists(
    st.tuples(STEPS, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=7,
)


def tree(arrays: list[Any], space: Any, choices: list[Any]) -> Any:
    """Build the tree of the choices; it has one value more with each."""
    for (kind, name), first, second, axis, keepdims in choices:
        values = [*arrays, 0.5, -2.0]
        x, y = arrays[first % len(arrays)], values[second % len(values)]
        if kind == "unary":
            made = getattr(space, name)(x)
        elif kind == "along":
            along = axis % x.ndim if axis is not None and x.ndim else None
            made = getattr(space, name)(x, axis=along, keepdims=keepdims)
        elif name == "where":
            made = space.where(x > 0, x, y)
        else:
            made = getattr(space, name)(x, y)
        # What does not fit stays small: NumPy and the device may differ beyond.
        arrays = [*arrays, space.clip(space.astype(made, space.float64), -50.0, 50.0)]
    return arrays[-1]


async def in_one_launch_or_several(function: Callable[..., Any], *on: ta.AccelRef) -> ta.AccelRef:
    found: ta.AccelRef
    try:
        found = await ta.fused(function)(*on)
    except ta.NotSupportedError as error:
        assert "several launches" in str(error)  # noqa: PT017
        found = await function(*on)
    return found


@pytest.mark.filterwarnings("ignore:.*never awaited")  # the result needs only some of the calls
@settings(max_examples=4 if IS_STAND_IN else 40, deadline=None)
@given(choices=CHOICES, size=st.integers(1, 4), draw=st.data())
async def test_any_function(choices: list[Any], size: int, draw: st.DataObject) -> None:
    """Trees of functions: the same as NumPy in float64."""
    shape = st.sampled_from([(size, size), (1, size), (size, 1), (size,), ()])
    arrays = [np.asarray(numbers(draw.draw(shape), "float64", seed)) for seed in (1, 2)]
    try:
        with np.errstate(all="ignore"):
            want = np.asarray(tree(list(arrays), np, choices))
    except ValueError as error:
        assert "broadcast" in str(error)  # noqa: PT017
        return
    options = ta.DeviceOptions(isolation="inline")
    async with ta.open_system("any") as system, system.open_device(BACKEND, options=options) as device:
        found = await in_one_launch_or_several(
            lambda x, y: tree([x, y], xp, choices), *[await device.put(each) for each in arrays]
        )
        assert (found.dtype, found.shape) == ("float64", want.shape)
        np.testing.assert_allclose(await found.to_host(), want, rtol=1e-9, atol=1e-9)
