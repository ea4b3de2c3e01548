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
from ._rules import composition, unpadded

__all__ = ["PAD_MODES", "axes_of_filter", "checked", "each"]

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
    before = size // 2 + origin
    zeros = [(size - 1, size - 1) if one == axis else (0, 0) for one in range(count)]
    whole = ndimage.correlate1d(arrays.pad(g, zeros), weights[::-1], axis, mode="constant")
    whole = whole[(slice(None),) * axis + (slice(size // 2, size // 2 + extent + size - 1),)]
    pairs = [(before, size - 1 - before) if one == axis else (0, 0) for one in range(count)]
    return _without_edges(whole, g.shape, pairs, mode)


def _without_edges(whole: Any, shape: Sequence[int], pairs: Sequence[tuple[int, int]], mode: str) -> Any:
    if PAD_MODES[mode] == "constant":
        inside = [slice(first, first + extent) for (first, _), extent in zip(pairs, shape, strict=True)]
        return whole[tuple(inside)]
    return unpadded(whole, shape, pairs, PAD_MODES[mode])


def checked(call: Any, *others: str) -> dict[str, Any]:
    """Return the arguments of a filter."""
    at = bound(call)
    if at["output"] is not None:
        raise refuse(call.function.name, "output= changes an array or the dtype")
    for name in others:
        if is_operand(at[name]):
            raise refuse(call.function.name, f"{name} must be an array of the host")
    return at


def _correlated_along(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call, "weights")
    x, weights, origin = at["input"], np.asarray(at["weights"]), at["origin"]
    if "convolve" in call.function.name:
        weights, origin = weights[::-1], -origin - (1 - len(weights) % 2)
    yield x, lambda: _back_along(g, weights, at["axis"] % len(x.shape), at["mode"], origin)


def _correlated(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call, "weights")
    x, weights = at["input"], np.asarray(at["weights"])
    if at["axes"] is not None:
        raise refuse(call.function.name, "axes are not supported")
    count = len(x.shape)
    origins = [int(one) for one in np.broadcast_to(at["origin"], count)]
    if "convolve" in call.function.name:
        weights = np.flip(weights)
        origins = [-one - (1 - size % 2) for one, size in zip(origins, weights.shape, strict=True)]

    def slope() -> Any:
        sizes = weights.shape
        zeros = [(size - 1, size - 1) for size in sizes]
        whole = ndimage.correlate(arrays.pad(g, zeros), np.flip(weights), mode="constant")
        parts = [slice(size // 2, size // 2 + n + size - 1) for size, n in zip(sizes, g.shape, strict=True)]
        pairs = [
            (size // 2 + one, size - 1 - size // 2 - one) for size, one in zip(sizes, origins, strict=True)
        ]
        return _without_edges(whole[tuple(parts)], g.shape, pairs, at["mode"])

    yield x, slope


def each(value: Any, count: int) -> list[Any]:
    """Return a value for each axis."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def axes_of_filter(at: dict[str, Any], count: int) -> list[int]:
    axes = at.get("axes")
    return list(range(count)) if axes is None else [int(one) % count for one in np.atleast_1d(axes)]


def _separated(g: Any, kernels: Sequence[tuple[Any, int, str, int]]) -> Any:
    """Return the adjoint of correlations along one axis after the other."""
    for weights, axis, mode, origin in reversed(kernels):
        if weights is not None:
            g = _back_along(g, weights, axis, mode, origin)
    return g


def _gaussian(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call)
    x = at["input"]
    axes = [at["axis"] % len(x.shape)] if "axis" in at else axes_of_filter(at, len(x.shape))
    rows = [each(at[name], len(axes)) for name in ("sigma", "order", "radius", "mode")]
    kernels = [
        (gaussian_weights(sigma, order, at["truncate"], radius), axis, mode, 0)
        for axis, sigma, order, radius, mode in zip(axes, *rows, strict=True)
    ]
    yield x, lambda: _separated(g, kernels)


def _gaussian_laplace(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call)
    x = at["input"]
    axes = axes_of_filter(at, len(x.shape))
    sigmas, modes = each(at["sigma"], len(axes)), each(at["mode"], len(axes))

    def slope() -> Any:
        total: Any = None
        for place in range(len(axes)):
            kernels = [
                (
                    gaussian_weights(sigma, 2 * (k == place), at["truncate"], at["radius"]),
                    axis,
                    modes[place],
                    0,
                )
                for k, (axis, sigma) in enumerate(zip(axes, sigmas, strict=True))
            ]
            one = _separated(g, kernels)
            total = one if total is None else total + one
        return total

    yield x, slope


def _uniform(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call)
    x = at["input"]
    axes = [at["axis"] % len(x.shape)] if "axis" in at else axes_of_filter(at, len(x.shape))
    rows = [each(at[name], len(axes)) for name in ("size", "mode", "origin")]
    kernels = [
        (np.full(size, 1 / size), axis, mode, origin)
        for axis, size, mode, origin in zip(axes, *rows, strict=True)
    ]
    yield x, lambda: _separated(g, kernels)


def _differences(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call)
    x = at["input"]
    count = len(x.shape)
    middle = 2.0 if "sobel" in call.function.name else 1.0
    modes, axis = each(at["mode"], count), at["axis"] % count
    kernels = [
        (np.array([-1.0, 0.0, 1.0] if one == axis else [1.0, middle, 1.0]), one, modes[one], 0)
        for one in (axis, *[one for one in range(count) if one != axis])
    ]
    yield x, lambda: _separated(g, kernels)


def _laplace(call: Any, g: Any) -> Iterator[Rule]:
    at = checked(call)
    x = at["input"]
    axes = axes_of_filter(at, len(x.shape))
    modes = each(at["mode"], len(axes))

    def slope() -> Any:
        total: Any = None
        for axis, mode in zip(axes, modes, strict=True):
            one = _back_along(g, np.array([1.0, -2.0, 1.0]), axis, mode, 0)
            total = one if total is None else total + one
        return total

    yield x, slope


def _recursive(call: Any, g: Any) -> Iterator[Rule]:
    """The adjoint of a filter is the same filter from the end."""
    at = bound(call)
    if at["zi"] is not None:
        raise refuse(call.function.name, "zi makes it return two results")
    first = [at["b"], at["a"]] if "b" in at else [at["sos"]]
    filtered = getattr(signal, call.function.name.partition(".")[2])
    axis = at["axis"]
    yield at["x"], lambda: arrays.flip(filtered(*first, arrays.flip(g, axis=axis), axis), axis=axis)


def _spline(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    if len(at["spline"].c.shape) > 2:
        raise refuse(call.function.name, "only a spline of numbers has a rule")
    yield at["x"], lambda: g * signal.evaluate_spline(at["spline"], at["x"], at["nu"] + 1)


def _contraction(subscripts: str, a: Any, b: Any, c: Any, alpha: Any, beta: Any) -> Any:
    made = linalg.einsum(subscripts, a, b) * alpha
    return made if c is None else made + c * beta


def _permuted(subscripts: str, a: Any, alpha: Any) -> Any:
    return linalg.einsum(subscripts, a) * alpha


def _reduced(subscripts: str, a: Any, op: str) -> Any:
    if op != "add":
        raise refuse("tensor.reduce", f"only op='add' is supported, got op={op!r}")
    return linalg.einsum(subscripts, a)


def _sparse_product(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    matrix, alpha = at["matrix"], at.get("alpha", 1.0)
    if at.get("beta", 0.0) or at.get("transpose", "N") != "N":
        raise refuse(call.function.name, "beta and transpose are not supported")
    dense: Any = at.get("b", at.get("x"))
    columns = g.shape if len(g.shape) == 2 else (math.prod(g.shape), 1)
    back = partial(sparse.spmm, matrix, alpha=alpha, transpose="T")
    yield dense, lambda: arrays.reshape(back(arrays.reshape(g, columns)), dense.shape)


def _sparse_solution(call: Any, g: Any) -> Iterator[Rule]:
    at = bound(call)
    matrix, b = at["matrix"], at["b"]
    if b.dtype.kind == "complex":
        raise refuse(call.function.name, "complex systems are not supported")
    how = {"unit_diagonal": at["unit_diagonal"], "trans": "T" if at["trans"] == "N" else "N"}
    yield b, lambda: sparse.spsolve_triangular(matrix, g, at["lower"], **how)


def _spectra(f: Callable[..., Any]) -> Make:
    """Make a rule for a function whose last result is the first of the calls that `f` returns."""

    def first(**at: Any) -> Any:
        return f(**at)[0]

    rule = composition(first)
    # Frequencies and times are on the host.
    return lambda call, g: rule(call, g[-1])


def _resample(x: Any, num: int, axis: int) -> Any:
    count, axis = x.shape[axis], axis % len(x.shape)
    weights = np.full(count // 2 + 1, num / count)
    # The highest frequency of the smaller length is its own opposite there, and one of two in the other.
    if min(num, count) % 2 == 0 and num != count:
        weights[min(num, count) // 2] *= 2 if num < count else 0.5
    weights = weights.reshape([-1 if one == axis else 1 for one in range(len(x.shape))])
    return fft.irfft(fft.rfft(x, axis=axis) * weights.astype(x.dtype.dtype), num, axis=axis)


RULES.update(
    {
        "signal.resample": composition(_resample),
        "signal.stft": _spectra(stft_of),
        "signal.welch": _spectra(welch_of),
        "sparse.spsolve_triangular": _sparse_solution,
        **{f"ndimage.{name}1d": _correlated_along for name in ("correlate", "convolve")},
        **{f"ndimage.{name}": _correlated for name in ("correlate", "convolve")},
        **dict.fromkeys(("ndimage.gaussian_filter", "ndimage.gaussian_filter1d"), _gaussian),
        **dict.fromkeys(("ndimage.uniform_filter", "ndimage.uniform_filter1d"), _uniform),
        **dict.fromkeys(("ndimage.sobel", "ndimage.prewitt"), _differences),
        "ndimage.gaussian_laplace": _gaussian_laplace,
        "ndimage.laplace": _laplace,
        "signal.lfilter": _recursive,
        "signal.sosfilt": _recursive,
        "signal.evaluate_spline": _spline,
        "tensor.contract": composition(_contraction),
        "tensor.permute": composition(_permuted),
        "tensor.reduce": composition(_reduced),
        "sparse.spmm": _sparse_product,
        "sparse.spmv": _sparse_product,
    }
)
