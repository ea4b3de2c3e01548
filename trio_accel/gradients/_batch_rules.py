"""Rules of functions for a batch, because their records are insufficient; added to `BATCH_RULES`.

There are two kinds of rules. Most call the function again, with the batch axis first and other axes moved.
Some compose the function for one example of calls with rules, and visit these (`_by_composition`).
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_letters
from typing import Any

import numpy as np

from .. import arrays as _arrays
from .._names import later
from ..backends.base.contract.ops import parse_shapes
from ..devices import ArrayFunction, Call, arguments_of
from ..expressions import Elementwise
from ._backward import put_like
from ._batched import (
    BATCH_RULES,
    Batch,
    BatchRule,
    Unbatched,
    along_axes,
    by_shapes,
    composed,
    layouts_of,
    moved_axes,
    public_of,
    refuse_batch,
    remade,
    shifted,
    value_of,
)
from ._elementwise import Rule
from ._rules import order_of, part
from ._scatter import added_along, added_at

__all__: list[str] = []

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays
fft = later("trio_accel.fft")
linalg = later("trio_accel.linalg")
ndimage = later("trio_accel.ndimage")
nn = later("trio_accel.nn")
nn_losses = later("trio_accel.nn._losses")


def _by_composition(compose: Callable[..., Any]) -> BatchRule:
    """Make a rule from a composition for one example, which gets the arguments by name."""
    return lambda batch, step: batch.run_as(step, compose(**batch.args(step)))


def _name(step: Any) -> str:
    return str(step.function.name)


# Views, and other functions of whole arrays.


def _replaced(batch: Batch, step: Any) -> Any:
    """Call a function of arrays with leading axes again, with the batch axis before these."""
    return Call(step.function, tuple(map(batch.value, step.args)), step.named)


def _of_leading(*names: str) -> BatchRule:
    """Make a rule for functions with arrays of leading axes; other arrays are the same for all examples."""

    def rule(batch: Batch, step: Any) -> Any:
        args = batch.args(step)
        leading = names or tuple(args)[:1]
        if extra := [key for key, value in args.items() if key not in leading and batch.has(value)]:
            raise refuse_batch(_name(step), f"{extra[0]} lacks leading axes, and differs between examples")
        return remade(step, args | {key: batch.value(args[key]) for key in leading})

    return rule


def _or_composed(name: str) -> BatchRule:
    """Make a rule for functions that take any shape, with a composition if other operands differ."""

    def rule(batch: Batch, step: Any) -> Any:
        args = batch.args(step)
        if any(batch.has(value) for key, value in args.items() if key != name):
            value = value_of(_name(step))
            assert value is not None  # both functions have bodies
            return composed(value, batch, step)
        return remade(step, args | {name: batch.value(args[name])})

    return rule


def _reshaped(batch: Batch, step: Any) -> Any:
    """Reshape to the shape of the example's result, which is known."""
    return arrays.reshape(batch.value(_array(batch, step)), (batch.size, *step.shape))


def _array(batch: Batch, step: Any) -> Any:
    """Return the array of a view, wherever it is among the arguments."""
    return next(filter(batch.has, arguments_of(step)))


def _part(batch: Batch, step: Any) -> Any:
    x, key = step.args
    return batch.value(x)[(slice(None), *(key if isinstance(key, tuple) else (key,)))]


def _turned(batch: Batch, step: Any) -> Any:
    return arrays.permute_dims(batch.value(step.args[0]), (0, *[axis + 1 for axis in order_of(step)]))


def _broadcast_to(batch: Batch, step: Any) -> Any:
    x = batch.aligned(_array(batch, step), len(step.shape))
    return arrays.broadcast_to(x, (batch.size, *step.shape))


def _broadcast_arrays(batch: Batch, step: Any) -> Any:
    return [
        arrays.broadcast_to(batch.spread(x, len(layout.shape)), (batch.size, *layout.shape))
        for x, layout in zip(step.args, layouts_of(step), strict=True)
    ]


