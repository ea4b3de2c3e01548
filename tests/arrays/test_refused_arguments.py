"""Wrong arguments of array functions: the error names the function, the argument, and its value."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import trio_accel as ta

arrays: Any = ta.arrays
# Functions by their first argument: an array on the device, then their other arguments.
WITH_ARRAY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "matrix_transpose", "diagonal", "unstack"), ()),
    **dict.fromkeys(("flip", "expand_dims", "softmax", "sum", "argmax", "sort", "unique_values", "exp"), ()),
    "full_like": (1.0,),
    "permute_dims": ((1, 0),),
    "moveaxis": (0, 1),
    "squeeze": (0,),
    "pad": (1,),
    "reshape": (6,),
    "split": (2,),
    "roll": (1,),
    "tile": (2,),
    "repeat": (2,),
    "broadcast_to": ((2, 3),),
}


async def _asked(name: str, *arguments: Any, **named: Any) -> None:
    reply = getattr(arrays, name)(*arguments, **named)
    if inspect.isawaitable(reply):
        await reply


@pytest.mark.parametrize("name", WITH_ARRAY)
async def test_the_array_must_be_one(device: ta.Device, name: str) -> None:
    for wrong in (None, [1, 2], "abc", 2.5, object()):
        with pytest.raises(TypeError, match=rf"\b{name}: (x\d? must be|no operand is on a device)"):
            await _asked(name, wrong, *WITH_ARRAY[name])


# Calls with `x` of shape (2, 3), and the text of the error.
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("arange", ("device", None), {}, TypeError, "start must be a real number, got None"),
    ("arange", ("device", 1), {"stop": "x"}, TypeError, "stop must be a real number, got <AccelRef"),
    ("arange", ("device", 1j), {}, TypeError, "start must be a real number, got 1j"),
    ("arange", ("device", 3), {"dtype": 7}, TypeError, "dtype: an object of int is not an element type"),
    ("asarray", ("device", None), {}, TypeError, "dtype: object is not an element type"),
    ("asarray", ("device", 1), {"copy": "yes"}, TypeError, "copy must be True or False, got 'yes'"),
    ("broadcast_arrays", ("x", 3), {}, TypeError, r"arrays\[1\] must be an AccelRef, got int"),
    ("concat", (None,), {}, TypeError, "arrays must be a sequence of AccelRefs or NumPy arrays, got None"),
    ("concat", ("x",), {}, TypeError, "arrays must be a sequence of AccelRefs or NumPy arrays, got <Acc"),
    ("concat", (["x"],), {"axis": "x"}, TypeError, "axis must be an integer, got <AccelRef"),
    ("diff", ("x",), {"n": -1}, ValueError, "n must not be negative, got -1"),
    ("empty", ("device", "abc"), {}, TypeError, "shape must be an integer, got 'abc'"),
    ("exp", ("x",), {"out": 7}, TypeError, "out must be an AccelRef, got int"),
    ("exp", ("x",), {"out": ["x", 7]}, TypeError, "out must be an AccelRef, got int"),
    ("exp", ("x",), {"out": np.zeros((2, 3))}, TypeError, "out must be an AccelRef, got ndarray; copy it"),
    ("expand_dims", ("x", 1.5), {}, TypeError, "axis must be an integer, got 1.5"),
    ("eye", ("device", None), {}, TypeError, "n_rows must be an integer, got None"),
    ("eye", ("device", 3), {"k": 1.5}, TypeError, "k must be an integer, got 1.5"),
    ("flip", ("x", "x"), {}, TypeError, "axis must be an integer, got <AccelRef"),
    ("full", ("device", 3, None), {}, TypeError, "fill_value must be a number, got None"),
    ("full", ("device", 1.5, 0), {}, TypeError, "shape must be an integer, got 1.5"),
    ("full", ("device", -2, 0), {}, ValueError, "shape must be integers of at least 0, got -2"),
    ("full", ("device", 2, 300), {"dtype": "int8"}, ValueError, "fill_value 300 is outside -128 to 127"),
    ("histogram", ("x",), {"range": 7}, TypeError, "range must be two numbers, got 7"),
    ("histogram", ("x", np.array([None, 1])), {}, TypeError, "bins: dtype: .* is not an element type"),
    ("histogram", ("x", np.ma.array([1, 2])), {}, TypeError, "bins is a masked array"),
    ("histogram", ("x",), {"range": ("a", 1)}, TypeError, "range must be a real number, got 'a'"),
    ("histogram", ("x",), {"weights": 7}, TypeError, "weights must be an AccelRef or a NumPy array, got int"),
    ("linspace", ("device", None, 1, 3), {}, TypeError, "start must be a number, got None"),
    ("linspace", ("device", 0, 1, "abc"), {}, TypeError, "num must be an integer, got 'abc'"),
    ("linspace", ("device", 0, 1, 3), {"endpoint": 2}, TypeError, "endpoint must be True or False, got 2"),
    ("meshgrid", (None,), {}, TypeError, r"arrays\[0\] must be an AccelRef, got NoneType"),
    ("one_hot", ("n", 3), {"dtype": "text"}, TypeError, "dtype: 'text' is not an element type"),
    ("pad", ("x", "x"), {}, ValueError, "pad_width must be .* got <AccelRef"),
    ("pad", ("x", 1), {"mode": [1]}, ValueError, r"mode must be one of .*, got \[1\]"),
    ("put", ("x", "n", 1.0), {"axis": "x"}, TypeError, "axis must be an integer, got <AccelRef"),
    ("repeat", ("x", 1.5), {}, TypeError, "repeats must be an integer, got 1.5"),
    ("reshape", ("x", None), {}, TypeError, "shape must be an integer, got None"),
    ("reshape", ("x", 6), {"copy": "x"}, TypeError, "copy must be True or False, got <AccelRef"),
    ("roll", ("x", None), {}, TypeError, "shift must be an integer, got None"),
    ("scatter", ("x", "n", 1.0, 0), {"reduce": [1]}, ValueError, r"reduce must be 'set', .* got \[1\]"),
    ("sliding_window_view", ("x", "abc"), {}, TypeError, "window_shape must be an integer, got 'abc'"),
    ("softmax", ("x",), {"out": "abc"}, TypeError, "out must be an AccelRef, got str"),
    ("split", ("x", 1.5), {}, TypeError, "indices_or_sections must be an integer, got 1.5"),
    ("squeeze", ("x", None), {}, TypeError, "axis must be an integer, got None"),
    ("stack", (["x"],), {"axis": None}, TypeError, "axis must be an integer, got None"),
    ("sum", ("x",), {"dtype": 7}, TypeError, "dtype: an object of int is not an element type"),
    ("sum", ("x",), {"keepdims": "x"}, TypeError, "keepdims must be True or False, got <AccelRef"),
    ("sum", ("x",), {"out": 7}, TypeError, "out must be an AccelRef, got int"),
    ("take", ("x", "n"), {"axis": "x"}, TypeError, "axis must be an integer, got <AccelRef"),
    ("tile", ("x", 1.5), {}, TypeError, "repetitions must be an integer, got 1.5"),
    ("tril", ("x",), {"k": 1.5}, TypeError, "k must be an integer, got 1.5"),
    ("unstack", ("x",), {"axis": [1]}, TypeError, r"axis must be an integer, got \[1\]"),
    ("var", ("x",), {"keepdims": 7}, TypeError, "keepdims must be True or False, got 7"),
    ("zeros", ("device", 3), {"dtype": 7}, TypeError, "dtype: an object of int is not an element type"),
    ("allclose", ("x", "x"), {"rtol": None}, TypeError, "rtol must be a real number, got None"),
    ("nan_to_num", ("x",), {"nan": "abc"}, TypeError, "nan must be a real number, got 'abc'"),
    ("nan_to_num", ("x",), {"posinf": 1j}, TypeError, "posinf must be a real number, got 1j"),
    ("trapezoid", ("x",), {"dx": None}, TypeError, "dx must be a real number, got None"),
    ("unwrap", ("x",), {"period": "x"}, TypeError, "period must be a real number, got <AccelRef"),
    ("digitize", ("x", np.array([1j, None])[1:]), {}, TypeError, "bins: dtype: .* is not an element type"),
    ("interp", ("x", "n", np.array([None, 1])), {}, TypeError, "fp: dtype: .* is not an element type"),
    ("interp", ("x", "n", np.ma.array([1, 2])), {}, TypeError, "fp is a masked array"),
    ("roll", ("x", np.array([None])), {}, TypeError, "shift must be an integer, got None"),
    ("diag", ("x",), {"k": np.array([None])}, TypeError, "k must be an integer, got an array of object"),
]


@pytest.mark.parametrize(("name", "given", "named", "error", "text"), WRONG, ids=[one[0] for one in WRONG])
async def test_an_argument_of_the_wrong_kind(
    device: ta.Device,
    name: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    known = {"x": await device.zeros((2, 3)), "n": await device.zeros(2, "int64"), "device": device}

    def made(one: Any) -> Any:
        if isinstance(one, list):
            return [made(each) for each in one]
        return known.get(one, one) if isinstance(one, str) else one

    with pytest.raises(error, match=rf"arrays\.{name}: {text}"):
        await _asked(name, *map(made, given), **{key: made(one) for key, one in named.items()})


ALONG_AXES = (
    "sum", "prod", "max", "min", "any", "all", "mean", "argmax", "count_nonzero", "nanmax", "nansum", "var",
    "std", "nanvar", "logsumexp", "softmax", "log_softmax", "nanargmax", "nanargmin",
)  # fmt: skip


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_a_number_alone_has_no_axes(system: ta.System, isolation: ta.Isolation) -> None:
    """The device of `out` is used, and the actor survives."""
    options = ta.DeviceOptions(isolation=isolation)
    async with system.open_device(name="numbers", options=options) as device:
        out = await device.zeros(())
        for name in ALONG_AXES:
            for number in (3.0, 3, True, 1j, np.float32(2)):
                with pytest.raises(
                    TypeError, match=f"^arrays.{name}: at least one argument must be an array"
                ):
                    await getattr(arrays, name)(number, out=out)
        assert await out.item() == 0.0
        assert device.generation == 1
