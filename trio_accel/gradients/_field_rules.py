"""Gradients of filters with a state or with weights, of splines, and of products with sparse matrices.

A filter is linear, so its gradient is its adjoint. The gradient of a padded image is the full convolution
with the weights, and each element also gets the gradients of its repetitions outside of the edge.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ._backward import RULES, bound, refuse
from ._bodies import through_body
from ._elementwise import Rule
from ._rules import transposed, unpadded

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
fft = later("trio_accel.fft")
linalg = later("trio_accel.linalg")
ndimage = later("trio_accel.ndimage")
signal = later("trio_accel.signal")
sparse = later("trio_accel.sparse")

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


def _is_usual(args: dict[str, Any]) -> bool:
    """Return whether the rules by hand hold for the arguments of a correlation."""
    is_plain = args["output"] is None and args.get("axes") is None
    return is_plain and isinstance(args["weights"], (np.ndarray, list, tuple))


def _correlated_along(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    if not _is_usual(args):
        yield from through_body(call, g)
        return
    x, weights, origin = args["input"], np.asarray(args["weights"]), args["origin"]
    if "convolve" in call.function.name:
        # A correlation conjugates its weights, as in SciPy.
        weights, origin = weights[::-1].conj(), -origin - (1 - len(weights) % 2)
    yield x, lambda: _back_along(g, weights, args["axis"] % len(x.shape), args["mode"], origin)


def _correlated(call: Any, g: Any) -> Iterator[Rule]:
    args = bound(call)
    if not _is_usual(args):
        yield from through_body(call, g)
        return
    x, weights = args["input"], np.asarray(args["weights"])
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


RULES.update(
    {
        "sparse.spsolve_triangular": _sparse_solution,
        **{f"ndimage.{name}1d": transposed(_correlated_along) for name in ("correlate", "convolve")},
        **{f"ndimage.{name}": transposed(_correlated) for name in ("correlate", "convolve")},
        "signal.lfilter": transposed(_recursive),
        "signal.sosfilt": transposed(_recursive),
        "signal.evaluate_spline": _spline,
        "sparse.spmm": transposed(_sparse_product),
        "sparse.spmv": transposed(_sparse_product),
    }
)