def _meshgrid(batch: Batch, step: Any) -> Any:
    count, grids = len(step.args), list[Any]()
    is_exchanged = (step.named or {}).get("indexing", "xy") == "xy" and count > 1
    for number, (x, layout) in enumerate(zip(step.args, layouts_of(step), strict=True)):
        line = [1] * count
        line[1 - number if is_exchanged and number < 2 else number] = math.prod(x.shape)
        lines = arrays.reshape(batch.spread(x), (batch.size, *line))
        grids.append(arrays.broadcast_to(lines, (batch.size, *layout.shape)))
    return grids


def _joined(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    operands = [batch.spread(operand) for operand in args["arrays"]]
    if args["axis"] is None:
        flat = [arrays.reshape(x, (batch.size, math.prod(x.shape[1:]))) for x in operands]
        return arrays.concat(flat, axis=1)
    return remade(step, args | {"arrays": operands, "axis": shifted(args["axis"])})


def _flattened(batch: Batch, step: Any) -> Any:
    """Move the axis of a function that flattens an array without one."""
    args = batch.args(step)
    x, axis = args["x"], args["axis"]
    if any(batch.has(value) for key, value in args.items() if key != "x"):
        raise refuse_batch(_name(step), "only x may differ between examples")
    if axis is not None:
        return remade(step, args | {"x": batch.value(x), "axis": moved_axes(axis, len(x.shape))})
    rows = arrays.reshape(batch.value(x), (batch.size, math.prod(x.shape)))
    return arrays.reshape(remade(step, args | {"x": rows, "axis": 1}), (batch.size, *step.shape))


def _along_vectors(batch: Batch, step: Any) -> Any:
    """Move the axis, which a vector need not have."""
    args = batch.args(step)
    axis = 1 if args["axis"] is None else shifted(args["axis"])
    return remade(step, args | {"x": batch.value(args["x"]), "axis": axis})


def _pad(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    x = args["x"]
    pairs = np.broadcast_to(np.asarray(args["pad_width"]), (len(x.shape), 2)).tolist()
    return remade(step, args | {"x": batch.value(x), "pad_width": [(0, 0), *map(tuple, pairs)]})


def _tile(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    x, repetitions = args["x"], [int(n) for n in np.atleast_1d(args["repetitions"])]
    ones = [1] * (len(x.shape) - len(repetitions))
    return remade(
        step, args | {"x": batch.aligned(x, len(repetitions)), "repetitions": (1, *ones, *repetitions)}
    )


def _quantile(batch: Batch, step: Any) -> Any:
    quantiles = along_axes("axis", batch, step)
    return arrays.moveaxis(quantiles, 1, 0) if np.ndim(batch.args(step)["q"]) else quantiles


# Functions of elements without an expression of their own.


def _broadcast(batch: Batch, step: Any) -> Any:
    """Let all operands broadcast, those in sequences too."""
    args = batch.args(step)
    return remade(step, {key: batch.aligned(value, len(step.shape)) for key, value in args.items()})


def _of_same_shape(batch: Batch, step: Any) -> Any:
    return remade(step, {key: batch.spread(value) for key, value in batch.args(step).items()})


def _loss(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    losses = nn_losses.LOSSES[_name(step)](**args).elementwise(**args)
    if args["reduction"] == "none":
        return batch.run(losses)
    if args["reduction"] == "mean":
        return batch.run(arrays.mean(losses))
    total = arrays.sum(losses)
    x = next(iter(args.values()))
    return batch.run(total / (x.shape[0] if x.shape else 1) if args["reduction"] == "batchmean" else total)


def _class_axis(logits: Any) -> int:
    return min(1, len(logits.shape) - 1)


def _labelled(logits: Any, labels: Any, weight: Any, ignore_index: int) -> tuple[Any, Any, Any]:
    """Return which labels count, their classes, and the factors of these, which are 0 of other labels."""
    is_host = isinstance(labels, np.ndarray)
    lib: Any = np if is_host else arrays
    # The dtype of the labels may not hold `ignore_index`.
    int_labels: Any = np.asarray(labels, "int64") if is_host else labels.cast("int64")
    is_used = int_labels != ignore_index
    class_indices = lib.where(is_used, int_labels, 0)
    factors: Any = arrays.ones_like(part(logits, _class_axis(logits), 0))
    if weight is not None:
        take: Any = np.take if is_host and isinstance(weight, np.ndarray) else arrays.take
        factors = factors * take(weight, class_indices)
    return is_used, class_indices, arrays.where(is_used, factors, 0)


# A class without weight adds nothing, even if its logarithm is infinite.
_WEIGHTED = Elementwise[Any]("v = where(w == 0, 0, -w * t)", inputs=("w", "t"), operation="nn.nll_loss")


def _nll_loss(
    log_probs: Any, labels: Any, weight: Any, ignore_index: int, reduction: str, smoothing: float = 0.0
) -> Any:
    axis = _class_axis(log_probs)
    is_used, class_indices, factors = _labelled(log_probs, labels, weight, ignore_index)
    lib: Any = np if isinstance(labels, np.ndarray) else arrays
    lines = lib.expand_dims(class_indices, axis=axis)
    taken = arrays.squeeze(arrays.take_along_axis(log_probs, lines, axis=axis), axis=axis)
    losses = _WEIGHTED(factors, taken)
    if smoothing:
        line = (-1, *(1,) * (len(log_probs.shape) - axis - 1))
        class_weights = 1 if weight is None else arrays.reshape(weight, line)
        total = arrays.sum(_WEIGHTED(class_weights, log_probs), axis=axis)
        smooth = arrays.where(is_used, total * (smoothing / log_probs.shape[axis]), 0)
        losses = losses * (1 - smoothing) + smooth
    if reduction == "none":
        return losses
    return arrays.sum(losses) / arrays.sum(factors) if reduction == "mean" else arrays.sum(losses)


def _cross_entropy(
    logits: Any, labels: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float
) -> Any:
    logarithms = arrays.log_softmax(logits, axis=_class_axis(logits))
    return _nll_loss(logarithms, labels, weight, ignore_index, reduction, label_smoothing)


# Products.


def _matmul(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    a, b = args["a"], args["b"]
    rows, columns = batch.value(a), batch.value(b)
    if len(a.shape) == 1 and len(b.shape) == 2 and not batch.has(b):
        return linalg.matmul(rows, columns)
    if len(b.shape) == 1 and len(a.shape) == 2 and not batch.has(a):
        return linalg.matmul(columns, arrays.matrix_transpose(rows))
    ndim = max(len(a.shape), len(b.shape), 2)
    if batch.has(a):
        rows = batch.aligned(a, ndim)
    if batch.has(b) and len(b.shape) > 1:
        columns = batch.aligned(b, ndim)
    elif batch.has(b):
        columns = arrays.reshape(columns, (batch.size, *(1,) * (ndim - 2), *b.shape, 1))
    return arrays.reshape(linalg.matmul(rows, columns), (batch.size, *step.shape))


def _einsum(batch: Batch, step: Any) -> Any:
    subscripts, *operands = step.args
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        letters = sorted(letter for letter in {*inputs} if letter.isalpha())
        output = "".join(["..." * ("." in inputs), *[c for c in letters if inputs.count(c) == 1]])
    letter = next((c for c in ascii_letters if c not in inputs), None)
    if letter is None:
        raise refuse_batch(_name(step), "all letters are in use")
    terms = [
        f"{letter}{term}" if batch.has(operand) else term
        for term, operand in zip(terms, operands, strict=True)
    ]
    values = [put_like(batch.value(operand), batch.like) for operand in operands]
    return public_of(step)(f"{','.join(terms)}->{letter}{output}", *values, **dict(step.named or {}))


def _length(x: Any) -> Any:
    return linalg.vector_norm(x)


def _lu_solve(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    pair, b = args["lu_and_piv"], args["b"]
    factors, pivots = pair[0], pair[1]
    for array in (factors, pivots):
        if isinstance(array, Call):
            # A part of a call with two results.
            batch.run(array)
    depth = max(len(factors.shape), len(b.shape), 2) - 2
    pair = batch.spread(factors, depth + 2), batch.spread(pivots, depth + 1)
    columns = batch.spread(b, depth + 1 if len(b.shape) == 1 else depth + 2)
    if len(b.shape) == 1:
        columns = arrays.expand_dims(columns, axis=-1)
    return arrays.reshape(linalg.lu_solve(pair, columns, args["trans"]), (batch.size, *step.shape))


def _convolved(batch: Batch, step: Any) -> Any:
    """Convolve by transforms, along all axes of an example or some."""
    args = batch.args(step)
    ndim, axes = len(step.shape), args["axes"]
    moved = range(1, ndim + 1) if axes is None else map(shifted, np.atleast_1d(axes).tolist())
    operands = {key: batch.spread(args[key], ndim) for key in ("in1", "in2")}
    return remade(step, args | operands | {"axes": tuple(moved)})


def _convolve(in1: Any, in2: Any, mode: str, **_: Any) -> Any:
    return fft.fftconvolve(in1, in2, mode)


def _correlate(in1: Any, in2: Any, mode: str, **_: Any) -> Any:
    if mode == "valid" and any(n < k for n, k in zip(in1.shape, in2.shape, strict=True)):
        raise refuse_batch("fft.correlate", "in2 is larger than in1")
    return fft.fftconvolve(in1, arrays.conj(arrays.flip(in2)), mode)


def _linear_recurrence(batch: Batch, step: Any) -> Any:
    args, ndim = batch.args(step), len(step.shape)
    operands = {key: batch.spread(args[key], ndim) for key in ("a", "b", "initial")}
    axis = 1 if args["axis"] is None else shifted(args["axis"])
    return remade(step, args | operands | {"axis": axis})


def _differences(smooth: Sequence[float], **args: Any) -> Any:
    """Compose a filter of differences along an axis, which smooths along the others."""
    x, options = args["input"], {"output": args["output"], "cval": args["cval"]}
    axis, mode = args["axis"] % len(x.shape), args["mode"]
    modes = list(mode) if isinstance(mode, (list, tuple)) else [mode] * len(x.shape)
    for dim in sorted(range(len(x.shape)), key=lambda dim: dim != axis):
        weights = [-1.0, 0.0, 1.0] if dim == axis else smooth
        x = ndimage.correlate1d(x, np.array(weights), dim, mode=modes[dim], **options)
    return x


def _spline_filter(**args: Any) -> Any:
    x = args.pop("input")
    for axis in range(len(x.shape)):
        x = ndimage.spline_filter1d(x, axis=axis, **args)
    return x


# Elements by indices.


def _numbers(batch: Batch, ndim: int) -> Any:
    """Return the numbers of the examples, which broadcast to the batch with `ndim` axes after its axis."""
    return np.arange(batch.size).reshape((batch.size, *(1,) * ndim))


def _take(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    x, indices = args["x"], args["indices"]
    axis = 0 if args["axis"] is None else args["axis"] % len(x.shape)
    if not batch.has(indices):
        return remade(step, args | {"x": batch.value(x), "indices": batch.value(indices), "axis": axis + 1})
    if not batch.has(x):
        taken = remade(step, args | {"x": batch.value(x), "indices": batch.value(indices), "axis": axis})
        return arrays.moveaxis(taken, axis, 0)
    count = len(indices.shape)
    lines = arrays.moveaxis(batch.value(x), axis + 1, 1)
    taken = arrays.gather_nd(lines, (_numbers(batch, count), batch.value(indices)))
    # The axes of the indices follow the axes before `axis`.
    first = range(1, count + 1)
    return arrays.moveaxis(taken, tuple(first), tuple([dim + axis for dim in first]))


def _take_along_axis(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    operands = {key: batch.spread(args[key]) for key in ("x", "indices")}
    return remade(step, args | operands | {"axis": shifted(args["axis"])})


def _gather_nd(batch: Batch, step: Any) -> Any:
    args = batch.args(step)
    x, indices = args["x"], list(args["indices"])
    ndim = max(len(index.shape) for index in indices)
    if not batch.has(x):
        aligned = [batch.aligned(index, ndim) for index in indices]
        return remade(step, args | {"x": batch.value(x), "indices": tuple(aligned)})
    aligned = [_numbers(batch, ndim), *[batch.spread(index, ndim) for index in indices]]
    return remade(step, args | {"x": batch.value(x), "indices": tuple(aligned)})


def _zeros(batch: Batch, values: Any, shape: Sequence[int]) -> Any:
    zero = arrays.sum(arrays.zeros_like(values)).cast(values.dtype)
    return arrays.broadcast_to(zero, (batch.size, *shape)).copy()


def _added_along(batch: Batch, step: Any) -> Any:
    added, positions, values, axis = step.args
    wide, shape = batch.spread(values), (batch.size, *added.shape)
    zeros = partial(_zeros, batch, wide, added.shape)
    return added_along(zeros, shape, batch.spread(positions), wide, shifted(axis % len(added.shape)))


def _added_at(batch: Batch, step: Any) -> Any:
    added, indices, values = step.args
    ndim = max(len(index.shape) for index in indices)
    wide = batch.spread(values)
    aligned = [_numbers(batch, ndim), *[batch.spread(index, ndim) for index in indices]]
    return added_at(_zeros(batch, wide, added.shape), aligned, wide)


def _embedding_grad(batch: Batch, step: Any) -> Any:
    """Add to the rows of one table, in which the tables of the examples follow one another."""
    args = batch.args(step)
    grad, indices, count = batch.spread(args["grad"]), args["indices"], args["num_embeddings"]
    if args["padding_idx"] is not None:
        is_padding = batch.spread(indices) == args["padding_idx"] % count
        grad = arrays.where(arrays.expand_dims(is_padding, axis=-1), 0, grad)
    rows = batch.spread(indices) + _numbers(batch, len(indices.shape)) * count
    return arrays.reshape(nn.embedding_grad(grad, rows, batch.size * count), (batch.size, *step.shape))


# Functions of gradients.


def _placed(batch: Batch, step: Any) -> Any:
    return Unbatched(put_like(step.args[0], batch.like))


def _first_value(batch: Batch, step: Any) -> Any:
    return batch.value(step.args[0])


def _custom(batch: Batch, step: Any) -> Any:
    """Return the value. Its rule composes gradients for one example, and so is not used for a batch."""
    value = batch.value(step.args[0])
    several = list(value) if isinstance(value, list) else [value]
    calls = [Call[Any](_CUSTOM, (part,)) for part in several]
    return calls if len(calls) > 1 else calls[0]


def _itself(value: Any) -> Any:
    return value


def _refused_rule(call: Any, g: Any) -> list[Rule]:
    raise refuse_batch("custom_gradient", "its rule would get a batch", "derive within vmap: vmap(grad(f))")


_CUSTOM = ArrayFunction("vmap of custom_gradient", _itself, "value", rule=_refused_rule)

_SHAPES = {
    "eigh": "a(s..., n, n), b(s..., n, n) -> w(s..., n), v(s..., n, n)",
    "eigvalsh": "a(s..., n, n), b(s..., n, n) -> w(s..., n)",
    "solve_banded": "ab(s..., k, n), b(s..., n, c?) -> out(s..., n, c?)",
    "solve_triangular": "a(..., n, n), b(..., n, c?) -> out(..., n, c?)",
    "solve_tridiagonal": "dl(s..., n), d(s..., n), du(s..., n), b(s..., n, c?) -> out(s..., n, c?)",
    "solveh_banded": "ab(s..., k, n), b(s..., n, c?) -> out(s..., n, c?)",
}
_LEADING = {
    "arrays": (
        "diag diagonal empty_like full_like matrix_transpose one_hot ones_like tril triu unravel_index "
        "zeros_like"
    ),
    "linalg": (
        "cond diagonal expm matrix_norm matrix_power matrix_rank matrix_transpose pinv polar svdvals trace"
    ),
}
_RESHAPED = ("AccelRef.reshape", "arrays.expand_dims", "arrays.reshape", "arrays.squeeze")
_TURNED = (
    "AccelRef.T",
    "AccelRef.mT",
    "AccelRef.transpose",
    "arrays.moveaxis",
    "arrays.permute_dims",
    "arrays.swapaxes",
)
_VECTORS = ("max", "min", "prod", "sum", "logsumexp")
_QUANTILES = ("nanpercentile", "nanquantile", "percentile", "quantile")
LOSS_NAMES = (
    "binary_cross_entropy binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss huber_loss "
    "kl_div l1_loss margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss"
)
"""Functions of `nn` that compute a loss for each element."""
_BROADCAST = ("arrays.clip", "arrays.nan_to_num", "arrays.select", "nn.gelu", "nn.gelu_grad")
BATCH_RULES.update(
    {
        **{f"linalg.{name}": partial(by_shapes, parse_shapes(line)) for name, line in _SHAPES.items()},
        **{f"{room}.{name}": _of_leading() for room, names in _LEADING.items() for name in names.split()},
        **dict.fromkeys(_RESHAPED, _reshaped),
        **dict.fromkeys(_TURNED, _turned),
        **dict.fromkeys(_BROADCAST, _broadcast),
        **{f"arrays.cumulative_{name}": _along_vectors for name in _VECTORS},
        **{f"arrays.{name}": _quantile for name in _QUANTILES},
        **{f"nn.{name}": _loss for name in LOSS_NAMES.split()},
        **{name: partial(along_axes, "axis") for name in ("arrays.flip", "arrays.sliding_window_view")},
        "AccelRef.__getitem__": _part,
        "AccelRef.copy": _replaced,
        "arrays.broadcast_arrays": _broadcast_arrays,
        "arrays.broadcast_to": _broadcast_to,
        "arrays.concat": _joined,
        "arrays.digitize": _of_leading("x"),
        "arrays.gather_nd": _gather_nd,
        "arrays.isin": _of_leading("x1"),
        "arrays.interp": _or_composed("x"),
        "arrays.polyval": _or_composed("x"),
        "arrays.linear_recurrence": _linear_recurrence,
        "arrays.meshgrid": _meshgrid,
        "arrays.pad": _pad,
        "arrays.repeat": _flattened,
        "arrays.roll": _flattened,
        "arrays.scan": _along_vectors,
        "arrays.searchsorted": _of_leading("x2"),
        "arrays.stack": _joined,
        "arrays.take": _take,
        "arrays.take_along_axis": _take_along_axis,
        "arrays.tile": _tile,
        "checkpoint": _first_value,
        "custom_gradient": _custom,
        "fft.convolve": _by_composition(_convolve),
        "fft.correlate": _by_composition(_correlate),
        "fft.fftconvolve": _convolved,
        "fft.oaconvolve": _convolved,
        "gradients.added_along": _added_along,
        "gradients.added_at": _added_at,
        "gradients.cofactors": _replaced,
        "gradients.composed": _first_value,
        "gradients.placed": _placed,
        "linalg.einsum": _einsum,
        "linalg.lu_solve": _lu_solve,
        "linalg.matmul": _matmul,
        "linalg.nrm2": _by_composition(_length),
        "nn.dropout_grad": _of_same_shape,
        "ndimage.prewitt": _by_composition(partial(_differences, (1.0, 1.0, 1.0))),
        "ndimage.sobel": _by_composition(partial(_differences, (1.0, 2.0, 1.0))),
        "ndimage.spline_filter": _by_composition(_spline_filter),
        "nn.nll_loss": _by_composition(_nll_loss),
        "nn.cross_entropy": _by_composition(_cross_entropy),
        "nn.embedding_grad": _embedding_grad,
        "stop_gradient": _replaced,
        "tensor.einsum": _einsum,
    }
)
