"""Axes in each form of NumPy and SciPy, for each function with axes: the results are theirs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.ndimage
import scipy.signal
import scipy.special
import scipy.stats
from chosen import BACKEND

import trio_accel as ta
from trio_accel import arrays, fft, linalg, ndimage, nn, signal

REFERENCES: dict[Any, tuple[Any, ...]] = {
    arrays: (np, scipy.special, scipy.stats, np.lib.stride_tricks, scipy.fft),
    fft: (scipy.fft, scipy.signal),
    linalg: (np.linalg, np),
    nn: (scipy.special,),
    ndimage: (scipy.ndimage,),
    signal: (scipy.signal,),
}
FORMS: dict[str, Any] = {
    "int": 1,
    "negative": -1,
    "of NumPy": np.int64(1),
    "without axes": np.array(1),
    "one": (1,),
    "list": [1],
    "array": np.array([1]),
    "range": range(1, 2),
    "pair": (0, 1),
    "negative pair": (-1, 0),
    "list of two": [0, 1],
    "pair of NumPy's": (np.int64(0), np.int32(1)),
    "none of them": (),
}
X = np.random.default_rng(0).random((4, 4)).round(3)
# The arguments of functions before their axes; `axis` and `axes` alone mean all others.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("concat", "stack"), ([X, X],)),
    **dict.fromkeys(("fftconvolve", "oaconvolve", "cross", "vecdot", "tensordot"), (X[:3, :3], X[1:, 1:])),
    **dict.fromkeys(("correlate", "convolve"), (X, X[:1, :3])),
    **dict.fromkeys(("correlate1d", "convolve1d"), (X, [1.0, 2.0, 4.0])),
    **dict.fromkeys(("gaussian_filter", "gaussian_filter1d", "gaussian_laplace"), (X, 1.0)),
    **dict.fromkeys(("maximum_filter", "minimum_filter", "median_filter", "uniform_filter"), (X, 3)),
    **dict.fromkeys(("maximum_filter1d", "minimum_filter1d", "uniform_filter1d"), (X, 3)),
    **dict.fromkeys(("percentile_filter", "rank_filter"), (X, 2, 3)),
    **dict.fromkeys(("binary_dilation", "binary_erosion"), (X > 0.5,)),
    **dict.fromkeys(("percentile", "nanpercentile"), (X, 30.0)),
    **dict.fromkeys(("quantile", "nanquantile"), (X, 0.3)),
    **dict.fromkeys(("all", "any", "count_nonzero"), (X > 0.5,)),
    **dict.fromkeys(("roll", "repeat"), (X, 3)),
    "expand_dims": (X,),
    "lexsort": ([X, X],),
    "resample": (X, 6),
    "rotate": (X, 30.0),
    "sliding_window_view": (X, 2),
    "split": (X, 2),
    "squeeze": (X[:1, :1],),
    "take": (X, np.array([0, 2])),
    "take_along_axis": (X, np.argsort(X)),
    "lfilter": ([1.0, 0.5], [1.0, 0.2], X),
    "sosfilt": ([[1.0, 0.5, 0.1, 1.0, 0.2, 0.1]], X),
    "czt": (X, 3),
    "zoom_fft": (X, 0.5, 3),
    "cubic_spline": (np.arange(4.0), X),
    "rfftfreq": (4,),
}
NAMED: dict[str, dict[str, Any]] = {"stft": {"nperseg": 4}, "welch": {"nperseg": 4}}
# Another meaning than the reference's for this name.
OTHERS = {
    "cubic_spline",
    "gradient",
    "stft",
    "put",
    "put_along_axis",
    "unstack",
    "top_k",
    "argsort",
    "sort",
    "lexsort",
}
# SciPy copies an array transformed along no axis. NumPy takes a sequence of one axis, or a negative number of
# axes, only because it does not look.
REFUSED = {
    **dict.fromkeys(fft.__all__, ("none of them",)),
    **dict.fromkeys(("cumulative_sum", "cumulative_prod", "resample"), ("one", "list", "array", "range")),
    "tensordot": ("negative",),
}


def _cases() -> Iterator[Any]:
    for module, references in REFERENCES.items():
        for name in module.__all__:
            function = getattr(module, name)
            if not inspect.isfunction(function) or name in OTHERS:
                continue
            argument = next(
                (a for a in inspect.signature(function).parameters if a in ("axis", "axes")), None
            )
            reference = next((getattr(one, name) for one in references if hasattr(one, name)), None)
            if argument and reference:
                yield pytest.param(function, reference, argument, id=f"{module.__name__[11:]}.{name}")


CASES = list(_cases())


async def _on_device(device: ta.Device, given: Any) -> Any:
    if isinstance(given, list) and isinstance(given[0], np.ndarray):
        return [await device.put(one) for one in given]
    return await device.put(given) if isinstance(given, np.ndarray) and given.dtype != object else given


def _named(function: Any, argument: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give an argument by its name, or by its position if it has no other."""
    parameters = inspect.signature(function).parameters
    by_place = argument not in parameters or parameters[argument].kind is inspect.Parameter.POSITIONAL_ONLY
    return ((value,), {}) if by_place else ((), {argument: value})


