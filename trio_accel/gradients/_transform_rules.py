"""Gradients of transforms and convolutions."""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ._backward import RULES, bound
from ._elementwise import Rule
from ._rules import composition

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
fft = later("trio_accel.fft")
linalg = later("trio_accel.linalg")


# Transforms. The adjoint of a transform is its inverse without a factor: by the other norm.
_ADJOINT_NORM = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _fitted(g: Any, extent: int, axis: int) -> Any:
    """Return a gradient that is cut, or padded with zeros at its end, along an axis."""
    there = g.shape[axis]
    if there > extent:
        return g[(slice(None),) * axis + (slice(0, extent),)]
    widths = [(0, extent - there if dim == axis else 0) for dim in range(len(g.shape))]
    return arrays.pad(g, widths) if there < extent else g


def _complex_transforms(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, name = args["a"], call.function.name.partition(".")[2]
    is_inverse = name.startswith("i")
    back = fft.fft if is_inverse else fft.ifft

    def slope() -> Any:
        grad = g
        for axis in _axes(args, x):
            grad = _fitted(back(grad, axis=axis, norm=_ADJOINT_NORM[args["norm"]]), x.shape[axis], axis)
        return grad

    yield x, slope


def _axes(args: dict[str, Any], x: Any) -> list[int]:
    count = len(x.shape)
    if "axis" in args:
        return [args["axis"] % count]
    axes, sizes = args["axes"], args["s"]
    if axes is None:
        axes = range(count) if sizes is None else range(count - len(np.atleast_1d(sizes)), count)
    return [int(axis) % count for axis in np.atleast_1d(axes)]


def _rfft_back(g: Any, length: int, axis: int, norm: Any) -> Any:
    wide = _fitted(g, length, axis)
    return fft.ifft(wide, axis=axis, norm=_ADJOINT_NORM[norm])


def _irfft_back(g: Any, length: int, axis: int, norm: Any) -> Any:
    """Each middle frequency represents two of the whole spectrum."""
    half = length // 2 + 1
    weights = np.full(half, 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        weights[-1] = 1.0
    line = weights.reshape([-1 if dim == axis else 1 for dim in range(len(g.shape))])
    return fft.rfft(g, axis=axis, norm=_ADJOINT_NORM[norm]) * line.astype(
        np.float32 if g.dtype == "float32" else float
    )


def _real_transforms(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    x, name, norm = args["a"], call.function.name.partition(".")[2], args["norm"]
    *leading_axes, last_axis = _axes(args, x)
    sizes = args.get("s") if "axis" not in args else None
    n = args.get("n") if "axis" in args else None if sizes is None else int(np.atleast_1d(sizes)[-1])

    def forwards() -> Any:
        grad = g
        for axis in leading_axes:
            grad = _fitted(fft.ifft(grad, axis=axis, norm=_ADJOINT_NORM[norm]), x.shape[axis], axis)
        length = x.shape[last_axis] if n is None else n
        return _fitted(arrays.real(_rfft_back(grad, length, last_axis, norm)), x.shape[last_axis], last_axis)

    def inverse() -> Any:
        grad = _fitted(_irfft_back(g, g.shape[last_axis], last_axis, norm), x.shape[last_axis], last_axis)
        for axis in leading_axes:
            grad = _fitted(fft.fft(grad, axis=axis, norm=_ADJOINT_NORM[norm]), x.shape[axis], axis)
        return grad

    yield x, inverse if name.startswith("i") else forwards


def _hfft(a: Any, n: int | None, axis: int, norm: Any) -> Any:
    return fft.irfft(arrays.conj(a), n, axis, _ADJOINT_NORM[norm])


def _ihfft(a: Any, n: int | None, axis: int, norm: Any) -> Any:
    return arrays.conj(fft.rfft(a, n, axis, _ADJOINT_NORM[norm]))


def _several_hfft(dims: str) -> Any:
    def compose(a: Any, s: Any, axes: Any, norm: Any) -> Any:
        return getattr(fft, f"irfft{dims}")(arrays.conj(a), s, axes, _ADJOINT_NORM[norm])

    return composition(compose)


def _several_ihfft(dims: str) -> Any:
    def compose(a: Any, s: Any, axes: Any, norm: Any) -> Any:
        return arrays.conj(getattr(fft, f"rfft{dims}")(a, s, axes, _ADJOINT_NORM[norm]))

    return composition(compose)


def _along(f: Callable[[Any], Any], x: Any, axis: int) -> Any:
    return arrays.moveaxis(f(arrays.moveaxis(x, axis, -1)), -1, axis)


def _real_dtype(x: Any) -> str:
    return "float32" if str(x.dtype) in ("float32", "complex64") else "float64"


def _czt(x: Any, m: int | None, w: Any, a: Any, axis: int) -> Any:
    n, count = x.shape[axis], x.shape[axis] if m is None else m
    rate = -2j * np.pi / count if w is None else np.log(complex(w))
    powers = np.exp(np.arange(n)[:, None] * (rate * np.arange(count) - np.log(complex(a))))
    narrow = np.complex64 if _real_dtype(x) == "float32" else np.complex128
    return _along(lambda x: (x + 0j * x) @ powers.astype(narrow), x, axis)


def _zoom_fft(x: Any, fn: Any, m: int | None, fs: float, endpoint: bool, axis: int) -> Any:
    start, stop = (0.0, *np.atleast_1d(fn))[-2:]
    count = x.shape[axis] if m is None else m
    step = (stop - start) / fs / (count - endpoint)
    return _czt(x, count, np.exp(-2j * np.pi * step), np.exp(2j * np.pi * start / fs), axis)


RULES.update(
    {
        **{f"fft.{back}fft{kind}": _complex_transforms for back in ("", "i") for kind in ("", "2", "n")},
        **{f"fft.{back}rfft{kind}": _real_transforms for back in ("", "i") for kind in ("", "2", "n")},
        **{f"fft.hfft{n}": _several_hfft(n) for n in ("2", "n")},
        **{f"fft.ihfft{n}": _several_ihfft(n) for n in ("2", "n")},
        "fft.czt": composition(_czt),
        "fft.zoom_fft": composition(_zoom_fft),
        "fft.hfft": composition(_hfft),
        "fft.ihfft": composition(_ihfft),
    }
)
