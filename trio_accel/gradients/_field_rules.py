"""Gradients of image and signal filters, of tensors, and of products with sparse matrices.

A filter is linear, so its gradient is its adjoint. The gradient of a padded image is the full convolution
with the weights, and each element also gets the gradients of its repetitions outside of the edge.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .. import fft as _fft
from .. import linalg as _linalg
from .. import ndimage as _ndimage
from .. import signal as _signal
from .. import sparse as _sparse
from ..ndimage._filters import gaussian_weights
from ..signal._spectra import stft_of, welch_of
from ._backward import RULES, Make, bound, is_operand, refuse
from ._elementwise import Rule
from ._rules import axes_of, composition, total_of, transposed, unpadded

__all__ = ["PAD_MODES", "axes_of_filter", "checked", "per_axis"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
fft: Any = _fft
linalg: Any = _linalg
ndimage: Any = _ndimage
signal: Any = _signal
sparse: Any = _sparse

# The modes of NumPy's `pad`.
PAD_MODES = {
    "reflect": "symmetric",
    "grid-mirror": "symmetric",
    "mirror": "reflect",
    "nearest": "edge",
    "wrap": "wrap",
    "grid-wrap": "wrap",
    "constant": "constant",
    "grid-constant": "constant",
}


def _back_along(g: Any, weights: Any, axis: int, mode: str, origin: int) -> Any:
    """Return the adjoint of a correlation along an axis."""
    size, extent, count = len(weights), g.shape[axis], len(g.shape)
    pad_before = size // 2 + origin
    zeros = [(size - 1, size - 1) if dim == axis else (0, 0) for dim in range(count)]
    padded = ndimage.correlate1d(arrays.pad(g, zeros), weights[::-1], axis, mode="constant")
    padded = padded[(slice(None),) * axis + (slice(size // 2, size // 2 + extent + size - 1),)]
    pairs = [(pad_before, size - 1 - pad_before) if dim == axis else (0, 0) for dim in range(count)]
    return _without_edges(padded, g.shape, pairs, mode)


def _without_edges(padded: Any, shape: Sequence[int], pairs: Sequence[tuple[int, int]], mode: str) -> Any:
    if PAD_MODES[mode] == "constant":
        inside = [slice(first, first + extent) for (first, _), extent in zip(pairs, shape, strict=True)]
        return padded[tuple(inside)]
    return unpadded(padded, shape, pairs, PAD_MODES[mode])


def checked(call: Any, *names: str) -> dict[str, Any]:
    """Return the arguments of a filter."""
    args = bound(call)
    if args["output"] is not None:
        raise refuse(call.function.name, "output= changes an array or the dtype")
    for name in names:
        if is_operand(args[name]):
            raise refuse(call.function.name, f"{name} must be an array of the host")
    return args


def _correlated_along(call: Any, g: Any) -> Iterator[Rule]:
    args = checked(call, "weights")
    x, weights, origin = args["input"], np.asarray(args["weights"]), args["origin"]
    if "convolve" in call.function.name:
        # A correlation conjugates its weights, as in SciPy.
        weights, origin = weights[::-1].conj(), -origin - (1 - len(weights) % 2)
    yield x, lambda: _back_along(g, weights, args["axis"] % len(x.shape), args["mode"], origin)


def _correlated(call: Any, g: Any) -> Iterator[Rule]:
    args = checked(call, "weights")
    x, weights = args["input"], np.asarray(args["weights"])
    if args["axes"] is not None:
        raise refuse(call.function.name, "axes are not supported")
    count = len(x.shape)
    origins = [int(origin) for origin in np.broadcast_to(args["origin"], count)]
    if "convolve" in call.function.name:
        weights = np.flip(weights).conj()
        origins = [-origin - (1 - size % 2) for origin, size in zip(origins, weights.shape, strict=True)]

    def slope() -> Any:
        sizes = weights.shape
        zeros = [(size - 1, size - 1) for size in sizes]
        padded = ndimage.correlate(arrays.pad(g, zeros), np.flip(weights), mode="constant")
        parts = [slice(size // 2, size // 2 + n + size - 1) for size, n in zip(sizes, g.shape, strict=True)]
        pairs = [
            (size // 2 + origin, size - 1 - size // 2 - origin)
            for size, origin in zip(sizes, origins, strict=True)
        ]
        return _without_edges(padded[tuple(parts)], g.shape, pairs, args["mode"])

    yield x, slope


def per_axis(value: Any, count: int) -> list[Any]:
    """Return a value for each axis."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def axes_of_filter(args: dict[str, Any]) -> tuple[int, ...]:
    """Return the axes of a filter, of one axis or of several."""
    return axes_of(args.get("axis", args.get("axes")), args["input"])