async def _host(result: Any) -> Any:
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, (list, tuple)):
        return [await _host(one) for one in result]
    return await result.to_host() if isinstance(result, ta.AccelRef) else result


def _same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, (list, tuple)):
        for one, other in zip(found, wanted, strict=True):
            _same(one, other)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.skipif(BACKEND != "cpu", reason="the arguments are taken ahead of all backends")
@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize(("function", "reference", "argument"), CASES)
async def test_axes_are_taken_in_the_forms_of_numpy_and_scipy(
    device: ta.Device, function: Callable[..., Any], reference: Callable[..., Any], argument: str
) -> None:
    name = function.__name__
    given = ARGUMENTS.get(name, (X,))
    on = [await _on_device(device, one) for one in given]
    taken, refused = 0, []
    for form, value in FORMS.items():
        more, named = _named(reference, argument, value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = reference(*given, *more, **named, **NAMED.get(name, {}))
        except (TypeError, ValueError, IndexError, RuntimeError):
            continue
        if form in REFUSED.get(name, ()):
            continue
        taken += 1
        more, named = _named(function, argument, value)
        try:
            found = await _host(function(*on, *more, **named, **NAMED.get(name, {})))
        except (TypeError, ValueError) as error:
            refused.append(f"{argument}={value!r} ({form}): {error}")
        else:
            _same(found, wanted)
    assert not refused, "\n".join(refused)
    assert taken >= 3
    assert device.generation == 1


WRONG: dict[str, Any] = {
    "float": 1.0,
    "float of NumPy": np.float64(1),
    "truth": True,
    "text": "a",
    "large": 2**40,
    "larger": 2**70,
    "digits": 10**5000,
    "pair": (0, 1.0),
    "pair of large": (0, -(2**64)),
}


@pytest.mark.parametrize("isolation", ["inline"])
@pytest.mark.parametrize(("function", "reference", "argument"), CASES)
async def test_other_axes_are_refused_without_advice_that_does_not_help(
    device: ta.Device, function: Callable[..., Any], reference: Callable[..., Any], argument: str
) -> None:
    name = function.__name__
    on = [await _on_device(device, one) for one in ARGUMENTS.get(name, (X,))]
    wrong: list[str] = []
    for form, value in WRONG.items():
        more, named = _named(function, argument, value)
        try:
            await _host(function(*on, *more, **named, **NAMED.get(name, {})))
        except (TypeError, ValueError) as error:
            if "np.asarray" in str(error) or name.replace("_", "") not in str(error).lower().replace("_", ""):
                wrong.append(f"{form}: {error}")
        else:
            wrong.append(f"{form} was taken")
    assert not wrong, "\n".join(wrong)