def _filtered(call: Any) -> tuple[dict[str, Any], Any, tuple[int, ...]]:
    """Return the arguments of a filter, its array and its axes."""
    args = checked(call)
    return args, args["input"], axes_of_filter(args)


def _separated(g: Any, kernels: Sequence[tuple[Any, int, str, int]]) -> Any:
    """Return the adjoint of correlations along one axis after the other."""
    for weights, axis, mode, origin in reversed(kernels):
        if weights is not None:
            g = _back_along(g, weights, axis, mode, origin)
    return g


def _gaussian(call: Any, g: Any) -> Iterator[Rule]:
    args, x, axes = _filtered(call)
    rows = [per_axis(args[name], len(axes)) for name in ("sigma", "order", "radius", "mode")]
    kernels = [
        (gaussian_weights(sigma, order, args["truncate"], radius), axis, mode, 0)
        for axis, sigma, order, radius, mode in zip(axes, *rows, strict=True)
    ]
    yield x, lambda: _separated(g, kernels)


def _gaussian_laplace(call: Any, g: Any) -> Iterator[Rule]:
    args, x, axes = _filtered(call)
    sigmas, modes = per_axis(args["sigma"], len(axes)), per_axis(args["mode"], len(axes))

    def slope() -> Any:
        terms = list[Any]()
        for number in range(len(axes)):
            kernels = [
                (
                    gaussian_weights(sigma, 2 * (k == number), args["truncate"], args["radius"]),
                    axis,
                    modes[number],
                    0,
                )
                for k, (axis, sigma) in enumerate(zip(axes, sigmas, strict=True))
            ]
            terms.append(_separated(g, kernels))
        return total_of(terms)

    yield x, slope


def _uniform(call: Any, g: Any) -> Iterator[Rule]:
    args, x, axes = _filtered(call)
    rows = [per_axis(args[name], len(axes)) for name in ("size", "mode", "origin")]
    kernels = [
        (np.full(size, 1 / size), axis, mode, origin)
        for axis, size, mode, origin in zip(axes, *rows, strict=True)
    ]
    yield x, lambda: _separated(g, kernels)


def _differences(call: Any, g: Any) -> Iterator[Rule]:
    args = checked(call)
    x = args["input"]
    count = len(x.shape)
    middle = 2.0 if "sobel" in call.function.name else 1.0
    modes, axis = per_axis(args["mode"], count), args["axis"] % count
    kernels = [
        (np.array([-1.0, 0.0, 1.0] if dim == axis else [1.0, middle, 1.0]), dim, modes[dim], 0)
        for dim in (axis, *[dim for dim in range(count) if dim != axis])
    ]
    yield x, lambda: _separated(g, kernels)


def _laplace(call: Any, g: Any) -> Iterator[Rule]:
    args, x, axes = _filtered(call)
    modes = per_axis(args["mode"], len(axes))

    weights = np.array([1.0, -2.0, 1.0])
    yield (
        x,
        lambda: total_of(
            _back_along(g, weights, axis, mode, 0) for axis, mode in zip(axes, modes, strict=True)
        ),
    )


def _recursive(call: Any, g: Any) -> Iterator[Rule]:
    """The adjoint of a filter is the same filter from the end."""
    args = bound(call)
    if args["zi"] is not None:
        raise refuse(call.function.name, "zi makes it return two results")
    first = [args["b"], args["a"]] if "b" in args else [args["sos"]]
    filtered = getattr(signal, call.function.name.partition(".")[2])
    axis = args["axis"]
    yield args["x"], lambda: arrays.flip(filtered(*first, arrays.flip(g, axis=axis), axis), axis=axis)


def _spline(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    if len(args["spline"].c.shape) > 2:
        raise refuse(call.function.name, "only a spline of numbers has a rule")
    yield args["x"], lambda: g * signal.evaluate_spline(args["spline"], args["x"], args["nu"] + 1)


def _contraction(subscripts: str, a: Any, b: Any, c: Any, alpha: Any, beta: Any) -> Any:
    product = linalg.einsum(subscripts, a, b) * alpha
    return product if c is None else product + c * beta


def _permuted(subscripts: str, a: Any, alpha: Any) -> Any:
    return linalg.einsum(subscripts, a) * alpha


def _reduced(subscripts: str, a: Any, op: str) -> Any:
    if op != "add":
        raise refuse("tensor.reduce", f"only op='add' is supported, got op={op!r}")
    return linalg.einsum(subscripts, a)


def _sparse_product(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    matrix, alpha = args["matrix"], args.get("alpha", 1.0)
    if args.get("beta", 0.0) or args.get("transpose", "N") != "N":
        raise refuse(call.function.name, "beta and transpose are not supported")
    dense: Any = args.get("b", args.get("x"))
    columns = g.shape if len(g.shape) == 2 else (math.prod(g.shape), 1)
    back = partial(sparse.spmm, matrix, alpha=alpha, transpose="T")
    yield dense, lambda: arrays.reshape(back(arrays.reshape(g, columns)), dense.shape)


def _sparse_solution(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    matrix, b = args["matrix"], args["b"]
    if b.dtype.kind == "complex":
        raise refuse(call.function.name, "complex systems are not supported")
    how = {"unit_diagonal": args["unit_diagonal"], "trans": "T" if args["trans"] == "N" else "N"}
    yield b, lambda: sparse.spsolve_triangular(matrix, g, args["lower"], **how)


def _spectra(f: Callable[..., Any]) -> Make:
    """Make a rule for a function whose last result is the first of the calls that `f` returns."""

    def first(**named: Any) -> Any:
        return f(**named)[0]

    rule = composition(first)
    # Frequencies and times are on the host.
    return lambda call, g: rule(call, g[-1])


def _resample(x: Any, num: int, axis: int) -> Any:
    if x.dtype.kind == "complex":
        # It is linear, with real weights.
        return _resample(arrays.real(x), num, axis) + 1j * _resample(arrays.imag(x), num, axis)
    count, axis = x.shape[axis], axis % len(x.shape)
    weights = np.full(count // 2 + 1, num / count)
    # The highest frequency of the smaller length is its own opposite there, and one of two in the other.
    if min(num, count) % 2 == 0 and num != count:
        weights[min(num, count) // 2] *= 2 if num < count else 0.5
    weights = weights.reshape([-1 if dim == axis else 1 for dim in range(len(x.shape))])
    return fft.irfft(fft.rfft(x, axis=axis) * weights.astype(x.dtype.dtype), num, axis=axis)


RULES.update(
    {
        "signal.resample": composition(_resample),
        "signal.stft": _spectra(stft_of),
        "signal.welch": _spectra(welch_of),
        "sparse.spsolve_triangular": _sparse_solution,
        **{f"ndimage.{name}1d": transposed(_correlated_along) for name in ("correlate", "convolve")},
        **{f"ndimage.{name}": transposed(_correlated) for name in ("correlate", "convolve")},
        **dict.fromkeys(("ndimage.gaussian_filter", "ndimage.gaussian_filter1d"), _gaussian),
        **dict.fromkeys(("ndimage.uniform_filter", "ndimage.uniform_filter1d"), _uniform),
        **dict.fromkeys(("ndimage.sobel", "ndimage.prewitt"), _differences),
        "ndimage.gaussian_laplace": _gaussian_laplace,
        "ndimage.laplace": _laplace,
        "signal.lfilter": transposed(_recursive),
        "signal.sosfilt": transposed(_recursive),
        "signal.evaluate_spline": _spline,
        "tensor.contract": composition(_contraction),
        "tensor.permute": composition(_permuted),
        "tensor.reduce": composition(_reduced),
        "sparse.spmm": transposed(_sparse_product),
        "sparse.spmv": transposed(_sparse_product),
    }
)
